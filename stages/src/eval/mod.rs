//! Evaluation: speculative against plain decoding, and how good the drafter's confidence is.

pub mod confidence;
