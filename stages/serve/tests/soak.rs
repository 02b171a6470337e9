//! The server's memory under many requests: a long answer whose drafter rests, long prompts and short requests beside it, over and
//! over. Resident memory has to be a flat line after the warm-up.
//!
//! A few seconds of it by default; `DEEPSPEC_SOAK_MINUTES` goes on for so long. Says that it was skipped where the system does not
//! tell a process its memory.
#![expect(
    clippy::disallowed_methods,
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "tests read the environment for how long they run, say what they measured and fail as tests do"
)]

#[path = "../../tests/common/mod.rs"]
mod common;
#[path = "../../tests/common/tiny.rs"]
mod tiny;
#[path = "../../tests/common/tiny_drafter.rs"]
mod tiny_drafter;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use deepspec_engine::TextSide;
use deepspec_engine::progress::{Context, Event, Interrupt, Reporter};
use deepspec_engine::{Adaptive, Engine, StepCost, StepCosts};
use deepspec_models::speculate::DSparkProposer;
use deepspec_serve::{ServeOptions, Server};
use serde_json::{Value, json};

const TEMPLATE: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
/// Slots and tokens per slot of the engine.
const ROOM: (usize, usize) = (5, 500);
/// Tokens of the answer that the drafter rests beside.
const LONG_ANSWER: usize = 440;
/// Bytes, and so tokens, of a long prompt.
const LONG_PROMPT: usize = 480;
/// Rounds of the short form, the first of which is the warm-up of the others.
const ROUNDS: usize = 4;
/// What resident memory may grow by when a long answer joins long prompts. The rows of the steps beside it come to far more.
const JOINING: usize = 12 << 20;
/// What it may grow by from round to round, over all rounds together.
const GROWTH: usize = 5 << 20;

struct Silent;

