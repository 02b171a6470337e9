//! The file of answers: one JSON line per prompt and sample, appended as they finish and put in order at the end.
//!
//! A line is self-contained: it names the row by key and line, holds each answer as token ids and text with its finish
//! reason, says how the conversation ended, and carries a hash of everything that decides an answer. A run that was stopped
//! goes on with the items that have no line yet; since an item's answers depend on nothing but that item, the finished file
//! has the same bytes as that of an uninterrupted run.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::path::Path;

use deepspec_datasets::renderer::Renderer;
use serde::{Deserialize, Serialize};
use serde_json::json;
use sha2::{Digest, Sha256};

use super::rejects::json_lines;
use crate::error::{Error, Result};
use crate::recipe::Recipe;
use crate::run_dir::{read_journal, write_atomic};
use deepspec_engine::FinishReason;

/// The target's side of one conversation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Answer {
    /// Key of the row: a hash of its line number and bytes.
    pub key: String,
    /// Which of the answers to the row, from 0.
    pub sample: usize,
    /// Line of the row, from 1.
    pub line: u64,
    /// The row's own id.
    pub id: String,
    /// The row's domain.
    pub domain: Option<String>,
    /// Hash of the target, tokenizer, template and settings that made the answers.
    pub settings: String,
    /// Why the conversation has no more turns.
    pub end: End,
    /// The answers in order, one per user turn that was answered; empty where the item is rejected.
    pub turns: Vec<AnswerTurn>,
}

/// One answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AnswerTurn {
    /// Tokens as generated, a final stop token included.
    pub ids: Vec<u32>,
    /// Their text, without special tokens.
    pub text: String,
    /// Why generation ended.
    pub finish_reason: Finish,
}

/// Why generation of one answer ended; spelled as in the OpenAI API.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Finish {
    /// The target ended its turn.
    Stop,
    /// The answer was cut by the limit of new tokens or of the sample's length.
    Length,
}

impl From<FinishReason> for Finish {
    fn from(reason: FinishReason) -> Self {
        match reason {
            FinishReason::Stop => Self::Stop,
            FinishReason::Length => Self::Length,
        }
    }
}

/// Why a conversation has no more answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum End {
    /// Every user turn is answered by the target to the end.
    Complete,
    /// The last answer was cut: what would follow it is no conversation of the target.
    Cut,
    /// The next prompt would leave too little room for an answer.
    TooLong,
    /// The target had nothing to say to the next turn.
    Empty,
    /// The next prompt, or the target's answer to it, holds the drafter's mask token.
    MaskToken,
    /// The next prompt cannot be rendered with the answers before it.
    NotRenderable,
}

impl End {
    /// Short name for counts.
    pub(super) fn kind(self) -> &'static str {
        match self {
            Self::Complete => "complete",
            Self::Cut => "answer cut",
            Self::TooLong => "prompt too long",
            Self::Empty => "empty answer",
            Self::MaskToken => "mask token in the text",
            Self::NotRenderable => "prompt not renderable",
        }
    }
}

/// Hash of everything besides the row that decides an answer.
pub(super) fn settings_hash(recipe: &Recipe, renderer: &Renderer, fingerprint: &str) -> String {
    let prepare = &recipe.prepare;
    let settings = json!({
        "target": fingerprint,
        "precision": recipe.target.precision,
        "tokenizer": renderer.tokenizer().hash(),
        "template": sha256_hex(renderer.template().source().as_bytes()),
        "stop_ids": renderer.stop_ids(),
        "strip_invisible": recipe.data.strip_invisible,
        "sampling": prepare.sampling(),
        "max_new_tokens": prepare.max_new_tokens,
        "max_length": prepare.max_length,
        "mask_token_id": recipe.draft.mask_token_id,
        "seed": prepare.seed,
    });
    let mut hash = sha256_hex(settings.to_string().as_bytes());
    hash.truncate(16);
    hash
}

/// Answers on file, by key and sample.
///
/// # Errors
/// A line is no answer, or was made with other settings.
pub(super) fn load(path: &Path, settings: &str) -> Result<HashMap<(String, usize), Answer>> {
    let mut answers = HashMap::new();
    for (index, answer) in read_journal::<Answer>(path)?.into_iter().enumerate() {
        if answer.settings != settings {
            return Err(Error::Mismatch {
                what: "the target, tokenizer or settings that make answers".into(),
                left: format!("{} in line {} of `{}`", answer.settings, index + 1, path.display()),
                right: format!("{settings} now"),
                hint: Some("use another run folder, or delete that file to have all prompts answered anew".into()),
            });
        }
        answers.insert((answer.key.clone(), answer.sample), answer);
    }
    Ok(answers)
}

/// Makes the file hold exactly these answers in this order; it is left alone where it already does.
///
/// # Errors
/// The disk refuses.
pub(super) fn store(path: &Path, answers: &[Answer]) -> Result<()> {
    let bytes = json_lines(answers)?;
    if path.is_file() && fs_err::read(path)? == bytes {
        return Ok(());
    }
    write_atomic(path, &bytes)
}

/// SHA-256 as 64 hex digits.
pub(super) fn sha256_hex(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

/// Bytes as lower-case hex digits.
pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").expect("writing to a string does not fail");
        text
    })
}
