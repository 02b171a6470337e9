//! What a forward pass of the target costs, by its number of rows: measured once, then kept up to date by the rounds.

use std::time::{Duration, Instant};

use deepspec_models::target::{NewTokens, Target};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// Tokens in the cache while the table is measured.
const CONTEXT: usize = 128;
/// Least and most timings of a row count; between the two, time decides.
const TIMINGS: (usize, usize) = (3, 31);
/// Time after which no further round of timings begins.
const BUDGET: Duration = Duration::from_millis(300);
/// How fast the whole table follows the machine.
const DRIFT_RATE: f64 = 0.1;
/// Timings that the first value of an entry counts for, and those that it counts for at most once others have come.
const WEIGHTS: (f64, f64) = (8.0, 50.0);

/// Cost of one forward pass.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct StepCost {
    /// Rows, the logits of all of them included.
    pub rows: usize,
    /// Seconds.
    pub seconds: f64,
}

/// Cost of a forward pass for any number of rows: linear between entries, never falling.
#[derive(Debug, Clone, PartialEq)]
pub struct StepCosts {
    entries: Vec<StepCost>,
    /// Timings that each entry rests on.
    weights: Vec<f64>,
    /// What the machine now takes in relation to the entries.
    drift: f64,
}

impl StepCosts {
    /// A table from known costs.
    ///
    /// # Errors
    /// [`Error::Input`] without entries, with rows that do not rise from at least 1, or a cost that is no number above 0.
    pub fn new(entries: Vec<StepCost>) -> Result<Self> {
        let rises = entries.is_sorted_by(|a, b| a.rows < b.rows) && entries.first().is_some_and(|first| first.rows > 0);
        if !rises || entries.iter().any(|entry| !entry.seconds.is_finite() || entry.seconds <= 0.0) {
            let count = entries.len();
            let problem =
                format!("no table of step costs: {count} entries whose rows do not rise from 1, or without a time");
            return Err(Error::Input(problem));
        }
        Ok(Self { weights: vec![WEIGHTS.0; entries.len()], entries, drift: 1.0 })
    }

    /// Times passes of 1 to `block` + 1 rows, and of doublings of that up to `sequences` times as many. The row counts take
    /// turns, so that a machine that slows down slows all of them; each entry is a median.
    ///
    /// # Errors
    /// When the target fails, or its context is too short for the rows.
    pub fn measure(target: &Target, block: usize, sequences: usize) -> Result<Self> {
        let most = (block + 1) * sequences.max(1);
        let mut counts: Vec<usize> = (1..=block + 1).collect();
        counts.extend(
            std::iter::successors(Some(2 * (block + 1)), |rows| Some(2 * rows)).take_while(|&rows| rows < most),
        );
        if most > block + 1 {
            counts.push(most);
        }
        let context = CONTEXT.min(target.config().max_position_embeddings.saturating_sub(most)).max(1);
        let vocab = target.config().vocab_size;
        let tokens: Vec<u32> = (0..context + most).map(|i| (i * 7919 % vocab) as u32).collect();
        let rows: Vec<usize> = (0..most).collect();
        let mut cache = target.new_cache(1, context + most)?;
        target.forward(&mut cache, &[NewTokens { slot: 0, tokens: &tokens[..context] }], &[])?;
        let mut timings = vec![Vec::new(); counts.len()];
        let begun = Instant::now();
        for turn in 0..TIMINGS.1 {
            if turn >= TIMINGS.0 && begun.elapsed() > BUDGET {
                break;
            }
            for (timings, &count) in timings.iter_mut().zip(&counts) {
                let begun = Instant::now();
                let new = NewTokens { slot: 0, tokens: &tokens[context..context + count] };
                let hidden = target.forward(&mut cache, &[new], &[])?.hidden;
                target.logits(&hidden, &rows[..count])?;
                timings.push(begun.elapsed().as_secs_f64());
                cache.truncate(0, context);
            }
        }
        let median = |mut timings: Vec<f64>| {
            timings.sort_unstable_by(f64::total_cmp);
            timings[timings.len() / 2]
        };
        let entries = counts.into_iter().zip(timings).map(|(rows, all)| StepCost { rows, seconds: median(all) });
        Self::new(entries.collect())
    }

    /// The entries as measured.
    pub fn entries(&self) -> &[StepCost] {
        &self.entries
    }

    /// Seconds of a pass over `rows` rows.
    pub fn seconds(&self, rows: usize) -> f64 {
        let (mut below, mut before) = (StepCost { rows: 0, seconds: 0.0 }, 0.0_f64);
        for entry in &self.entries {
            // An entry that was measured below a smaller one is taken as equal to it.
            let seconds = entry.seconds.max(below.seconds);
            let slope = (seconds - below.seconds) / (entry.rows - below.rows) as f64;
            if rows <= entry.rows {
                return self.drift * (seconds - slope * (entry.rows - rows) as f64);
            }
            (below, before) = (StepCost { rows: entry.rows, seconds }, slope);
        }
        self.drift * (below.seconds + before * (rows - below.rows) as f64)
    }

    /// Learns from a pass that was timed.
    pub(super) fn observe(&mut self, rows: usize, seconds: f64) {
        // One interrupted pass should not count for more than a slow one.
        let ratio = (seconds / self.seconds(rows)).clamp(0.5, 2.0);
        self.drift *= 1.0 + DRIFT_RATE * (ratio - 1.0);
        if let Some(at) = self.entries.iter().position(|entry| entry.rows == rows) {
            self.weights[at] = (self.weights[at] + 1.0).min(WEIGHTS.1);
            self.entries[at].seconds *= 1.0 + (ratio - 1.0) / self.weights[at];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(entries: &[(usize, f64)]) -> Result<StepCosts> {
        StepCosts::new(entries.iter().map(|&(rows, seconds)| StepCost { rows, seconds }).collect())
    }

    #[test]
    fn costs_are_linear_between_entries_and_never_fall() {
        let costs = table(&[(1, 2.0), (2, 1.5), (4, 3.0), (8, 4.0)]).unwrap();
        let seconds: Vec<f64> = [1, 2, 3, 4, 6, 8, 12].map(|rows| costs.seconds(rows)).to_vec();
        assert_eq!(seconds, [2.0, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0]);
        assert_eq!(table(&[(1, 0.5)]).unwrap().seconds(3), 1.5);
    }

    #[test]
    fn tables_that_are_none_are_refused() {
        for broken in [&[][..], &[(0, 1.0)], &[(2, 1.0), (1, 2.0)], &[(1, 0.0)], &[(1, f64::NAN)]] {
            assert!(table(broken).is_err(), "{broken:?}");
        }
    }

    #[test]
    fn a_machine_that_slows_down_moves_the_whole_table_and_an_outlier_hardly_does() {
        let mut costs = table(&[(1, 1.0), (2, 1.5)]).unwrap();
        costs.observe(1, 1000.0);
        assert!(costs.seconds(1) < 1.25, "{}", costs.seconds(1));
        for _ in 0..100 {
            costs.observe(1, 2.0);
        }
        assert!((costs.seconds(1) - 2.0).abs() < 0.02);
        assert!(costs.seconds(2) > 2.0, "{}", costs.seconds(2));
        for _ in 0..400 {
            costs.observe(1, 2.0);
            costs.observe(2, 5.0);
        }
        assert!((costs.seconds(2) / costs.seconds(1) - 2.5).abs() < 0.1);
    }
}
