//! Everything that can go wrong with text data, templates and tokenizers. The target cache has its own error type.

use std::path::PathBuf;

use thiserror::Error;

#[cfg(test)]
mod tests;

/// An error of this crate's text side. A single bad row is not an error but a [`crate::jsonl::Reject`].
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// A file could not be opened or read. The source names the path.
    #[error(transparent)]
    Read(#[from] std::io::Error),
    /// A data file is in a format that is recognised but not read.
    #[error("cannot read `{}`: it is {format}, which is not supported yet", path.display())]
    UnsupportedFormat {
        /// The file.
        path: PathBuf,
        /// The format found.
        format: &'static str,
        /// How to turn it into JSON lines.
        convert: &'static str,
    },
    /// A data file holds no row at all.
    #[error("no rows in `{}`", path.display())]
    NoRows {
        /// The file.
        path: PathBuf,
    },
    /// A file that is one JSON array is larger than is read at once.
    #[error("`{}` is one JSON array of more than {limit_bytes} bytes", path.display())]
    ArrayTooLarge {
        /// The file.
        path: PathBuf,
        /// The limit.
        limit_bytes: usize,
    },
    /// A file that starts as one JSON array ends inside it.
    #[error("`{}` starts with a JSON array that is not closed", path.display())]
    ArrayNotClosed {
        /// The file.
        path: PathBuf,
    },
    /// No row of an evaluation set could be used.
    #[error("no usable prompt in `{}`: {rejected} rows refused, the first at line {line}: {reason}", path.display())]
    NoPrompts {
        /// The file.
        path: PathBuf,
        /// How many rows were refused.
        rejected: usize,
        /// Line of the first one.
        line: u64,
        /// Why the first one was refused.
        reason: String,
        /// What to do about rows like that.
        hint: String,
    },
    /// A tokenizer file or vocabulary is not usable.
    #[error("cannot load tokenizer `{origin}`: {problem}")]
    Tokenizer {
        /// The file, or where the vocabulary came from.
        origin: String,
        /// What is wrong.
        problem: String,
    },
    /// A tokenizer is of a kind that is not implemented.
    #[error("cannot load tokenizer `{origin}`: unknown {what} `{found}`, expected {expected}")]
    UnknownTokenizerKind {
        /// The file, or where the vocabulary came from.
        origin: String,
        /// Which setting.
        what: &'static str,
        /// Its value.
        found: String,
        /// The values known.
        expected: &'static str,
    },
    /// A text holds a character for which the vocabulary has no token.
    #[error("the vocabulary has no token for byte 0x{byte:02x} of U+{:04X}", u32::from(*character))]
    Unencodable {
        /// The missing byte.
        byte: u8,
        /// The character it belongs to.
        character: char,
    },
    /// The tokenizer library refused a text.
    #[error("cannot tokenize: {problem}")]
    Encode {
        /// What it said.
        problem: String,
    },
    /// A chat template does not parse.
    #[error("cannot read chat template: {cause}")]
    TemplateSyntax {
        /// What the template engine said, with the line.
        cause: minijinja::Error,
    },
    /// A chat template failed on a conversation.
    #[error("cannot render chat template: {cause}")]
    TemplateRender {
        /// What the template engine said, with the line.
        cause: minijinja::Error,
    },
    /// A chat template refused a conversation by its own rule.
    #[error("chat template refused the conversation: {message}")]
    TemplateRefused {
        /// The template's own words.
        message: String,
    },
    /// A conversation uses tools and the template prints none.
    #[error("the conversation has `{what}`, which the chat template does not print")]
    TemplateWithoutTools {
        /// `tools`, `tool_calls` or `tool`.
        what: &'static str,
    },
    /// A chat template reads the text of control tokens inside the content, so they can't be kept as plain text.
    #[error("the chat template changes content that holds the text of a control token")]
    ControlTextInContent,
    /// A conversation holds every character that could mark control text.
    #[error("the conversation holds every noncharacter that could mark control text")]
    NoSentinelLeft,
    /// Pieces of text between control tokens do not tokenize the same as within the whole.
    #[error("the tokenizer encodes text after a control token otherwise than alone")]
    ContextDependentTokenizer,
    /// No token ends a turn.
    #[error("no end-of-turn token: no stop ids were given and the chat template ends answers without a control token")]
    NoEndOfTurn,
    /// A conversation does not end as its use needs.
    #[error("expected a conversation that ends with a turn of `{expected}`, found `{found}`")]
    WrongLastTurn {
        /// The role needed.
        expected: &'static str,
        /// The role found, or `nothing`.
        found: &'static str,
    },
    /// A chat template prints the last answer in no way that continues the serving prompt.
    #[error("the chat template prints the last answer apart from its generation prompt")]
    AnswerNotFound,
    /// The caller asked to stop in the middle of a long conversation.
    #[error("stopped while a conversation was rendered")]
    Stopped,
    /// Nothing of a conversation would be trained on.
    #[error("no supervised token in the conversation")]
    NothingSupervised,
}

impl Error {
    /// What to do about it, where that is known.
    pub fn hint(&self) -> Option<String> {
        let hint = match self {
            Error::UnsupportedFormat { convert, .. } => convert,
            Error::NoRows { .. } => "write one JSON object per line, such as {\"messages\": [...]}",
            Error::ArrayTooLarge { .. } => "write one JSON object per line: jq -c '.[]' data.json > data.jsonl",
            Error::ArrayNotClosed { .. } => "the file was cut off: copy or download it again",
            Error::NoPrompts { hint, .. } if hint.is_empty() => return None,
            Error::NoPrompts { hint, .. } => hint,
            Error::UnknownTokenizerKind { .. } | Error::ContextDependentTokenizer => {
                "use a target with a byte-level BPE tokenizer"
            }
            Error::Unencodable { .. } => "remove the character from the text, or use another target",
            Error::TemplateSyntax { .. } | Error::TemplateRender { .. } => {
                "compare the template with the one published with the model"
            }
            Error::TemplateRefused { .. } => "change the order of the turns to what the template accepts",
            Error::TemplateWithoutTools { .. } => "use a target whose template knows tools, or leave such rows out",
            Error::NoEndOfTurn => "give the model's stop ids, for example from generation_config.json",
            Error::NothingSupervised => "the conversation needs an answer with text",
            Error::Tokenizer { .. } => "copy the model's files again from where they were published",
            Error::ControlTextInContent | Error::NoSentinelLeft => {
                "leave such rows out: their text cannot be told from the template's"
            }
            Error::WrongLastTurn { .. } => "check the order of the turns in the row",
            Error::AnswerNotFound => {
                "compare the template with the one published with the model, or use prompts alone and let the target answer"
            }
            _ => return None,
        };
        Some(hint.to_owned())
    }
}
