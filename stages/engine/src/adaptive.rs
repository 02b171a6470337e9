//! Adaptive speculation: whether to draft, how much, and how much of it to verify, from running estimates and costs.
//!
//! Lossless whatever the costs and estimates are. Greedy decoding writes the same tokens whichever part of a proposal is
//! verified. When sampling, every decision about a token looks only at what was known before the token was drawn: costs and
//! outcomes of earlier rounds, committed text, confidences of the tokens up to and with it, which its own draw does not enter.
//! The clock may so change how a text is reached and, when sampling, which text of the target's distribution it is; never the
//! distribution.

use deepspec_models::speculate::Proposal;

use super::estimates::{Estimates, Outlook, Use};
use super::length::{best_length, worthwhile_prefix};
use super::share::Allocation;
use super::step_costs::StepCosts;

/// Cost of drafting in plain steps before any was timed: of a block, and of each of its tokens.
const FIRST_DRAFT: (f64, f64) = (0.15, 0.02);
/// Weight of a new timing.
const RATE: f64 = 0.1;
/// Slots drafted beyond the length that pays on average: confidences may ask for more.
const SPARE_SLOTS: usize = 1;
/// Tokens per plain step that a drafter has to promise: a little more than plain decoding, since an estimate that wavers
/// around 1 would be followed when it is too high.
const WORTHWHILE: f64 = 1.03;

/// A cost that is linear in a count.
#[derive(Debug, Clone, Copy, PartialEq)]
struct LinearCost {
    fixed: f64,
    slope: f64,
}

impl LinearCost {
    fn at(self, count: f64) -> f64 {
        self.fixed + self.slope * count
    }

    /// Moves towards a timing, that of an interrupted round no further than towards a slow one.
    fn observe(&mut self, count: f64, seconds: f64, slack: f64) {
        let error = seconds.min(4.0 * self.at(count) + slack) - self.at(count);
        let step = RATE * error / (1.0 + count * count);
        self.fixed = (self.fixed + step).max(0.0);
        self.slope = (self.slope + step * count).max(0.0);
    }
}

/// The time of one step, as far as it teaches what rounds cost: a step without prompts to read.
#[derive(Debug, Clone, Copy)]
pub(super) struct StepTimes {
    /// Sequences in the step.
    pub(super) load: usize,
    /// Rows of the target's pass.
    pub(super) rows: usize,
    /// Seconds of the pass.
    pub(super) target_s: f64,
    /// Seconds of accepting and committing, and of what the caller did between the steps, such as sending tokens to clients.
    pub(super) other_s: f64,
    /// Blocks drafted, their slots together, and the seconds that this took; `None` where it was not the usual work.
    pub(super) draft: Option<(usize, usize, f64)>,
}

/// What a request is to draft in a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct DraftPlan {
    /// Tokens; 0 for no draft.
    pub(super) slots: usize,
    /// Whether drafting does not pay and is only tried.
    pub(super) is_probe: bool,
    /// Whether nothing is drafted because it does not pay.
    pub(super) is_fallback: bool,
}

/// Decides on drafting and verification for an engine.
#[derive(Debug, Clone)]
pub struct Adaptive {
    steps: StepCosts,
    draft: LinearCost,
    other: LinearCost,
    learns: bool,
    estimates: Estimates,
    allocation: Allocation,
}

impl Adaptive {
    /// Starts from a table of step costs and follows the clock from there.
    pub fn new(steps: StepCosts) -> Self {
        let plain = steps.seconds(1);
        let draft = LinearCost { fixed: FIRST_DRAFT.0 * plain, slope: FIRST_DRAFT.1 * plain };
        let other = LinearCost { fixed: 0.0, slope: 0.0 };
        let (estimates, allocation) = (Estimates::of_engine(), Allocation::Alone);
        Self { steps, draft, other, learns: true, estimates, allocation }
    }

    /// Costs that stay as given whatever the clock says, so that a run can be repeated. Drafting costs `draft_s` seconds.
    pub fn fixed(steps: StepCosts, draft_s: f64) -> Self {
        let draft = LinearCost { fixed: draft_s, slope: 0.0 };
        Self { draft, learns: false, ..Self::new(steps) }
    }

