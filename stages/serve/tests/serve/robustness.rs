//! Good requests beside bad ones: each ends as it does alone, and nothing is left behind.

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use deepspec_models::speculate::{CounterRng, Stream};
use serde_json::{Value, json};

use crate::server::{Reply, Setup, get, metric, post_bytes, read, serve_with, wait_until_idle};

const CLIENTS: usize = 8;
const REQUESTS: usize = 12;

/// The requests of one client: all forms, greedy and with a seed, whole and in parts.
fn requests(client: usize) -> Vec<(&'static str, Value)> {
    (0..REQUESTS)
        .map(|i| {
            let path = ["/v1/completions", "/v1/chat/completions", "/generate"][(client + i) % 3];
            let mut body =
                json!({ "max_tokens": 10 + 5 * ((client + i) % 4), "ignore_eos": i % 2 == 0, "stream": i % 3 == 0 });
            let text = format!("a b a b {client} {}", i % 4);
            match path {
                "/v1/chat/completions" => body["messages"] = json!([{ "role": "user", "content": text }]),
                _ => body["prompt"] = json!(text),
            }
            match i % 4 {
                0 => body["temperature"] = json!(0),
                1 => (body["temperature"], body["seed"]) = (json!(1.3), json!(client)),
                2 => (body["temperature"], body["frequency_penalty"]) = (json!(0), json!(1.5)),
                _ => (body["seed"], body["stop"], body["n"]) = (json!(i), json!(["b"]), json!(2)),
            }
            (path, body)
        })
        .collect()
}

/// What a client hears, without what differs from time to time: ids, times, and how speculation went.
fn heard(path: &str, reply: &Reply, streams: bool) -> Vec<Value> {
    assert_eq!(reply.status, 200, "{reply:?}");
    if path == "/generate" {
        // The last line of each answer has its whole text.
        let lines = reply.body.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        let mut texts: Vec<Value> = Vec::new();
        for line in lines {
            let index = line["index"].as_u64().unwrap_or(0) as usize;
            texts.resize(texts.len().max(index + 1), Value::Null);
            texts[index] = line["text"].clone();
        }
        return texts;
    }
    if !streams {
        return reply.json()["choices"].as_array().unwrap().clone();
    }
    let mut texts: Vec<String> = Vec::new();
    for event in reply.events() {
        for choice in event["choices"].as_array().unwrap() {
            let index = choice["index"].as_u64().unwrap() as usize;
            texts.resize(texts.len().max(index + 1), String::new());
            for part in [&choice["delta"]["content"], &choice["text"], &choice["finish_reason"]] {
                texts[index].push_str(part.as_str().unwrap_or_default());
            }
        }
    }
    texts.into_iter().map(Value::String).collect()
}

fn ask(address: SocketAddr, (path, body): &(&'static str, Value)) -> Vec<Value> {
    let reply = read(post_bytes(address, path, body.to_string().as_bytes()));
    heard(path, &reply, body["stream"] == true)
}

/// Does something that no client should do; gives the status where there is one.
fn misbehave(address: SocketAddr, case: u64) -> Option<u16> {
    let draws = CounterRng::new(7, Stream::Shuffle, case);
    let path = ["/v1/completions", "/v1/chat/completions", "/generate"][draws.below(0, 3) as usize];
    let long = json!({ "prompt": "a b", "max_tokens": 180, "ignore_eos": true, "stream": true }).to_string();
    let bad: Vec<u8> = match case % 8 {
        0 => b"{\"prompt\": ".to_vec(),
        1 => br#"{"prompt": 5, "messages": "x", "max_tokens": "many"}"#.to_vec(),
        2 => json!({ "prompt": "a".repeat(3 << 20), "messages": [] }).to_string().into_bytes(),
        3 => (0..200).map(|i| draws.below(10 + i, 256) as u8).collect(),
        4 => "[".repeat(10_000).into_bytes(),
        5 => {
            // Hears the beginning and leaves.
            let mut stream = post_bytes(address, "/v1/completions", long.as_bytes());
            let _ = stream.read(&mut [0; 40]);
            return None;
        }
        6 => {
            // Never hears anything, and leaves in the middle.
            let stream = post_bytes(address, "/generate", long.as_bytes());
            thread::sleep(std::time::Duration::from_millis(draws.below(1, 30)));
            let _ = stream.shutdown(Shutdown::Both);
            return None;
        }
        _ => {
            // Promises more than it sends.
            let mut stream = std::net::TcpStream::connect(address).unwrap();
            let head = format!(
                "POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 900\r\n\r\n{{"
            );
            let _ = stream.write_all(head.as_bytes());
            return None;
        }
    };
    Some(read(post_bytes(address, path, &bad)).status)
}

#[test]
fn good_requests_end_beside_bad_ones_as_they_do_alone() {
    serve_with(Setup { queue: 64, ..Setup::default() }, |address, _| {
        let alone: Vec<Vec<Vec<Value>>> =
            (0..CLIENTS).map(|client| requests(client).iter().map(|request| ask(address, request)).collect()).collect();
        let (is_done, refused) = (AtomicBool::new(false), AtomicUsize::new(0));
        thread::scope(|scope| {
            for bad in 0..4_u64 {
                let (is_done, refused) = (&is_done, &refused);
                scope.spawn(move || {
                    let mut case = bad << 32;
                    while !is_done.load(Ordering::Relaxed) {
                        if let Some(status) = misbehave(address, case + bad) {
                            assert!((400..500).contains(&status), "{status} in case {case}");
                            refused.fetch_add(1, Ordering::Relaxed);
                        }
                        case += 1;
                    }
                });
            }
            // Ends the others also when a good client fails.
            struct Done<'a>(&'a AtomicBool);
            impl Drop for Done<'_> {
                fn drop(&mut self) {
                    self.0.store(true, Ordering::Relaxed);
                }
            }
            let _done = Done(&is_done);
            let good: Vec<_> = (0..CLIENTS)
                .map(|client| {
                    scope
                        .spawn(move || requests(client).iter().map(|request| ask(address, request)).collect::<Vec<_>>())
                })
                .collect();
            for (client, (good, alone)) in good.into_iter().zip(&alone).enumerate() {
                let found = good.join().unwrap();
                for (i, (found, alone)) in found.iter().zip(alone).enumerate() {
                    assert_eq!(found, alone, "client {client}, request {i}");
                }
            }
        });
        assert!(refused.load(Ordering::Relaxed) > 20, "there were hardly any bad ones");
        // All places are free again: more than wait are taken at once.
        wait_until_idle(address);
        assert_eq!(get(address, "/health").status, 200);
        let error = r#"vllm:request_success_total{model_name="tiny",finished_reason="error"} 0"#;
        assert!(get(address, "/metrics").body.lines().any(|line| line == error), "a request failed");
        let body = json!({ "prompt": "a", "max_tokens": 2 }).to_string();
        let streams: Vec<_> = (0..60).map(|_| post_bytes(address, "/v1/completions", body.as_bytes())).collect();
        assert!(streams.into_iter().all(|stream| read(stream).status == 200));
        assert_eq!(metric(address, "vllm:num_requests_waiting"), 0.0);
    });
}
