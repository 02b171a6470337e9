//! Who proposes and how much of it is verified, as a user says it in a word: the way to an engine.

use std::fmt;
use std::str::FromStr;

use deepspec_models::speculate::{NgramProposer, NoProposer, Proposer};
use deepspec_models::target::Target;

use super::{Adaptive, Allocation, Engine, StepCosts};
use crate::error::{Error, Result};

/// Longest suffix that the n-gram lookup searches for, and tokens that it proposes.
const NGRAM: (usize, usize) = (4, 5);

/// How many proposed tokens are verified.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum Schedule {
    /// Running estimates and the measured cost of rows decide, over all sequences of a step together: a budget from what
    /// was promised two rounds ago, spent where survival is likeliest now.
    #[default]
    Scheduled,
    /// The same by Algorithm 1 of the paper: one token after the other, until one does not raise the throughput.
    EarlyStop,
    /// The longest prefix of each proposal whose confidences all reach this.
    Threshold(f32),
    /// So many tokens of each proposal.
    Fixed(usize),
    /// None: plain decoding.
    Plain,
}

impl Schedule {
    /// Confidence that a token needs to be verified; 0 for no such rule.
    pub fn threshold(self) -> f32 {
        if let Self::Threshold(threshold) = self { threshold } else { 0.0 }
    }

    /// Whether it looks at what passes of the target cost.
    pub fn needs_costs(self) -> bool {
        matches!(self, Self::Scheduled | Self::EarlyStop)
    }
}

impl FromStr for Schedule {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected = || format!("`{text}` is none of scheduled, early-stop, threshold=0.5, fixed=4, plain");
        match text.split_once('=') {
            None => match text {
                "scheduled" => Ok(Self::Scheduled),
                "early-stop" => Ok(Self::EarlyStop),
                "plain" => Ok(Self::Plain),
                _ => Err(expected()),
            },
            Some(("threshold", value)) => match value.parse() {
                Ok(threshold) if (0.0..=1.0).contains(&threshold) => Ok(Self::Threshold(threshold)),
                _ => Err(format!("threshold `{value}` is not a number from 0 to 1")),
            },
            Some(("fixed", value)) => match value.parse() {
                Ok(tokens) if tokens > 0 => Ok(Self::Fixed(tokens)),
                _ => Err(format!("fixed length `{value}` is not a whole number above 0")),
            },
            Some(_) => Err(expected()),
        }
    }
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Scheduled => f.write_str("scheduled"),
            Self::EarlyStop => f.write_str("early-stop"),
            Self::Threshold(threshold) => write!(f, "threshold={threshold}"),
            Self::Fixed(tokens) => write!(f, "fixed={tokens}"),
            Self::Plain => f.write_str("plain"),
        }
    }
}

/// Where proposed tokens come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sources {
    /// What followed the last tokens earlier in the text.
    Ngram,
    /// The trained drafter.
    Draft,
    /// The lookup, or the drafter where that promises more.
    Hybrid,
}

impl Sources {
    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ngram => "ngram",
            Self::Draft => "draft",
            Self::Hybrid => "hybrid",
        }
    }

    /// Whether the trained drafter is among them.
    pub fn needs_drafter(self) -> bool {
        self != Self::Ngram
    }

    /// Most tokens of a proposal.
    pub fn block_size(self, drafter: Option<usize>) -> usize {
        match self {
            Self::Ngram => NGRAM.1,
            Self::Draft => drafter.unwrap_or(0),
            Self::Hybrid => NGRAM.1.max(drafter.unwrap_or(0)),
        }
    }
}

impl<'a> Engine<'a> {
    /// The engine of a schedule. `drafter` is asked for where `sources` has one, `costs` where the schedule needs them.
    ///
    /// # Errors
    /// When the drafter or the costs are missing, or the memory cannot be had.
    pub fn scheduled(
        target: &'a Target,
        schedule: Schedule,
        sources: Sources,
        drafter: Option<Box<dyn Proposer + 'a>>,
        costs: Option<StepCosts>,
        (slots, capacity): (usize, usize),
    ) -> Result<Self> {
        if schedule == Schedule::Plain {
            return Self::new(target, Box::new(NoProposer), slots, capacity);
        }
        let lookup = || Box::new(NgramProposer::new(NGRAM.0, NGRAM.1));
        let drafter = drafter.ok_or_else(|| Error::Input(format!("`{}` needs a drafter", sources.name())));
        let engine = match sources {
            Sources::Ngram => Self::new(target, lookup(), slots, capacity)?,
            Sources::Draft => Self::new(target, drafter?, slots, capacity)?,
            Sources::Hybrid => Self::hybrid(target, lookup(), drafter?, slots, capacity)?,
        };
        if let Schedule::Fixed(tokens) = schedule {
            return Ok(engine.limit_drafts(tokens));
        }
        if !schedule.needs_costs() {
            return Ok(engine);
        }
        let costs = costs.ok_or_else(|| Error::Input(format!("schedule `{schedule}` needs the costs of passes")))?;
        let allocation = if schedule == Schedule::EarlyStop { Allocation::EarlyStop } else { Allocation::Budget };
        Ok(engine.adapt(Adaptive::new(costs).allocate(allocation)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schedules_are_read_as_they_are_written() {
        for schedule in
            [Schedule::Scheduled, Schedule::EarlyStop, Schedule::Threshold(0.5), Schedule::Fixed(4), Schedule::Plain]
        {
            assert_eq!(schedule.to_string().parse(), Ok(schedule));
        }
        for wrong in ["", "fast", "fixed", "fixed=0", "fixed=x", "threshold=1.5", "threshold=nan", "plain=1"] {
            assert!(wrong.parse::<Schedule>().is_err(), "{wrong}");
        }
    }
}
