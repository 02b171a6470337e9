#!/usr/bin/env bash
# Runs the tests of the kernels crate, which holds the unsafe code, under the address sanitizer.
# Needs a toolchain that ships the sanitizer's runtime; the nightly flag is unlocked for this build alone.
set -euo pipefail
cd "$(dirname "$0")/.."

export RUSTC_BOOTSTRAP=1
export RUSTFLAGS="-Zsanitizer=address"
export CARGO_TARGET_DIR=target/sanitize
# The thread pool and the panels of some tests live as long as the program.
export ASAN_OPTIONS=detect_leaks=0
cargo test --release --target x86_64-unknown-linux-gnu -p deepspec-kernels --lib --tests "$@"
