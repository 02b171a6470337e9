//! One step over all sequences in work: draft → choose how much to verify → one target forward → accept → commit.

use std::borrow::Cow;
use std::ops::Range;
use std::time::Instant;

use candle_core::Tensor;
use deepspec_models::speculate::propose::host;
use deepspec_models::speculate::{Distribution, TokenLogprobs, top_gap, verify_lazily};
use deepspec_models::target::NewTokens;

use super::adaptive::StepTimes;
use super::commit::commit;
use super::draft::{Draft, Drafts};
use super::sequence::{FinishReason, RoundRecord, Sequence};
use super::text::Piece;
use super::{Engine, PREFILL_CHUNK, PREFILL_STEP, PhaseTimes, Update};
use crate::error::{Error, Result};

/// What one sequence runs through the target in this step.
struct Turn {
    tokens: Vec<u32>,
    /// Rows of the batch whose logits are needed, relative to the turn's first row.
    logits: Range<usize>,
    /// Empty while the sequence is still reading its prompt.
    draft: Draft,
    is_round: bool,
}

/// What the target said of some turns.
struct Pass {
    /// One row per wanted row of the turns, in order.
    logits: Option<Tensor>,
    /// One row per token of the turns, where a drafter takes them.
    features: Option<Tensor>,
}

/// How a sequence left in this step.
enum Ending {
    Finished(FinishReason),
    Failed(Error),
}

/// What came of the turns of a step.
#[derive(Default)]
struct News {
    updates: Vec<Update>,
    /// Place of each sequence that has ended, ascending.
    ended: Vec<(usize, Ending)>,
}

