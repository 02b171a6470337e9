//! What a drafter's rounds amount to: acceptance length and rates, and how much the answers repeat themselves.
//!
//! Several numbers in use share the name "acceptance length"; [`DEFINITIONS`] states each one as it is computed here,
//! and every report prints it.

use std::collections::HashSet;

use serde::{Deserialize, Serialize};

use super::confidence::{Calibration, CalibrationReport, ConfidenceError, survival};
use crate::recipe::Proposer;
use deepspec_engine::{IDLE_TAU, RoundRecord};

/// Tokens of the n-grams whose repetition is counted.
pub const REPETITION_ORDER: usize = 4;
/// Rounds after which a low acceptance length is called a failure and not bad luck.
pub const IDLE_ROUNDS: u64 = 200;
/// Rounds among them that have to have drafted, where an adaptive engine has left the drafter out of the others.
const IDLE_DRAFTS: u64 = 32;

/// Name and meaning of every number in a report.
pub const DEFINITIONS: &[(&str, &str)] = &[
    (
        "round",
        "one draft, one target forward over the anchor and the proposed tokens, one acceptance; the forward over the \
         prompt, which gives the first token, is none",
    ),
    (
        "tau",
        "tokens committed in rounds / rounds, pooled over all rounds: accepted tokens and the target's own token; a \
         round that ends on an accepted stop token counts its accepted tokens only; plain decoding has 1",
    ),
    (
        "tau (vLLM)",
        "1 + accepted / rounds, the definition of vLLM and llama.cpp: it counts the target's own token even where \
         the round ended before it",
    ),
    (
        "verify rate",
        "tokens committed in rounds / (tokens proposed for verification + rounds): share of the target's rows that \
         became output",
    ),
    (
        "accept@k",
        "rounds whose first k proposed tokens were all accepted / rounds in which anything was proposed; it cannot rise with k",
    ),
    (
        "accept_rate@k",
        "the same / the rounds that proposed a k-th token: where lengths are chosen, those are the rounds that promised much, so \
         it may rise with k",
    ),
    (
        "conditional accept@k",
        "the same / the rounds that proposed a k-th token and whose first k − 1 were all accepted",
    ),
    (
        "draft length, verify length",
        "drafted tokens / rounds before the confidence threshold and the choice of length, and proposed tokens / rounds \
         after them, cut after an accepted stop token",
    ),
    (
        "fallback",
        "share of the rounds in which a drafter was left out because its running estimate of tokens per unit of time was \
         below that of plain decoding",
    ),
    ("rollbacks", "rounds in which at least one verified token was rejected"),
    (
        "repetition",
        "share of the 4-grams of an answer that occurred earlier in it; a looping answer is easy to draft and its \
         speed means little",
    ),
    (
        "tokens/s, ms/token",
        "output tokens against wall-clock time from the submission of a prompt to its last token, reading the prompt \
         included; mean, median, p99 and standard deviation of ms/token are over prompts",
    ),
    (
        "speedup",
        "tokens/s over all prompts / the same of plain decoding in the same run; on each prompt the proposers take turns, a few \
         tokens at a time and in rotating order; the interval is a 95 % bootstrap over prompts and, within each, over those \
         pieces; the ratio of medians compares the median ms/token",
    ),
    (
        "verdict",
        "faster or slower where the interval of the speedup excludes 1; none with fewer than 8 prompts, where plain passes over a \
         context of fixed length, timed before every prompt, drifted by more than 15 % between quarters of the run, or for a \
         speedup above tau, which accepted tokens cannot explain",
    ),
    (
        "break-even tau",
        "mean time of a round (draft, target pass, the rest) / mean time of a plain step, over all steps in which no \
         prompt was read: the tau above which a proposer pays; tau / break-even tau is its speedup without the prompts",
    ),
    (
        "cost of a target pass",
        "median time of one pass with the logits of all its rows, timed before the first answer over a context of 128 tokens",
    ),
    (
        "identical",
        "at temperature 0, whether every answer equals that of plain decoding token for token; not shown where no draft was \
         accepted, since all tokens are then written as in plain decoding",
    ),
    (
        "ECE, AUROC, Brier",
        "of the running product of confidences up to k as a prediction that the prefix up to k is accepted: \
         calibration error in 20 bins, area under the ROC curve in 1000 bins, mean squared error",
    ),
];

