//! Answers as events: one JSON object after the other while tokens come.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse as _, Response};
use futures_util::{Stream, StreamExt as _};
use serde_json::{Value, json};

use super::answer::{Usage, delta};
use super::api_error::ApiError;
use super::engine_thread::{News, Ticket};
use super::openai::{ApiRequest, Form};
use super::routes::{App, names, now};

/// Time between signs of life while no token comes.
const SIGN_OF_LIFE: Duration = Duration::from_secs(15);

/// Turns news into events.
pub(super) struct EventWriter {
    app: Arc<App>,
    api: ApiRequest,
    usage: Usage,
    /// Text of each answer so far, prompt included, where the form repeats it; else its length in characters.
    texts: Vec<(String, usize)>,
    created: u64,
    id: String,
    has_failed: bool,
    _ticket: Ticket,
}

impl EventWriter {
    pub(super) fn new(app: &Arc<App>, api: ApiRequest, usage: Usage, prompts: Vec<Vec<u32>>, ticket: Ticket) -> Self {
        let tokenizer = app.text.tokenizer();
        let start = |prompt: Vec<u32>| match api.form {
            Form::Simple => (tokenizer.decode(&prompt, true), 0),
            Form::Chat | Form::Text => (String::new(), 0),
        };
        let texts = prompts.into_iter().map(start).collect();
        let id = format!("{}-{}", names(api.form, true).0, ticket.ids.first().copied().unwrap_or(0));
        Self { app: app.clone(), api, usage, texts, created: now(), id, has_failed: false, _ticket: ticket }
    }

    fn event(&self, choices: Vec<Value>) -> Value {
        let mut event = json!({
            "id": self.id,
            "object": names(self.api.form, true).1,
            "created": self.created,
            "model": self.app.model_name,
            "choices": choices,
        });
        if self.api.includes_usage {
            event["usage"] = Value::Null;
        }
        event
    }

    /// The events of a piece of news.
    pub(super) fn news(&mut self, (index, update): News) -> Vec<Value> {
        let update = match update {
            Ok(update) => update,
            Err(message) => {
                self.has_failed = true;
                return vec![ApiError::internal(message).to_json()];
            }
        };
        self.usage.add(&update);
        let is_first = update.round.is_none();
        let (text, length) = &mut self.texts[index];
        let offset = *length;
        *length += update.text.chars().count();
        if self.api.form == Form::Simple {
            text.push_str(&update.text);
            return vec![json!({ "text": [text.clone()], "index": index })];
        }
        let mut events = Vec::new();
        if is_first && self.api.form == Form::Chat {
            let delta = json!({ "role": "assistant", "content": "" });
            events.push(
                self.event(vec![json!({ "index": index, "delta": delta, "logprobs": null, "finish_reason": null })]),
            );
        }
        let wants = (self.api.logprobs.is_some(), self.api.returns_rounds);
        if let Some(choice) = delta(self.api.form, index, &update, wants, self.app.text.tokenizer(), offset) {
            events.push(self.event(vec![choice]));
        }
        events
    }

    /// The events after the last news.
    pub(super) fn end(&mut self) -> Vec<Value> {
        if !self.api.includes_usage || self.has_failed {
            return Vec::new();
        }
        let mut event = self.event(Vec::new());
        event["usage"] = self.usage.to_json();
        event["speculation"] = self.usage.speculation();
        vec![event]
    }
}

/// Server-sent events of JSON objects, with the API's mark at the end.
pub(super) fn sse(events: impl Stream<Item = Value> + Send + 'static) -> Response {
    let events = events.map(|value| Event::default().data(value.to_string()));
    let end = futures_util::stream::iter([Event::default().data("[DONE]")]);
    let events = events.chain(end).map(Ok::<_, Infallible>);
    Sse::new(events).keep_alive(KeepAlive::new().interval(SIGN_OF_LIFE)).into_response()
}
