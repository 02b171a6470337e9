//! The value that names a set of prompts: the built-in one or a file.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Spelling of the built-in prompts.
const BUILT_IN: &str = "built-in";

/// A set of prompts; written `built-in` or as a path.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub enum PromptSource {
    /// The prompts inside the program.
    BuiltIn,
    /// A file, relative to the current directory.
    File(PathBuf),
}

impl From<String> for PromptSource {
    fn from(text: String) -> Self {
        if text == BUILT_IN { Self::BuiltIn } else { Self::File(text.into()) }
    }
}

impl From<PromptSource> for String {
    fn from(source: PromptSource) -> Self {
        match source {
            PromptSource::BuiltIn => BUILT_IN.into(),
            // Made from a string, so nothing is lost.
            PromptSource::File(path) => path.to_string_lossy().into_owned(),
        }
    }
}
