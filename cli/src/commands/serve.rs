//! `deepspec serve`: target and drafter behind an OpenAI-compatible API.

use std::time::Duration;

use deepspec_engine::progress::Context;
use deepspec_serve::{ApiKey, Capacity, ServeOptions, Server};
use deepspec_stages::drafter::{Drafter, describe};

use super::decoding::{Models, check_named};
use super::setup::{api_key, available_memory};
use crate::args::{ReasoningPlace, ServeArguments};

/// Share of the free memory that caches may take.
const SHARE_OF_FREE: f64 = 0.9;

/// Time that clients have for the head of a request, for its body, and for taking in any part of an answer.
const PATIENCE: Duration = Duration::from_secs(30);
/// Connections at a time.
const CONNECTIONS: usize = 1024;

/// Serves until a signal.
///
/// # Errors
/// When a model cannot be loaded, memory does not suffice, or the address cannot be listened on.
pub(super) fn run(arguments: &ServeArguments, context: Context<'_>) -> anyhow::Result<()> {
    // Before the models are loaded: nobody likes to wait for an address that is taken, or a key that is none.
    let api_key = arguments.api_key.clone().or_else(api_key).as_deref().map(ApiKey::new).transpose()?;
    check_named(&arguments.models)?;
    let server = Server::bind(arguments.listen)?;
    let models = Models::load(&arguments.models, context)?;
    let target = models.target.target.config();
    let drafter = models.drafter.as_ref().map(Drafter::config);
    let available = match arguments.memory {
        Some(gigabytes) => Some((gigabytes * 1e9) as u64),
        None => available_memory().map(|bytes| (SHARE_OF_FREE * bytes as f64) as u64),
    };
    let slots = usize::from(arguments.slots);
    let capacity = Capacity::plan(target, drafter.as_ref(), slots, arguments.context, available)?;
    let Capacity { slots, context: tokens, bytes } = capacity;
    context.note(format!("{slots} slots of {tokens} tokens, up to {:.2} GB of caches", bytes as f64 / 1e9));
    if api_key.is_none() && !arguments.listen.ip().is_loopback() {
        context.warn("other machines can use this server: it listens beyond this one, without an API key");
    }
    let mut engine = models.engine(slots, tokens, context)?;
    let schedule = models.schedule;
    let description = match &drafter {
        Some(config) => format!("schedule {schedule}; {}", describe(config)),
        None => format!("schedule {schedule}; no drafter"),
    };
    context.note(format!("schedule {schedule}, proposals: {}", engine.proposer_name()));
    let mut text = models.target.text.clone();
    if arguments.thinking {
        text.renderer = text.renderer.with_thinking(Some(true));
    }
    let options = ServeOptions {
        model_name: arguments.model_name.clone().unwrap_or_else(|| models.target.name.clone()),
        api_key,
        queue: arguments.queue,
        drain: Duration::from_secs(arguments.drain),
        reasoning: text.reasoning_marks().filter(|_| arguments.reasoning == ReasoningPlace::Apart),
        connections: CONNECTIONS,
        patience: PATIENCE,
        confidence_threshold: schedule.threshold(),
        has_drafter: drafter.is_some(),
        description,
    };
    server.run(&mut engine, &text, &options, context)?;
    Ok(())
}
