//! What a measured speedup allows to say, and whether the answers behind it show that the output is that of plain decoding.
//!
//! A ratio of times is no finding by itself. Too few prompts, a machine that changed its speed during the run, and a speedup that
//! the accepted tokens cannot explain give no verdict, however narrow the interval.

use serde::{Deserialize, Serialize};

use super::report::digits;
use super::speed::Speedup;

/// Prompts below which nothing is said about speed.
pub const LEAST_PROMPTS: usize = 8;
/// Drift of plain passes within the run above which nothing is said about speed.
pub const MOST_DRIFT: f64 = 0.15;

/// What is said about the speed of a proposer.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// The interval lies above 1.
    Faster,
    /// The interval lies below 1.
    Slower,
    /// The interval holds 1.
    NoDifference,
    /// Nothing: too few prompts.
    FewPrompts {
        /// How many there were.
        prompts: usize,
    },
    /// Nothing: plain passes were faster at one time of the run than at another.
    Drift {
        /// By how much, as a share.
        drift: f64,
    },
    /// Nothing: a round commits `tau` tokens and costs a plain step at the least, so a speedup above that is noise of the clock.
    AboveTau {
        /// Tokens committed per round.
        tau: f64,
    },
}

impl Verdict {
    /// What `speedup` allows to say, with the tokens committed per round and the drift of plain passes, where they are known.
    pub fn of(speedup: &Speedup, tau: Option<f64>, drift: Option<f64>) -> Self {
        // Without a round no draft was accepted.
        let (interval, tau) = (speedup.totals, tau.unwrap_or(1.0));
        match (drift, interval.low, interval.high) {
            _ if speedup.prompts < LEAST_PROMPTS => Self::FewPrompts { prompts: speedup.prompts },
            (Some(drift), ..) if drift > MOST_DRIFT => Self::Drift { drift },
            _ if interval.value > tau => Self::AboveTau { tau },
            (_, Some(low), _) if low > 1.0 => Self::Faster,
            (_, _, Some(high)) if high < 1.0 => Self::Slower,
            _ => Self::NoDifference,
        }
    }

    /// Whether anything is said.
    pub fn is_given(self) -> bool {
        matches!(self, Self::Faster | Self::Slower | Self::NoDifference)
    }

    /// The verdict in a word or two, for tables.
    pub fn short(self) -> String {
        match self {
            Self::Faster => "faster".into(),
            Self::Slower => "slower".into(),
            Self::NoDifference => "no clear difference".into(),
            Self::FewPrompts { prompts } => format!("none: {} {}", prompts, plural(prompts, "prompt")),
            Self::Drift { drift } => format!("none: drift of {} %", digits(100.0 * drift)),
            Self::AboveTau { .. } => "none: above tau".into(),
        }
    }

    /// Why nothing is said; `None` where something is.
    pub fn reason(self) -> Option<String> {
        match self {
            Self::Faster | Self::Slower | Self::NoDifference => None,
            Self::FewPrompts { prompts } => {
                let are = if prompts == 1 { "is" } else { "are" };
                Some(format!("at least {LEAST_PROMPTS} prompts are needed, there {are} {prompts}"))
            }
            Self::Drift { drift } => Some(format!(
                "plain passes drifted by {} % within the run, above {:.0} %",
                digits(100.0 * drift),
                100.0 * MOST_DRIFT
            )),
            Self::AboveTau { tau } => Some(format!(
                "a speedup above tau ({} tokens a round) is noise of the clock, since a round costs a plain step at the least",
                digits(tau)
            )),
        }
    }
}

/// Answers of a proposer beside those of plain decoding at temperature 0.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Comparison {
    /// Answers compared.
    pub answers: usize,
    /// Those that differ.
    pub different: usize,
    /// Tokens in them.
    pub tokens: u64,
    /// Of these, drafted ones that were accepted; the others the target wrote as it does in plain decoding.
    pub accepted: u64,
}

impl Comparison {
    /// Both together.
    pub fn and(self, other: Self) -> Self {
        Self {
            answers: self.answers + other.answers,
            different: self.different + other.different,
            tokens: self.tokens + other.tokens,
            accepted: self.accepted + other.accepted,
        }
    }

