//! Connections that are held by clients who do nothing: the server can still be asked how it is, and it can still end.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::server::{Reply, Setup, get, metric, open, post, read, serve_with, wait_until_idle};

const CONNECTIONS: usize = 8;

fn setup() -> Setup {
    Setup { connections: CONNECTIONS, drain: Duration::from_secs(2), ..Setup::default() }
}

fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    stream
}

/// Connections that ask for much, again and again, and read none of it; they are all open when this returns.
fn deaf(address: SocketAddr, count: usize, requests: &str) -> Vec<TcpStream> {
    let send = || {
        let mut stream = connect(address);
        stream.set_write_timeout(Some(Duration::from_millis(200))).unwrap();
        // Until no more can be sent, or enough is.
        for _ in 0..100 {
            if stream.write_all(requests.as_bytes()).is_err() {
                break;
            }
        }
        stream
    };
    thread::scope(|scope| {
        let clients: Vec<_> = (0..count).map(|_| scope.spawn(send)).collect();
        clients.into_iter().map(|client| client.join().unwrap()).collect()
    })
}

const PAGE: &str = "GET /openapi.json HTTP/1.1\r\nhost: test\r\n\r\n";

/// Waits until so many connections of the usual ones are free; there is none at the beginning.
fn wait_for_seats(address: SocketAddr, count: usize) {
    let begun = Instant::now();
    let is_away = |reply: &Reply| reply.status == 503 && reply.json()["error"]["code"] == "no_connection";
    assert!(is_away(&get(address, "/v1/models")), "a connection is free");
    loop {
        let streams: Vec<TcpStream> = (0..count).map(|_| open(address, "GET /v1/models HTTP/1.1", b"")).collect();
        let replies: Vec<Reply> = streams.into_iter().map(read).collect();
        if replies.iter().all(|reply| reply.status == 200) {
            return;
        }
        assert!(replies.iter().all(|reply| reply.status == 200 || is_away(reply)), "{replies:?}");
        assert!(begun.elapsed() < Duration::from_secs(60), "connections are held after {:?}", begun.elapsed());
        thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn idle_connections_do_not_hide_how_the_server_is() {
    serve_with(setup(), |address, interrupt| {
        let idle: Vec<TcpStream> = (0..CONNECTIONS).map(|_| connect(address)).collect();
        thread::sleep(Duration::from_millis(100));
        for _ in 0..10 {
            assert_eq!(get(address, "/health").status, 200);
        }
        assert!(metric(address, "vllm:num_requests_running") == 0.0);
        let away = post(address, "/v1/completions", &json!({ "prompt": "a", "max_tokens": 1 }));
        assert_eq!((away.status, away.json()["error"]["code"].as_str()), (503, Some("no_connection")));
        assert!(away.head.to_lowercase().contains("retry-after:"), "{away:?}");
        assert!(away.head.to_lowercase().contains("connection: close"), "{away:?}");
        // They have had their time.
        wait_for_seats(address, CONNECTIONS);
        drop(idle);
        // And again, up to the end: a server with every connection taken stops at once.
        let idle: Vec<TcpStream> = (0..10 * CONNECTIONS).map(|_| connect(address)).collect();
        thread::sleep(Duration::from_millis(100));
        interrupt.set();
        let begun = Instant::now();
        for mut stream in idle {
            // Closed, or reset.
            let _ = stream.read(&mut [0; 64]);
        }
        assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    });
}

#[test]
fn answers_that_nobody_reads_give_their_connections_back() {
    serve_with(setup(), |address, _| {
        let deaf = deaf(address, CONNECTIONS, &PAGE.repeat(64));
        assert_eq!(get(address, "/health").status, 200);
        wait_for_seats(address, CONNECTIONS);
        drop(deaf);
    });
}

#[test]
fn streams_that_nobody_reads_give_their_connections_and_places_back() {
    const CLIENTS: usize = 3;
    let body = json!({
        "messages": [{ "role": "user", "content": "a" }], "max_tokens": 150, "n": 4, "stream": true, "ignore_eos": true,
        "logprobs": true, "top_logprobs": 20, "return_rounds": true,
    })
    .to_string();
    let length = body.len();
    let head = "POST /v1/chat/completions HTTP/1.1\r\nhost: test\r\ncontent-type: application/json";
    let request = format!("{head}\r\ncontent-length: {length}\r\n\r\n{body}");
    serve_with(Setup { connections: CLIENTS, queue: 16, ..setup() }, |address, _| {
        // Each answer has a megabyte; what fits between the two ends does not matter.
        let deaf = deaf(address, CLIENTS, &request);
        assert_eq!(get(address, "/health").status, 200);
        wait_for_seats(address, CLIENTS);
        wait_until_idle(address);
        let body = json!({ "prompt": ["a", "b", "c", "d"], "n": 4, "max_tokens": 2 });
        assert_eq!(post(address, "/v1/completions", &body).status, 200, "their places are free as well");
        drop(deaf);
    });
}

#[test]
fn a_server_whose_answers_nobody_reads_can_be_stopped() {
    let (result, _) = serve_with(setup(), |address, interrupt| {
        let deaf = deaf(address, 2 * CONNECTIONS, &PAGE.repeat(64));
        interrupt.set();
        (deaf, Instant::now())
    });
    // The server has returned while all of them are still held.
    let (deaf, stopped) = result;
    assert!(stopped.elapsed() < Duration::from_secs(12), "{:?}", stopped.elapsed());
    drop(deaf);
}