    /// Decides over several sequences in another way than each for itself.
    #[must_use]
    pub fn allocate(self, allocation: Allocation) -> Self {
        Self { allocation, ..self }
    }

    /// How the verification of several sequences is decided.
    pub(super) fn allocation(&self) -> Allocation {
        self.allocation
    }

    /// Chance of each of `planned` tokens given those before it: its confidence where it was drawn, else what became of the like.
    pub(super) fn chances(&self, request: &Estimates, proposal: &Proposal, planned: usize) -> Vec<f64> {
        let outlook = Outlook { engine: &self.estimates, request };
        let mut chances = outlook.acceptance(proposal.matched, planned);
        for (k, (chance, &logit)) in chances.iter_mut().zip(&proposal.confidence_logits).enumerate() {
            *chance = outlook.corrected(k, confidence(logit));
        }
        chances
    }

    /// Chance of each token of proposals of a kind, whatever the tokens are.
    pub(super) fn expected(&self, request: &Estimates, matched: usize, length: usize) -> Vec<f64> {
        Outlook { engine: &self.estimates, request }.acceptance(matched, length)
    }

    /// Time of a whole round of `load` sequences with `rows` rows, after drafting so many blocks with so many slots together.
    pub(super) fn pass_seconds(&self, rows: usize, load: usize, (blocks, slots): (usize, usize)) -> f64 {
        let load = load.max(1) as f64;
        let drafting = if blocks == 0 { 0.0 } else { blocks as f64 * self.draft.at(slots as f64 / blocks as f64) };
        drafting + self.steps.seconds(rows) + load * self.other.at(rows as f64 / load)
    }

    /// The costs of the target's passes as they are known now.
    pub fn step_costs(&self) -> &StepCosts {
        &self.steps
    }

    /// Cost for one of `load` sequences, in plain steps, of a round in which each verifies `length` tokens, after `spent`
    /// seconds of drafting.
    fn round_cost(&self, load: usize, spent: f64, length: usize) -> f64 {
        let seconds = |rows: usize| self.steps.seconds(load * rows) / load as f64 + self.other.at(rows as f64);
        (spent + seconds(1 + length)) / seconds(1)
    }

    /// What to draft where up to `most` tokens are possible and a lookup promises `rival` tokens per plain step (1 without).
    pub(super) fn plan(&self, request: &mut Estimates, rival: f64, most: usize, load: usize) -> DraftPlan {
        let outlook = Outlook { engine: &self.estimates, request };
        let promise = outlook.drafter_yield();
        if rival > 1.0 && rival >= promise {
            return DraftPlan { slots: 0, is_probe: false, is_fallback: false };
        }
        let expected = outlook.acceptance(0, most);
        let cost = |length: usize| self.round_cost(load, self.draft.at(length as f64), length);
        let usual = best_length(&expected, cost).0 + SPARE_SLOTS;
        match request.decide(0, promise > WORTHWHILE) {
            Use::Take => DraftPlan { slots: usual.min(most), is_probe: false, is_fallback: false },
            Use::Probe => DraftPlan { slots: most, is_probe: true, is_fallback: false },
            Use::Leave => DraftPlan { slots: 0, is_probe: false, is_fallback: true },
        }
    }

    /// How many tokens of a lookup to verify, the tokens per plain step that this promises, and whether it does not pay and
    /// is only tried.
    pub(super) fn admit_lookup(&self, request: &mut Estimates, proposal: &Proposal, load: usize) -> (usize, f64, bool) {
        if proposal.tokens.is_empty() {
            return (0, 1.0, false);
        }
        let outlook = Outlook { engine: &self.estimates, request };
        let expected = outlook.acceptance(proposal.matched, proposal.tokens.len());
        let (length, promise) = best_length(&expected, |length| self.round_cost(load, 0.0, length));
        match request.decide(proposal.matched, promise > 1.0) {
            Use::Take => (length, promise, false),
            Use::Probe => (length, promise, true),
            Use::Leave => (0, 1.0, false),
        }
    }