impl Engine<'_> {
    /// Runs one step; the time of its draft and of its target pass.
    pub(super) fn round(&mut self) -> Result<(Vec<Update>, PhaseTimes)> {
        let begun = Instant::now();
        let pause_s = self.paused.map_or(0.0, |ended| (begun - ended).as_secs_f64());
        let Drafts { all, has_backlog } = self.draft();
        let drafted = Instant::now();
        let mut room = PREFILL_STEP;
        let turns: Vec<Turn> =
            self.active.iter().zip(all).map(|(sequence, draft)| self.turn(sequence, draft, &mut room)).collect();
        let row_count = turns.iter().map(|turn| turn.tokens.len()).sum();
        let pass = self.pass(0, &turns);
        let verified = Instant::now();
        let (is_reading, load) = (turns.iter().any(|turn| !turn.is_round), turns.len());
        let blocks: Vec<usize> = turns.iter().map(|turn| turn.draft.drafted).filter(|&slots| slots > 0).collect();
        let mut news = News::default();
        match pass {
            Ok(pass) => self.accept(0, turns, pass, load, &mut news)?,
            // A pass fails as a whole: one for each sequence tells which of them cannot go on.
            Err(_) => {
                for (place, turn) in turns.into_iter().enumerate() {
                    match self.pass(place, std::slice::from_ref(&turn)) {
                        Ok(pass) => self.accept(place, vec![turn], pass, load, &mut news)?,
                        Err(error) => news.ended.push((place, Ending::Failed(error))),
                    }
                }
            }
        }
        let updates = self.retire(news);
        let times = PhaseTimes {
            steps: 1,
            draft_s: (drafted - begun).as_secs_f64(),
            target_s: (verified - drafted).as_secs_f64(),
            other_s: verified.elapsed().as_secs_f64(),
        };
        if let Some(adaptive) = self.adaptive.as_mut().filter(|_| !is_reading) {
            let usual = !has_backlog && !blocks.is_empty();
            adaptive.observe_times(StepTimes {
                load,
                rows: row_count,
                target_s: times.target_s,
                other_s: pause_s + times.other_s,
                draft: usual.then(|| (blocks.len(), blocks.iter().sum(), times.draft_s)),
            });
        }
        Ok((updates, times))
    }

    /// What a sequence runs; `room` is how many prompt tokens may still be read in this step.
    fn turn(&self, sequence: &Sequence, draft: Draft, room: &mut usize) -> Turn {
        let known = self.cache.len(sequence.slot);
        if sequence.is_prefilling() {
            let end = sequence.tokens.len().min(known + PREFILL_CHUNK.min(*room));
            *room -= end - known;
            let tokens = sequence.tokens[known..end].to_vec();
            let complete = end == sequence.tokens.len();
            let logits = if complete && !tokens.is_empty() { tokens.len() - 1..tokens.len() } else { 0..0 };
            return Turn { tokens, logits, draft, is_round: false };
        }
        let tokens = [&sequence.tokens[known..], &draft.proposal.tokens[..draft.admitted]].concat();
        Turn { logits: 0..tokens.len(), tokens, draft, is_round: true }
    }

    /// The target forward over the turns of the sequences from place `first` on. Where it fails, the caches are as before.
    fn pass(&mut self, first: usize, turns: &[Turn]) -> Result<Pass> {
        let sequences = &self.active[first..first + turns.len()];
        let batch: Vec<NewTokens<'_>> = (sequences.iter().zip(turns))
            .filter(|(_, turn)| !turn.tokens.is_empty())
            .map(|(sequence, turn)| NewTokens { slot: sequence.slot, tokens: &turn.tokens })
            .collect();
        if batch.is_empty() {
            return Ok(Pass { logits: None, features: None });
        }
        let drafter = self.sources.iter().filter(|_| !self.is_drafter_dropped());
        let capture = drafter.map(|source| source.feature_layers()).find(|layers| !layers.is_empty());
        let rows = self.target.forward(&mut self.cache, &batch, capture.unwrap_or_default())?;
        let mut wanted = Vec::new();
        let mut row_count = 0;
        for turn in turns {
            wanted.extend(turn.logits.clone().map(|row| row_count + row));
            row_count += turn.tokens.len();
        }
        self.rows += row_count as u64;
        let logits = if wanted.is_empty() { None } else { Some(self.target.logits(&rows.hidden, &wanted)?) };
        Ok(Pass { logits, features: rows.features })
    }

    /// Accepts or resamples per sequence from place `first` on, commits, rolls caches back, and keeps committed features for a
    /// drafter. A sequence whose rows have no distribution ends alone.
    fn accept(&mut self, first: usize, turns: Vec<Turn>, pass: Pass, load: usize, news: &mut News) -> Result<()> {
        let logits = pass.logits.as_ref().map(Tensor::storage_and_layout);
        let logits = logits.as_ref().map(|(storage, layout)| host(storage, layout)).transpose()?.unwrap_or_default();
        let vocab = self.target.config().vocab_size;
        let (mut first_row, mut first_logits) = (0, 0);
        // The only source that takes features is the drafter.
        let window = self.sources.iter().find(|source| !source.feature_layers().is_empty()).and_then(|s| s.window());
        for (place, turn) in (first..).zip(turns) {
            let sequence = &mut self.active[place];
            let row_count = turn.tokens.len();
            let rows = &logits[first_logits * vocab..(first_logits + turn.logits.len()) * vocab];
            first_logits += turn.logits.len();
            let features = pass.features.as_ref().map(|features| (features, first_row));
            first_row += row_count;
            let mut kept = row_count;
            if !rows.is_empty() {
                let (accepted, tokens) = match decide(sequence, &turn.draft, rows, vocab) {
                    Ok(decided) => decided,
                    Err(error) => {
                        news.ended.push((place, Ending::Failed(error)));
                        continue;
                    }
                };
                let (count, reason) = commit(sequence, &tokens);
                let mut round = None;
                if turn.is_round {
                    // The anchor and the accepted tokens stay; the target's own token is the next anchor.
                    kept = 1 + accepted;
                    let length = self.cache.len(sequence.slot) - row_count + kept;
                    self.cache.truncate(sequence.slot, length);
                    if let Some(adaptive) = &mut self.adaptive {
                        let Draft { proposal, admitted, drafted, .. } = &turn.draft;
                        adaptive.observe(&mut sequence.estimates, proposal, [*admitted, accepted, *drafted], load);
                    }
                    let record = record(turn.draft, accepted, count, reason);
                    round = Some(record.clone());
                    sequence.rounds.push(record);
                }
                let tokens = sequence.tokens[sequence.tokens.len() - count..].to_vec();
                let logprobs = logprobs(sequence, &tokens, rows, vocab)?;
                let text = sequence.text.as_mut();
                let text = text.map(|text| if reason.is_some() { text.finish() } else { text.take() });
                let (id, Piece { text, reasoning }) = (sequence.request.id, text.unwrap_or_default());
                news.updates.push(Update { tokens, text, reasoning, logprobs, round, ..Update::of(id) });
                if let Some(reason) = reason {
                    news.ended.push((place, Ending::Finished(reason)));
                    continue;
                }
            }
            if let Some((features, row)) = features.filter(|_| kept > 0 && !sequence.is_drafter_dropped) {
                sequence.keep_features(&features.narrow(0, row, kept)?, window)?;
            }
        }
        Ok(())
    }

    /// Takes the sequences that have ended out of work; the updates of the step.
    fn retire(&mut self, news: News) -> Vec<Update> {
        let News { mut updates, ended } = news;
        for (place, ending) in ended.into_iter().rev() {
            let sequence = self.active.remove(place);
            self.release(sequence.slot);
            let id = sequence.request.id;
            match ending {
                Ending::Failed(error) => updates.push(Update { failed: Some(error), ..Update::of(id) }),
                Ending::Finished(reason) => {
                    let finished = sequence.finish(reason);
                    if let Some(update) = updates.iter_mut().find(|update| update.id == id) {
                        update.finished = Some(finished);
                    }
                }
            }
        }
        updates
    }
}