/// What the metrics need of a round.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Round {
    /// Tokens drafted, before the confidence threshold.
    pub drafted: usize,
    /// Tokens verified; cut after a stop token that was accepted.
    pub proposed: usize,
    /// Proposed tokens that were accepted and committed.
    pub accepted: usize,
    /// Tokens committed, the target's own included where there was room for it.
    pub committed: usize,
    /// Whether a drafter was left out because it did not pay.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_fallback: bool,
    /// Confidence logits of the verified tokens; empty without a confidence head.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub confidence_logits: Vec<f32>,
}

impl From<&RoundRecord> for Round {
    fn from(record: &RoundRecord) -> Self {
        // A logit beyond the finite range means the same confidence as the largest finite one, which JSON can hold.
        let logits = record.confidence_logits.iter().take(record.proposed).map(|logit| logit.clamp(f32::MIN, f32::MAX));
        Self {
            drafted: record.block.len(),
            proposed: record.proposed,
            accepted: record.accepted,
            committed: record.committed,
            is_fallback: record.is_fallback,
            confidence_logits: logits.collect(),
        }
    }
}

/// Acceptance over a number of rounds; rates are `None` where nothing was counted.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Acceptance {
    /// Rounds.
    pub rounds: u64,
    /// Tokens drafted before the confidence threshold.
    pub drafted: u64,
    /// Tokens proposed for verification.
    pub proposed: u64,
    /// Proposed tokens accepted.
    pub accepted: u64,
    /// Tokens committed in rounds.
    pub committed: u64,
    /// Rounds in which a verified token was rejected.
    pub rollback_count: u64,
    /// Rounds without a draft because the drafter did not pay.
    #[serde(default)]
    pub fallback_rounds: u64,
    /// Committed / rounds.
    pub tau: Option<f64>,
    /// 1 + accepted / rounds.
    pub tau_vllm: Option<f64>,
    /// Committed / (proposed + rounds).
    pub verify_rate: Option<f64>,
    /// Drafted / rounds.
    pub avg_draft_len: Option<f64>,
    /// Proposed / rounds.
    pub avg_verify_len: Option<f64>,
    /// Rounds in which at least one token was proposed.
    #[serde(default)]
    pub proposing_rounds: u64,
    /// Rates of each block position that was ever proposed, the first first.
    pub positions: Vec<PositionAcceptance>,
}

/// Acceptance at one block position.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct PositionAcceptance {
    /// Position in the block, from 1.
    pub k: usize,
    /// Rounds that proposed a k-th token.
    pub proposed: u64,
    /// Of these, rounds whose first k − 1 tokens were accepted.
    pub reached: u64,
    /// Of these, rounds whose k-th token was accepted too.
    pub accepted: u64,
    /// accept@k: accepted / rounds in which anything was proposed. It never rises with k.
    /// Results of earlier versions lack it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accept_at_k: Option<f64>,
    /// `accept_rate@k`: accepted / proposed, conditional on a k-th token having been proposed.
    pub accept_rate: Option<f64>,
    /// Accepted / reached.
    pub conditional_rate: Option<f64>,
}

