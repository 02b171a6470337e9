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
. scripts/servers.sh
unset DEEPSPEC_API_KEY
start_server "$@" --context 2048
node --experimental-websocket --no-warnings cli/tests/page.mjs "$url/" target/page.png
