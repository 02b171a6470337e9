//! A server with the tiny target over real sockets, and clients that speak to it byte by byte.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use deepspec_engine::TextSide;
use deepspec_engine::progress::{Context, Event, Interrupt, Reporter};
use deepspec_engine::{Engine, Schedule, Sources, StepCost, StepCosts};
use deepspec_models::speculate::{DSparkProposer, Proposer};
use deepspec_serve::{ApiKey, ServeOptions, Server};
use serde_json::Value;

use crate::turns_bad::{Fault, TurnsBad};
use crate::{common, tiny, tiny_drafter};

const TEMPLATE: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking %}<think>\n{% endif %}{% endif %}";
/// Ids of the marks around reasoning.
pub(crate) const THINK: [u32; 2] = [258, 259];
/// Time that the server of these tests gives to a client.
pub(crate) const PATIENCE: Duration = Duration::from_millis(1500);

#[derive(Default)]
struct Log(Mutex<Vec<String>>);

impl Reporter for Log {
    fn event(&self, event: Event<'_>) {
        if let Event::Note(text) | Event::Warning(text) | Event::Line(text) = event {
            self.0.lock().unwrap().push(text.to_owned());
        }
    }
}

/// What differs between the servers of tests.
pub(crate) struct Setup {
    pub(crate) api_key: Option<ApiKey>,
    /// Requests that may wait beside the three that are decoded.
    pub(crate) queue: usize,
    pub(crate) connections: usize,
    pub(crate) drain: Duration,
    /// How the drafter turns bad, and after how many calls.
    pub(crate) fault: Option<(Fault, usize)>,
    pub(crate) sources: Sources,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            api_key: None,
            queue: 2,
            connections: 512,
            drain: Duration::from_secs(20),
            fault: None,
            sources: Sources::Hybrid,
        }
    }
}

/// Runs `client` against a server of three slots with two places to wait.
pub(crate) fn serve<T: Send>(
    api_key: Option<&str>,
    client: impl FnOnce(SocketAddr, &Interrupt) -> T + Send,
) -> (T, Vec<String>) {
    let api_key = api_key.map(|key| ApiKey::new(key).unwrap());
    serve_with(Setup { api_key, ..Setup::default() }, client)
}

/// Runs `client` against a server of three slots.
pub(crate) fn serve_with<T: Send>(
    setup: Setup,
    client: impl FnOnce(SocketAddr, &Interrupt) -> T + Send,
) -> (T, Vec<String>) {
    let (log, interrupt) = (Log::default(), Interrupt::new());
    let server = Server::bind(([127, 0, 0, 1], 0).into()).unwrap();
    let address = server.address();
    let result = thread::scope(|scope| {
        let client = scope.spawn(|| {
            // A client that fails must not leave the server running.
            struct Stop<'a>(&'a Interrupt);
            impl Drop for Stop<'_> {
                fn drop(&mut self) {
                    self.0.set();
                }
            }
            let _stop = Stop(&interrupt);
            client(address, &interrupt)
        });
        let (target, drafter) = (tiny::target(), tiny_drafter::drafter("decode/dspark_vanilla"));
        let renderer =
            common::byte_renderer(TEMPLATE, &["<|im_start|>", "<|im_end|>", "<think>", "</think>"], "<|im_end|>", &[]);
        let text = TextSide { renderer, bos: Some(256), pad: None };
        let marks = text.reasoning_marks().unwrap();
        assert_eq!([marks.open, marks.close], THINK);
        let mut proposer: Box<dyn Proposer> =
            Box::new(DSparkProposer::new(&drafter, target.lm_head(), 3, 200).unwrap());
        if let Some((fault, good_calls)) = setup.fault {
            proposer = Box::new(TurnsBad { inner: proposer, fault, good_calls });
        }
        let costs =
            StepCosts::new(vec![StepCost { rows: 1, seconds: 1.0 }, StepCost { rows: 9, seconds: 1.4 }]).unwrap();
        let mut engine =
            Engine::scheduled(&target, Schedule::Scheduled, setup.sources, Some(proposer), Some(costs), (3, 200))
                .unwrap();
        let options = ServeOptions {
            model_name: "tiny".into(),
            api_key: setup.api_key,
            queue: setup.queue,
            drain: setup.drain,
            connections: setup.connections,
            reasoning: Some(marks),
            patience: PATIENCE,
            confidence_threshold: 0.0,
            has_drafter: true,
            description: "a test".into(),
        };
        let context = Context { reporter: &log, interrupt: &interrupt };
        server.run(&mut engine, &text, &options, context).unwrap();
        assert_eq!((engine.active(), engine.waiting(), engine.free_slots()), (0, 0, 3), "the engine is not empty");
        client.join().unwrap()
    });
    (result, log.0.into_inner().unwrap())
}

/// An answer of the server.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: String,
}

impl Reply {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// Data of server-sent events.
    pub(crate) fn events(&self) -> Vec<Value> {
        let data: Vec<&str> = self.body.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
        assert_eq!(data.last(), Some(&"[DONE]"), "{self:?}");
        data[..data.len() - 1].iter().map(|data| serde_json::from_str(data).unwrap()).collect()
    }
}

pub(crate) fn open(address: SocketAddr, head: &str, body: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let length = body.len();
    let head = format!("{head}\r\nhost: test\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n");
    // A server that has heard enough may close before all is sent.
    let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body));
    stream
}

pub(crate) fn read(mut stream: TcpStream) -> Reply {
    let mut bytes = Vec::new();
    let _ = stream.read_to_end(&mut bytes);
    let text = String::from_utf8(bytes).expect("answers are UTF-8");
    let (head, mut rest) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no answer: {text:?}"));
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    let mut body = String::new();
    if head.to_lowercase().contains("transfer-encoding: chunked") {
        while let Some((size, after)) = rest.split_once("\r\n") {
            let size = usize::from_str_radix(size, 16).unwrap();
            body.push_str(&after[..size]);
            rest = &after[size + 2..];
        }
    } else {
        body.push_str(rest);
    }
    Reply { status, head: head.into(), body }
}

pub(crate) fn get(address: SocketAddr, path: &str) -> Reply {
    read(open(address, &format!("GET {path} HTTP/1.1"), b""))
}

pub(crate) fn post_bytes(address: SocketAddr, path: &str, body: &[u8]) -> TcpStream {
    open(address, &format!("POST {path} HTTP/1.1\r\ncontent-type: application/json"), body)
}

pub(crate) fn post(address: SocketAddr, path: &str, body: &Value) -> Reply {
    read(post_bytes(address, path, body.to_string().as_bytes()))
}

pub(crate) fn metric(address: SocketAddr, name: &str) -> f64 {
    let text = get(address, "/metrics").body;
    let line =
        text.lines().find(|line| line.starts_with(&format!("{name}{{"))).unwrap_or_else(|| panic!("{name}: {text}"));
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

/// Waits until the server holds no request.
pub(crate) fn wait_until_idle(address: SocketAddr) {
    let begun = Instant::now();
    let mut looks = 0;
    // Requests on their way to the engine are in no count yet: it has to be idle for a while.
    while looks < 10 {
        let is_idle =
            metric(address, "vllm:num_requests_running") + metric(address, "vllm:num_requests_waiting") == 0.0;
        looks = if is_idle { looks + 1 } else { 0 };
        assert!(begun.elapsed() < Duration::from_secs(30), "requests are left");
        thread::sleep(Duration::from_millis(20));
    }
}