impl Acceptance {
    /// Counts rounds.
    pub fn of<'a>(rounds: impl IntoIterator<Item = &'a Round>) -> Self {
        let mut sum = Self::default();
        for round in rounds {
            sum.rounds += 1;
            sum.drafted += round.drafted as u64;
            sum.proposed += round.proposed as u64;
            sum.accepted += round.accepted as u64;
            sum.committed += round.committed as u64;
            sum.rollback_count += u64::from(round.accepted < round.proposed);
            sum.fallback_rounds += u64::from(round.is_fallback);
            sum.proposing_rounds += u64::from(round.proposed > 0);
            for k in sum.positions.len()..round.proposed {
                sum.positions.push(PositionAcceptance { k: k + 1, ..PositionAcceptance::default() });
            }
            for (k, position) in sum.positions[..round.proposed].iter_mut().enumerate() {
                position.proposed += 1;
                position.reached += u64::from(round.accepted >= k);
                position.accepted += u64::from(round.accepted > k);
            }
        }
        for position in &mut sum.positions {
            position.accept_at_k = ratio(position.accepted, sum.proposing_rounds);
            position.accept_rate = ratio(position.accepted, position.proposed);
            position.conditional_rate = ratio(position.accepted, position.reached);
        }
        sum.tau = ratio(sum.committed, sum.rounds);
        sum.tau_vllm = ratio(sum.accepted, sum.rounds).map(|accepted| 1.0 + accepted);
        sum.verify_rate = ratio(sum.committed, sum.proposed + sum.rounds);
        sum.avg_draft_len = ratio(sum.drafted, sum.rounds);
        sum.avg_verify_len = ratio(sum.proposed, sum.rounds);
        sum
    }

    /// Says that a proposer does as good as nothing, which its output alone would never show, and where to look.
    pub fn idle_warning(&self, name: &str, proposer: Proposer) -> Option<String> {
        if proposer == Proposer::Plain {
            return None;
        }
        let rounds = self.rounds - self.fallback_rounds;
        if rounds > 0 && self.drafted == 0 {
            return Some(format!("`{name}` proposed no token in {rounds} rounds"));
        }
        if rounds > 0 && self.proposed == 0 {
            return Some(format!(
                "none of the {} tokens drafted by `{name}` was verified: all stayed below the confidence threshold, or \
                 did not promise to pay",
                self.drafted
            ));
        }
        // Without the rounds that were left to plain decoding on purpose.
        let tau = ratio(self.committed.saturating_sub(self.fallback_rounds), rounds);
        let is_enough = self.rounds >= IDLE_ROUNDS && rounds >= IDLE_DRAFTS;
        let tau = tau.filter(|&tau| is_enough && tau < IDLE_TAU)?;
        let cause = match proposer {
            Proposer::Draft => {
                "it does not fit this target, or its config.json is wrong about the block layout (`sample_from_anchor`), the \
                 target layers or the mask token"
            }
            Proposer::Ngram => "these answers repeat next to nothing of their prompts or of themselves",
            Proposer::Hybrid => "neither the lookup nor the drafter finds what the target writes",
            Proposer::Plain => "",
        };
        Some(format!("`{name}` has a tau of {tau:.3} over {rounds} rounds, below {IDLE_TAU}: {cause}"))
    }
}

/// Calibration of the confidences; `None` where no round has any.
///
/// # Errors
/// A confidence is no number.
pub fn calibration<'a>(
    rounds: impl IntoIterator<Item = &'a Round>,
) -> Result<Option<CalibrationReport>, ConfidenceError> {
    let rounds: Vec<&Round> = rounds.into_iter().filter(|round| !round.confidence_logits.is_empty()).collect();
    let Some(longest) = rounds.iter().map(|round| round.confidence_logits.len()).max() else { return Ok(None) };
    let mut calibration = Calibration::new(longest);
    for round in rounds {
        calibration.observe(&survival(&round.confidence_logits), round.accepted)?;
    }
    Ok(Some(calibration.report()))
}

