//! What the server answers under each address.

use std::collections::hash_map::RandomState;
use std::convert::Infallible;
use std::hash::BuildHasher as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{Path, Request as HttpRequest, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::{get, post};
use deepspec_models::speculate::SpeculateError;
use futures_util::StreamExt as _;
use futures_util::stream;
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use tokio::sync::mpsc as news_channel;

use super::answer::{Answer, Usage};
use super::engine_thread::{Command, Job, News, Shared, Ticket};
use super::error::ApiError;
use super::openai::{ApiRequest, Form, Prompt, too_long};
use super::stream::{EventWriter, sse};
use crate::engine::{Reasoning, ReasoningMarks, Request, RequestOptions, TextOptions};
use crate::model_source::TextSide;

/// Largest body of a request.
const MOST_BYTES: usize = 4 << 20;
/// Tokens generated where a completion does not say how many.
const DEFAULT_TOKENS: usize = 16;
/// Answers that one request may ask for.
const MOST_ANSWERS: usize = 256;
/// What the page may do: nothing but talk to this server.
const PAGE_POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; \
img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// What the routes know.
pub(super) struct App {
    pub(super) shared: Arc<Shared>,
    pub(super) commands: mpsc::Sender<Command>,
    pub(super) text: TextSide,
    pub(super) vocab_size: usize,
    /// Most tokens of a sequence.
    pub(super) context: usize,
    pub(super) model_name: String,
    /// Unix time of the start.
    pub(super) created: u64,
    /// Time in which a body has to come.
    pub(super) patience: Duration,
    /// Tokens around reasoning, where it is to be told apart.
    pub(super) reasoning: Option<ReasoningMarks>,
    /// Confidence that proposed tokens need.
    pub(super) threshold: f32,
    /// SHA-256 of the key that clients have to send.
    pub(super) key_hash: Option<[u8; 32]>,
    pub(super) next_id: AtomicU64,
    /// In words, for the page.
    pub(super) describes: Value,
}

type SharedApp = Arc<App>;

/// All routes.
pub(super) fn router(app: SharedApp) -> Router {
    let guarded = Router::new()
        .route("/v1/models", get(models))
        .route("/v1/models/{*name}", get(model))
        .route("/v1/completions", post(completions))
        .route("/v1/chat/completions", post(chat))
        .route("/generate", post(generate))
        .route("/metrics", get(metrics))
        .route("/stats", get(stats))
        .layer(middleware::from_fn_with_state(app.clone(), check_key));
    Router::new()
        .route("/", get(page))
        .route("/health", get(health))
        .route("/openapi.json", get(openapi))
        .merge(guarded)
        .fallback(|| async {
            ApiError::bad("there is nothing under this address")
                .with_status(StatusCode::NOT_FOUND)
                .with_code("not_found")
        })
        .method_not_allowed_fallback(|| async {
            ApiError::bad("this address does not take this method")
                .with_status(StatusCode::METHOD_NOT_ALLOWED)
                .with_code("method_not_allowed")
        })
        .with_state(app)
}

async fn check_key(State(app): State<SharedApp>, request: HttpRequest, next: Next) -> Response {
    if let Some(expected) = &app.key_hash {
        let given = request.headers().get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
        let key = given.and_then(|value| value.strip_prefix("Bearer ")).unwrap_or_default();
        if !is_same(expected, &Sha256::digest(key.as_bytes()).into()) {
            return ApiError::unauthorized().into_response();
        }
    }
    next.run(request).await
}

/// Compares in a time that does not depend on where two hashes differ.
fn is_same(left: &[u8; 32], right: &[u8; 32]) -> bool {
    let difference = left.iter().zip(right).fold(0, |sum, (l, r)| sum | (l ^ r));
    std::hint::black_box(difference) == 0
}

fn json_response(value: &Value) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], value.to_string()).into_response()
}

async fn page() -> Response {
    let headers = [(header::CONTENT_SECURITY_POLICY, PAGE_POLICY), (header::REFERRER_POLICY, "no-referrer")];
    (headers, Html(include_str!("page.html"))).into_response()
}

async fn openapi() -> Response {
    ([(header::CONTENT_TYPE, "application/json")], include_str!("openapi.json")).into_response()
}