    /// Whether the output is that of plain decoding; `None` where no draft was accepted, which shows nothing.
    pub fn is_identical(&self) -> Option<bool> {
        if self.different > 0 { Some(false) } else { (self.accepted > 0).then_some(true) }
    }

    /// [`Self::is_identical`] in a word.
    pub fn short(&self) -> &'static str {
        match self.is_identical() {
            Some(true) => "yes",
            Some(false) => "NO",
            None => "not shown",
        }
    }

    /// What it rests on.
    pub fn basis(&self) -> String {
        format!(
            "{} tokens, of which {} accepted {}",
            self.tokens,
            self.accepted,
            plural(self.accepted as usize, "draft")
        )
    }
}

fn plural(count: usize, word: &str) -> String {
    if count == 1 { word.to_owned() } else { format!("{word}s") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::eval::speed::Interval;

    fn speedup(value: f64, low: f64, high: f64, prompts: usize) -> Speedup {
        let totals = Interval { value, low: Some(low), high: Some(high) };
        Speedup { totals, medians: totals, prompts }
    }

    #[test]
    fn lucky_timings_of_a_drafter_that_accepts_nothing_are_no_speedup() {
        let found = Verdict::of(&speedup(1.02, 1.01, 1.03, 24), Some(1.0), Some(0.01));
        assert_eq!(found, Verdict::AboveTau { tau: 1.0 });
        assert!(!found.is_given() && found.reason().unwrap().contains("noise"));
        assert_eq!(Verdict::of(&speedup(1.02, 1.01, 1.03, 24), None, None), Verdict::AboveTau { tau: 1.0 });
        assert_eq!(
            Verdict::of(&speedup(1.23, 1.15, 1.31, 24), Some(1.07), Some(0.01)),
            Verdict::AboveTau { tau: 1.07 }
        );
    }

    #[test]
    fn seven_prompts_give_no_verdict_and_eight_do() {
        let at = |prompts| Verdict::of(&speedup(1.3, 1.2, 1.4, prompts), Some(1.5), None);
        assert_eq!((at(7), at(8)), (Verdict::FewPrompts { prompts: 7 }, Verdict::Faster));
        assert_eq!(at(1).reason().unwrap(), "at least 8 prompts are needed, there is 1");
        let one = Speedup { totals: Interval { value: 0.99, low: None, high: None }, ..speedup(0.99, 0.0, 0.0, 1) };
        assert_eq!(Verdict::of(&one, Some(1.2), None), Verdict::FewPrompts { prompts: 1 });
    }

    #[test]
    fn a_machine_that_changes_its_speed_gives_no_verdict() {
        let at = |drift| Verdict::of(&speedup(1.3, 1.2, 1.4, 24), Some(1.5), Some(drift));
        assert_eq!((at(0.15), at(0.16)), (Verdict::Faster, Verdict::Drift { drift: 0.16 }));
        assert_eq!(at(0.225).short(), "none: drift of 22.5 %");
    }

    #[test]
    fn an_interval_that_holds_one_shows_no_difference() {
        let at = |value, low, high| Verdict::of(&speedup(value, low, high, 24), Some(2.0), Some(0.05));
        assert_eq!(at(1.1, 0.99, 1.2), Verdict::NoDifference);
        assert_eq!(at(1.1, 1.0, 1.2), Verdict::NoDifference);
        assert_eq!(at(0.9, 0.8, 1.0), Verdict::NoDifference);
        assert_eq!((at(1.1, 1.01, 1.2), at(0.9, 0.8, 0.99)), (Verdict::Faster, Verdict::Slower));
    }

    #[test]
    fn answers_without_an_accepted_draft_show_nothing() {
        let some = Comparison { answers: 24, different: 0, tokens: 2304, accepted: 80 };
        let none = Comparison { accepted: 0, ..some };
        assert_eq!((some.is_identical(), some.short()), (Some(true), "yes"));
        assert_eq!((none.is_identical(), none.short()), (None, "not shown"));
        assert_eq!(none.basis(), "2304 tokens, of which 0 accepted drafts");
        assert_eq!(Comparison { different: 1, ..none }.is_identical(), Some(false));
        assert_eq!(some.and(none), Comparison { answers: 48, different: 0, tokens: 4608, accepted: 80 });
    }
}