/// Number of accepted tokens, and the tokens to commit: the accepted ones and the target's own.
///
/// # Shapes
/// `rows`: one row of `vocab` logits for the anchor and for each verified token.
fn decide(sequence: &mut Sequence, draft: &Draft, rows: &[f32], vocab: usize) -> Result<(usize, Vec<u32>)> {
    let Sequence { request, tokens, min_margin, history, .. } = sequence;
    let sampling = &request.sampling;
    let proposed = &draft.proposal.tokens[..draft.admitted];
    // Row k is seen with the draft tokens before it, all of them accepted when it is asked for.
    let (mut seen, mut adjusted) = (history.clone(), Vec::new());
    let target = |k: usize| {
        let mut row = &rows[k * vocab..(k + 1) * vocab];
        if let Some(seen) = &mut seen {
            if k > 0 {
                seen.push(proposed[k - 1]);
            }
            adjusted.clear();
            adjusted.extend_from_slice(row);
            request.options.adjustments.apply(&mut adjusted, seen);
            row = &adjusted;
        }
        if sampling.is_greedy() {
            *min_margin = min_margin.min(top_gap(row));
        }
        Distribution::from_logits(row, sampling).map(Cow::Owned)
    };
    let distributions = &draft.proposal.distributions[..draft.admitted];
    let verdict = verify_lazily(target, distributions, proposed, request.seed, tokens.len() as u64)?;
    Ok((verdict.accepted, [&proposed[..verdict.accepted], &[verdict.next_token]].concat()))
}

/// Log probabilities of committed tokens, where the request wants them: row k is what the target said of token k.
fn logprobs(sequence: &Sequence, tokens: &[u32], rows: &[f32], vocab: usize) -> Result<Vec<TokenLogprobs>> {
    let Some(top) = sequence.request.options.logprobs else { return Ok(Vec::new()) };
    let of = |(&token, row)| Ok(TokenLogprobs::new(row, token, top)?);
    tokens.iter().zip(rows.chunks_exact(vocab)).map(of).collect()
}

fn record(draft: Draft, accepted: usize, committed: usize, reason: Option<FinishReason>) -> RoundRecord {
    let stopped_early = reason == Some(FinishReason::Stop) && committed <= accepted;
    RoundRecord {
        proposed: if stopped_early { committed } else { draft.admitted },
        accepted: accepted.min(committed),
        committed,
        confidence_logits: draft.proposal.confidence_logits,
        block: draft.proposal.tokens,
        drafted: draft.drafted,
        is_fallback: draft.is_fallback,
    }
}

#[cfg(test)]
mod tests {
    use deepspec_models::speculate::Proposal;

    use super::*;

    /// A block verified whole that holds the end at its third token counts three tokens, not six.
    #[test]
    fn what_comes_after_the_end_is_not_counted() {
        let draft = || Draft {
            proposal: Proposal { tokens: vec![10, 11, 99, 20, 21], ..Proposal::default() },
            admitted: 5,
            ..Draft::default()
        };
        let counts = |record: RoundRecord| (record.proposed, record.accepted, record.committed);
        assert_eq!(counts(record(draft(), 5, 3, Some(FinishReason::Stop))), (3, 3, 3));
        // The budget ends there instead: all five were tried.
        assert_eq!(counts(record(draft(), 5, 3, Some(FinishReason::Length))), (5, 3, 3));
        // The end is the target's own token after two accepted ones.
        assert_eq!(counts(record(draft(), 2, 3, Some(FinishReason::Stop))), (5, 2, 3));
        assert_eq!(counts(record(draft(), 5, 6, None)), (5, 5, 6));
    }
}
