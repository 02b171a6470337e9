//! Running estimates of what proposals are worth: acceptance per position, confidences against outcomes, tokens per time.
//!
//! There is one set for the engine and one for each request. The engine's tells what to expect of a request that has hardly
//! begun; its own outcomes soon weigh more.

/// Matches of a lookup that are told apart; longer ones count as this long.
const LONGEST_MATCH: usize = 8;
/// Outcomes after which an old one has lost most of its weight: in the engine's set, in a request's.
const WINDOWS: (f64, f64) = (256.0, 48.0);
/// Acceptance before anything has been seen, high so that everything is tried, and the outcomes that it counts for.
const PRIOR: (f64, f64) = (0.7, 3.0);
/// Tokens per plain step of a source that has not been tried, and the plain steps that this counts for.
const PRIOR_YIELD: (f64, f64) = (1.3, 4.0);
/// Outcomes that the engine's set counts for in a request.
const ENGINE_WEIGHT: f64 = 8.0;
/// Rounds that a source rests after its first failure, and at most.
const RESTS: (u32, u32) = (16, 256);

/// A quotient of two exponentially weighted sums.
#[derive(Debug, Clone, Copy, Default)]
struct Tally {
    part: f64,
    whole: f64,
}

impl Tally {
    fn add(&mut self, part: f64, whole: f64, window: f64) {
        let keep = 1.0 - 1.0 / window;
        *self = Self { part: keep * self.part + part, whole: keep * self.whole + whole };
    }

    fn quotient(self, prior: f64, weight: f64) -> f64 {
        (self.part + weight * prior) / (self.whole + weight)
    }
}

/// What is known of one kind of proposal.
#[derive(Debug, Clone, Default)]
struct Kind {
    /// Accepted / reached, per position.
    acceptance: Vec<Tally>,
    /// Accepted / confidence, per position.
    confidence: Vec<Tally>,
    /// Tokens / cost in plain steps.
    tokens: Tally,
    rest: Rest,
}

/// When a source that does not pay is tried again.
#[derive(Debug, Clone, Copy)]
struct Rest {
    length: u32,
    left: u32,
}

impl Default for Rest {
    fn default() -> Self {
        Self { length: RESTS.0, left: RESTS.0 }
    }
}

/// What to do with a source in a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Use {
    /// It pays.
    Take,
    /// It does not, but is tried to see whether that has changed.
    Probe,
    /// It does not.
    Leave,
}

/// Estimates of all kinds of proposals; kind 0 is the drafter's, kind n a lookup's with a match of n tokens.
#[derive(Debug, Clone)]
pub(super) struct Estimates {
    kinds: Vec<Kind>,
    window: f64,
}

impl Estimates {
    fn with_window(window: f64) -> Self {
        Self { kinds: vec![Kind::default(); LONGEST_MATCH + 1], window }
    }

    /// An engine's set.
    pub(super) fn of_engine() -> Self {
        Self::with_window(WINDOWS.0)
    }

    /// A request's set.
    pub(super) fn of_request() -> Self {
        Self::with_window(WINDOWS.1)
    }

    fn kind(&self, matched: usize) -> &Kind {
        &self.kinds[matched.min(LONGEST_MATCH)]
    }

    /// Whether to use a kind of proposal, of which the other estimates say whether it pays. What does not pay rests, twice
    /// as long after every trial that brought nothing.
    pub(super) fn decide(&mut self, matched: usize, pays: bool) -> Use {
        let rest = &mut self.kinds[matched.min(LONGEST_MATCH)].rest;
        if pays {
            *rest = Rest::default();
            return Use::Take;
        }
        if rest.left > 0 {
            rest.left -= 1;
            return Use::Leave;
        }
        rest.length = (2 * rest.length).min(RESTS.1);
        rest.left = rest.length;
        Use::Probe
    }

    /// Learns from a verification: acceptance of the positions that it reached, and their confidences (0 to 1, or none).
    pub(super) fn observe_acceptance(&mut self, matched: usize, confidences: &[f64], proposed: usize, accepted: usize) {
        let window = self.window;
        let kind = &mut self.kinds[matched.min(LONGEST_MATCH)];
        let reached = proposed.min(accepted + 1);
        for tallies in [&mut kind.acceptance, &mut kind.confidence] {
            tallies.resize(tallies.len().max(reached), Tally::default());
        }
        for k in 0..reached {
            let hit = f64::from(u8::from(k < accepted));
            kind.acceptance[k].add(hit, 1.0, window);
            if let Some(&confidence) = confidences.get(k) {
                kind.confidence[k].add(hit, confidence, window);
            }
        }
    }

    /// Learns what a round with the drafter gave, at a cost in plain steps. A trial that paid ends the rest.
    pub(super) fn observe_yield(&mut self, tokens: usize, cost: f64) {
        let window = self.window;
        let kind = &mut self.kinds[0];
        kind.tokens.add(tokens as f64, cost, window);
        if tokens as f64 > cost {
            kind.rest = Rest { left: 0, ..Rest::default() };
        }
    }
}

