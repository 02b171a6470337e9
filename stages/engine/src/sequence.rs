//! A request, the state of its sequence, and what is recorded of its rounds.

use std::sync::Arc;

use candle_core::Tensor;
use deepspec_models::speculate::{Adjustments, History, SamplingParams};

use super::estimates::Estimates;
use super::text::{TextOptions, TextState};
use crate::error::Result;

/// One generation to do.
#[derive(Debug, Clone)]
pub struct Request {
    /// Chosen by the caller, returned with every update.
    pub id: u64,
    /// Prompt tokens.
    pub prompt: Vec<u32>,
    /// Sampling settings.
    pub sampling: SamplingParams,
    /// Seed of all random draws of this request.
    pub seed: u64,
    /// Most tokens to generate.
    pub max_new_tokens: usize,
    /// Tokens that end the sequence; the one met is part of the output.
    pub stop_ids: Arc<[u32]>,
    /// Verify the longest prefix of a proposal whose confidences all reach this; 0 verifies everything.
    pub confidence_threshold: f32,
    /// What else is asked for.
    pub options: RequestOptions,
}

/// What a request may ask for beyond tokens; nothing by default.
#[derive(Debug, Clone, Default)]
pub struct RequestOptions {
    /// Biases and penalties of the target's logits.
    pub adjustments: Adjustments,
    /// Text beside tokens, and texts that end the sequence.
    pub text: Option<TextOptions>,
    /// Log probabilities of each token, and of so many likeliest ones.
    pub logprobs: Option<usize>,
    /// Verify by this request's own proposals and threshold alone, whatever the engine's schedule: a sampled text then
    /// depends on nothing but the request.
    pub is_reproducible: bool,
}

/// Why a sequence ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// A stop token was committed, or a stop text completed.
    Stop,
    /// The budget of new tokens is used up.
    Length,
}

impl FinishReason {
    /// Spelling of the OpenAI API, used in files too.
    pub fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
        }
    }
}

/// One draft-verify-accept round.
#[derive(Debug, Clone, PartialEq)]
pub struct RoundRecord {
    /// Tokens proposed and verified; cut after a stop token that was accepted.
    pub proposed: usize,
    /// Proposed tokens that were accepted and committed.
    pub accepted: usize,
    /// Tokens committed: the accepted ones and the target's own, unless the round ended on an accepted stop token or the
    /// budget.
    pub committed: usize,
    /// Confidence logits of the whole block before the gate; empty without a confidence head.
    pub confidence_logits: Vec<f32>,
    /// The whole block before the gate.
    pub block: Vec<u32>,
    /// Tokens that a drafter was asked for in this round, whoever's proposal was verified in the end.
    pub drafted: usize,
    /// Whether a drafter was left out because it did not pay.
    pub is_fallback: bool,
}

/// What speculation did for a request.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct RequestStats {
    /// Whether a drafter was left out in the last round because it did not pay.
    pub is_fallback: bool,
    /// Rounds in which it was.
    pub fallback_rounds: usize,
    /// Drafted tokens / rounds; 0 without rounds, as below.
    pub avg_draft_len: f64,
    /// Verified tokens / rounds.
    pub avg_verify_len: f64,
    /// Accepted / verified tokens; 0 where none was verified.
    pub draft_accept_rate: f64,
    /// Rounds in which a verified token was rejected.
    pub rollback_count: usize,
    /// Committed tokens / rounds.
    pub tau: f64,
}

/// A finished sequence.
#[derive(Debug, Clone)]
pub struct Finished {
    /// The request.
    pub request: Request,
    /// Generated tokens, a final stop token included.
    pub output: Vec<u32>,
    /// Why it ended.
    pub reason: FinishReason,
    /// The stop text that ended it, where one did.
    pub stop_text: Option<String>,
    /// Its rounds; the prefill that gave the first token is none.
    pub rounds: Vec<RoundRecord>,
    /// Smallest gap between the two best target logits met at T = 0; infinite when sampling.
    pub min_margin: f32,
}

