//! The first half of a round: who proposes for each sequence, how many tokens, and how many of them are verified.

use std::fmt::Display;

use candle_core::Tensor;
use deepspec_models::speculate::{DraftRequest, Proposal};

use super::adaptive::confidence;
use super::drafter_faults::DrafterFaults;
use super::sequence::Sequence;
use super::{Engine, MOST_UNSEEN};
use crate::error::{Error, Result};

/// What was drafted for one sequence.
#[derive(Debug, Default)]
pub(super) struct Draft {
    pub(super) proposal: Proposal,
    /// Tokens that it was to have: decisions look at this number, never at how many were drawn.
    pub(super) planned: usize,
    /// Tokens of it that are verified.
    pub(super) admitted: usize,
    /// Slots that a drafter filled for it, whatever became of them.
    pub(super) drafted: usize,
    /// Whether a drafter was left out because it does not pay.
    pub(super) is_fallback: bool,
    /// Whether it is verified as a trial, though it does not promise to pay.
    pub(super) is_probe: bool,
}

/// The drafts of a step, one per sequence.
#[derive(Debug, Default)]
pub(super) struct Drafts {
    pub(super) all: Vec<Draft>,
    /// Whether a drafter first had to read more than the tokens of a usual round.
    pub(super) has_backlog: bool,
}

