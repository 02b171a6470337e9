//! Attention without score matrices and without expanding grouped key/value heads.
//!
//! * [`ragged`]: inference over preallocated key/value caches; segments of many sequences in one row dimension.
//! * [`block`]: the training pattern of block drafters, with gradients: each block sees a part of its sequence's context
//!   and itself.
//! * [`ttt`]: the training pattern of Eagle3, with gradients: each step sees the first step causally and its own row of
//!   every later one.
//!
//! Scores are q·k/√head_dim; a row that sees no key gives zeros, never NaN.

pub mod block;
pub mod ragged;
mod row;
pub mod ttt;

/// Sizes shared by the queries, keys and values of one call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadLayout {
    /// Query heads.
    pub heads: usize,
    /// Key/value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
}

impl HeadLayout {
    /// Query heads that share one key/value head.
    pub fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    pub(crate) fn scale(&self) -> f32 {
        1.0 / (self.head_dim as f32).sqrt()
    }
}
