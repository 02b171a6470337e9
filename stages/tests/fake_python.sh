#!/bin/sh
# Stands in for `python3 -m pip download ... -d FOLDER`: takes fake.whl from the cache folder that FOLDER lies in, and
# writes down its arguments. Without such a wheel it fails as pip does.
for last; do :; done
cache="$last/../../.."
echo "$@" >>"$cache/calls"
if [ ! -f "$cache/fake.whl" ]; then
    echo "Looking in indexes" >&2
    echo "ERROR: No matching distribution found for $7" >&2
    exit 1
fi
cp "$cache/fake.whl" "$last/fake-0-py3-none-any.whl"
