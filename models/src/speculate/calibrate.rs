//! Sequential temperature scaling (STS) of a drafter's confidence: one temperature per block position, so that the product of
//! the confidences up to a position is the share of blocks whose prefix up to it is accepted.
//!
//! Positions are fitted left to right. At each, a grid search takes the temperature of the confidence logit that gives the
//! running product the smallest expected calibration error, with the temperatures of the positions before it in place. Scaling
//! changes which tokens are verified and nothing else, so it cannot change an output.

use super::SpeculateError;

/// Equal-width bins of the calibration error.
pub const ECE_BINS: usize = 20;
/// Verified blocks that a position needs before a temperature is fitted to it.
pub const MIN_BLOCKS: usize = 20;
/// Predictions are clamped to this distance from 0 and 1, as in the reports.
const PROBABILITY_MARGIN: f64 = 1e-8;
/// Candidates are `GRID_LIMIT^(i / GRID_STEPS)` for i from −`GRID_STEPS` to `GRID_STEPS`: 1/20 to 20, each 3 % above the last,
/// and 1 exactly.
const GRID_LIMIT: f64 = 20.0;
const GRID_STEPS: i32 = 100;

/// One temperature per block position; every one is a finite number above 0.
#[derive(Debug, Clone, PartialEq)]
pub struct Temperatures(Vec<f32>);

impl Temperatures {
    /// Checks the temperatures of a block of `block_size` tokens.
    ///
    /// # Errors
    /// Their number is another, or one of them is not a finite number above 0.
    pub fn new(values: Vec<f32>, block_size: usize) -> Result<Self, SpeculateError> {
        if values.len() != block_size {
            return Err(SpeculateError::TemperatureCount { found: values.len(), expected: block_size });
        }
        match values.iter().position(|value| !(value.is_finite() && *value > 0.0)) {
            Some(position) => Err(SpeculateError::Temperature { position, value: values[position] }),
            None => Ok(Self(values)),
        }
    }

    /// The temperatures, the first position first.
    pub fn values(&self) -> &[f32] {
        &self.0
    }

    /// Divides confidence logits, the first position first, by their temperatures.
    pub fn scale(&self, logits: &mut [f32]) {
        for (logit, temperature) in logits.iter_mut().zip(&self.0) {
            *logit /= temperature;
        }
    }

    /// Takes [`Temperatures::scale`] back, to rounding.
    pub fn unscale(&self, logits: &mut [f32]) {
        for (logit, temperature) in logits.iter_mut().zip(&self.0) {
            *logit *= temperature;
        }
    }
}

/// A block that was verified whole, whatever its confidences said.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct VerifiedBlock<'a> {
    /// Confidence logits of the verified tokens, as the head gave them.
    pub logits: &'a [f32],
    /// How many of these tokens were accepted.
    pub accepted: usize,
}

/// Result of a fit; every list has one entry per block position.
#[derive(Debug, Clone, PartialEq)]
pub struct Fit {
    /// The temperatures.
    pub temperatures: Temperatures,
    /// Calibration error of the running product without scaling, on the blocks of the fit.
    pub ece_before: Vec<f64>,
    /// The same with scaling.
    pub ece_after: Vec<f64>,
    /// Blocks that reached the position.
    pub blocks: Vec<usize>,
}

