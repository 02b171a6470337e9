#!/usr/bin/env bash
# Measures serving under load: a server per schedule, the same prompts at 1 to 32 clients, in turns.
#
# Usage: scripts/bench_serve.sh OUT PROMPTS.jsonl TARGET [options of `deepspec serve`, such as --draft DIR]
# Environment: TOKENS (64), REQUESTS (8), LEVELS (1,2,4,8,16,32), SCHEDULES (plain fixed=3 threshold=0.5 scheduled).
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/servers.sh

out=$1 prompts=$2 target=$3
shift 3
log=$(mktemp -d)
pids=()
trap 'kill "${pids[@]}" 2> /dev/null || true; rm -rf "$log"' EXIT
servers=()
for schedule in ${SCHEDULES:-plain fixed=3 threshold=0.5 scheduled}; do
    target/release/deepspec serve --target "$target" "$@" --schedule "$schedule" --listen 127.0.0.1:0 --slots 32 \
        --context 1024 --queue 64 > "$log/$schedule" 2>&1 &
    pids+=($!)
    address=$(server_address "$log/$schedule" "${pids[-1]}")
    servers+=("$schedule=$address")
done
cargo build --quiet --release --workspace --example bench_serve
target/release/examples/bench_serve \
    "$out" "$prompts" "${TOKENS:-64}" "${REQUESTS:-8}" "${LEVELS:-1,2,4,8,16,32}" "${servers[@]}"

# What the servers said of themselves when they began.
{
    printf '\n## What was run\n\n'
    echo "- deepspec $(git describe --always --dirty), $(nproc) processors: $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1)"
    for server in "${servers[@]}"; do
        echo "- \`serve --schedule ${server%=*}\`: $(sed '/^listening/,$d; /are kept in/d' "$log/${server%=*}" | paste -sd ';' | sed 's/;/; /g')"
    done
} >> "$out/README.md"