async fn health(State(app): State<SharedApp>) -> Response {
    if app.shared.is_stopping() {
        return ApiError::stopping().into_response();
    }
    // Answers are right without the drafter, only slower: that is no reason to take the server out of service.
    match app.shared.metrics.drafter_faults() {
        None => json_response(&json!({ "status": "ok" })),
        Some(faults) => json_response(&json!({
            "status": "degraded",
            "drafter": { "failed_requests": faults.requests, "dropped": faults.is_dropped, "reason": faults.reason },
        })),
    }
}

async fn metrics(State(app): State<SharedApp>) -> Response {
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], app.shared.metrics.render(&app.model_name)).into_response()
}

async fn stats(State(app): State<SharedApp>) -> Response {
    let mut stats = json!(app.shared.metrics.recent());
    stats["server"] = app.describes.clone();
    json_response(&stats)
}

fn model_json(app: &App) -> Value {
    json!({
        "id": app.model_name, "object": "model", "created": app.created, "owned_by": "deepspec",
        "max_model_len": app.context,
    })
}

async fn models(State(app): State<SharedApp>) -> Response {
    json_response(&json!({ "object": "list", "data": [model_json(&app)] }))
}

async fn model(State(app): State<SharedApp>, Path(name): Path<String>) -> Response {
    if name == app.model_name {
        return json_response(&model_json(&app));
    }
    ApiError::unknown_model(&name, &app.model_name).into_response()
}

async fn completions(State(app): State<SharedApp>, request: HttpRequest) -> Response {
    answer(app, Form::Text, request).await.unwrap_or_else(IntoResponse::into_response)
}

async fn chat(State(app): State<SharedApp>, request: HttpRequest) -> Response {
    answer(app, Form::Chat, request).await.unwrap_or_else(IntoResponse::into_response)
}

async fn generate(State(app): State<SharedApp>, request: HttpRequest) -> Response {
    answer(app, Form::Simple, request).await.unwrap_or_else(IntoResponse::into_response)
}

/// The body of a JSON request, within limits of size and time.
async fn body(request: HttpRequest, patience: Duration) -> Result<Vec<u8>, ApiError> {
    let kind = request.headers().get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    // A page of another origin may send other types without being asked for leave, but not this one.
    if !kind.split(';').next().unwrap_or_default().trim().eq_ignore_ascii_case("application/json") {
        return Err(ApiError::bad("the request is not of type `application/json`; set the `Content-Type` header")
            .with_status(StatusCode::UNSUPPORTED_MEDIA_TYPE));
    }
    let collected = Limited::new(request.into_body(), MOST_BYTES).collect();
    match tokio::time::timeout(patience, collected).await {
        Ok(Ok(body)) => Ok(body.to_bytes().to_vec()),
        Ok(Err(error)) if error.downcast_ref::<LengthLimitError>().is_some() => {
            Err(ApiError::bad(format!("the body is larger than {MOST_BYTES} bytes"))
                .with_status(StatusCode::PAYLOAD_TOO_LARGE))
        }
        Ok(Err(error)) => Err(ApiError::bad(format!("the body cannot be read: {error}"))),
        Err(_) => Err(ApiError::bad(format!("the body did not come within {} seconds", patience.as_secs_f64()))
            .with_status(StatusCode::REQUEST_TIMEOUT)),
    }
}

/// What a request needs to be answered.
struct Accepted {
    api: ApiRequest,
    requests: Vec<Request>,
    usage: Usage,
}

async fn answer(app: SharedApp, form: Form, request: HttpRequest) -> Result<Response, ApiError> {
    let body = body(request, app.patience).await?;
    let checker = app.clone();
    // A long prompt takes a while to become tokens.
    let accepted = tokio::task::spawn_blocking(move || accept(&checker, form, &body)).await;
    let Accepted { api, requests, usage } =
        accepted.map_err(|_| ApiError::internal("reading the request failed"))??;
    if app.shared.is_stopping() {
        return Err(ApiError::stopping());
    }
    let places = app.shared.places(requests.len()).map_err(|held| {
        app.shared.metrics.refused();
        ApiError::overloaded(held, 1 + held as u64 / 8)
    })?;
    let room = requests.iter().map(|request| request.max_new_tokens + 2).sum();
    let (sender, news) = news_channel::channel(room);
    let ids = requests.iter().map(|request| request.id).collect();
    let ticket = Ticket { ids, commands: app.commands.clone() };
    let prompts = requests.iter().map(|request| request.prompt.clone()).collect();
    for (index, (request, place)) in requests.into_iter().zip(places).enumerate() {
        let job = Job { request, index, news: sender.clone(), place };
        app.commands.send(Command::Submit(Box::new(job))).map_err(|_| ApiError::stopping())?;
    }
    drop(sender);
    if api.streams {
        Ok(streamed(&app, api, usage, prompts, news, ticket))
    } else {
        whole(&app, &api, usage, prompts, news, ticket).await
    }
}

