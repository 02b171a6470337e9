//! Speculative decoding: random numbers, token distributions, the accept-or-resample rule, and who proposes.
//!
//! All but the proposers works on plain slices and knows no tensor, model or batch: a caller hands over logits of one row at a time, so a result depends
//! only on those logits, the seed and the position in the sequence. The decoding engine and the samplers of training use it.

pub mod adjust;
pub mod calibrate;
pub mod distribution;
pub mod eagle3_propose;
pub mod error;
pub mod logprobs;
pub mod propose;
pub mod rng;
pub mod verify;

#[cfg(test)]
mod tests;

pub use adjust::{Adjustments, History};
pub use calibrate::Temperatures;
pub use deepspec_kernels::logit_row::top_gap;
pub use distribution::{Distribution, SamplingParams, argmax_first};
pub use eagle3_propose::Eagle3Proposer;
pub use error::SpeculateError;
pub use logprobs::TokenLogprobs;
pub use propose::{DSparkProposer, DraftRequest, NgramProposer, NoProposer, Proposal, Proposer};
pub use rng::{CounterRng, Stream, derived_seed};
pub use verify::{Verdict, accept_probability, residual, verify_block, verify_lazily};