/// Fits the temperatures of a block of `block_size` tokens. Among equally good ones the one closest to 1 is taken.
///
/// # Errors
/// A block is longer than `block_size`, has fewer tokens than accepted ones or a logit that is no number; a position was verified
/// in fewer than [`MIN_BLOCKS`] blocks.
pub fn fit(block_size: usize, blocks: &[VerifiedBlock<'_>]) -> Result<Fit, SpeculateError> {
    for block in blocks {
        check(block_size, block)?;
    }
    // Running products of all blocks up to the position before, without and with scaling.
    let (mut raw, mut scaled) = (vec![1.0; blocks.len()], vec![1.0; blocks.len()]);
    let (mut temperatures, mut ece_before, mut ece_after, mut counts) =
        (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for position in 0..block_size {
        let reached: Vec<usize> = (0..blocks.len()).filter(|&i| blocks[i].logits.len() > position).collect();
        if reached.len() < MIN_BLOCKS {
            return Err(SpeculateError::TooFewBlocks { position, found: reached.len(), needed: MIN_BLOCKS });
        }
        let error = |products: &[f64], temperature: f32| {
            let prediction = |&i: &usize| {
                let product = products[i] * confidence(blocks[i].logits[position], temperature);
                (product, blocks[i].accepted > position)
            };
            expected_calibration_error(reached.iter().map(prediction))
        };
        let (best, after) = best_temperature(|temperature| error(&scaled, temperature));
        ece_before.push(error(&raw, 1.0));
        ece_after.push(after);
        for &i in &reached {
            raw[i] *= confidence(blocks[i].logits[position], 1.0);
            scaled[i] *= confidence(blocks[i].logits[position], best);
        }
        temperatures.push(best);
        counts.push(reached.len());
    }
    Ok(Fit { temperatures: Temperatures(temperatures), ece_before, ece_after, blocks: counts })
}

fn check(block_size: usize, block: &VerifiedBlock<'_>) -> Result<(), SpeculateError> {
    let tokens = block.logits.len();
    for (what, found, expected) in
        [("number of confidences", tokens, block_size), ("number of accepted tokens", block.accepted, tokens)]
    {
        if found > expected {
            return Err(SpeculateError::BlockShape { tokens, what, found, expected });
        }
    }
    match block.logits.iter().position(|logit| logit.is_nan()) {
        Some(position) => Err(SpeculateError::NanConfidence { position }),
        None => Ok(()),
    }
}

/// Candidate with the smallest error, and that error; from 1 outwards, so that the first of equals is the closest to 1.
fn best_temperature(error: impl Fn(f32) -> f64) -> (f32, f64) {
    let candidate = |step: i32| GRID_LIMIT.powf(f64::from(step) / f64::from(GRID_STEPS)) as f32;
    let mut best = (1.0, error(1.0));
    for step in (1..=GRID_STEPS).flat_map(|step| [step, -step]) {
        let temperature = candidate(step);
        let found = error(temperature);
        if found < best.1 {
            best = (temperature, found);
        }
    }
    best
}

/// Probability of one step, in f32 as decoding computes it.
fn confidence(logit: f32, temperature: f32) -> f64 {
    f64::from(1.0 / (1.0 + (-logit / temperature).exp()))
}

/// Σ over bins of (bin's share of the predictions) · |mean prediction − observed rate|; 0 without predictions.
fn expected_calibration_error(predictions: impl Iterator<Item = (f64, bool)>) -> f64 {
    let (mut gaps, mut count) = ([0.0; ECE_BINS], 0_usize);
    for (prediction, accepted) in predictions {
        let prediction = prediction.clamp(PROBABILITY_MARGIN, 1.0 - PROBABILITY_MARGIN);
        gaps[((prediction * ECE_BINS as f64) as usize).min(ECE_BINS - 1)] += prediction - f64::from(u8::from(accepted));
        count += 1;
    }
    gaps.iter().map(|gap: &f64| gap.abs()).sum::<f64>() / count.max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::speculate::{CounterRng, Stream};

    /// Blocks of a head whose logits are `factor` times too large: token k survives with probability σ(logit / factor), with
    /// another factor at each position.
    fn miscalibrated(factors: &[f32], count: u64) -> Vec<(Vec<f32>, usize)> {
        let block = |number: u64| {
            let (logits, draws) = (CounterRng::new(3, Stream::Init, number), CounterRng::new(3, Stream::Draft, number));
            let truths: Vec<f32> = (0..factors.len()).map(|k| (logits.normal(k as u64) * 1.5 + 0.8) as f32).collect();
            let survives = |(k, truth): (usize, &f32)| draws.uniform_f64(k as u64) < confidence(*truth, 1.0);
            let accepted = truths.iter().enumerate().take_while(|&step| survives(step)).count();
            (truths.iter().zip(factors).map(|(truth, factor)| truth * factor).collect(), accepted)
        };
        (0..count).map(block).collect()
    }

    fn fit_all(block_size: usize, blocks: &[(Vec<f32>, usize)]) -> Result<Fit, SpeculateError> {
        let view: Vec<_> =
            blocks.iter().map(|(logits, accepted)| VerifiedBlock { logits, accepted: *accepted }).collect();
        fit(block_size, &view)
    }

    /// Observations become fewer and noisier with the position, hence the wider tolerance further right.
    #[test]
    fn a_known_miscalibration_is_found_and_undone() {
        let found = fit_all(3, &miscalibrated(&[2.5; 3], 40_000)).unwrap();
        for (k, tolerance) in [0.1, 0.2, 0.3].into_iter().enumerate() {
            let ratio = found.temperatures.values()[k] / 2.5;
            assert!((ratio.ln().abs() as f64) < tolerance, "position {k}: {:?}", found.temperatures);
            assert!(found.ece_before[k] > 0.03 && found.ece_after[k] < 0.012, "{found:?}");
        }
        assert_eq!(found.blocks, [40_000; 3]);
        let mixed = fit_all(2, &miscalibrated(&[0.4, 3.0], 40_000)).unwrap();
        let [first, second] = mixed.temperatures.values() else { panic!("two positions") };
        assert!((first / 0.4).ln().abs() < 0.1 && (second / 3.0).ln().abs() < 0.25, "{mixed:?}");
    }

    #[test]
    fn what_is_calibrated_stays_almost_as_it_is() {
        let found = fit_all(2, &miscalibrated(&[1.0; 2], 40_000)).unwrap();
        assert!(found.temperatures.values().iter().all(|t| t.ln().abs() < 0.15), "{found:?}");
        // 1 is among the candidates, but only for the first position is the product before it the same.
        assert!(found.ece_after[0] <= found.ece_before[0] && found.ece_after[1] < 0.012, "{found:?}");
        // Logits of 0 stay at one half whatever the temperature: the tie goes to 1.
        let blocks = vec![(vec![0.0], 1); 40];
        assert_eq!(fit_all(1, &blocks).unwrap().temperatures.values(), [1.0]);
    }

    /// Only positions that were verified count: short blocks say nothing about what lies behind them.
    #[test]
    fn short_blocks_count_where_they_reach() {
        let mut blocks = miscalibrated(&[2.5, 2.5], 3000);
        let whole = fit_all(2, &blocks).unwrap();
        for (logits, accepted) in blocks.iter_mut().take(1000) {
            logits.truncate(1);
            *accepted = (*accepted).min(1);
        }
        let cut = fit_all(2, &blocks).unwrap();
        assert_eq!(cut.blocks, [3000, 2000]);
        assert_eq!(cut.temperatures.values()[0], whole.temperatures.values()[0]);
        let error = fit_all(3, &blocks).unwrap_err().to_string();
        assert!(error.contains("position 3") && error.contains("0 verified blocks"), "{error}");
    }

    #[test]
    fn blocks_that_do_not_fit_are_refused() {
        let refuse = |logits: &[f32], accepted| fit(2, &[VerifiedBlock { logits, accepted }]).unwrap_err().to_string();
        assert!(refuse(&[0.0; 3], 0).contains("number of confidences is 3, expected 2"));
        assert!(refuse(&[0.0], 2).contains("number of accepted tokens is 2, expected 1"));
        assert!(refuse(&[0.0, f32::NAN], 0).contains("confidence logit at block position 2 is NaN"));
    }

    #[test]
    fn temperatures_of_another_block_or_zero_are_refused() {
        let error = Temperatures::new(vec![1.0; 5], 7).unwrap_err().to_string();
        assert!(error.contains("`temperatures` has 5 entries, expected 7"), "{error}");
        for bad in [0.0, -1.0, f32::NAN, f32::INFINITY] {
            let error = Temperatures::new(vec![1.0, bad], 2).unwrap_err().to_string();
            assert!(error.contains("`temperatures[1]` is"), "{error}");
        }
        let temperatures = Temperatures::new(vec![2.0, 4.0], 2).unwrap();
        let mut logits = [3.0, 3.0];
        temperatures.scale(&mut logits);
        assert_eq!(logits, [1.5, 0.75]);
        temperatures.unscale(&mut logits[..1]);
        assert_eq!(logits, [3.0, 0.75]);
    }
}
