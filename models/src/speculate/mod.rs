//! Speculative decoding on plain slices: random numbers, token distributions, and the accept-or-resample rule.
//!
//! Nothing here knows a tensor, a model or a batch: a caller hands over logits of one row at a time, so a result depends
//! only on those logits, the seed and the position in the sequence. The decoding engine and the samplers of training use it.

pub mod distribution;
pub mod error;
pub mod rng;
pub mod verify;

#[cfg(test)]
mod tests;

pub use distribution::{Distribution, SamplingParams, argmax_first};
pub use error::SpeculateError;
pub use rng::{CounterRng, Stream};
pub use verify::{Verdict, accept_probability, residual, verify_block};