    /// How many tokens of a drafted block to verify.
    ///
    /// A drafter may stop before the `planned` number of tokens, behind a stop token or a row of unusable numbers. Whether it did
    /// depends on what was drawn, so the choice is made as if it had not, and is cut to what there is.
    pub(super) fn admit_draft(
        &self,
        request: &Estimates,
        proposal: &Proposal,
        planned: usize,
        is_probe: bool,
        load: usize,
    ) -> usize {
        let expected = self.expected(request, 0, planned);
        let spent = self.draft.at(planned as f64);
        let cost = |length: usize| self.round_cost(load, spent, length);
        let length = if is_probe {
            best_length(&expected, cost).0
        } else {
            worthwhile_prefix(&self.chances(request, proposal, planned), &expected, cost)
        };
        length.min(proposal.tokens.len())
    }

    /// Learns from a verified proposal: `admitted` tokens of it were verified, `accepted` accepted; `drafted` slots had been
    /// drafted for the round.
    pub(super) fn observe(
        &mut self,
        request: &mut Estimates,
        proposal: &Proposal,
        [admitted, accepted, drafted]: [usize; 3],
        load: usize,
    ) {
        let confidences: Vec<f64> = proposal.confidence_logits.iter().map(|&logit| confidence(logit)).collect();
        let cost = self.round_cost(load, self.draft.at(drafted as f64), admitted);
        for estimates in [request, &mut self.estimates] {
            estimates.observe_acceptance(proposal.matched, &confidences, admitted, accepted);
            if drafted > 0 {
                estimates.observe_yield(1 + accepted, cost);
            }
        }
    }

    /// Learns what a step cost.
    pub(super) fn observe_times(&mut self, times: StepTimes) {
        if !self.learns {
            return;
        }
        let slack = 0.02 * self.steps.seconds(1);
        self.steps.observe(times.rows, times.target_s);
        let load = times.load as f64;
        self.other.observe(times.rows as f64 / load, times.other_s / load, slack);
        if let Some((blocks, slots, seconds)) = times.draft {
            let blocks = blocks as f64;
            self.draft.observe(slots as f64 / blocks, seconds / blocks, slack);
        }
    }
}

/// Probability that a confidence logit stands for; 0 for one that is not a number.
pub(super) fn confidence(logit: f32) -> f64 {
    if logit.is_nan() { 0.0 } else { 1.0 / (1.0 + f64::from(-logit).exp()) }
}

#[cfg(test)]
mod tests {
    use super::super::step_costs::StepCost;
    use super::*;

    /// One row costs 1, the second 0.2 more, each further one 0.05 more.
    fn adaptive(draft_s: f64) -> Adaptive {
        let entry = |rows, seconds| StepCost { rows, seconds };
        Adaptive::fixed(StepCosts::new(vec![entry(1, 1.0), entry(2, 1.2), entry(8, 1.5)]).unwrap(), draft_s)
    }

    fn proposal(tokens: usize, matched: usize) -> Proposal {
        Proposal { tokens: vec![0; tokens], matched, ..Proposal::default() }
    }

    #[test]
    fn a_drafter_that_does_not_pay_is_left_alone_and_tried_again() {
        let (mut adaptive, mut request) = (adaptive(0.3), Estimates::of_request());
        let (mut drafted, mut probes, mut fallbacks) = (0, 0, 0);
        for _ in 0..500 {
            let plan = adaptive.plan(&mut request, 1.0, 3, 1);
            fallbacks += usize::from(plan.is_fallback);
            probes += usize::from(plan.is_probe);
            if plan.slots > 0 {
                drafted += 1;
                let block = proposal(plan.slots, 0);
                let admitted = adaptive.admit_draft(&request, &block, plan.slots, plan.is_probe, 1);
                adaptive.observe(&mut request, &block, [admitted, 0, plan.slots], 1);
            }
        }
        assert_eq!(drafted + fallbacks, 500);
        assert!(drafted < 20 && (4..8).contains(&probes), "{drafted} {probes}");
        // The text changes: every token is accepted from here on.
        let mut last = 0;
        for round in 0..400 {
            let plan = adaptive.plan(&mut request, 1.0, 3, 1);
            if plan.slots > 0 {
                let block = proposal(plan.slots, 0);
                let admitted = adaptive.admit_draft(&request, &block, plan.slots, plan.is_probe, 1);
                adaptive.observe(&mut request, &block, [admitted, admitted, plan.slots], 1);
            } else {
                last = round;
            }
        }
        assert!(last <= 256, "still left alone in round {last}");
    }

