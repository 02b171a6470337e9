#!/usr/bin/env bash
# Runs the tests of the crates that hold unsafe code under the address sanitizer: reads and writes outside of what was
# allocated, and use after free. Linux on x86-64; the stable compiler does it when told that it may (RUSTC_BOOTSTRAP).
#   scripts/sanitize.sh [cargo test options]      default: the libraries of kernels, datasets and models
set -euo pipefail
cd "$(dirname "$0")/.."

target=x86_64-unknown-linux-gnu
export RUSTC_BOOTSTRAP=1 RUSTFLAGS="-Zsanitizer=address -Cforce-frame-pointers=yes" CARGO_TARGET_DIR=target/sanitize
# The kernels' pool lives as long as the process.
export ASAN_OPTIONS=detect_leaks=0:abort_on_error=1
if [ $# -eq 0 ]; then
    set -- -p deepspec-kernels -p deepspec-datasets -p deepspec-models --lib
fi
cargo test --release --target "$target" "$@"