/// Reads and checks a request and turns it into those of the engine.
fn accept(app: &App, form: Form, body: &[u8]) -> Result<Accepted, ApiError> {
    let api = ApiRequest::parse(form, body)?;
    if let Some(name) = api.model.as_ref().filter(|name| **name != app.model_name) {
        return Err(ApiError::unknown_model(name, &app.model_name));
    }
    let most = MOST_ANSWERS.min(app.shared.most());
    if api.total() > most {
        return Err(ApiError::field("n", format!("{} answers are asked for, at most {most} are allowed", api.total())));
    }
    check_tokens(app, &api)?;
    let mut stop_ids = api.stop_token_ids.clone();
    if !api.ignores_eos {
        stop_ids.extend_from_slice(app.text.stop_ids());
    }
    let stop_ids: Arc<[u32]> = stop_ids.into();
    let (mut requests, mut usage) = (Vec::new(), Usage::default());
    for prompt in &api.prompts {
        let ids = tokens(app, prompt, api.thinks)?;
        let marks = app.reasoning.filter(|_| form == Form::Chat);
        let text = TextOptions {
            tokenizer: app.text.tokenizer().clone(),
            stop: api.stop.clone(),
            reasoning: marks.map(|marks| Reasoning { marks, is_open: app.text.opens_reasoning(&ids, marks) }),
        };
        let room = app.context.saturating_sub(ids.len());
        let new = match (api.max_tokens, form) {
            (Some(tokens), _) => tokens,
            (None, Form::Chat) => room.max(1),
            (None, Form::Text | Form::Simple) => DEFAULT_TOKENS.min(room.max(1)),
        };
        if new > room {
            return Err(too_long(form, ids.len(), new, app.context));
        }
        usage.prompt += ids.len();
        for _ in 0..api.choices {
            let number = requests.len() as u64;
            requests.push(Request {
                id: app.next_id.fetch_add(1, Ordering::Relaxed),
                prompt: ids.clone(),
                sampling: api.sampling,
                seed: api.seed.map_or_else(random_seed, |seed| seed.wrapping_add(number)),
                max_new_tokens: new,
                stop_ids: stop_ids.clone(),
                confidence_threshold: app.threshold,
                options: RequestOptions {
                    adjustments: api.adjustments.clone(),
                    text: Some(text.clone()),
                    logprobs: api.logprobs,
                    is_reproducible: api.seed.is_some() && !api.sampling.is_greedy(),
                },
            });
        }
    }
    Ok(Accepted { api, requests, usage })
}

fn check_tokens(app: &App, api: &ApiRequest) -> Result<(), ApiError> {
    api.adjustments.validate(app.vocab_size).map_err(|error| {
        let field = if let SpeculateError::Parameter { field, .. } = error { field } else { "logit_bias" };
        ApiError::field(field, error.to_string())
    })?;
    match api.stop_token_ids.iter().find(|&&token| token as usize >= app.vocab_size) {
        Some(token) => Err(unknown_token("stop_token_ids", *token, app.vocab_size)),
        None => Ok(()),
    }
}

fn unknown_token(field: &str, token: u32, vocab_size: usize) -> ApiError {
    ApiError::field(field, format!("token {token} is outside the vocabulary of {vocab_size}"))
}

