#!/bin/bash
# One prepared run for a machine with an NVIDIA GPU, the CUDA toolkit (13) and a Rust toolchain: builds with the feature
# cuda, checks every operation on the device against the CPU, runs a real target where DEEPSPEC_SMOLLM2_GGUF names it,
# and measures each operation beside what the device reaches at best.
# Output also goes to gpu_check.txt in $OUT (default: target).
set -euo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-target}
mkdir -p "$out"

run() {
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv
    git rev-parse HEAD 2>/dev/null || true
    cargo test --release -p deepspec-kernels --features cuda --test gpu -- --nocapture
    cargo test --release -p deepspec-models --features cuda --test gpu -- --nocapture
    cargo run --release -p deepspec-kernels --features cuda --example gpu_bench
}

run 2>&1 | tee "$out/gpu_check.txt"
