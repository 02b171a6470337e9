//! The words of every error, reject and repair of this crate: one style, no artefacts of Debug, and a way out wherever the user has
//! one. A new variant fails the build here until it has a sample.

use std::io;
use std::path::PathBuf;

use super::Error;
use crate::conversation::{RejectReason, Repair};
use crate::target_cache::{CacheError, Mismatch};

/// The names of all variants, and the name of a value's.
macro_rules! variants {
    ($name:ident, $all:ident, $kind:ident: $($variant:ident)*) => {
        const $all: &[&str] = &[$(stringify!($variant)),*];
        fn $name(value: &$kind) -> &'static str {
            match value {
                $($kind::$variant { .. } => stringify!($variant),)*
            }
        }
    };
}

variants!(name_of_error, ERRORS, Error: Read UnsupportedFormat NoRows ArrayTooLarge ArrayNotClosed NoPrompts Tokenizer
    UnknownTokenizerKind Unencodable Encode TemplateSyntax TemplateRender TemplateRefused TemplateWithoutTools ControlTextInContent
    NoSentinelLeft ContextDependentTokenizer NoEndOfTurn WrongLastTurn AnswerNotFound Stopped NothingSupervised);
variants!(name_of_cache_error, CACHE_ERRORS, CacheError: Io DiskFull NotEnoughSpace Locked NotACache Occupied Version2 Unfinished Version
    ManifestJson ManifestField Meta ResumeMismatch Unfit Sample OutOfOrder NoSuchSample NothingSupervised Shard Checksum Encode);
variants!(name_of_reject, REJECTS, RejectReason: NotUtf8 InvalidJson PythonLiteral LoneSurrogate LineTooLong NotAnObject UnknownShape
    MissingField WrongType EmptyContent UnknownRole UnsupportedPart NotRendered NoUserTurn NoAnswer EmptyAnswer InvalidToolUse);
variants!(name_of_repair, REPAIRS, Repair: UserTurnsJoined AnswersJoined SystemMessagesJoined LeadingAnswersDropped OpenTurnsDropped
    TurnsAfterToolCallDropped DeveloperAsSystem RoleInCapitals LegacyFunctionCall LegacyFunctions ToolCallIdFilled EmptyInstruction);

/// One style for all words; a hint is a sentence of its own without a full stop.
fn check(name: &str, words: &str) {
    let first = words.chars().next().unwrap();
    assert!(first.is_lowercase() || first == '`' || first.is_ascii_digit(), "{name} starts with {first}: {words}");
    assert!(!words.ends_with('.'), "{name} ends with a full stop: {words}");
    for artefact in ["Some(", "None", "{ ", "\\\"", "Ok(", "Err("] {
        assert!(!words.contains(artefact), "{name} holds `{artefact}`: {words}");
    }
}

fn check_all<T: ToString>(samples: &[T], name: fn(&T) -> &'static str, all: &[&str]) {
    let mut found: Vec<&str> = samples.iter().map(name).collect();
    found.dedup();
    assert_eq!(found, all, "one sample of each variant, in their order");
    for sample in samples {
        check(name(sample), &sample.to_string());
    }
}

fn path() -> PathBuf {
    "data.jsonl".into()
}

fn errors() -> Vec<Error> {
    let line = || "x".to_owned();
    let jinja = || minijinja::Error::new(minijinja::ErrorKind::SyntaxError, "unexpected end of block");
    vec![
        Error::Read(io::Error::new(io::ErrorKind::NotFound, "failed to open file `x`")),
        Error::UnsupportedFormat {
            path: path(),
            format: "gzip data",
            convert: "unpack it: gzip -dc FILE > data.jsonl",
        },
        Error::NoRows { path: path() },
        Error::ArrayTooLarge { path: path(), limit_bytes: 9 },
        Error::ArrayNotClosed { path: path() },
        Error::NoPrompts { path: path(), rejected: 2, line: 1, reason: "no user turn".into(), hint: "each row".into() },
        Error::Tokenizer { origin: line(), problem: "the vocabulary is empty".into() },
        Error::UnknownTokenizerKind { origin: line(), what: "decoder", found: line(), expected: "ByteLevel" },
        Error::Unencodable { byte: 0xe2, character: '"' },
        Error::Encode { problem: line() },
        Error::TemplateSyntax { cause: jinja() },
        Error::TemplateRender { cause: jinja() },
        Error::TemplateRefused { message: "no system message here".into() },
        Error::TemplateWithoutTools { what: "tools" },
        Error::ControlTextInContent,
        Error::NoSentinelLeft,
        Error::ContextDependentTokenizer,
        Error::NoEndOfTurn,
        Error::WrongLastTurn { expected: "user", found: "nothing" },
        Error::AnswerNotFound,
        Error::Stopped,
        Error::NothingSupervised,
    ]
}