    #[test]
    fn a_promising_lookup_spares_the_draft() {
        let (mut adaptive, mut request) = (adaptive(0.2), Estimates::of_request());
        for _ in 0..200 {
            adaptive.observe(&mut request, &proposal(4, 4), [4, 4, 0], 1);
            adaptive.observe(&mut request, &proposal(4, 1), [4, 0, 0], 1);
            adaptive.observe(&mut request, &proposal(3, 0), [3, 1, 3], 1);
        }
        let (length, promise, _) = adaptive.admit_lookup(&mut request, &proposal(4, 4), 1);
        assert!(length == 4 && promise > 3.5, "{length} {promise}");
        assert_eq!(adaptive.plan(&mut request, promise, 3, 1).slots, 0);
        // A match of one token that never pays is not verified, and the drafter is asked.
        let (length, rival, _) = adaptive.admit_lookup(&mut request, &proposal(4, 1), 1);
        assert_eq!((length, rival), (0, 1.0));
        let plan = adaptive.plan(&mut request, rival, 3, 1);
        assert!(!plan.is_fallback && plan.slots == 2, "one token pays, one slot is spare: {plan:?}");
    }

    #[test]
    fn confidences_choose_the_length() {
        let (adaptive, request) = (adaptive(0.1), Estimates::of_request());
        let mut block = proposal(3, 0);
        let logit = |p: f32| (p / (1.0 - p)).ln();
        block.confidence_logits = [0.9, 0.05, 0.9].map(logit).to_vec();
        assert_eq!(adaptive.admit_draft(&request, &block, 3, false, 1), 1);
        block.confidence_logits = [0.9, 0.7, 0.9].map(logit).to_vec();
        assert_eq!(adaptive.admit_draft(&request, &block, 3, false, 1), 3);
        block.confidence_logits = [0.05, 0.05, 0.9].map(logit).to_vec();
        assert_eq!(adaptive.admit_draft(&request, &block, 3, false, 1), 0);
    }

    #[test]
    fn a_shared_pass_costs_each_sequence_its_part() {
        let entry = |rows, seconds| StepCost { rows, seconds };
        let steps = StepCosts::new(vec![entry(1, 1.0), entry(4, 1.3), entry(16, 4.0)]).unwrap();
        let adaptive = Adaptive::fixed(steps, 0.0);
        assert!((adaptive.round_cost(1, 0.0, 3) - 1.3).abs() < 1e-12);
        assert!((adaptive.round_cost(4, 0.0, 3) - 4.0 / 1.3).abs() < 1e-12);
    }

    #[test]
    fn costs_follow_the_clock_unless_they_are_fixed() {
        let times = StepTimes { load: 1, rows: 4, target_s: 1.2, other_s: 0.05, draft: Some((1, 3, 0.6)) };
        let mut fixed = adaptive(0.2);
        let mut learning = Adaptive { learns: true, ..fixed.clone() };
        for _ in 0..200 {
            fixed.observe_times(times);
            learning.observe_times(times);
        }
        assert_eq!((fixed.draft.at(3.0), fixed.other.at(4.0)), (0.2, 0.0));
        assert!((learning.draft.at(3.0) - 0.6).abs() < 1e-3 && (learning.other.at(4.0) - 0.05).abs() < 1e-3);
        assert!((learning.steps.seconds(4) - 1.2).abs() < 1e-9);
    }
}
