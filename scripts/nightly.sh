#!/usr/bin/env bash
# Checks that take too long for the gate, or that look at the world outside: for once a night, or by hand before a release.
#
#   deny       cargo-deny: licences, sources, versions and known faults of all dependencies (deny.toml). Installs cargo-deny below
#              target/tools. Known faults need the network's advisory database; where it cannot be had, that part says so and fails.
#   cuda       scripts/cuda_check.sh rust: clippy over all targets with the features cuda and nccl, with a stand-in for nvcc
#   sanitize   scripts/sanitize.sh: the library tests of the crates that hold unsafe code under the address sanitizer
#   soak       stages/serve/tests/soak.rs for SOAK_MINUTES (20) minutes: the server's memory stays a flat line
#   mutations  scripts/mutations.py: seeded mistakes, each of which a named test has to catch
#
# Usage: scripts/nightly.sh [check ...]      default: all of them, in this order
# Every check runs, whatever became of those before it; the last lines tell which failed.
# Unused dependencies are a test of the gate: `every_dependency_is_used` in cli/tests/layering.rs.
set -uo pipefail
cd "$(dirname "$0")/.."

deny() {
    local tools=target/tools version=0.20.2
    if [ "$("$tools/bin/cargo-deny" --version 2> /dev/null)" != "cargo-deny $version" ]; then
        cargo install --quiet --locked --root "$tools" --version "$version" cargo-deny || return 1
    fi
    PATH="$PWD/$tools/bin:$PATH" cargo deny --workspace check bans licenses sources &&
        PATH="$PWD/$tools/bin:$PATH" cargo deny --workspace check advisories
}

cuda() { scripts/cuda_check.sh rust; }

sanitize() { scripts/sanitize.sh; }

soak() { DEEPSPEC_SOAK_MINUTES=${SOAK_MINUTES:-20} cargo test --release -p deepspec-serve --test soak -- --nocapture; }

mutations() { scripts/mutations.py; }

if [ $# -eq 0 ]; then
    set -- deny cuda sanitize soak mutations
fi
failed=()
for check in "$@"; do
    case "$check" in
        deny | cuda | sanitize | soak | mutations) ;;
        *)
            echo "usage: $0 [deny|cuda|sanitize|soak|mutations ...]" >&2
            exit 2
            ;;
    esac
    printf '\n== %s\n' "$check"
    "$check" || failed+=("$check")
done
if [ ${#failed[@]} -gt 0 ]; then
    echo "failed: ${failed[*]}" >&2
    exit 1
fi
echo "all green"