impl Finished {
    /// What speculation did for it.
    pub fn stats(&self) -> RequestStats {
        let sum = |part: fn(&RoundRecord) -> usize| self.rounds.iter().map(part).sum::<usize>();
        let mean = |total: usize, count: usize| if count == 0 { 0.0 } else { total as f64 / count as f64 };
        let (rounds, proposed) = (self.rounds.len(), sum(|round| round.proposed));
        RequestStats {
            is_fallback: self.rounds.last().is_some_and(|round| round.is_fallback),
            fallback_rounds: sum(|round| usize::from(round.is_fallback)),
            avg_draft_len: mean(sum(|round| round.block.len()), rounds),
            avg_verify_len: mean(proposed, rounds),
            draft_accept_rate: mean(sum(|round| round.accepted), proposed),
            rollback_count: sum(|round| usize::from(round.accepted < round.proposed)),
            tau: mean(sum(|round| round.committed), rounds),
        }
    }
}

/// A sequence in work.
#[derive(Debug)]
pub(super) struct Sequence {
    pub(super) request: Request,
    pub(super) slot: usize,
    /// Prompt and committed tokens; after the prefill the last one is the anchor, which the cache does not hold yet.
    pub(super) tokens: Vec<u32>,
    pub(super) rounds: Vec<RoundRecord>,
    pub(super) min_margin: f32,
    /// Features of committed positions that no drafter has been given yet, in order.
    pub(super) unseen: Vec<Tensor>,
    /// Positions before those whose features are no longer kept, since the drafter's window lies behind them.
    pub(super) passed: usize,
    /// Whether the drafter failed here and is no longer asked.
    pub(super) is_drafter_dropped: bool,
    pub(super) estimates: Estimates,
    /// What penalties look at; `None` where nothing is adjusted.
    pub(super) history: Option<History>,
    pub(super) text: Option<TextState>,
    pub(super) stop_text: Option<String>,
    /// Survival of the drafter's tokens as promised one and two rounds ago; empty where there was no such round.
    pub(super) promises: [Vec<f64>; 2],
}

impl Sequence {
    /// Positions whose features wait for the drafter.
    pub(super) fn unseen_rows(&self) -> usize {
        self.unseen.iter().map(|rows| rows.dims()[0]).sum()
    }

    /// Keeps features of newly committed positions for a drafter that needs those of the last `window`, or all.
    ///
    /// They are copied: a view would hold the rows of all sequences of its step, prompts of others included.
    ///
    /// # Errors
    /// When the memory cannot be had.
    pub(super) fn keep_features(&mut self, rows: &Tensor, window: Option<usize>) -> Result<()> {
        self.unseen.push(rows.force_contiguous()?);
        let Some(window) = window else { return Ok(()) };
        let mut kept = self.unseen_rows();
        while let Some(first) = self.unseen.first().map(|rows| rows.dims()[0]).filter(|first| kept - first >= window) {
            self.unseen.remove(0);
            self.passed += first;
            kept -= first;
        }
        Ok(())
    }

    pub(super) fn new(request: Request, slot: usize) -> Self {
        let tokens = request.prompt.clone();
        let options = &request.options;
        let history = (!options.adjustments.is_none()).then(|| History::new(&tokens));
        let text = options.text.as_ref().map(TextState::new);
        Self {
            request,
            slot,
            tokens,
            rounds: Vec::new(),
            min_margin: f32::INFINITY,
            unseen: Vec::new(),
            passed: 0,
            is_drafter_dropped: false,
            estimates: Estimates::of_request(),
            history,
            text,
            stop_text: None,
            promises: [Vec::new(), Vec::new()],
        }
    }

    pub(super) fn generated(&self) -> usize {
        self.tokens.len() - self.request.prompt.len()
    }

    pub(super) fn is_prefilling(&self) -> bool {
        self.generated() == 0
    }

    /// Tokens that may still be committed.
    pub(super) fn remaining(&self) -> usize {
        self.request.max_new_tokens - self.generated()
    }

    pub(super) fn finish(mut self, reason: FinishReason) -> Finished {
        let output = self.tokens.split_off(self.request.prompt.len());
        let Self { request, rounds, min_margin, stop_text, .. } = self;
        Finished { request, output, reason, stop_text, rounds, min_margin }
    }
}