/// Share of the 4-grams that occurred earlier in the same answer, pooled over answers; `None` if all are shorter.
pub fn repetition<'a>(outputs: impl IntoIterator<Item = &'a [u32]>) -> Option<f64> {
    let (mut repeated, mut total) = (0, 0);
    for output in outputs {
        let mut seen = HashSet::new();
        for gram in output.windows(REPETITION_ORDER) {
            total += 1;
            repeated += u64::from(!seen.insert(gram));
        }
    }
    ratio(repeated, total)
}

/// A quotient, where there is one.
pub(super) fn ratio(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round(drafted: usize, proposed: usize, accepted: usize, committed: usize) -> Round {
        Round { drafted, proposed, accepted, committed, is_fallback: false, confidence_logits: Vec::new() }
    }

    #[test]
    fn known_rates_by_hand() {
        // All three accepted and the bonus; one of three; none of two after a gate; nothing proposed.
        let rounds = [round(3, 3, 3, 4), round(3, 3, 1, 2), round(3, 2, 0, 1), round(0, 0, 0, 1)];
        let found = Acceptance::of(&rounds);
        assert_eq!((found.rounds, found.drafted, found.proposed, found.accepted, found.committed), (4, 9, 8, 4, 8));
        assert_eq!(found.rollback_count, 2);
        assert_eq!(found.tau, Some(2.0));
        assert_eq!(found.tau_vllm, Some(2.0));
        assert_eq!(found.verify_rate, Some(8.0 / 12.0));
        assert_eq!(found.avg_draft_len, Some(9.0 / 4.0));
        assert_eq!(found.avg_verify_len, Some(2.0));
        let at = |k: usize| &found.positions[k - 1];
        assert_eq!((at(1).k, at(1).proposed, at(1).reached, at(1).accepted), (1, 3, 3, 2));
        assert_eq!((at(1).accept_at_k, at(1).accept_rate), (Some(2.0 / 3.0), Some(2.0 / 3.0)));
        assert_eq!(found.proposing_rounds, 3);
        assert_eq!((at(2).proposed, at(2).reached, at(2).accepted), (3, 2, 1));
        assert_eq!((at(2).accept_rate, at(2).conditional_rate), (Some(1.0 / 3.0), Some(0.5)));
        assert_eq!((at(3).accept_rate, at(3).conditional_rate), (Some(0.5), Some(1.0)));
        assert_eq!((at(2).accept_at_k, at(3).accept_at_k), (Some(1.0 / 3.0), Some(1.0 / 3.0)));
        assert_eq!(found.positions.len(), 3);
    }

    /// Long proposals are made where they promise to pay: of those, more are accepted whole than of the short ones.
    #[test]
    fn accept_at_k_never_rises_where_lengths_are_chosen() {
        let short = vec![round(1, 1, 0, 1); 60];
        let long = vec![round(5, 5, 5, 6); 30];
        let gated = vec![round(5, 0, 0, 1); 50];
        let found = Acceptance::of(&[short, long, vec![round(5, 5, 2, 3); 10], gated].concat());
        let rates: Vec<f64> = found.positions.iter().map(|at| at.accept_at_k.unwrap()).collect();
        assert_eq!(rates, [0.4, 0.4, 0.3, 0.3, 0.3]);
        assert!(rates.is_sorted_by(|before, after| before >= after));
        let proposed: Vec<f64> = found.positions.iter().map(|at| at.accept_rate.unwrap()).collect();
        assert_eq!(proposed, [0.4, 1.0, 0.75, 0.75, 0.75]);
    }

    /// Verified [d1, d2, stop, d4, d5, bonus]: three tokens are committed; vLLM's definition adds a fourth.
    #[test]
    fn a_round_that_ends_on_a_stop_token_counts_its_accepted_tokens() {
        let found = Acceptance::of(&[round(5, 3, 3, 3)]);
        assert_eq!((found.tau, found.tau_vllm, found.verify_rate), (Some(3.0), Some(4.0), Some(0.75)));
        assert_eq!(found.rollback_count, 0);
    }

    #[test]
    fn nothing_counted_gives_no_rate() {
        let found = Acceptance::of(&[]);
        assert_eq!((found.tau, found.tau_vllm, found.verify_rate, found.positions.len()), (None, None, None, 0));
        assert_eq!(found.idle_warning("x", Proposer::Draft), None);
    }

    #[test]
    fn a_proposer_that_does_nothing_is_called_out() {
        let idle = |rounds: Vec<Round>| Acceptance::of(&rounds).idle_warning("dspark", Proposer::Draft);
        assert!(idle(vec![round(0, 0, 0, 1); 3]).unwrap().contains("proposed no token in 3 rounds"));
        assert!(idle(vec![round(5, 0, 0, 1); 3]).unwrap().contains("none of the 15 tokens"));
        assert_eq!(idle(vec![round(5, 5, 0, 1); 199]), None);
        assert!(idle(vec![round(5, 5, 0, 1); 200]).unwrap().contains("tau of 1.000 over 200 rounds"));
        assert_eq!(idle(vec![round(5, 5, 1, 2); 200]), None);
        let fallback = Round { is_fallback: true, ..round(0, 0, 0, 1) };
        let mostly_plain = |drafted: Round| [vec![fallback.clone(); 4000], vec![drafted; 200]].concat();
        assert_eq!(idle(mostly_plain(round(5, 5, 1, 2))), None, "left out on purpose");
        assert!(idle(mostly_plain(round(5, 5, 0, 1))).unwrap().contains("over 200 rounds"));
        let tried = |times: usize| [vec![fallback.clone(); 400], vec![round(5, 5, 0, 1); times]].concat();
        assert_eq!(idle(tried(31)), None, "hardly tried");
        assert!(idle(tried(32)).unwrap().contains("over 32 rounds"));
    }

    #[test]
    fn a_warning_names_only_what_the_proposer_has() {
        let found = Acceptance::of(&vec![round(5, 5, 0, 1); 300]);
        let said = |proposer| found.idle_warning("x", proposer).unwrap();
        assert!(said(Proposer::Draft).contains("config.json") && said(Proposer::Draft).contains("mask token"));
        for proposer in [Proposer::Ngram, Proposer::Hybrid] {
            let text = said(proposer);
            assert!(
                !text.contains("config.json") && !text.contains("layout") && text.contains("tau of 1.000"),
                "{text}"
            );
        }
        assert_eq!(found.idle_warning("plain", Proposer::Plain), None);
    }

    #[test]
    fn repetition_of_a_loop() {
        assert_eq!(repetition([&[1, 2, 3, 4, 5, 6][..]]), Some(0.0));
        // 1111 three times, of which two are repeats; the other answer is too short to count.
        assert_eq!(repetition([&[1; 6][..], &[7, 7, 7][..]]), Some(2.0 / 3.0));
        assert_eq!(repetition([&[1, 2, 3][..]]), None);
    }

    #[test]
    fn calibration_takes_the_verified_tokens() {
        let record = RoundRecord {
            proposed: 2,
            accepted: 1,
            committed: 2,
            confidence_logits: vec![f32::INFINITY, 0.0, -1.0],
            block: vec![7, 8, 9],
            drafted: 3,
            is_fallback: false,
        };
        let round = Round::from(&record);
        assert_eq!((round.drafted, round.proposed, round.confidence_logits.len()), (3, 2, 2));
        let report = calibration([&round]).unwrap().unwrap();
        assert_eq!(report.positions.len(), 2);
        assert_eq!((report.positions[0].observed_mean, report.positions[1].observed_mean), (Some(1.0), Some(0.0)));
        assert!((report.positions[1].predicted_mean.unwrap() - 0.5).abs() < 1e-9);
        assert_eq!(calibration([&Round { confidence_logits: Vec::new(), ..round }]).unwrap(), None);
        let broken = Round { confidence_logits: vec![f32::NAN], ..self::round(1, 1, 0, 1) };
        assert!(calibration([&broken]).is_err());
    }
}
