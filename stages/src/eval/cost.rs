//! What a round costs in relation to a plain step, and the target's passes by their number of rows.

use std::path::Path;

use deepspec_models::target::Target;
use serde::{Deserialize, Serialize};

use super::speed::Timing;
use crate::error::Result;
use crate::run_dir::write_atomic;
use deepspec_engine::{PhaseTimes, StepCost, StepCosts};

/// Time of an answer's rounds, the reading of the prompt left out. With several sequences at once, its share of the common
/// steps.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct RoundTime {
    /// Steps.
    pub steps: f64,
    /// Drafting, in seconds.
    pub draft_s: f64,
    /// The target's passes, in seconds.
    pub verify_s: f64,
    /// Accepting, committing, bookkeeping, in seconds.
    pub other_s: f64,
}

impl RoundTime {
    /// A share of what passed between two readings of an engine.
    pub(super) fn between(before: PhaseTimes, after: PhaseTimes, share: f64) -> Self {
        Self {
            steps: share * (after.steps - before.steps) as f64,
            draft_s: share * (after.draft_s - before.draft_s),
            verify_s: share * (after.target_s - before.target_s),
            other_s: share * (after.other_s - before.other_s),
        }
    }
}

/// Cost of a round, on average over all rounds, those without a draft included.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct RoundCost {
    /// Drafting, in milliseconds.
    pub draft_ms: f64,
    /// The target's pass, in milliseconds.
    pub verify_ms: f64,
    /// Accepting, committing, bookkeeping, in milliseconds.
    pub other_ms: f64,
    /// All three.
    pub round_ms: f64,
    /// Round / step of plain decoding: the tau above which the proposer pays; `None` without plain decoding beside it.
    pub break_even_tau: Option<f64>,
}

impl RoundCost {
    /// Mean cost of the rounds of some answers; `None` without rounds.
    pub fn of(timings: &[&Timing], plain: Option<&[&Timing]>) -> Option<Self> {
        let steps: f64 = timings.iter().map(|timing| timing.rounds.steps).sum();
        if steps <= 0.0 {
            return None;
        }
        let mean =
            |part: fn(&RoundTime) -> f64| 1e3 * timings.iter().map(|timing| part(&timing.rounds)).sum::<f64>() / steps;
        let (draft_ms, verify_ms, other_ms) = (mean(|t| t.draft_s), mean(|t| t.verify_s), mean(|t| t.other_s));
        let round_ms = draft_ms + verify_ms + other_ms;
        let plain_ms = plain.and_then(|plain| Self::of(plain, None)).map(|cost| cost.round_ms);
        let break_even_tau = plain_ms.filter(|&plain| plain > 0.0).map(|plain| round_ms / plain);
        Some(Self { draft_ms, verify_ms, other_ms, round_ms, break_even_tau })
    }
}

/// The table as an evaluation has measured it.
#[derive(Serialize, Deserialize)]
struct Measured {
    run: String,
    step_costs: Vec<StepCost>,
}

/// The target's step costs: those that this evaluation has measured before, or measured now and kept in `path`.
///
/// # Errors
/// When the target fails, or the file cannot be read or written.
pub(super) fn step_costs(
    path: &Path,
    identity: &str,
    target: &Target,
    block: usize,
    sequences: usize,
) -> Result<StepCosts> {
    if path.exists() {
        let text = fs_err::read(path)?;
        // A file of another evaluation, or a broken one, is replaced.
        if let Ok(Measured { run, step_costs }) = serde_json::from_slice(&text)
            && run == identity
        {
            return Ok(StepCosts::new(step_costs)?);
        }
    }
    let costs = StepCosts::measure(target, block, sequences)?;
    let measured = Measured { run: identity.to_owned(), step_costs: costs.entries().to_vec() };
    let json = serde_json::to_string_pretty(&measured).map_err(std::io::Error::from)?;
    write_atomic(path, json.as_bytes())?;
    Ok(costs)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timing(steps: f64, draft_s: f64, verify_s: f64) -> Timing {
        Timing { rounds: RoundTime { steps, draft_s, verify_s, other_s: 0.1 }, ..Timing::default() }
    }

    #[test]
    fn known_cost_by_hand() {
        let plain = [timing(10.0, 0.0, 1.9), timing(30.0, 0.0, 5.9)];
        let plain = [&plain[0], &plain[1]];
        let cost = RoundCost::of(&[&timing(10.0, 0.4, 2.5)], Some(&plain)).unwrap();
        assert!((cost.draft_ms - 40.0).abs() < 1e-9 && (cost.round_ms - 300.0).abs() < 1e-9);
        assert!((cost.break_even_tau.unwrap() - 1.5).abs() < 1e-9);
        assert_eq!(RoundCost::of(&plain, None).unwrap().break_even_tau, None);
        assert_eq!(RoundCost::of(&[&timing(0.0, 0.0, 0.0)], None), None);
    }
}
