//! Why a row of a data set is not used.

use serde_json::Value;
use thiserror::Error;

/// The reason why a row was refused. The text names the field and never prints raw control characters.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum RejectReason {
    /// The line holds bytes that are not UTF-8.
    #[error("not UTF-8 at byte {byte} of the line")]
    NotUtf8 {
        /// Offset of the first bad byte in the line, from 0.
        byte: usize,
    },
    /// The line is not one JSON value.
    #[error("not JSON at column {column}: {message}")]
    InvalidJson {
        /// Column in bytes, from 1 (of the line on which the fault is, where an element spans several).
        column: usize,
        /// What the parser said.
        message: String,
    },
    /// A string escapes half of a surrogate pair, which is no character.
    #[error("lone surrogate in an escape at column {column}")]
    LoneSurrogate {
        /// Column in bytes, from 1.
        column: usize,
    },
    /// The line is longer than the reader holds in memory.
    #[error("line is longer than {limit_bytes} bytes")]
    LineTooLong {
        /// The limit.
        limit_bytes: usize,
    },
    /// The row is JSON but not an object.
    #[error("expected an object, found {found}")]
    NotAnObject {
        /// Kind of the value found.
        found: &'static str,
    },
    /// No key of the row tells its shape.
    #[error("no `conversations`, `messages`, `turns`, `instruction`, `prompt` or `question` among the keys {keys}")]
    UnknownShape {
        /// The keys that the row has.
        keys: String,
    },
    /// A needed field is missing.
    #[error("`{field}` is missing")]
    MissingField {
        /// Path of the field.
        field: String,
    },
    /// A field holds another kind of value.
    #[error("`{field}`: expected {expected}, found {found}")]
    WrongType {
        /// Path of the field.
        field: String,
        /// What is wanted.
        expected: &'static str,
        /// What was found.
        found: &'static str,
    },
    /// A text that must say something is empty or blank.
    #[error("`{field}` is empty")]
    EmptyContent {
        /// Path of the field.
        field: String,
    },
    /// A role that is no known speaker.
    #[error("`{field}`: unknown role {role}")]
    UnknownRole {
        /// Path of the field.
        field: String,
        /// The role, quoted and escaped, cut to 40 characters.
        role: String,
    },
    /// A content part that is not text.
    #[error("`{field}`: content part of type {kind} is not text")]
    UnsupportedPart {
        /// Path of the part.
        field: String,
        /// The part's `type`, quoted and escaped.
        kind: String,
    },
    /// A system message after the first turn.
    #[error("`{field}`: system message after the first turn")]
    SystemNotFirst {
        /// Path of the message.
        field: String,
    },
    /// Nobody asks anything.
    #[error("no user turn")]
    NoUserTurn,
    /// There is no assistant turn, where answers are needed.
    #[error("no answer")]
    NoAnswer,
    /// An assistant turn has neither text nor tool calls, where answers are needed.
    #[error("answer {answer} is empty")]
    EmptyAnswer {
        /// Which answer, from 1.
        answer: usize,
    },
    /// Tool calls or tool replies that make no sense.
    #[error("`{field}`: {problem}")]
    InvalidToolUse {
        /// Path of the message or call.
        field: String,
        /// What is wrong.
        problem: &'static str,
    },
}

/// Kind of a JSON value, in words.
pub(super) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// Foreign text made safe for a message: quoted, escaped and short.
pub(super) fn quoted(text: &str) -> String {
    let short: String = text.chars().take(40).collect();
    let dots = if short.len() < text.len() { "…" } else { "" };
    format!("{short:?}{dots}")
}
