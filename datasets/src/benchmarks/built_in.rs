//! The prompts that come with the program: enough to try everything without a download.

use super::{EvalSet, read_set};
use crate::error::Error;
use crate::jsonl::ConversationFile;

const TRAIN: &str = include_str!("../../prompts/train.jsonl");
const EVAL: &str = include_str!("../../prompts/eval.jsonl");

/// The built-in training prompts as JSON lines, to be read like any file.
///
/// # Errors
/// None in a built program; the type is that of [`ConversationFile::open`].
pub fn built_in_train() -> Result<ConversationFile, Error> {
    ConversationFile::from_bytes(TRAIN, "built-in training prompts")
}

/// The built-in evaluation set, `built-in`, whole and in order.
///
/// # Errors
/// None in a built program; the type is that of [`super::load_eval_set`].
pub fn built_in_eval() -> Result<EvalSet, Error> {
    read_set(ConversationFile::from_bytes(EVAL, "built-in evaluation prompts")?, "built-in".to_owned())
}
