//! What a client is told when its request is refused: a status and OpenAI's error object.

use axum::body::Body;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

/// Why requests are refused, for the counters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reason {
    /// Too many wait already, or too much is being read.
    QueueFull,
    /// All connections are taken.
    NoConnection,
    /// The prompt does not fit into the context.
    TooLong,
    /// The body is too large.
    TooLarge,
    /// The body did not come in time.
    TooSlow,
    /// The key is missing or wrong.
    Unauthorized,
    /// The server is about to end.
    Stopping,
    /// Anything else that is wrong with it.
    Invalid,
}

impl Reason {
    /// All of them.
    pub(super) const ALL: [Self; 8] = [
        Self::QueueFull,
        Self::NoConnection,
        Self::TooLong,
        Self::TooLarge,
        Self::TooSlow,
        Self::Unauthorized,
        Self::Stopping,
        Self::Invalid,
    ];

    /// Its label.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::QueueFull => "queue_full",
            Self::NoConnection => "no_connection",
            Self::TooLong => "too_long",
            Self::TooLarge => "too_large",
            Self::TooSlow => "too_slow",
            Self::Unauthorized => "unauthorized",
            Self::Stopping => "stopping",
            Self::Invalid => "invalid",
        }
    }
}

/// A refusal.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct ApiError {
    pub(super) status: StatusCode,
    kind: &'static str,
    message: String,
    /// The field at fault.
    param: Option<String>,
    code: Option<&'static str>,
    retry_after_s: Option<u64>,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        Self { status, kind, message: message.into(), param: None, code: None, retry_after_s: None }
    }

    /// The request is wrong as a whole.
    pub(super) fn bad(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", message)
    }

    /// A field is wrong.
    pub(super) fn field(name: &str, message: impl Into<String>) -> Self {
        Self { param: Some(name.into()), ..Self::bad(message) }
    }

    /// Another status than 400.
    pub(super) fn with_status(self, status: StatusCode) -> Self {
        Self { status, ..self }
    }

    /// A word for programs.
    pub(super) fn with_code(self, code: &'static str) -> Self {
        Self { code: Some(code), ..self }
    }

    /// There is no such model.
    pub(super) fn unknown_model(name: &str, known: &str) -> Self {
        let message = format!("the model `{name}` does not exist here; this server has `{known}`");
        Self::field("model", message).with_status(StatusCode::NOT_FOUND).with_code("model_not_found")
    }

    /// Key missing or wrong.
    pub(super) fn unauthorized() -> Self {
        let message = "missing or wrong API key; send it as `Authorization: Bearer KEY`";
        Self::new(StatusCode::UNAUTHORIZED, "authentication_error", message).with_code("invalid_api_key")
    }

    /// Too many requests wait already.
    pub(super) fn overloaded(waiting: usize, retry_after_s: u64) -> Self {
        let message = format!("{waiting} requests are in work or wait already; try again later");
        let error = Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message);
        Self { retry_after_s: Some(retry_after_s), ..error.with_code("queue_full") }
    }

    /// Too many bytes of requests are in memory already.
    pub(super) fn crowded(bytes: usize, retry_after_s: u64) -> Self {
        let message = format!("requests of {bytes} bytes are being read already; try again later");
        let error = Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message);
        Self { retry_after_s: Some(retry_after_s), ..error.with_code("queue_full") }
    }

    /// All connections are taken.
    pub(super) fn no_connection() -> Self {
        let message = "all connections of this server are taken; try again later";
        let error = Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", message);
        Self { retry_after_s: Some(1), ..error.with_code("no_connection") }
    }

    /// The server is about to end.
    pub(super) fn stopping() -> Self {
        let error = Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", "the server is stopping");
        Self { retry_after_s: Some(5), ..error.with_code("stopping") }
    }

    /// The engine failed.
    pub(super) fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message)
    }

    /// Why a request is refused with it; `None` for a failure of the server.
    pub(super) fn reason(&self) -> Option<Reason> {
        Some(match (self.status, self.code) {
            (StatusCode::INTERNAL_SERVER_ERROR, _) => return None,
            (StatusCode::TOO_MANY_REQUESTS, _) => Reason::QueueFull,
            (StatusCode::SERVICE_UNAVAILABLE, Some("no_connection")) => Reason::NoConnection,
            (StatusCode::SERVICE_UNAVAILABLE, _) => Reason::Stopping,
            (_, Some("context_length_exceeded")) => Reason::TooLong,
            (StatusCode::PAYLOAD_TOO_LARGE, _) => Reason::TooLarge,
            (StatusCode::REQUEST_TIMEOUT, _) => Reason::TooSlow,
            (StatusCode::UNAUTHORIZED, _) => Reason::Unauthorized,
            _ => Reason::Invalid,
        })
    }

    /// The error object.
    pub(super) fn to_json(&self) -> Value {
        let Self { kind, message, param, code, .. } = self;
        json!({ "error": { "message": message, "type": kind, "param": param, "code": code } })
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = Response::new(Body::from(self.to_json().to_string()));
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(seconds) = self.retry_after_s {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}
