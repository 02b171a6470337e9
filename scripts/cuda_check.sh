#!/bin/bash
# Checks the CUDA side on a machine without a GPU or a CUDA toolkit.
#   rust     clippy over all targets with the features cuda and nccl, with a stand-in for nvcc
#   kernels  every .cu compiled by the real nvcc (from PyPI, kept under target/) for Ampere, Hopper and Blackwell;
#            prints registers per kernel and fails when one spills
# With no argument, both.
set -euo pipefail
cd "$(dirname "$0")/.."

check_rust() {
    NVCC=$PWD/scripts/stand-in-nvcc CUDARC_CUDA_VERSION=13000 CUDA_COMPUTE_CAP=90 CARGO_TARGET_DIR=target/cuda-check \
        cargo clippy --workspace --all-targets --features cuda,nccl -- -D warnings
}

# The pieces of the toolkit that compile kernels, all of one release.
install_nvcc() {
    local venv=target/cuda-venv
    if ! compgen -G "$venv/lib/python3*/site-packages/nvidia/cu13/bin/nvcc" >/dev/null; then
        python3 -m venv "$venv"
        "$venv/bin/pip" install --quiet nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88 \
            nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85
    fi
    CUDA_HOME=$(echo "$PWD/$venv"/lib/python3*/site-packages/nvidia/cu13)
    export CUDA_HOME PATH=$CUDA_HOME/bin:$PATH
}

check_kernels() {
    install_nvcc
    local out=target/cuda-cubins failed=0
    mkdir -p "$out"
    for arch in sm_80 sm_90a sm_100; do
        for source in $(find kernels/src -name '*.cu' | sort); do
            nvcc -arch=$arch -cubin -O3 -std=c++17 -Ikernels/src/cuda -Ikernels/src -Xptxas -v \
                -o "$out/$(basename "$source" .cu).$arch.cubin" "$source" 2>"$out/log" || {
                cat "$out/log"
                exit 1
            }
            grep -E 'error|warning' "$out/log" && failed=1
            # One line per kernel: registers, shared bytes, spills.
            awk -v arch=$arch -v file="$source" '
                /Compiling entry function/ { split($0, part, "\x27"); name = part[2] }
                /spill stores/ { spill = $0; sub(/^ */, "", spill); split(spill, word, " "); spilled = word[5] + word[9] }
                /Used [0-9]+ registers/ {
                    match($0, /[0-9]+ registers/); registers = substr($0, RSTART, RLENGTH)
                    shared = match($0, /[0-9]+ bytes smem/) ? ", " substr($0, RSTART, RLENGTH) : ""
                    printf "%-7s %-28s %s%s%s\n", arch, name, registers, shared, spilled ? ", SPILLS" : ""
                    bad += spilled > 0
                }
                END { exit bad > 0 }' "$out/log" || failed=1
        done
    done
    if [ $failed -ne 0 ]; then
        echo "kernels with warnings or spills, see above" >&2
        exit 1
    fi
}

case "${1:-all}" in
    rust) check_rust ;;
    kernels) check_kernels ;;
    all)
        check_kernels
        check_rust
        ;;
    *)
        echo "usage: $0 [rust|kernels]" >&2
        exit 2
        ;;
esac
