//! Evaluation prompts: any file of rows with `turns`, `prompt`, `question` or messages, and the two built-in sets.
//!
//! A file with more rows than wanted is shuffled as Python's `random.Random(seed).shuffle` does and then cut, so that the
//! same rows are chosen as by evaluators in Python.

mod built_in;
mod python_random;

pub use built_in::{built_in_eval, built_in_train};
pub use python_random::PythonRandom;

use std::path::Path;

use serde_json::Value;

use crate::conversation::{Conversation, Message, Prompts};
use crate::error::Error;
use crate::jsonl::{ConversationFile, Reject, Row, file_stem};

/// Prompts on which a drafter is measured.
#[derive(Clone, Debug, PartialEq)]
pub struct EvalSet {
    /// Name of the set: that of the file without its suffix.
    pub name: String,
    /// The prompts, in the order in which they are to run.
    pub prompts: Vec<EvalPrompt>,
    /// Rows that could not be used.
    pub rejects: Vec<Reject>,
}

/// One prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct EvalPrompt {
    /// Place in the set, from 0; a prompt's seed is the run's seed plus this.
    pub index: usize,
    /// Line of the file, from 1.
    pub line: u64,
    /// Messages up to the first user turn, and with it: what evaluation asks.
    pub messages: Vec<Message>,
    /// Tool definitions of the row.
    pub tools: Option<Value>,
    /// User turns of the row, at least one.
    pub turns: usize,
    /// The row's `domain`.
    pub domain: Option<String>,
}

/// Reads a set; with a `limit` below the number of usable rows, shuffles them with `seed` and keeps the first `limit`.
///
/// # Errors
/// Those of [`ConversationFile::open`], and [`Error::NoPrompts`] if no row is usable.
pub fn load_eval_set(path: impl AsRef<Path>, limit: Option<usize>, seed: u64) -> Result<EvalSet, Error> {
    let path = path.as_ref();
    let mut set = read_set(ConversationFile::open(path)?, file_stem(path))?;
    if let (true, Some(first)) = (set.prompts.is_empty(), set.rejects.first()) {
        return Err(Error::NoPrompts {
            path: path.to_owned(),
            rejected: set.rejects.len(),
            line: first.line,
            reason: first.reason.to_string(),
            hint: first.reason.hint().to_owned(),
        });
    }
    if let Some(limit) = limit.filter(|limit| *limit < set.prompts.len()) {
        PythonRandom::new(seed).shuffle(&mut set.prompts);
        set.prompts.truncate(limit);
        for (index, prompt) in set.prompts.iter_mut().enumerate() {
            prompt.index = index;
        }
    }
    Ok(set)
}

fn read_set(file: ConversationFile, name: String) -> Result<EvalSet, Error> {
    let mut set = EvalSet { name, prompts: Vec::new(), rejects: Vec::new() };
    for row in file {
        match row? {
            Row::Conversation(conversation, _) => set.prompts.push(prompt(set.prompts.len(), conversation)),
            Row::Reject(reject) => set.rejects.push(reject),
        }
    }
    Ok(set)
}

fn prompt(index: usize, conversation: Conversation) -> EvalPrompt {
    let Prompts { mut messages, answers, .. } = conversation.prompts();
    messages.truncate(answers.first().copied().unwrap_or(messages.len()));
    let Conversation { line, domain, tools, .. } = conversation;
    EvalPrompt { index, line, messages, tools, turns: answers.len(), domain }
}
