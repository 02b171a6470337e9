#!/usr/bin/env bash
# Starts a server and drives its page in a headless browser; screenshots go to target/page.png and target/page-wide.png.
#
# Usage: scripts/page_check.sh TARGET [options of `deepspec serve`, such as --draft DIR]
# Needs chromium and node 20 or newer; says so and does nothing where one of them is missing.
set -euo pipefail
cd "$(dirname "$0")/.."

if ! command -v "${CHROMIUM:-chromium}" > /dev/null || ! node --experimental-websocket -e 'process.exit(typeof WebSocket === "function" ? 0 : 1)' 2> /dev/null; then
    echo "skipped: the page needs chromium and node 20 or newer"
    exit 0
fi
log=$(mktemp)
env -u DEEPSPEC_API_KEY ${DEEPSPEC_BINARY:-target/release/deepspec} serve --target "$@" --listen 127.0.0.1:0 --slots 4 \
    --context 2048 > "$log" 2>&1 &
server=$!
trap 'kill $server 2> /dev/null || true; cat "$log"; rm -f "$log"' EXIT
url=
for _ in $(seq 240); do
    url=$(sed -n 's/^listening on \(http:[^;]*\);.*/\1/p' "$log")
    [ -n "$url" ] && break
    kill -0 $server
    sleep 0.5
done
test -n "$url"
node --experimental-websocket --no-warnings cli/tests/page.mjs "$url/" target/page.png
