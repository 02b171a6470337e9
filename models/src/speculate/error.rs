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
            Self::EmptyRow | Self::NotADistribution { .. } | Self::BlockShape { .. } => None,
        }
    }
}
