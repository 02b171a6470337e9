//! What happens to requests before they get to the engine: large ones cost little, and hold up nobody.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::resident_bytes;
use crate::server::{Setup, get, metric, open, post, post_bytes, read, serve, serve_with};

/// Nearly the largest body that is taken, with one long word.
fn long_word(path: &str) -> Vec<u8> {
    let word = "a".repeat((4 << 20) - 200);
    let body = match path {
        "/v1/chat/completions" => json!({ "messages": [{ "role": "user", "content": word }], "max_tokens": 1 }),
        _ => json!({ "prompt": word, "max_tokens": 1 }),
    };
    body.to_string().into_bytes()
}

fn refused(address: std::net::SocketAddr, reason: &str) -> f64 {
    let text = get(address, "/metrics").body;
    let label = format!("deepspec_requests_refused_total{{model_name=\"tiny\",reason=\"{reason}\"}} ");
    let line = text.lines().find_map(|line| line.strip_prefix(&label));
    line.unwrap_or_else(|| panic!("{label}: {text}")).parse().unwrap()
}

#[test]
fn a_text_that_cannot_fit_is_refused_before_it_is_encoded() {
    serve(None, |address, _| {
        let begun = Instant::now();
        for path in ["/v1/completions", "/v1/chat/completions", "/generate"] {
            let reply = read(post_bytes(address, path, &long_word(path)));
            let error = &reply.json()["error"];
            assert_eq!((reply.status, error["code"].as_str()), (400, Some("context_length_exceeded")), "{path}");
            let message = error["message"].as_str().unwrap();
            assert!(message.contains("200 tokens") && message.contains("at least"), "not counted: {message}");
        }
        // As tokens, it is counted in any case.
        let tokens = json!({ "prompt": vec![1; 500_000] });
        let reply = read(post_bytes(address, "/v1/completions", tokens.to_string().as_bytes()));
        assert_eq!(reply.json()["error"]["code"], "context_length_exceeded");
        assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
        // What just fits is answered, and what just does not is told its exact length.
        let fits =
            |length: usize| post(address, "/v1/completions", &json!({ "prompt": "a".repeat(length), "max_tokens": 1 }));
        assert_eq!(fits(199).status, 200);
        let reply = fits(200);
        assert_eq!(reply.status, 400);
        assert!(reply.json()["error"]["message"].as_str().unwrap().contains("200 of the prompt and 1 to generate"));
        assert_eq!(refused(address, "too_long"), 5.0);
        assert_eq!(metric(address, "vllm:prompt_tokens_total"), 199.0);
    });
}

#[test]
fn many_large_bodies_at_once_take_little_memory() {
    serve_with(Setup { queue: 32, ..Setup::default() }, |address, _| {
        let before = resident_bytes();
        let is_done = AtomicBool::new(false);
        let highest = thread::scope(|scope| {
            let watch = scope.spawn(|| {
                let mut highest = 0;
                while !is_done.load(Ordering::Relaxed) {
                    highest = highest.max(resident_bytes());
                    thread::sleep(Duration::from_millis(1));
                }
                highest
            });
            let clients: Vec<_> = (0..12)
                .map(|i| {
                    let path = ["/v1/completions", "/v1/chat/completions"][i % 2];
                    scope.spawn(move || read(post_bytes(address, path, &long_word(path))).status)
                })
                .collect();
            for client in clients {
                assert_eq!(client.join().unwrap(), 400);
            }
            is_done.store(true, Ordering::Relaxed);
            watch.join().unwrap()
        });
        // Encoding took 400 megabytes for each of them; the clients and the other tests of this process have their share.
        let grown = highest.saturating_sub(before);
        assert!(grown < 1 << 30, "{grown} bytes");
        assert_eq!(refused(address, "too_long"), 12.0);
    });
}

