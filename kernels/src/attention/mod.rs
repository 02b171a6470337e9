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
mod head_gradients;
pub mod ragged;
mod row;
pub mod ttt;

use candle_core::{Result, bail};

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

    /// Fails where the shapes of queries, keys and values are not `rows` and twice `keys` rows of this layout; `what` is for the
    /// message.
    pub(crate) fn check(&self, what: &str, (rows, keys): (usize, usize), [q, k, v]: [[usize; 2]; 3]) -> Result<()> {
        let Self { heads, kv_heads, head_dim } = *self;
        let expected = [keys, kv_heads * head_dim];
        if [q, k, v] != [[rows, heads * head_dim], expected, expected] {
            bail!(
                "{what} of {rows} rows over {keys} keys, {heads}/{kv_heads} heads of {head_dim} got q {q:?}, k {k:?}, v {v:?}"
            );
        }
        Ok(())
    }
}
