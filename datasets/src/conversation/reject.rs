//! Why a row of a data set is not used.

use serde_json::Value;
use thiserror::Error;

use crate::jsonl::foreign::PYTHON_LITERALS;

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
    /// The line is written as Python prints a dict.
    #[error("not JSON at column {column} but a literal of Python")]
    PythonLiteral {
        /// Column in bytes, from 1.
        column: usize,
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
        /// The role, in backticks and escaped, cut to 40 characters.
        role: String,
    },
    /// A content part that is not text.
    #[error("`{field}`: content part of type {kind} is not text")]
    UnsupportedPart {
        /// Path of the part.
        field: String,
        /// The part's `type`, in backticks and escaped.
        kind: String,
    },
    /// A field that would change what the model is asked and that no stage renders.
    #[error("`{field}` is given, which is not rendered")]
    NotRendered {
        /// The field.
        field: &'static str,
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

impl RejectReason {
    /// Short name of the kind, the same for all rows that are refused for it: for counts.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::NotUtf8 { .. } => "not UTF-8",
            Self::InvalidJson { .. } | Self::PythonLiteral { .. } => "not JSON",
            Self::LoneSurrogate { .. } => "lone surrogate",
            Self::LineTooLong { .. } => "line too long",
            Self::NotAnObject { .. } => "not an object",
            Self::UnknownShape { .. } => "unknown shape",
            Self::MissingField { .. } => "missing field",
            Self::WrongType { .. } => "wrong type",
            Self::EmptyContent { .. } => "empty content",
            Self::UnknownRole { .. } => "unknown role",
            Self::UnsupportedPart { .. } => "content is not text",
            Self::NotRendered { .. } => "field not rendered",
            Self::NoUserTurn => "no user turn",
            Self::NoAnswer => "no answer",
            Self::EmptyAnswer { .. } => "empty answer",
            Self::InvalidToolUse { .. } => "invalid tool use",
        }
    }

    /// What to do about rows like this one.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::NotUtf8 { .. } => "convert the file to UTF-8, for example with iconv",
            Self::InvalidJson { .. } => {
                "write one JSON object per line; of plain prompts, one per line: jq -R '{prompt: .}' FILE > data.jsonl"
            }
            Self::PythonLiteral { .. } => PYTHON_LITERALS,
            Self::LoneSurrogate { .. } => "write the text again as whole characters",
            Self::LineTooLong { .. } => "split the row, or leave it out",
            Self::NotAnObject { .. } => "write one JSON object per line, such as {\"messages\": [...]}",
            Self::UnknownShape { keys } if keys.contains("`chosen`") => {
                "of rows with a preference take the chosen side: jq -c '{messages: .chosen}' FILE > data.jsonl"
            }
            Self::UnknownShape { keys } if keys.contains("`data`") => {
                "take the rows out of the object: jq -c '.data[]' FILE > data.jsonl"
            }
            Self::UnknownShape { .. } => {
                "each row needs `messages`, `conversations`, `turns`, `instruction`, `prompt` or `question`: rename a key with jq"
            }
            Self::WrongType { field, found: "a list", .. } if field == "prompt" => {
                "turns are read under `messages`: jq -c '{messages: .prompt}' FILE > data.jsonl"
            }
            Self::WrongType { .. } | Self::MissingField { .. } => {
                "each message is an object with `role` and `content`, or `from` and `value`"
            }
            Self::EmptyContent { .. } | Self::NoUserTurn => "each row needs a user turn with text",
            Self::UnknownRole { .. } => "roles are `system`, `user`, `assistant` and `tool`, and the names of ShareGPT",
            Self::UnsupportedPart { .. } => "leave rows with images, sound or files out: targets here read text",
            Self::NotRendered { .. } => "leave the field out, or write what it says into the messages",
            Self::NoAnswer | Self::EmptyAnswer { .. } => {
                "let the target answer: `--set prepare.regenerate=true`, or leave rows without an answer out"
            }
            Self::InvalidToolUse { .. } => {
                "each tool reply follows an assistant turn that calls the tool, and arguments are JSON, as in OpenAI's form"
            }
        }
    }
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

/// Foreign text made safe for a message: as a name, short, with control and invisible characters spelled out.
pub(super) fn quoted(text: &str) -> String {
    let short: String = text.chars().take(40).collect();
    let dots = if short.len() < text.len() { "…" } else { "" };
    let spelled = short.chars().map(|c| {
        // A space that is none, or a mark that draws nothing, is spelled by Debug; quotes need no backslash here.
        if matches!(c, '"' | '\'' | '\\') { c.to_string() } else { c.escape_debug().to_string() }
    });
    format!("`{}`{dots}", spelled.collect::<String>())
}