/// What a request's own outcomes and those of the whole engine say together.
#[derive(Debug, Clone, Copy)]
pub(super) struct Outlook<'a> {
    pub(super) engine: &'a Estimates,
    pub(super) request: &'a Estimates,
}

impl Outlook<'_> {
    fn blend(self, matched: usize, (prior, weight): (f64, f64), tally: impl Fn(&Kind) -> Tally) -> f64 {
        let engine = tally(self.engine.kind(matched)).quotient(prior, weight);
        tally(self.request.kind(matched)).quotient(engine, ENGINE_WEIGHT)
    }

    /// Expected acceptance of each of the first `length` positions, given those before it.
    pub(super) fn acceptance(self, matched: usize, length: usize) -> Vec<f64> {
        let at = |k: usize| self.blend(matched, PRIOR, |kind| kind.acceptance.get(k).copied().unwrap_or_default());
        (0..length).map(at).collect()
    }

    /// A confidence at a position, corrected by what came of such confidences.
    pub(super) fn corrected(self, k: usize, confidence: f64) -> f64 {
        let tally = |kind: &Kind| kind.confidence.get(k).copied().unwrap_or_default();
        (confidence * self.blend(0, (1.0, PRIOR.1), tally)).min(1.0)
    }

    /// Tokens per plain step of rounds with the drafter.
    pub(super) fn drafter_yield(self) -> f64 {
        self.blend(0, PRIOR_YIELD, |kind| kind.tokens)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn estimates_start_high_and_follow_outcomes() {
        let (mut engine, mut request) = (Estimates::of_engine(), Estimates::of_request());
        let acceptance = |engine: &Estimates, request: &Estimates| Outlook { engine, request }.acceptance(2, 3);
        assert!(acceptance(&engine, &request).iter().all(|rate| (rate - 0.7).abs() < 1e-9));
        for round in 0..400 {
            // The first token is accepted every other time, the second then always, the third never.
            engine.observe_acceptance(2, &[], 3, if round % 2 == 0 { 2 } else { 0 });
        }
        let found = acceptance(&engine, &request);
        assert!((found[0] - 0.5).abs() < 0.02 && found[1] > 0.97 && found[2] < 0.03, "{found:?}");
        // Another text of another request.
        for _ in 0..60 {
            request.observe_acceptance(2, &[], 3, 3);
        }
        let found = acceptance(&engine, &request);
        assert!(found[0] > 0.85 && found[2] > 0.75, "{found:?}");
        let other = Outlook { engine: &engine, request: &request }.acceptance(1, 1);
        assert!((other[0] - 0.7).abs() < 1e-9, "other matches: {other:?}");
        request.observe_acceptance(40, &[], 1, 0);
        let longest = Outlook { engine: &engine, request: &request };
        assert!(longest.acceptance(LONGEST_MATCH, 1)[0] < 0.7);
    }

    #[test]
    fn confidences_are_corrected_by_what_came_of_them() {
        let (mut engine, request) = (Estimates::of_engine(), Estimates::of_request());
        for round in 0..400 {
            // Says .8, is right half the time.
            engine.observe_acceptance(0, &[0.8], 1, usize::from(round % 2 == 0));
        }
        let outlook = Outlook { engine: &engine, request: &request };
        assert!((outlook.corrected(0, 0.8) - 0.5).abs() < 0.02);
        assert!((outlook.corrected(0, 0.4) - 0.25).abs() < 0.02);
        assert_eq!(outlook.corrected(1, 0.9), 0.9);
    }

    #[test]
    fn what_does_not_pay_rests_ever_longer_and_returns_on_success() {
        let mut request = Estimates::of_request();
        let mut rests = Vec::new();
        for _ in 0..6 {
            let mut rest = 0;
            while request.decide(0, false) == Use::Leave {
                rest += 1;
            }
            rests.push(rest);
            request.observe_yield(1, 1.4);
        }
        assert_eq!(rests, [16, 32, 64, 128, 256, 256]);
        // A trial that pays is followed by another at once.
        request.observe_yield(3, 1.4);
        assert_eq!(request.decide(0, false), Use::Probe);
        assert_eq!(request.decide(0, false), Use::Leave);
        assert_eq!(request.decide(0, true), Use::Take);
        assert_eq!((0..20).find(|_| request.decide(0, false) == Use::Probe), Some(16));
        assert_eq!(request.decide(3, true), Use::Take, "kinds rest on their own");
    }

    #[test]
    fn the_yield_of_the_drafter_is_tokens_per_plain_step() {
        let (mut engine, request) = (Estimates::of_engine(), Estimates::of_request());
        assert!((Outlook { engine: &engine, request: &request }.drafter_yield() - 1.3).abs() < 1e-12);
        for round in 0..600 {
            engine.observe_yield(1 + round % 2, 1.4);
        }
        let found = Outlook { engine: &engine, request: &request }.drafter_yield();
        assert!((found - 1.5 / 1.4).abs() < 0.02, "{found}");
    }
}
