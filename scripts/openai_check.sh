#!/usr/bin/env bash
# Starts a server and drives it with OpenAI's Python client and curl, as users do.
#
# Usage: scripts/openai_check.sh TARGET [options of `deepspec serve`, such as --draft DIR]
# Needs Python with venv and pip: the client comes from PyPI into target/openai-client.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=target/openai-client
if ! "$venv/bin/python" -c 'import openai' 2> /dev/null; then
    "${DEEPSPEC_PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check openai
fi

. scripts/servers.sh
DEEPSPEC_API_KEY=secret start_server "$@" --context 1024 --queue 16 --model-name smol

"$venv/bin/python" cli/tests/openai_client.py "$url/v1" smol

if ! command -v curl > /dev/null; then
    echo "skipped: there is no curl"
    exit 0
fi
# curl, with nothing but what its manual has.
ask() { curl --silent --show-error --header 'Authorization: Bearer secret' --header 'Content-Type: application/json' "$@"; }
code() { ask --output /dev/null --write-out '%{http_code}' "$@"; }
expect() { [ "$1" = "$2" ] || { echo "expected $2, found $1: $3"; exit 1; }; }
prompt='{"prompt": "The sea", "max_tokens": 8, "temperature": 0}'
ask "$url/v1/completions" --data "$prompt" | grep > /dev/null '"finish_reason":"length"'
ask "$url/generate" --data "$prompt" | grep > /dev/null '"text":\["The sea'
ask --no-buffer "$url/v1/completions" --data '{"prompt": "The sea", "max_tokens": 8, "stream": true}' | grep > /dev/null 'data: \[DONE\]'
ask "$url/metrics" | grep > /dev/null '^vllm:spec_decode_num_accepted_tokens_total'
ask "$url/openapi.json" | grep > /dev/null '"openapi": "3.1.0"'
expect "$(code "$url/health")" 200 health
expect "$(curl --silent --output /dev/null --write-out '%{http_code}' "$url/v1/models")" 401 'no key'
expect "$(code "$url/v1/completions" --data '{')" 400 'broken JSON'
expect "$(head -c 5000000 /dev/zero | code "$url/v1/completions" --data-binary @-)" 413 'huge body'
expect "$(code --request DELETE "$url/v1/models")" 405 method

kill -TERM $server
wait $server
echo "curl is content, and the server has ended"
