//! Requests of decoding tests.

use deepspec_engine::{Request, RequestOptions};
use deepspec_models::speculate::SamplingParams;

/// A greedy request that no token ends.
pub(crate) fn request(id: u64, prompt: Vec<u32>, max_new_tokens: usize) -> Request {
    Request {
        id,
        prompt,
        sampling: SamplingParams::greedy(),
        seed: 7 + id,
        max_new_tokens,
        stop_ids: Vec::new().into(),
        confidence_threshold: 0.0,
        options: RequestOptions::default(),
    }
}
