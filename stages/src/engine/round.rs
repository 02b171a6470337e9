//! One step over all sequences in work: draft → choose how much to verify → one target forward → accept → commit.

use std::time::Instant;

use candle_core::Tensor;
use deepspec_models::speculate::{Distribution, DraftRequest, Proposal, verify_block};
use deepspec_models::target::{NewTokens, select_rows};

use super::commit::commit;
use super::sequence::{FinishReason, RoundRecord, Sequence};
use super::{Engine, PREFILL_CHUNK, Update};
use crate::error::{Error, Result};

/// What one sequence runs through the target in this step.
struct Turn {
    tokens: Vec<u32>,
    proposal: Proposal,
    /// Rows of the batch whose logits are needed, relative to the turn's first row.
    logits: std::ops::Range<usize>,
    block: Vec<u32>,
    block_confidence: Vec<f32>,
}

impl Engine<'_> {
    pub(super) fn round(&mut self) -> Result<Vec<Update>> {
        let begun = Instant::now();
        let proposals = self.draft()?;
        let drafted = Instant::now();
        let turns: Vec<Turn> =
            self.active.iter().zip(proposals).map(|(sequence, proposal)| self.turn(sequence, proposal)).collect();
        let batch: Vec<NewTokens<'_>> = self
            .active
            .iter()
            .zip(&turns)
            .map(|(sequence, turn)| NewTokens { slot: sequence.slot, tokens: &turn.tokens })
            .collect();
        let capture = self.proposer.feature_layers().to_vec();
        let rows = self.target.forward(&mut self.cache, &batch, &capture)?;
        let mut wanted = Vec::new();
        let mut first = 0;
        for turn in &turns {
            wanted.extend(turn.logits.clone().map(|row| first + row));
            first += turn.tokens.len();
        }
        let logits: Vec<Vec<f32>> =
            if wanted.is_empty() { Vec::new() } else { self.target.logits(&rows.hidden, &wanted)?.to_vec2()? };
        let verified = Instant::now();
        let updates = self.accept(&turns, &logits, rows.features.as_ref())?;
        let draft = (drafted - begun).as_secs_f64();
        let target = (verified - drafted).as_secs_f64();
        self.times.draft_s += draft;
        self.times.target_s += target;
        // `step` adds the whole step to the rest.
        self.times.other_s -= draft + target;
        Ok(updates)
    }

    /// Proposals for all sequences, empty for those that are still reading their prompt.
    fn draft(&mut self) -> Result<Vec<Proposal>> {
        let mut proposals = vec![Proposal::default(); self.active.len()];
        if self.proposer.block_size() == 0 {
            return Ok(proposals);
        }
        let (places, requests): (Vec<usize>, Vec<DraftRequest<'_>>) = self
            .active
            .iter()
            .enumerate()
            .filter(|(_, sequence)| !sequence.is_prefilling())
            .map(|(place, sequence)| {
                let request = DraftRequest {
                    slot: sequence.slot,
                    tokens: &sequence.tokens,
                    // The target adds one token of its own to whatever is accepted.
                    most: sequence.remaining() - 1,
                    sampling: &sequence.request.sampling,
                    seed: sequence.request.seed,
                };
                (place, request)
            })
            .unzip();
        if requests.is_empty() {
            return Ok(proposals);
        }
        let drafted = self.proposer.propose(&requests)?;
        if drafted.len() != requests.len() {
            return Err(Error::Engine(format!("{} proposals for {} requests", drafted.len(), requests.len())));
        }
        for (place, proposal) in places.into_iter().zip(drafted) {
            proposals[place] = proposal;
        }
        Ok(proposals)
    }

    fn turn(&self, sequence: &Sequence, mut proposal: Proposal) -> Turn {
        let known = self.cache.len(sequence.slot);
        if sequence.is_prefilling() {
            let end = sequence.tokens.len().min(known + PREFILL_CHUNK);
            let tokens = sequence.tokens[known..end].to_vec();
            let complete = end == sequence.tokens.len();
            let logits = if complete { tokens.len() - 1..tokens.len() } else { 0..0 };
            return Turn { tokens, proposal, logits, block: Vec::new(), block_confidence: Vec::new() };
        }
        let block = proposal.tokens.clone();
        let block_confidence = proposal.confidence_logits.clone();
        let admitted = gate(&proposal, sequence.request.confidence_threshold);
        proposal.tokens.truncate(admitted);
        proposal.distributions.truncate(admitted);
        let mut tokens = sequence.tokens[known..].to_vec();
        tokens.extend(&proposal.tokens);
        Turn { logits: 0..tokens.len(), tokens, proposal, block, block_confidence }
    }

    /// Accepts or resamples per sequence, commits, rolls caches back, and hands committed features to the proposer.
    fn accept(&mut self, turns: &[Turn], logits: &[Vec<f32>], features: Option<&Tensor>) -> Result<Vec<Update>> {
        let mut updates = Vec::new();
        let mut ended: Vec<Option<FinishReason>> = vec![None; self.active.len()];
        let mut kept_rows = Vec::new();
        let mut commits = Vec::new();
        let (mut first_row, mut first_logits) = (0, 0);
        for (i, (sequence, turn)) in self.active.iter_mut().zip(turns).enumerate() {
            let rows = &logits[first_logits..first_logits + turn.logits.len()];
            first_logits += turn.logits.len();
            let was_prefilling = sequence.is_prefilling();
            let mut kept = turn.tokens.len();
            if !rows.is_empty() {
                let (accepted, tokens) = decide(sequence, turn, rows)?;
                let before = sequence.tokens.len();
                let (count, reason) = commit(sequence, &tokens);
                if !was_prefilling {
                    // The anchor and the accepted tokens stay; the target's own token is the next anchor.
                    kept = 1 + accepted;
                    let length = self.cache.len(sequence.slot) - turn.tokens.len() + kept;
                    self.cache.truncate(sequence.slot, length);
                    sequence.rounds.push(record(turn, accepted, count, reason));
                }
                ended[i] = reason;
                let tokens = sequence.tokens[before..].to_vec();
                updates.push(Update { id: sequence.request.id, tokens, finished: None });
            }
            if ended[i].is_none() {
                kept_rows.extend(first_row..first_row + kept);
                commits.push((sequence.slot, kept));
            }
            first_row += turn.tokens.len();
        }
        if let Some(features) = features
            && !commits.is_empty()
        {
            let kept = if kept_rows.len() == first_row { features.clone() } else { select_rows(features, &kept_rows)? };
            self.proposer.observe(&kept, &commits)?;
        }
        self.retire(&ended, &mut updates);
        Ok(updates)
    }

    fn retire(&mut self, ended: &[Option<FinishReason>], updates: &mut [Update]) {
        for i in (0..ended.len()).rev() {
            let Some(reason) = ended[i] else { continue };
            let sequence = self.active.remove(i);
            self.release(sequence.slot);
            let finished = sequence.finish(reason);
            if let Some(update) = updates.iter_mut().find(|update| update.id == finished.request.id) {
                update.finished = Some(finished);
            }
        }
    }
}

