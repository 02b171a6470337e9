//! The first half of a round: who proposes for each sequence, how many tokens, and how many of them are verified.

use candle_core::Tensor;
use deepspec_models::speculate::{DraftRequest, Proposal};

use super::Engine;
use super::adaptive::confidence;
use super::sequence::Sequence;
use crate::error::{Error, Result};

/// What was drafted for one sequence.
#[derive(Debug, Default)]
pub(super) struct Draft {
    pub(super) proposal: Proposal,
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
    pub(super) fn draft(&mut self) -> Result<Drafts> {
        let mut drafts = Drafts { all: Vec::new(), has_backlog: false };
        drafts.all.resize_with(self.active.len(), Draft::default);
        let load = self.active.iter().filter(|sequence| !sequence.is_prefilling()).count();
        // Tokens per plain step that a lookup promises.
        let mut rivals = vec![1.0; self.active.len()];
        for index in 0..self.sources.len() {
            let mut asked = Vec::new();
            let mut probes = Vec::new();
            let source = &self.sources[index];
            for (place, sequence) in self.active.iter_mut().enumerate().filter(|(_, s)| !s.is_prefilling()) {
                // The target adds one token of its own to whatever is accepted.
                let most = source.block_size().min(self.longest_draft).min(sequence.remaining() - 1);
                let draft = &mut drafts.all[place];
                let adaptive = self.adaptive.as_ref().filter(|_| !sequence.request.options.is_reproducible);
                let (slots, is_probe) = match adaptive {
                    Some(adaptive) if !source.is_lookup() && most > 0 => {
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
            let proposals = self.ask(index, &asked, &mut drafts)?;
            let is_lookup = self.sources[index].is_lookup();
            for (((place, slots), is_probe), proposal) in asked.into_iter().zip(probes).zip(proposals) {
                let sequence = &mut self.active[place];
                let draft = &mut drafts.all[place];
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
                        let length = adaptive.admit_draft(&sequence.estimates, &proposal, is_probe, load);
                        (length.min(gated), is_probe)
                    }
                };
                // Whether a block is verified at all was known before its first token was drawn, and a lookup draws none.
                if admitted > 0 || draft.admitted == 0 {
                    (draft.proposal, draft.admitted, draft.is_probe) = (proposal, admitted, is_probe);
                }
            }
        }
        self.share_pass(&mut drafts.all);
        Ok(drafts)
    }

    /// Asks a source for tokens of some sequences, after telling it what it has not seen of them.
    fn ask(&mut self, index: usize, asked: &[(usize, usize)], drafts: &mut Drafts) -> Result<Vec<Proposal>> {
        if asked.is_empty() {
            return Ok(Vec::new());
        }
        let proposer = &mut self.sources[index];
        if !proposer.feature_layers().is_empty() {
            let usual = proposer.block_size() + 1;
            let (mut features, mut commits): (Vec<Tensor>, Vec<(usize, usize)>) = (Vec::new(), Vec::new());
            for &(place, _) in asked {
                let sequence = &mut self.active[place];
                let rows = sequence.unseen.iter().map(|rows| rows.dims()[0]).sum();
                let passed = std::mem::take(&mut sequence.passed);
                if passed > 0 {
                    proposer.skip(sequence.slot, passed)?;
                }
                if rows > 0 {
                    drafts.has_backlog |= rows > usual;
                    commits.push((sequence.slot, rows));
                    features.append(&mut sequence.unseen);
                }
            }
            match &features[..] {
                [] => {}
                [only] => proposer.observe(only, &commits)?,
                several => proposer.observe(&Tensor::cat(several, 0)?, &commits)?,
            }
        }
        let request = |&(place, most): &(usize, usize)| {
            let Sequence { slot, tokens, request, rounds, .. } = &self.active[place];
            DraftRequest {
                slot: *slot,
                tokens,
                most,
                stop_ids: &request.stop_ids,
                sampling: &request.sampling,
                seed: request.seed,
                round: rounds.len() as u64,
            }
        };
        let requests: Vec<DraftRequest<'_>> = asked.iter().map(request).collect();
        let proposals = proposer.propose(&requests)?;
        if proposals.len() != requests.len() {
            return Err(Error::Engine(format!("{} proposals for {} requests", proposals.len(), requests.len())));
        }
        Ok(proposals)
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