fn cache_errors() -> Vec<CacheError> {
    let io = || io::Error::other("failed to write to file `x`");
    let mismatch = || Mismatch { field: "layer_ids".into(), cache: "[1, 2]".into(), wanted: "[1]".into() };
    let sample = |shard: Option<&str>, field| CacheError::Sample {
        shard: shard.map(PathBuf::from),
        sample: 7,
        field,
        found: "has inf at number 3 in row 2".into(),
        expected: "finite numbers".into(),
    };
    vec![
        CacheError::Io(io()),
        CacheError::DiskFull(io()),
        CacheError::NotEnoughSpace { dir: path(), needed: 2, available: 1 },
        CacheError::Locked { dir: path(), pid: "17".into() },
        CacheError::NotACache { dir: path() },
        CacheError::Occupied { dir: path() },
        CacheError::Version2 { path: path(), reason: "record 2: 0 tokens".into() },
        CacheError::Unfinished { dir: path(), done: 1, samples: 2 },
        CacheError::Version { path: path(), found: 9, expected: 3 },
        CacheError::ManifestJson { path: path(), source: serde_json::from_str::<u8>("{\"a\": \"b\"}").unwrap_err() },
        CacheError::ManifestField { path: path(), field: "tokens".into(), found: "1".into(), expected: "2".into() },
        CacheError::Meta { field: "layer_ids", found: "[]".into(), expected: "one or more".into() },
        CacheError::ResumeMismatch { dir: path(), mismatch: mismatch() },
        CacheError::Unfit { dir: path(), mismatches: vec![mismatch(), mismatch()] },
        sample(Some("shard-00000.arrow"), "features"),
        sample(None, "features"),
        sample(None, "input_ids"),
        CacheError::OutOfOrder { found: 2, expected: 1 },
        CacheError::NoSuchSample { dir: path(), sample: 9, samples: 2 },
        CacheError::NothingSupervised { dir: path(), samples: 2 },
        CacheError::Shard { path: path(), reason: "it has 1 bytes, expected 2".into() },
        CacheError::Checksum { path: path(), what: "sample 3".into(), found: 1, expected: 2 },
        CacheError::Encode(arrow_schema::ArrowError::InvalidArgumentError("x".into())),
    ]
}

fn rejects() -> Vec<RejectReason> {
    let field = || "messages[0].content".to_owned();
    vec![
        RejectReason::NotUtf8 { byte: 3 },
        RejectReason::InvalidJson { column: 3, message: "expected value".into() },
        RejectReason::PythonLiteral { column: 2 },
        RejectReason::LoneSurrogate { column: 3 },
        RejectReason::LineTooLong { limit_bytes: 3 },
        RejectReason::NotAnObject { found: "a list" },
        RejectReason::UnknownShape { keys: "[`text`]".into() },
        RejectReason::UnknownShape { keys: "[`chosen`, `rejected`]".into() },
        RejectReason::UnknownShape { keys: "[`data`]".into() },
        RejectReason::MissingField { field: field() },
        RejectReason::WrongType { field: field(), expected: "text", found: "a number" },
        RejectReason::WrongType { field: "prompt".into(), expected: "text", found: "a list" },
        RejectReason::EmptyContent { field: field() },
        RejectReason::UnknownRole { field: field(), role: "`critic`".into() },
        RejectReason::UnsupportedPart { field: field(), kind: "`image_url`".into() },
        RejectReason::NotRendered { field: "documents" },
        RejectReason::NoUserTurn,
        RejectReason::NoAnswer,
        RejectReason::EmptyAnswer { answer: 2 },
        RejectReason::InvalidToolUse { field: field(), problem: "a call without `function`" },
    ]
}

fn repairs() -> Vec<Repair> {
    vec![
        Repair::UserTurnsJoined { count: 1 },
        Repair::AnswersJoined { count: 1 },
        Repair::SystemMessagesJoined { count: 1 },
        Repair::LeadingAnswersDropped { count: 1 },
        Repair::OpenTurnsDropped { count: 1 },
        Repair::TurnsAfterToolCallDropped { count: 1 },
        Repair::DeveloperAsSystem,
        Repair::RoleInCapitals,
        Repair::LegacyFunctionCall,
        Repair::LegacyFunctions,
        Repair::ToolCallIdFilled,
        Repair::EmptyInstruction,
    ]
}

#[test]
fn every_message_is_written_in_one_style() {
    check_all(&errors(), name_of_error, ERRORS);
    check_all(&cache_errors(), name_of_cache_error, CACHE_ERRORS);
    check_all(&rejects(), name_of_reject, REJECTS);
    check_all(&repairs(), name_of_repair, REPAIRS);
}

#[test]
fn whatever_the_user_can_mend_has_a_hint() {
    // The system's own words say what to do, or the caller is at fault, not the user.
    let errors_without = ["Read", "Encode", "Stopped"];
    for error in errors() {
        let name = name_of_error(&error);
        match error.hint() {
            Some(hint) => check(name, &hint),
            None => assert!(errors_without.contains(&name), "{name} has no hint"),
        }
    }
    let cache_errors_without = ["Io", "Meta", "OutOfOrder", "NoSuchSample", "Encode"];
    for error in cache_errors() {
        let name = name_of_cache_error(&error);
        match error.hint() {
            Some(hint) => check(name, &hint),
            None => assert!(cache_errors_without.contains(&name), "{name} has no hint"),
        }
    }
    for reason in rejects() {
        // The way out of Python literals is a line of Python.
        if !matches!(reason, RejectReason::PythonLiteral { .. }) {
            check(name_of_reject(&reason), reason.hint());
        }
        assert!(!reason.kind().is_empty());
    }
}