#[test]
fn others_are_answered_beside_clients_who_send_large_bodies_again_and_again() {
    serve_with(Setup { queue: 32, ..Setup::default() }, |address, _| {
        let body = json!({ "prompt": "a b a b", "max_tokens": 8, "temperature": 0, "ignore_eos": true });
        let alone = post(address, "/v1/completions", &body).json()["choices"].clone();
        let (is_done, sent) = (AtomicBool::new(false), AtomicUsize::new(0));
        thread::scope(|scope| {
            // Ends the others also when this test fails.
            struct Done<'a>(&'a AtomicBool);
            impl Drop for Done<'_> {
                fn drop(&mut self) {
                    self.0.store(true, Ordering::Relaxed);
                }
            }
            let done = Done(&is_done);
            for i in 0..16 {
                let (is_done, sent) = (&is_done, &sent);
                scope.spawn(move || {
                    let path = ["/v1/completions", "/v1/chat/completions", "/generate"][i % 3];
                    let bytes = long_word(path);
                    while !is_done.load(Ordering::Relaxed) {
                        let status = read(post_bytes(address, path, &bytes)).status;
                        assert!([400, 429].contains(&status), "{status}");
                        sent.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
            let begun = Instant::now();
            while sent.load(Ordering::Relaxed) < 16 {
                thread::sleep(Duration::from_millis(5));
                assert!(begun.elapsed() < Duration::from_secs(60), "nothing is refused");
            }
            let mut longest = Duration::ZERO;
            for _ in 0..10 {
                let begun = Instant::now();
                let reply = post(address, "/v1/completions", &body);
                assert_eq!((reply.status, &reply.json()["choices"]), (200, &alone));
                longest = longest.max(begun.elapsed());
            }
            // It was twenty seconds where sixteen of them were encoded at a time.
            assert!(longest < Duration::from_secs(8), "{longest:?}");
            drop(done);
        });
        assert!(refused(address, "too_long") >= 16.0);
    });
}

#[test]
fn refused_requests_are_counted_by_their_reason() {
    serve(Some("secret"), |address, _| {
        let head = |path: &str| {
            format!("POST {path} HTTP/1.1\r\ncontent-type: application/json\r\nauthorization: bearer secret")
        };
        let send = |path: &str, body: &[u8]| read(open(address, &head(path), body)).status;
        let status =
            |key: &str| read(open(address, &format!("GET /v1/models HTTP/1.1\r\nauthorization: {key}"), b"")).status;
        assert_eq!((status("Bearer wrong"), status("BEARER secret"), status("Basic secret")), (401, 200, 401));
        assert_eq!(send("/v1/completions", b"{"), 400);
        assert_eq!(send("/generate", br#"{"prompt": "a", "temperature": "hot"}"#), 400);
        assert_eq!(send("/v1/chat/completions", br#"{"messages": [], "model": "other"}"#), 400);
        assert_eq!(send("/v1/completions", &vec![b' '; (4 << 20) + 1]), 413);
        assert_eq!(send("/v1/completions", br#"{"prompt": "a", "max_tokens": 1000}"#), 400);
        assert_eq!(send("/v1/completions", br#"{"prompt": "a", "max_tokens": 1}"#), 200);
        let text = read(open(address, "GET /metrics HTTP/1.1\r\nauthorization: Bearer secret", b"")).body;
        for (reason, count) in
            [("unauthorized", 2), ("invalid", 3), ("too_large", 1), ("too_long", 1), ("queue_full", 0)]
        {
            let line = format!("deepspec_requests_refused_total{{model_name=\"tiny\",reason=\"{reason}\"}} {count}");
            assert!(text.lines().any(|found| found == line), "{line} in\n{text}");
        }
    });
}

/// Two choices of one seed, and one of the next: three different texts.
#[test]
fn choices_of_neighbouring_seeds_are_different_texts() {
    serve(None, |address, _| {
        let texts = |path: &str, seed: i64| -> Vec<String> {
            let mut body = json!({ "seed": seed, "max_tokens": 16, "temperature": 1.8, "n": 4, "ignore_eos": true });
            match path {
                "/v1/chat/completions" => body["messages"] = json!([{ "role": "user", "content": "a b" }]),
                _ => body["prompt"] = json!("a b"),
            }
            if path == "/generate" {
                body["best_of"] = json!(4);
            }
            let reply = post(address, path, &body).json();
            let choices = reply["choices"].as_array().or(reply["text"].as_array()).unwrap();
            let text = |choice: &Value| match (&choice["message"]["content"], &choice["text"]) {
                (Value::String(text), _) | (_, Value::String(text)) => text.clone(),
                _ => choice.as_str().unwrap().to_owned(),
            };
            choices.iter().map(text).collect()
        };
        for path in ["/v1/completions", "/v1/chat/completions", "/generate"] {
            let all: Vec<Vec<String>> = [-1, 0, 1, 2].iter().map(|&seed| texts(path, seed)).collect();
            let distinct: std::collections::BTreeSet<&String> = all.iter().flatten().collect();
            assert_eq!(distinct.len(), 16, "{path}: {all:?}");
            assert_eq!(all[1], texts(path, 0), "{path}: a seed gives the same again");
        }
    });
}
