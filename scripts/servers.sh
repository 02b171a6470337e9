# Servers for the scripts of this folder; to be sourced.

# Prints the address of the server that writes to the file $1 and is process $2, as soon as it listens.
server_address() {
    local address
    for _ in $(seq 240); do
        address=$(sed -n 's/^listening on http:\/\/\([^;]*\);.*/\1/p' "$1")
        if [ -n "$address" ]; then
            echo "$address"
            return
        fi
        kill -0 "$2" || return
        sleep 0.5
    done
    return 1
}

# Starts `deepspec serve --target "$@"` on a free port and sets `server` to its process and `url` to its address. When the script ends,
# the server does too, and what it printed is shown.
start_server() {
    log=$(mktemp)
    "${DEEPSPEC_BINARY:-target/release/deepspec}" serve --target "$@" --listen 127.0.0.1:0 --slots 4 > "$log" 2>&1 &
    server=$!
    trap 'kill $server 2> /dev/null || true; cat "$log"; rm -f "$log"' EXIT
    url=http://$(server_address "$log" "$server")
}