impl Engine<'_> {
    /// Drafts for all sequences; nothing for those that are still reading their prompt.
    pub(super) fn draft(&mut self) -> Drafts {
        let mut drafts = Drafts { all: Vec::new(), has_backlog: false };
        drafts.all.resize_with(self.active.len(), Draft::default);
        let load = self.active.iter().filter(|sequence| !sequence.is_prefilling()).count();
        // Tokens per plain step that a lookup promises.
        let mut rivals = vec![1.0; self.active.len()];
        for index in 0..self.sources.len() {
            let is_lookup = self.sources[index].is_lookup();
            if !is_lookup && self.is_drafter_dropped() {
                continue;
            }
            drafts.has_backlog |= self.catch_up(index);
            let mut asked = Vec::new();
            let mut probes = Vec::new();
            let source = &self.sources[index];
            let decoding = self.active.iter_mut().enumerate().filter(|(_, sequence)| !sequence.is_prefilling());
            for (place, sequence) in decoding.filter(|(_, sequence)| is_lookup || !sequence.is_drafter_dropped) {
                // The target adds one token of its own to whatever is accepted.
                let most = source.block_size().min(self.longest_draft).min(sequence.remaining() - 1);
                let draft = &mut drafts.all[place];
                let adaptive = self.adaptive.as_ref().filter(|_| !sequence.request.options.is_reproducible);
                let (slots, is_probe) = match adaptive {
                    Some(adaptive) if !is_lookup && most > 0 => {
                        let plan = adaptive.plan(&mut sequence.estimates, rivals[place], most, load);
                        draft.is_fallback = plan.is_fallback;
                        (plan.slots, plan.is_probe)
                    }
                    None if !draft.proposal.tokens.is_empty() => (0, false),
                    _ => (most, false),
                };
                if slots > 0 {
                    asked.push((place, slots));
                    probes.push(is_probe);
                }
            }
            let proposals = self.ask(index, &asked, &mut drafts);
            for (((place, slots), is_probe), proposal) in asked.into_iter().zip(probes).zip(proposals) {
                let sequence = &mut self.active[place];
                let draft = &mut drafts.all[place];
                let planned = if is_lookup { proposal.tokens.len() } else { slots };
                if !is_lookup {
                    draft.drafted = slots;
                }
                let gated = gate(&proposal, sequence.request.confidence_threshold);
                let adaptive = self.adaptive.as_ref().filter(|_| !sequence.request.options.is_reproducible);
                let (admitted, is_probe) = match adaptive {
                    None => (gated, false),
                    Some(adaptive) if is_lookup => {
                        let (length, promise, is_probe) =
                            adaptive.admit_lookup(&mut sequence.estimates, &proposal, load);
                        rivals[place] = promise;
                        (length, is_probe)
                    }
                    Some(adaptive) => {
                        let length = adaptive.admit_draft(&sequence.estimates, &proposal, planned, is_probe, load);
                        (length.min(gated), is_probe)
                    }
                };
                // Whether a block is verified at all was known before its first token was drawn, and a lookup draws none.
                if admitted > 0 || draft.admitted == 0 {
                    (draft.proposal, draft.planned) = (proposal, planned);
                    (draft.admitted, draft.is_probe) = (admitted, is_probe);
                }
            }
        }
        self.share_pass(&mut drafts.all);
        drafts
    }

    /// Asks a source for tokens of some sequences, after telling it what it has not seen of them. Where it fails, they get
    /// none and go on without it.
    fn ask(&mut self, index: usize, asked: &[(usize, usize)], drafts: &mut Drafts) -> Vec<Proposal> {
        if asked.is_empty() {
            return Vec::new();
        }
        let places: Vec<usize> = asked.iter().map(|&(place, _)| place).collect();
        let usual = self.sources[index].block_size() + 1;
        let told = self.tell(index, &places);
        drafts.has_backlog |= told.as_ref().is_ok_and(|&most| most > usual);
        let proposals = match told.and_then(|_| self.propose(index, asked)) {
            Ok(proposals) => proposals,
            Err(error) => {
                self.drop_drafter(index, &places, &error);
                return vec![Proposal::default(); asked.len()];
            }
        };
        for (&place, proposal) in places.iter().zip(&proposals) {
            if let Some(fault) = &proposal.fault {
                self.drop_drafter(index, &[place], fault);
            }
        }
        proposals
    }

    fn propose(&mut self, index: usize, asked: &[(usize, usize)]) -> Result<Vec<Proposal>> {
        let request = |&(place, most): &(usize, usize)| {
            let Sequence { slot, tokens, request, rounds, history, .. } = &self.active[place];
            DraftRequest {
                slot: *slot,
                tokens,
                most,
                stop_ids: &request.stop_ids,
                sampling: &request.sampling,
                adjustments: history.as_ref().map(|history| (&request.options.adjustments, history)),
                seed: request.seed,
                round: rounds.len() as u64,
            }
        };
        let requests: Vec<DraftRequest<'_>> = asked.iter().map(request).collect();
        let proposals = self.sources[index].propose(&requests)?;
        if proposals.len() != requests.len() {
            return Err(Error::Invariant(format!("{} proposals for {} requests", proposals.len(), requests.len())));
        }
        Ok(proposals)
    }

    /// Gives a source the features of the positions of some sequences that it has not seen; most rows of one of them.
    fn tell(&mut self, index: usize, places: &[usize]) -> Result<usize> {
        let proposer = &mut self.sources[index];
        if proposer.feature_layers().is_empty() {
            return Ok(0);
        }
        let (mut features, mut commits): (Vec<Tensor>, Vec<(usize, usize)>) = (Vec::new(), Vec::new());
        for &place in places {
            let sequence = &mut self.active[place];
            let rows = sequence.unseen_rows();
            let passed = std::mem::take(&mut sequence.passed);
            if passed > 0 {
                proposer.skip(sequence.slot, passed)?;
            }
            if rows > 0 {
                commits.push((sequence.slot, rows));
                features.append(&mut sequence.unseen);
            }
        }
        match &features[..] {
            [] => {}
            [only] => proposer.observe(only, &commits)?,
            several => proposer.observe(&Tensor::cat(several, 0)?, &commits)?,
        }
        Ok(commits.into_iter().map(|(_, rows)| rows).max().unwrap_or(0))
    }

    /// Gives a source the features of sequences that it has not been asked about for long, so that what is kept of them stays
    /// bounded; whether there were any. A source with a window needs no such help: older features are let go.
    fn catch_up(&mut self, index: usize) -> bool {
        if self.sources[index].feature_layers().is_empty() || self.sources[index].window().is_some() {
            return false;
        }
        let behind = |sequence: &Sequence| !sequence.is_drafter_dropped && sequence.unseen_rows() >= MOST_UNSEEN;
        let places: Vec<usize> =
            self.active.iter().enumerate().filter(|(_, sequence)| behind(sequence)).map(|(place, _)| place).collect();
        if let Err(error) = self.tell(index, &places) {
            self.drop_drafter(index, &places, &error);
        }
        !places.is_empty()
    }

    /// Decodes some sequences without the drafter from here on.
    fn drop_drafter(&mut self, index: usize, places: &[usize], error: &impl Display) {
        for &place in places {
            let sequence = &mut self.active[place];
            sequence.is_drafter_dropped = true;
            sequence.unseen = Vec::new();
            DrafterFaults::count(&mut self.drafter_faults, self.sources[index].name(), error);
        }
    }

    /// Whether no request asks the drafter any more.
    pub(super) fn is_drafter_dropped(&self) -> bool {
        self.drafter_faults.as_ref().is_some_and(|faults| faults.is_dropped)
    }
}

/// Length of the longest prefix whose confidences all reach the threshold. It looks at each token's own confidence, which
/// depends only on what precedes that token, so the choice does not bias the output.
fn gate(proposal: &Proposal, threshold: f32) -> usize {
    if threshold <= 0.0 || proposal.confidence_logits.is_empty() {
        return proposal.tokens.len();
    }
    let low = |logit: &f32| confidence(*logit) < f64::from(threshold);
    proposal.confidence_logits.iter().position(low).unwrap_or(proposal.tokens.len())
}