/// Length of the longest prefix whose confidences all reach the threshold. It looks at each token's own confidence, which
/// depends only on what precedes that token, so the choice does not bias the output.
fn gate(proposal: &Proposal, threshold: f32) -> usize {
    if threshold <= 0.0 || proposal.confidence_logits.is_empty() {
        return proposal.tokens.len();
    }
    let low = |logit: &f32| 1.0 / (1.0 + (-logit).exp()) < threshold;
    proposal.confidence_logits.iter().position(low).unwrap_or(proposal.tokens.len())
}

/// Number of accepted tokens, and the tokens to commit: the accepted ones and the target's own.
fn decide(sequence: &mut Sequence, turn: &Turn, rows: &[Vec<f32>]) -> Result<(usize, Vec<u32>)> {
    let sampling = &sequence.request.sampling;
    let target: Vec<Distribution> =
        rows.iter().map(|row| Distribution::from_logits(row, sampling)).collect::<Result<_, _>>()?;
    let position = sequence.tokens.len() as u64;
    let proposal = &turn.proposal;
    let verdict = verify_block(&target, &proposal.distributions, &proposal.tokens, sequence.request.seed, position)?;
    if sampling.is_greedy() {
        for row in &rows[..=verdict.accepted] {
            sequence.min_margin = sequence.min_margin.min(margin(row));
        }
    }
    let mut tokens = proposal.tokens[..verdict.accepted].to_vec();
    tokens.push(verdict.next_token);
    Ok((verdict.accepted, tokens))
}

/// Gap between the two largest logits.
fn margin(row: &[f32]) -> f32 {
    let (mut best, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
    for &logit in row {
        if logit > best {
            (best, second) = (logit, best);
        } else if logit > second {
            second = logit;
        }
    }
    best - second
}

fn record(turn: &Turn, accepted: usize, committed: usize, reason: Option<FinishReason>) -> RoundRecord {
    let proposed = turn.proposal.tokens.len();
    let stopped_early = reason == Some(FinishReason::Stop) && committed <= accepted;
    RoundRecord {
        proposed: if stopped_early { committed } else { proposed },
        accepted: accepted.min(committed),
        committed,
        confidence_logits: turn.block_confidence.clone(),
        block: turn.block.clone(),
    }
}
