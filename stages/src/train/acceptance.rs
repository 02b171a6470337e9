//! Train-time acceptance: every so many steps a few prompts of the cache go through the real decoding loop with the drafter as it
//! is, so that a run that learns nothing useful shows long before its end.
//!
//! The drafter is built from the current parameters as from a saved checkpoint and decodes greedily, every block verified whole.
//! The prompts are from the training data: the numbers are an early warning and a curve, not a result. Nothing here touches the
//! weights, so a run with measurements ends with the same ones as a run without.

use std::time::Instant;

use candle_core::Tensor;
use deepspec_datasets::target_cache::Reader;
use deepspec_models::checkpoint;
use deepspec_models::config::DrafterConfig;
use deepspec_models::speculate::SamplingParams;
use deepspec_models::target::Target;

use crate::drafter::drafter_of;
use crate::error::{Error, Result};
use crate::eval::metrics::{Acceptance as Rates, Round};
use crate::recipe::{Precision, Recipe};
use deepspec_engine::progress::Context;
use deepspec_engine::{Engine, IDLE_TAU, Request, RequestOptions};

/// Longest answer to a prompt, in tokens.
const ANSWER_TOKENS: usize = 48;
/// Longest prompt, in tokens; samples with longer ones are passed over.
const PROMPT_TOKENS: usize = 1024;
/// Measurements in a row with next to no acceptance after which a warning says so.
const IDLE_MEASUREMENTS: u32 = 3;

/// What a measurement found.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Measured {
    /// Tokens committed / rounds.
    pub tau: f64,
    /// Share of the rounds whose first proposed token was accepted.
    pub accept_at_1: f64,
}

/// Measures a drafter in training.
pub struct TrainAcceptance<'a> {
    target: &'a Target,
    every: u64,
    requests: Vec<Request>,
    precision: Precision,
    idle: u32,
}

impl<'a> TrainAcceptance<'a> {
    /// Takes the prompts from the last samples of the cache; `None` where the recipe wants no measurements.
    ///
    /// # Errors
    /// The target is not there any more, or no sample has a prompt that fits.
    pub fn new(recipe: &Recipe, target: Option<&'a Target>, cache: &Reader) -> Result<Option<Self>> {
        let Some(every) = recipe.train.acceptance_every.filter(|&every| every > 0) else { return Ok(None) };
        let target = target
            .ok_or_else(|| Error::Invariant("the target was freed, but `train.acceptance_every` needs it".into()))?;
        let longest = PROMPT_TOKENS.min(target.config().max_position_embeddings.saturating_sub(ANSWER_TOKENS));
        let mut requests = Vec::new();
        for index in (0..cache.len()).rev() {
            let sample = cache.sample(index)?;
            let prompt = sample.loss_mask.iter().position(|&mask| mask == 1).unwrap_or(0);
            if (1..=longest).contains(&prompt) {
                requests.push(Request {
                    id: requests.len() as u64,
                    prompt: sample.input_ids[..prompt].to_vec(),
                    sampling: SamplingParams::greedy(),
                    seed: recipe.train.seed,
                    max_new_tokens: ANSWER_TOKENS,
                    stop_ids: target.config().stop_ids.as_slice().into(),
                    confidence_threshold: 0.0,
                    options: RequestOptions::default(),
                });
            }
            if requests.len() == recipe.train.acceptance_prompts {
                break;
            }
        }
        if requests.is_empty() {
            let problem =
                format!("no sample of the cache has a prompt of 1 to {longest} tokens to measure acceptance with");
            return Err(Error::Input(problem));
        }
        Ok(Some(Self { target, every, requests, precision: recipe.draft.precision, idle: 0 }))
    }

    /// Whether acceptance is measured after so many steps.
    pub fn is_due(&self, step: u64) -> bool {
        step.is_multiple_of(self.every)
    }

    /// Decodes with the drafter of these tensors, named as in a checkpoint, and warns when acceptance stays away.
    ///
    /// # Errors
    /// When a model fails.
    pub fn measure(
        &mut self,
        step: u64,
        config: &DrafterConfig,
        tensors: &[(String, Tensor)],
        ctx: Context<'_>,
    ) -> Result<Measured> {
        let begun = Instant::now();
        let weights = checkpoint::in_memory("parameters", tensors)?;
        let drafter = drafter_of(config.clone(), &weights, self.precision)?;
        let slots = self.requests.len();
        let capacity = self.requests.iter().map(|request| request.prompt.len() + ANSWER_TOKENS).max().unwrap_or(0);
        let mut engine = Engine::new(self.target, drafter.proposer(self.target, slots, capacity)?, slots, capacity)?;
        let finished = engine.run(self.requests.iter().cloned(), |_| Ok(()))?;
        if let Some(faults) = engine.drafter_faults() {
            ctx.warn(faults.message());
        }
        let rounds: Vec<Round> = finished.iter().flat_map(|done| &done.rounds).map(Round::from).collect();
        let rates = Rates::of(&rounds);
        let first = rates.positions.first().and_then(|position| position.accept_at_k);
        // Answers of one token have no round: nothing was drafted, so nothing is known.
        let measured = Measured { tau: rates.tau.unwrap_or(1.0), accept_at_1: first.unwrap_or(0.0) };
        ctx.note(format!(
            "acceptance after step {step}: tau {:.3}, first token {:.0} %, in {} rounds of greedy decoding ({:.1} s)",
            measured.tau,
            100.0 * measured.accept_at_1,
            rates.rounds,
            begun.elapsed().as_secs_f64()
        ));
        self.idle = if measured.tau < IDLE_TAU { self.idle + 1 } else { 0 };
        if self.idle > 0 && self.idle.is_multiple_of(IDLE_MEASUREMENTS) {
            ctx.warn(format!(
                "the target accepts next to nothing of this drafter: tau {:.3} in {} measurements in a row, up to step {step}. \
                 If the loss falls all the same, the drafter is trained for something else than it is used for: look at the \
                 block layout (`sample_from_anchor`), at `draft.target_layer_ids` and at `draft.mask_token_id`",
                measured.tau, self.idle
            ));
        }
        Ok(measured)
    }
}
