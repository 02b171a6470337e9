//! Lets the proposers decode the same prompts in turns of a few tokens, so that whatever slows the machine down slows all of them,
//! and times plain passes over a context of fixed length, which tell whether it did.

use std::time::Instant;

use deepspec_models::kv_cache::KvCache;
use deepspec_models::target::{NewTokens, Target};

use super::speed::Piece;
use crate::error::{Error, Result};
use deepspec_engine::{DrafterFaults, Engine, Finished, PhaseTimes, Request};

/// Tokens of each answer that a proposer writes before the next one has its turn.
const PIECE_TOKENS: usize = 16;
/// Tokens in the cache of the timed passes.
const PROBE_CONTEXT: usize = 128;
/// Passes of which a timing is the median.
const PROBE_PASSES: usize = 5;

/// One proposer's share of the turns over a batch of requests with the ids 0, 1, ….
pub(super) struct Turn<'e, 'a> {
    engine: &'e mut Engine<'a>,
    requests: usize,
    started: (PhaseTimes, PhaseTimes),
    tokens: usize,
    wall_s: f64,
    first_token_s: Vec<f64>,
    pieces: Vec<Vec<Piece>>,
    finished: Vec<Finished>,
}

/// What a proposer's turns gave.
pub(super) struct Run {
    /// Answers in the order of the requests.
    pub(super) finished: Vec<Finished>,
    /// Seconds until the first token of each, the turns of others left out.
    pub(super) first_token_s: Vec<f64>,
    /// Pieces of each. The time of a piece is shared out among the answers in proportion to their tokens in it.
    pub(super) pieces: Vec<Vec<Piece>>,
    /// The engine's readings before and after, of all steps and of rounds.
    pub(super) times: [PhaseTimes; 2],
    pub(super) rounds: [PhaseTimes; 2],
}

impl<'e, 'a> Turn<'e, 'a> {
    /// Submits requests to an idle engine.
    ///
    /// # Errors
    /// When a request cannot be answered.
    pub(super) fn new(engine: &'e mut Engine<'a>, requests: Vec<Request>) -> Result<Self> {
        let (started, count) = ((engine.times(), engine.round_times()), requests.len());
        for request in requests {
            engine.submit(request)?;
        }
        Ok(Self {
            engine,
            requests: count,
            started,
            tokens: 0,
            wall_s: 0.0,
            first_token_s: vec![0.0; count],
            pieces: vec![Vec::new(); count],
            finished: Vec::new(),
        })
    }

    /// Decodes until there are `goal` tokens of all answers together, or the answers have ended.
    fn advance(&mut self, goal: usize, check: &mut impl FnMut() -> Result<()>) -> Result<()> {
        self.engine.forget_pause();
        let mut tokens = vec![0; self.requests];
        let begun = Instant::now();
        while !self.engine.is_idle() && self.tokens < goal {
            for update in self.engine.step()? {
                if let Some(error) = update.failed {
                    return Err(error.into());
                }
                let at = update.id as usize;
                if !update.tokens.is_empty() && self.first_token_s[at] == 0.0 {
                    self.first_token_s[at] = self.wall_s + begun.elapsed().as_secs_f64();
                }
                tokens[at] += update.tokens.len();
                self.tokens += update.tokens.len();
                self.finished.extend(update.finished);
            }
            check()?;
        }
        let wall_s = begun.elapsed().as_secs_f64();
        self.wall_s += wall_s;
        let total: usize = tokens.iter().sum();
        for (pieces, tokens) in self.pieces.iter_mut().zip(tokens).filter(|(_, tokens)| *tokens > 0) {
            pieces.push(Piece { tokens, wall_s: wall_s * tokens as f64 / total as f64 });
        }
        Ok(())
    }

    fn end(mut self) -> Result<Run> {
        if let Some(DrafterFaults { reason, requests, .. }) = self.engine.drafter_faults().cloned() {
            return Err(Error::DrafterFailed { reason, requests });
        }
        self.finished.sort_by_key(|done| done.request.id);
        Ok(Run {
            finished: self.finished,
            first_token_s: self.first_token_s,
            pieces: self.pieces,
            times: [self.started.0, self.engine.times()],
            rounds: [self.started.1, self.engine.round_times()],
        })
    }
}

/// Runs all turns to their end, forwards and backwards, so that none is always first; `check` may stop them.
///
/// # Errors
/// When an engine, a drafter or a sequence fails, or `check` does.
pub(super) fn take(mut turns: Vec<Turn<'_, '_>>, mut check: impl FnMut() -> Result<()>) -> Result<Vec<Run>> {
    let (mut goal, mut is_forwards) = (0, true);
    while turns.iter().any(|turn| !turn.engine.is_idle()) {
        goal += PIECE_TOKENS;
        let mut order: Vec<&mut Turn<'_, '_>> = turns.iter_mut().filter(|turn| !turn.engine.is_idle()).collect();
        if !is_forwards {
            order.reverse();
        }
        for turn in order {
            let goal = goal * turn.requests;
            turn.advance(goal, &mut check)?;
        }
        is_forwards = !is_forwards;
    }
    turns.into_iter().map(Turn::end).collect()
}

/// Plain passes over a context of fixed length, which would always take the same time on a machine that does not change.
pub(super) struct Probe<'a> {
    target: &'a Target,
    cache: KvCache,
    context: usize,
}

impl<'a> Probe<'a> {
    /// Reads the context.
    ///
    /// # Errors
    /// When the target fails.
    pub(super) fn new(target: &'a Target) -> Result<Self> {
        let config = target.config();
        let context = PROBE_CONTEXT.min(config.max_position_embeddings.saturating_sub(1)).max(1);
        let tokens: Vec<u32> = (0..context).map(|i| (i * 7919 % config.vocab_size) as u32).collect();
        let mut cache = target.new_cache(1, context + 1)?;
        target.forward(&mut cache, &[NewTokens { slot: 0, tokens: &tokens }], &[])?;
        Ok(Self { target, cache, context })
    }

    /// Median seconds of a pass of one row.
    ///
    /// # Errors
    /// When the target fails.
    pub(super) fn time(&mut self) -> Result<f64> {
        let mut timings = [0.0; PROBE_PASSES];
        for timing in &mut timings {
            let begun = Instant::now();
            let rows = self.target.forward(&mut self.cache, &[NewTokens { slot: 0, tokens: &[0] }], &[])?;
            self.target.logits(&rows.hidden, &[0])?;
            *timing = begun.elapsed().as_secs_f64();
            self.cache.truncate(0, self.context);
        }
        timings.sort_unstable_by(f64::total_cmp);
        Ok(timings[PROBE_PASSES / 2])
    }
}
