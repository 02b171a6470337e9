//! One streamed completion over a socket, timed as a client sees it.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::Result;

/// What one request was to its client.
#[derive(Debug, Clone, Default)]
pub(crate) struct Timed {
    pub(crate) first_s: f64,
    pub(crate) whole_s: f64,
    pub(crate) tokens: usize,
    pub(crate) rounds: usize,
    pub(crate) verified: usize,
    pub(crate) accepted: usize,
}

impl Timed {
    /// Mean time between tokens after the first.
    pub(crate) fn per_token_s(&self) -> Option<f64> {
        (self.tokens > 1).then(|| (self.whole_s - self.first_s) / (self.tokens - 1) as f64)
    }
}

/// Sends a request to an address such as `127.0.0.1:8000` and reads its events to the end.
pub(crate) fn ask(address: &str, body: &Value) -> Result<Timed> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(Duration::from_secs(300)))?;
    let body = body.to_string();
    let begun = Instant::now();
    write!(
        stream,
        "POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    )?;
    let mut timed = Timed::default();
    let mut status = String::new();
    for line in BufReader::new(stream).lines() {
        let line = line?;
        if status.is_empty() {
            status.clone_from(&line);
        }
        let Some(data) = line.strip_prefix("data: ") else { continue };
        let now = begun.elapsed().as_secs_f64();
        let Ok(event) = serde_json::from_str::<Value>(data) else { continue };
        if event["choices"][0]["delta"]["content"].as_str().is_some_and(|text| !text.is_empty()) {
            timed.whole_s = now;
            if timed.first_s == 0.0 {
                timed.first_s = now;
            }
        }
        let count = |value: &Value| value.as_u64().unwrap_or(0) as usize;
        if !event["speculation"].is_null() {
            timed.tokens = count(&event["usage"]["completion_tokens"]);
            timed.rounds = count(&event["speculation"]["rounds"]);
            timed.verified = count(&event["speculation"]["verified_tokens"]);
            timed.accepted = count(&event["speculation"]["accepted_tokens"]);
        }
    }
    if timed.tokens == 0 {
        return Err(format!("no answer: {status}").into());
    }
    Ok(timed)
}
