//! What can be wrong with the input of sampling and verification.

use thiserror::Error;

/// Input that `speculate` refuses.
#[derive(Debug, Clone, PartialEq, Error)]
pub enum SpeculateError {
    /// A sampling parameter lies outside its range.
    #[error("sampling parameter `{field}` is {value}, expected {expected}")]
    Parameter {
        /// Name of the parameter, spelled as the field of `SamplingParams`.
        field: &'static str,
        /// The value given.
        value: f64,
        /// The range allowed, in words.
        expected: &'static str,
    },
    /// A row of logits or probabilities has no entry.
    #[error("cannot choose a token from an empty row, expected one entry per vocabulary token")]
    EmptyRow,
    /// A logit is NaN.
    #[error("logit of token {token} is NaN")]
    NanLogit {
        /// Index of the first NaN in the row.
        token: usize,
    },
    /// The largest logit is infinite, so no softmax exists: every token is masked, or the forward pass overflowed.
    #[error("largest logit is {value}, expected a finite number")]
    InfiniteMaximum {
        /// Positive or negative infinity.
        value: f32,
    },
    /// Values given as probabilities are not a distribution.
    #[error(
        "probabilities sum to {sum} with smallest entry {smallest}, expected a sum of 1 and no negative or NaN entry"
    )]
    NotADistribution {
        /// Their sum.
        sum: f64,
        /// Their smallest entry; NaN if any is.
        smallest: f32,
    },
    /// The rows handed to the verification of a block do not fit together.
    #[error("cannot verify a block of {tokens} tokens: {what} is {found}, expected {expected}")]
    BlockShape {
        /// Number of drafted tokens.
        tokens: usize,
        /// The quantity that disagrees.
        what: &'static str,
        /// Its value.
        found: usize,
        /// The value that fits the block.
        expected: usize,
    },
    /// A token does not exist in the vocabulary of a row.
    #[error("token {token} at block position {position} is outside the vocabulary of {vocab_size}")]
    UnknownToken {
        /// The token id.
        token: u32,
        /// Its position in the block, from 0.
        position: usize,
        /// Number of tokens of the row.
        vocab_size: usize,
    },
    /// A table of confidence temperatures belongs to another block size.
    #[error("`temperatures` has {found} entries, expected {expected}, one per confidence of a block")]
    TemperatureCount {
        /// Number of temperatures.
        found: usize,
        /// Confidences of a block; 0 for a drafter without a confidence head.
        expected: usize,
    },
    /// A confidence temperature is not a finite number above 0.
    #[error("`temperatures[{position}]` is {value}, expected a finite number above 0")]
    Temperature {
        /// Position in the block, from 0.
        position: usize,
        /// The value given.
        value: f32,
    },
    /// A confidence logit is NaN.
    #[error("confidence logit at block position {} is NaN", position + 1)]
    NanConfidence {
        /// Position in the block, from 0.
        position: usize,
    },
    /// A drafter's confidence is not a finite number.
    #[error("confidence logit at block position {} is {value}, expected a finite number", position + 1)]
    Confidence {
        /// Position in the block, from 0.
        position: usize,
        /// The value found.
        value: f32,
    },
    /// Too little was verified to fit a confidence temperature.
    #[error("cannot calibrate block position {}: {found} verified blocks reach it, at least {needed} are needed", position + 1)]
    TooFewBlocks {
        /// Position in the block, from 0.
        position: usize,
        /// Blocks that reach it.
        found: usize,
        /// Blocks needed.
        needed: usize,
    },
}

impl SpeculateError {
    /// What the user can do about it, where there is something.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Parameter { field, expected, .. } => Some(format!("set `{field}` to {expected}")),
            Self::NanLogit { .. } | Self::InfiniteMaximum { .. } => Some(
                "the forward pass produced unusable numbers: check the checkpoint's weights and dtype, and that a logit \
                 mask leaves at least one token"
                    .to_owned(),
            ),
            Self::UnknownToken { .. } => {
                Some("the drafter and the target must share one tokenizer and vocabulary size".to_owned())
            }
            Self::TemperatureCount { .. } | Self::Temperature { .. } => {
                Some("fit the temperatures again with `deepspec eval --calibrate`".to_owned())
            }
            Self::NanConfidence { .. } | Self::Confidence { .. } => Some("check the drafter's confidence head for NaN weights".to_owned()),
            Self::TooFewBlocks { .. } => Some("give more prompts or longer answers".to_owned()),
            Self::EmptyRow | Self::NotADistribution { .. } | Self::BlockShape { .. } => None,
        }
    }
}
