#!/usr/bin/env bash
# Sends random requests, made from the served OpenAPI document, to a server: broken ones and valid ones. No answer may be a server
# error or of another form than the document says, what it forbids has to be refused, and the server has to live on.
#
# Usage: scripts/fuzz_serve.sh TARGET|tiny [options of `deepspec serve`, such as --draft DIR]
# `tiny` is the tests' own model of a few thousand weights, which answers at once.
# Environment: REQUESTS (10000), at least so many; SEED (1). Needs Python with venv and pip: schemathesis comes from PyPI.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=target/fuzz
if ! "$venv/bin/python" -c 'import schemathesis' 2> /dev/null; then
    "${DEEPSPEC_PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check 'schemathesis>=4,<5'
fi
model=$1
shift
if [ "$model" = tiny ]; then
    folder=target/fuzz/tiny
    mkdir -p "$folder"
    cargo build --quiet --release --workspace --example tiny_model
    model=$(target/release/examples/tiny_model "$folder")
fi

. scripts/servers.sh
start_server "$model" "$@" --context 256 --queue 64

# Three operations take a body; the others have nothing to vary. Not everything that the document allows is taken: some fields go only
# with others, as `best_of` with an equal `n`, which a schema cannot say.
# It keeps files where it runs.
cd "$venv"
bin/st run "$url/openapi.json" --seed "${SEED:-1}" --max-examples $(((${REQUESTS:-10000} + 2) / 3)) \
    --checks all --exclude-checks positive_data_acceptance --request-timeout 120 --max-failures 20 --suppress-health-check all --generation-database none --no-color

[ "$(curl --silent --output /dev/null --write-out '%{http_code}' "$url/health")" = 200 ]
kill -TERM $server
wait $server
echo "no failure, and the server has ended"