/// The tokens of a prompt; an empty text is the begin-of-text token, where the model has one.
fn tokens(app: &App, prompt: &Prompt, thinks: Option<bool>) -> Result<Vec<u32>, ApiError> {
    let refused = |field: &str, error: deepspec_datasets::Error| ApiError::field(field, error.to_string());
    let ids = match prompt {
        Prompt::Chat(messages) => {
            let renderer = match thinks {
                Some(_) => &app.text.renderer.clone().with_thinking(thinks),
                None => &app.text.renderer,
            };
            renderer.render_prompt(messages, None).map_err(|error| refused("messages", error))?
        }
        Prompt::Text(text) => {
            app.text.tokenizer().encode_with_specials(text).map_err(|error| refused("prompt", error))?
        }
        Prompt::Tokens(ids) => match ids.iter().find(|&&token| token as usize >= app.vocab_size) {
            Some(token) => return Err(unknown_token("prompt", *token, app.vocab_size)),
            None => ids.clone(),
        },
    };
    match (ids.is_empty(), app.text.bos) {
        (false, _) => Ok(ids),
        (true, Some(bos)) => Ok(vec![bos]),
        (true, None) => Err(ApiError::field("prompt", "`prompt` has no tokens")),
    }
}

/// A seed that nobody knows in advance.
fn random_seed() -> u64 {
    RandomState::new().hash_one(0_u8)
}

/// The answer in one piece.
async fn whole(
    app: &App,
    api: &ApiRequest,
    mut usage: Usage,
    prompts: Vec<Vec<u32>>,
    mut news: news_channel::Receiver<News>,
    ticket: Ticket,
) -> Result<Response, ApiError> {
    let mut answers = vec![Answer::default(); api.total()];
    let tokenizer = app.text.tokenizer();
    while let Some((index, update)) = news.recv().await {
        let update = update.map_err(ApiError::internal)?;
        usage.add(&update);
        answers[index].add(&update, tokenizer, api.returns_rounds);
    }
    let id = ticket.ids.first().copied().unwrap_or(0);
    drop(ticket);
    if answers.iter().any(|answer| !answer.is_finished()) {
        return Err(ApiError::stopping());
    }
    if api.form == Form::Simple {
        let texts = answers.iter().zip(prompts).map(|(answer, prompt)| tokenizer.decode(&prompt, true) + &answer.text);
        return Ok(json_response(&json!({ "text": texts.collect::<Vec<_>>() })));
    }
    let choice = |(index, answer): (usize, &Answer)| answer.choice(api.form, index, api.logprobs.is_some(), tokenizer);
    let choices: Vec<Value> = answers.iter().enumerate().map(choice).collect();
    let (prefix, object) = names(api.form, false);
    Ok(json_response(&json!({
        "id": format!("{prefix}-{id}"),
        "object": object,
        "created": now(),
        "model": app.model_name,
        "choices": choices,
        "usage": usage.to_json(),
        "speculation": usage.speculation(),
    })))
}

/// Names of an answer: of its id, of its object.
pub(super) fn names(form: Form, is_part: bool) -> (&'static str, &'static str) {
    match (form, is_part) {
        (Form::Chat, false) => ("chatcmpl", "chat.completion"),
        (Form::Chat, true) => ("chatcmpl", "chat.completion.chunk"),
        (Form::Text | Form::Simple, _) => ("cmpl", "text_completion"),
    }
}

/// Unix time.
pub(super) fn now() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// The answer as it comes. When the client leaves, the ticket goes with the stream and cancels what is left.
fn streamed(
    app: &SharedApp,
    api: ApiRequest,
    usage: Usage,
    prompts: Vec<Vec<u32>>,
    mut news: news_channel::Receiver<News>,
    ticket: Ticket,
) -> Response {
    let is_simple = api.form == Form::Simple;
    let mut writer = EventWriter::new(app, api, usage, prompts, ticket);
    let news = stream::poll_fn(move |context| news.poll_recv(context)).map(Some);
    let events = news.chain(stream::iter([None])).flat_map(move |news| {
        stream::iter(match news {
            Some(news) => writer.news(news),
            None => writer.end(),
        })
    });
    if is_simple {
        let lines = events.map(|value| Ok::<_, Infallible>(format!("{value}\n")));
        return ([(header::CONTENT_TYPE, "application/x-ndjson")], Body::from_stream(lines)).into_response();
    }
    let mut response = sse(events);
    response.headers_mut().insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_compared_whole() {
        let hash = |key: &str| Sha256::digest(key.as_bytes()).into();
        assert!(is_same(&hash("a"), &hash("a")));
        assert!(!is_same(&hash("a"), &hash("b")));
        let mut last: [u8; 32] = hash("a");
        last[31] ^= 1;
        assert!(!is_same(&hash("a"), &last));
    }
}
