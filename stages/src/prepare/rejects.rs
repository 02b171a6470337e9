//! Rows and answers that are not used: why, how many, and the side file that lists them.

use std::collections::{BTreeMap, BTreeSet};

use deepspec_datasets::Error as DatasetError;
use deepspec_datasets::conversation::RejectReason;
use serde::Serialize;

use crate::error::{Error, Result};

/// How often each kind of thing happened.
pub type Counts = BTreeMap<&'static str, u64>;

/// Why something is not used.
#[derive(Debug)]
pub(super) enum Refusal {
    /// This row or answer is left out; the rest goes on.
    LeftOut {
        /// Short name, the same for all cases of one kind.
        kind: &'static str,
        /// The full reason.
        reason: String,
        /// What to do about it.
        hint: String,
    },
    /// The stage cannot go on.
    Fatal(Box<Error>),
}

/// One thing that is not used, as a line of the side file has it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Reject {
    /// Where the row came from: a path, or `built-in`.
    pub file: String,
    /// Line on which the row starts, from 1.
    pub line: u64,
    /// Which of the answers to the row, from 0; absent where the row itself is refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sample: Option<usize>,
    /// Short name of the reason.
    pub kind: &'static str,
    /// The full reason.
    pub reason: String,
    /// What to do about it; not in the side file, where one hint would stand thousands of times.
    #[serde(skip)]
    pub hint: String,
}

/// Everything refused so far.
#[derive(Debug)]
pub(super) struct Rejects {
    file: String,
    list: Vec<Reject>,
}

impl Rejects {
    pub(super) fn new(file: String) -> Self {
        Self { file, list: Vec::new() }
    }

    /// Notes a refusal; a fatal one is returned as the error it is.
    pub(super) fn add(&mut self, line: u64, sample: Option<usize>, refusal: Refusal) -> Result<()> {
        match refusal {
            Refusal::LeftOut { kind, reason, hint } => {
                self.list.push(Reject { file: self.file.clone(), line, sample, kind, reason, hint });
                Ok(())
            }
            Refusal::Fatal(error) => Err(*error),
        }
    }

    /// Number of rows of which something was refused.
    pub(super) fn rows(&self) -> u64 {
        self.list.iter().map(|reject| reject.line).collect::<BTreeSet<_>>().len() as u64
    }

    pub(super) fn counts(&self) -> Counts {
        count_kinds(&self.list)
    }

    /// All of them, in the order of the data.
    pub(super) fn sorted(&self) -> Vec<Reject> {
        let mut list = self.list.clone();
        list.sort_by_key(|reject| (reject.line, reject.sample));
        list
    }

    /// The error for a data set of which nothing is left.
    pub(super) fn nothing_left(&self) -> Error {
        match self.sorted().first() {
            Some(first) => Error::Dataset(DatasetError::NoPrompts {
                path: self.file.clone().into(),
                rejected: self.list.len(),
                line: first.line,
                reason: first.reason.clone(),
                hint: first.hint.clone(),
            }),
            None => Error::Dataset(DatasetError::NoRows { path: self.file.clone().into() }),
        }
    }

    /// Fails when more than `max_bad_ratio` of the rows were refused.
    pub(super) fn check_ratio(&self, rows_read: u64, max_bad_ratio: f64) -> Result<()> {
        let bad = self.rows();
        if bad as f64 <= max_bad_ratio * rows_read as f64 {
            return Ok(());
        }
        let first = self.sorted().into_iter().next();
        let first =
            first.map_or_else(String::new, |first| format!("; the first at line {}: {}", first.line, first.reason));
        Err(Error::Input(format!(
            "{bad} of {rows_read} rows of `{}` cannot be used, which is more than `data.max_bad_ratio` {max_bad_ratio}{first}",
            self.file
        )))
    }

    /// The content of the side file: one JSON object per line, in the order of the data.
    pub(super) fn to_json_lines(&self) -> Result<Vec<u8>> {
        json_lines(&self.sorted())
    }
}

/// How many there are of each kind.
pub(super) fn count_kinds(rejects: &[Reject]) -> Counts {
    let mut counts = Counts::new();
    for reject in rejects {
        *counts.entry(reject.kind).or_default() += 1;
    }
    counts
}

/// Values as JSON lines.
pub(super) fn json_lines<T: Serialize>(values: &[T]) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    for value in values {
        serde_json::to_writer(&mut bytes, value).map_err(std::io::Error::from)?;
        bytes.push(b'\n');
    }
    Ok(bytes)
}

impl Refusal {
    pub(super) fn left_out(kind: &'static str, reason: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::LeftOut { kind, reason: reason.into(), hint: hint.into() }
    }
}

impl From<RejectReason> for Refusal {
    fn from(reason: RejectReason) -> Self {
        Self::left_out(reason.kind(), reason.to_string(), reason.hint())
    }
}

impl From<DatasetError> for Refusal {
    /// What the renderer says about one conversation.
    fn from(error: DatasetError) -> Self {
        let kind = match &error {
            DatasetError::Stopped => {
                return Self::Fatal(Box::new(Error::Interrupted { safe: "nothing had been started" }));
            }
            DatasetError::Unencodable { .. } | DatasetError::Encode { .. } => "not in the vocabulary",
            DatasetError::TemplateRefused { .. } => "refused by the chat template",
            DatasetError::TemplateRender { .. } => "chat template failed",
            DatasetError::TemplateWithoutTools { .. } => "chat template knows no tools",
            DatasetError::ControlTextInContent | DatasetError::NoSentinelLeft => "control text in content",
            DatasetError::AnswerNotFound | DatasetError::NothingSupervised => "nothing supervised",
            _ => "not renderable",
        };
        Self::left_out(kind, error.to_string(), error.hint().unwrap_or_default())
    }
}