impl Reporter for Silent {
    fn event(&self, _: Event<'_>) {}
}

/// Memory of this process in bytes, where the system says.
fn resident_bytes() -> Option<usize> {
    let text = fs_err::read_to_string("/proc/self/statm").ok()?;
    Some(text.split(' ').nth(1)?.parse::<usize>().ok()? * 4096)
}

/// The body of an answer.
fn ask(address: SocketAddr, head: &str, body: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
    let length = body.len();
    let head = format!("{head} HTTP/1.1\r\nhost: test\r\nconnection: close\r\ncontent-type: application/json");
    write!(stream, "{head}\r\ncontent-length: {length}\r\n\r\n{body}").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    assert!(text.starts_with("HTTP/1.1 200"), "{text}");
    text.split_once("\r\n\r\n").unwrap().1.to_owned()
}

fn complete(address: SocketAddr, prompt: &str, tokens: usize) {
    let body = json!({ "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": true }).to_string();
    let answer: Value = serde_json::from_str(&ask(address, "POST /v1/completions", &body)).unwrap();
    assert_eq!(answer["usage"]["completion_tokens"], json!(tokens), "{answer}");
}

fn metric(address: SocketAddr, name: &str) -> f64 {
    let text = ask(address, "GET /metrics", "");
    let line =
        text.lines().find(|line| line.starts_with(&format!("{name}{{"))).unwrap_or_else(|| panic!("{name}: {text}"));
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

/// Clients beside a long answer: three with long prompts, one with short requests. They go on until told to stop.
fn beside<T>(address: SocketAddr, requests: &AtomicUsize, work: impl FnOnce() -> T) -> T {
    // Ends the clients when the work has ended, however that was.
    struct Stop<'a>(&'a AtomicBool);
    impl Drop for Stop<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    let is_over = AtomicBool::new(false);
    let go_on = |prompt: String, tokens: usize| {
        while !is_over.load(Ordering::Relaxed) {
            complete(address, &prompt, tokens);
            requests.fetch_add(1, Ordering::Relaxed);
        }
    };
    thread::scope(|scope| {
        let _stop = Stop(&is_over);
        for client in 0..3 {
            let prompt: String = (0..LONG_PROMPT).map(|i| char::from(b'a' + ((i * (client + 3)) % 23) as u8)).collect();
            scope.spawn(|| go_on(prompt, 1));
        }
        scope.spawn(|| go_on("a short one".into(), 8));
        work()
    })
}

/// The largest resident memory while `work` runs, and what it returned.
fn peak_of<T: Send>(work: impl FnOnce() -> T + Send) -> (usize, T) {
    thread::scope(|scope| {
        let worker = scope.spawn(work);
        let mut peak = 0;
        while !worker.is_finished() {
            peak = peak.max(resident_bytes().unwrap_or(0));
            thread::sleep(Duration::from_millis(10));
        }
        (peak, worker.join().unwrap())
    })
}

fn soak(address: SocketAddr, minutes: Option<f64>) {
    let begun = Instant::now();
    let requests = AtomicUsize::new(0);
    // All kinds of requests but for the long answer, which is to find the memory as it is without it.
    let enough = || {
        while requests.load(Ordering::Relaxed) < 60 {
            thread::sleep(Duration::from_millis(5));
        }
    };
    let (before, ()) = peak_of(|| beside(address, &requests, enough));
    let mut peaks = Vec::new();
    let is_due =
        |round: usize| minutes.map_or(round < ROUNDS, |m| round < ROUNDS || begun.elapsed().as_secs_f64() < 60.0 * m);
    while is_due(peaks.len()) {
        let (peak, ()) = peak_of(|| beside(address, &requests, || complete(address, "a b a b ", LONG_ANSWER)));
        requests.fetch_add(1, Ordering::Relaxed);
        peaks.push(peak);
    }
    let (rested, written) =
        (metric(address, "deepspec_fallback_rounds_total"), metric(address, "vllm:generation_tokens_total"));
    let mib = |bytes: usize| bytes as f64 / f64::from(1 << 20);
    println!(
        "{} requests in {:.0} s, drafter left out of {rested} rounds for {written} tokens; resident {:.1} MiB before, then {:.1} to {:.1} MiB",
        requests.load(Ordering::Relaxed),
        begun.elapsed().as_secs_f64(),
        mib(before),
        mib(peaks[0]),
        mib(*peaks.iter().max().unwrap())
    );
    assert!(
        rested > 0.5 * (LONG_ANSWER * peaks.len()) as f64,
        "the drafter does not rest: {rested} rounds, {written} tokens"
    );
    let joined = peaks[0].saturating_sub(before);
    assert!(joined < JOINING, "a long answer beside long prompts takes {:.1} MiB", mib(joined));
    let grown = peaks.iter().map(|peak| peak.saturating_sub(peaks[0])).max().unwrap();
    assert!(grown < GROWTH, "memory grows by {:.1} MiB in {} rounds: {peaks:?}", mib(grown), peaks.len());
}

#[test]
fn memory_stays_flat_where_long_prompts_run_beside_a_resting_drafter() {
    if resident_bytes().is_none() {
        println!("skipped: the system does not tell a process its memory");
        return;
    }
    let minutes: Option<f64> = std::env::var("DEEPSPEC_SOAK_MINUTES").ok().map(|text| text.parse().unwrap());
    let interrupt = Interrupt::new();
    let server = Server::bind(([127, 0, 0, 1], 0).into()).unwrap();
    let address = server.address();
    let (target, drafter) = (tiny::target(), tiny_drafter::drafter("decode/dspark_vanilla"));
    let renderer = common::byte_renderer(TEMPLATE, &["<|im_start|>", "<|im_end|>"], "<|im_end|>", &[]);
    let text = TextSide { renderer, bos: None, pad: None };
    let proposer = Box::new(DSparkProposer::new(&drafter, target.lm_head(), ROOM.0, ROOM.1).unwrap());
    // Drafts so dear that the drafter is only tried now and then.
    let costs = StepCosts::new(vec![StepCost { rows: 1, seconds: 1.0 }, StepCost { rows: 2, seconds: 1.1 }]).unwrap();
    let mut engine = Engine::new(&target, proposer, ROOM.0, ROOM.1).unwrap().adapt(Adaptive::fixed(costs, 8.0));
    let options = ServeOptions {
        model_name: "tiny".into(),
        api_key: None,
        queue: 8,
        drain: Duration::from_secs(20),
        reasoning: None,
        connections: 64,
        patience: Duration::from_secs(30),
        confidence_threshold: 0.0,
        has_drafter: true,
        description: "a test".into(),
    };
    thread::scope(|scope| {
        let client = scope.spawn(|| {
            // A client that fails must not leave the server running.
            struct Stop<'a>(&'a Interrupt);
            impl Drop for Stop<'_> {
                fn drop(&mut self) {
                    self.0.set();
                }
            }
            let _stop = Stop(&interrupt);
            soak(address, minutes);
        });
        server.run(&mut engine, &text, &options, Context { reporter: &Silent, interrupt: &interrupt }).unwrap();
        client.join().unwrap();
    });
}
