//! What the server answers under each address.

use std::convert::Infallible;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{Path, Request as HttpRequest, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::{get, post};
use futures_util::StreamExt as _;
use futures_util::stream;
use serde_json::{Value, json};
use tokio::sync::{Semaphore, mpsc as news_channel};

use super::accept::{Accepted, accept};
use super::answer::{Answer, Usage};
use super::api_error::ApiError;
use super::body::Bodies;
use super::engine_thread::{Command, Job, News, Place, Shared, Ticket};
use super::key::ApiKey;
use super::openai::{ApiRequest, Form};
use super::stream::{EventWriter, sse};
use deepspec_engine::ReasoningMarks;
use deepspec_engine::TextSide;

/// Bytes that are read of a body that nobody is going to look at.
const UNHEARD_BYTES: usize = 64 << 10;
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
    /// Key that clients have to send.
    pub(super) key: Option<ApiKey>,
    /// Bodies in memory.
    pub(super) bodies: Arc<Bodies>,
    /// Requests that may be read and encoded at a time.
    pub(super) turns: Arc<Semaphore>,
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

/// What connections beyond the usual number may ask for: how the server is.
pub(super) fn reserve_router(app: SharedApp) -> Router {
    let guarded =
        Router::new().route("/metrics", get(metrics)).layer(middleware::from_fn_with_state(app.clone(), check_key));
    Router::new()
        .route("/health", get(health))
        .merge(guarded)
        .fallback(|State(app): State<SharedApp>, request: HttpRequest| async move {
            // A client that is still sending would not hear the answer; one that sends much does not hear it anyway.
            let _ = axum::body::to_bytes(request.into_body(), UNHEARD_BYTES).await;
            refused(&app, ApiError::no_connection())
        })
        .with_state(app)
}

async fn check_key(State(app): State<SharedApp>, request: HttpRequest, next: Next) -> Response {
    match &app.key {
        Some(key) if !key.is_in(request.headers()) => refused(&app, ApiError::unauthorized()),
        _ => next.run(request).await,
    }
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
    answered(app, Form::Text, request).await
}

async fn chat(State(app): State<SharedApp>, request: HttpRequest) -> Response {
    answered(app, Form::Chat, request).await
}

async fn generate(State(app): State<SharedApp>, request: HttpRequest) -> Response {
    answered(app, Form::Simple, request).await
}

/// Answers a request, or counts it as refused.
async fn answered(app: SharedApp, form: Form, request: HttpRequest) -> Response {
    let metrics = app.clone();
    answer(app, form, request).await.unwrap_or_else(|error| refused(&metrics, error))
}

/// The refusal as a response, counted by its reason.
fn refused(app: &App, error: ApiError) -> Response {
    if let Some(reason) = error.reason() {
        app.shared.metrics.refused(reason);
    }
    error.into_response()
}

/// So many places in the server.
fn places(app: &App, count: usize) -> Result<Vec<Place>, ApiError> {
    app.shared.places(count).map_err(|held| ApiError::overloaded(held, 1 + held as u64 / 8))
}

async fn answer(app: SharedApp, form: Form, request: HttpRequest) -> Result<Response, ApiError> {
    if app.shared.is_stopping() {
        return Err(ApiError::stopping());
    }
    let body = app.bodies.read(request, app.patience).await?;
    // From here on it costs something, so it waits in the same queue as those that are decoded.
    let mut places = places(&app, 1)?;
    let turn = app.turns.clone().acquire_owned().await.map_err(|_| ApiError::stopping())?;
    let checker = app.clone();
    // A long prompt takes a while to become tokens, and the threads here have connections to serve. The turn lasts as long
    // as the work does, also when the client leaves.
    let accepted = tokio::task::spawn_blocking(move || {
        let _turn = turn;
        accept(&checker, form, body.bytes())
    });
    let Accepted { api, requests, usage } =
        accepted.await.map_err(|_| ApiError::internal("reading the request failed"))??;
    if app.shared.is_stopping() {
        return Err(ApiError::stopping());
    }
    places.extend(self::places(&app, requests.len().saturating_sub(1))?);
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
