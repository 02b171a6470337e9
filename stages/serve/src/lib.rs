//! Serve: target and drafter behind an HTTP API that OpenAI's clients speak.
//!
//! The engine stays on the thread that calls [`Server::run`]; connections live on threads of their own and talk to it through
//! channels (`engine_thread.rs`). `body.rs`, `openai.rs` and `accept.rs` read requests, `answer.rs` and `stream.rs` write
//! answers, `routes.rs` joins the two, `http.rs` accepts connections. Nothing here decodes: that is [`deepspec_engine`].
//!
//! Same request, same answer, whatever else is being served: greedy answers always; sampled ones if the request carries a
//! seed, for then its own proposals alone decide what is verified.

mod accept;
mod answer;
mod api_error;
mod body;
mod capacity;
mod engine_thread;
pub mod error;
mod fields;
mod http;
mod key;
#[cfg(test)]
#[path = "../../../models/src/error/message_form.rs"]
mod message_form;
#[cfg(test)]
mod messages;
mod metrics;
mod openai;
mod routes;
mod stream;

use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use serde_json::json;
use tokio::sync::{Semaphore, watch};

use self::body::Bodies;
pub use self::capacity::Capacity;
use self::engine_thread::{EngineLoop, Shared};
pub use self::error::{Error, Result};
use self::http::Limits;
pub use self::key::ApiKey;
use self::routes::{App, now, reserve_router, router};
use deepspec_engine::TextSide;
use deepspec_engine::progress::Context;
use deepspec_engine::{Engine, ReasoningMarks};

/// Threads for connections; tokens come from the engine's.
const THREADS: usize = 2;

/// What the server is told.
#[derive(Debug, Clone)]
pub struct ServeOptions {
    /// Name of the model in the API.
    pub model_name: String,
    /// Key that clients have to send.
    pub api_key: Option<ApiKey>,
    /// Requests that may wait for a slot.
    pub queue: usize,
    /// Time that requests in work get to finish once the server is told to stop.
    pub drain: Duration,
    /// Tokens around reasoning, which chats get apart from the answer.
    pub reasoning: Option<ReasoningMarks>,
    /// Connections at a time; a few more are told how the server is, and no other thing.
    pub connections: usize,
    /// Time that a client has for sending the head of a request, for its body, and for taking in any part of the answer.
    pub patience: Duration,
    /// Confidence that proposed tokens need to be verified; 0 for no such rule.
    pub confidence_threshold: f32,
    /// Whether there is a trained drafter, to be judged by what is accepted.
    pub has_drafter: bool,
    /// What the page says of models and schedule.
    pub description: String,
}

/// A server that listens.
#[derive(Debug)]
pub struct Server {
    listener: TcpListener,
    address: SocketAddr,
}

impl Server {
    /// Listens on an address; port 0 takes a free one.
    ///
    /// # Errors
    /// [`Error::Input`] when that is not possible.
    pub fn bind(address: SocketAddr) -> Result<Self> {
        let listen = || {
            let listener = TcpListener::bind(address)?;
            listener.set_nonblocking(true)?;
            let address = listener.local_addr()?;
            Ok(Self { listener, address })
        };
        listen().map_err(|error: std::io::Error| Error::Input(format!("cannot listen on {address}: {error}")))
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves until the interrupt is set and the requests in work are finished or out of time.
    ///
    /// # Errors
    /// When the threads for connections cannot be started, or stop by themselves.
    pub fn run(self, engine: &mut Engine<'_>, text: &TextSide, options: &ServeOptions, ctx: Context<'_>) -> Result<()> {
        let shared = Arc::new(Shared::new(engine.slots() + options.queue));
        let (commands, orders) = mpsc::channel();
        let app = App {
            shared: shared.clone(),
            commands,
            text: text.clone(),
            vocab_size: engine.vocab_size(),
            context: engine.capacity(),
            model_name: options.model_name.clone(),
            created: now(),
            reasoning: options.reasoning,
            patience: options.patience,
            threshold: options.confidence_threshold,
            key: options.api_key.clone(),
            bodies: Arc::new(Bodies::default()),
            turns: Arc::new(Semaphore::new(thread::available_parallelism().map_or(1, usize::from))),
            next_id: AtomicU64::new(1),
            describes: json!({
                "model": options.model_name,
                "description": options.description,
                "proposer": engine.proposer_name(),
                "slots": engine.slots(),
                "context": engine.capacity(),
            }),
        };
        let (stop, stops) = watch::channel(false);
        let app = Arc::new(app);
        let routers = (router(app.clone()), reserve_router(app));
        let limits = Limits { connections: options.connections, patience: options.patience };
        let connections = connections(self.listener, routers, limits, stops)?;
        ctx.note(format!("listening on http://{}; the page is at /, the API at /v1", self.address));
        EngineLoop::new(engine, shared, options.has_drafter).run(&orders, options.drain, ctx);
        // Requests that have come too late are told so.
        drop(orders);
        let _ = stop.send(true);
        match connections.join() {
            Ok(ended) => Ok(ended?),
            Err(_) => Err(Error::Invariant("the thread that serves connections panicked".into())),
        }
    }
}

/// Starts the threads for connections.
fn connections(
    listener: TcpListener,
    routers: (axum::Router, axum::Router),
    limits: Limits,
    stops: watch::Receiver<bool>,
) -> Result<thread::JoinHandle<std::io::Result<()>>> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(THREADS).enable_all().build()?;
    let serve = move || {
        let ended = runtime.block_on(http::serve(listener, routers, limits, stops));
        runtime.shutdown_background();
        ended
    };
    Ok(thread::Builder::new().name("connections".into()).spawn(serve)?)
}
