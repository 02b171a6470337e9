//! One pass for all sequences: the second half of drafting, where the scheduler decides over all proposals together.

use super::adaptive::Adaptive;
use super::draft::Draft;
use super::prefix_scheduler::{allocate, best_budget, early_stop, survivals};
use super::sequence::Sequence;
use super::{Engine, PREFILL_CHUNK, PREFILL_STEP};

/// How the verification of several sequences is decided.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Allocation {
    /// Each sequence decides for itself, as if the others did the same.
    #[default]
    Alone,
    /// A budget found by a search over what was promised two rounds ago, spent where survival is highest now.
    Budget,
    /// Algorithm 1 of the paper: one token after the other, until one does not raise the throughput.
    EarlyStop,
}

/// A proposal that takes part.
struct Candidate {
    place: usize,
    now: Vec<f64>,
    /// What could be known before any of its tokens was drawn, for all that were planned.
    before: Vec<f64>,
    /// Of all that were planned, for later rounds.
    promise: Vec<f64>,
}

impl Engine<'_> {
    /// Decides anew how much of each proposal is verified. Trials, requests with a rule of their own, and lookups that were
    /// left out keep what they have.
    pub(super) fn share_pass(&mut self, drafts: &mut [Draft]) {
        let Some(adaptive) = &self.adaptive else { return };
        let allocation = adaptive.allocation();
        let decoding = self.active.iter().filter(|sequence| !sequence.is_prefilling()).count();
        if allocation == Allocation::Alone || decoding == 0 || (allocation == Allocation::Budget && decoding == 1) {
            return;
        }
        let candidates: Vec<Candidate> = (self.active.iter().zip(drafts.iter()).enumerate())
            .filter(|(_, (sequence, draft))| takes_part(sequence, draft))
            .map(|(place, (sequence, draft))| candidate(adaptive, place, sequence, draft))
            .collect();
        let fixed: usize = drafts.iter().map(|draft| draft.admitted).sum();
        let given_back: usize = candidates.iter().map(|candidate| drafts[candidate.place].admitted).sum();
        let rows = self.prompt_rows() + decoding + fixed - given_back;
        let (slots, blocks) = drafts
            .iter()
            .fold((0, 0), |(slots, blocks), draft| (slots + draft.drafted, blocks + usize::from(draft.drafted > 0)));
        let seconds = |rows: usize| adaptive.pass_seconds(rows, decoding, (blocks, slots));
        let now: Vec<Vec<f64>> = candidates.iter().map(|candidate| candidate.now.clone()).collect();
        let lengths = if allocation == Allocation::EarlyStop {
            early_stop(&now, decoding, rows, seconds)
        } else {
            let before: Vec<Vec<f64>> = candidates.iter().map(|candidate| candidate.before.clone()).collect();
            allocate(&now, best_budget(&before, decoding, rows, seconds))
        };
        for (candidate, length) in candidates.into_iter().zip(lengths) {
            drafts[candidate.place].admitted = length;
            if drafts[candidate.place].drafted > 0 && drafts[candidate.place].proposal.matched == 0 {
                let promises = &mut self.active[candidate.place].promises;
                promises.swap(0, 1);
                promises[0] = candidate.promise;
            }
        }
    }

    /// Rows of prompts in the next pass.
    fn prompt_rows(&self) -> usize {
        let reading = self.active.iter().filter(|sequence| sequence.is_prefilling());
        let left = reading.map(|s| (s.tokens.len() - self.cache.len(s.slot)).min(PREFILL_CHUNK));
        left.sum::<usize>().min(PREFILL_STEP)
    }
}

fn takes_part(sequence: &Sequence, draft: &Draft) -> bool {
    let is_left_out = draft.proposal.matched > 0 && draft.admitted == 0;
    !draft.proposal.tokens.is_empty() && !draft.is_probe && !is_left_out && !sequence.request.options.is_reproducible
}

fn candidate(adaptive: &Adaptive, place: usize, sequence: &Sequence, draft: &Draft) -> Candidate {
    let Draft { proposal, planned, .. } = draft;
    let (estimates, planned) = (&sequence.estimates, *planned);
    let chances = adaptive.chances(estimates, proposal, planned);
    // A row that is not there costs nothing; that it is not there may have been drawn, so it counts beforehand.
    let now = survivals(chances[..proposal.tokens.len()].iter().copied());
    let before = match &sequence.promises[1][..] {
        // A lookup is a function of the committed text: nothing was drawn for it.
        _ if proposal.matched > 0 => now.clone(),
        promised if promised.len() >= planned => promised[..planned].to_vec(),
        _ => survivals(adaptive.expected(estimates, proposal.matched, planned)),
    };
    Candidate { place, now, before, promise: survivals(chances) }
}
