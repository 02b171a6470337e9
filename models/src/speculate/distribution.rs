//! From logits to a token: sampling parameters, the distribution they give, and drawing from it.
//!
//! Drafter and target go through the same code with the same parameters, so the ratio of the acceptance test compares
//! like with like. Verification, plain decoding and drafting call it.

use std::cmp::Ordering;
use std::sync::Arc;

use deepspec_kernels::logit_row;
use serde::{Deserialize, Serialize};

use super::error::SpeculateError;

/// Temperatures below this mean greedy decoding.
pub const GREEDY_TEMPERATURE: f64 = 1e-5;

/// How the logits of one row become a distribution: temperature first, then top-k, top-p and min-p in this order.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SamplingParams {
    /// Divides the logits; below 1e-5 the most likely token is taken. At least 0.
    pub temperature: f64,
    /// Keep the k most likely tokens; 0 keeps all.
    pub top_k: usize,
    /// Keep the smallest set of most likely tokens with at least this mass; in (0, 1], 1 keeps all.
    pub top_p: f64,
    /// Drop tokens less likely than this fraction of the most likely one; in [0, 1], 0 drops none.
    pub min_p: f64,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0 }
    }
}

impl SamplingParams {
    /// Always the most likely token.
    pub const fn greedy() -> Self {
        Self { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0 }
    }

    /// Whether the temperature selects greedy decoding; the filters then change nothing.
    pub fn is_greedy(&self) -> bool {
        self.temperature < GREEDY_TEMPERATURE
    }

    /// Checks every range.
    ///
    /// # Errors
    /// [`SpeculateError::Parameter`] names the first field outside its range.
    pub fn validate(&self) -> Result<(), SpeculateError> {
        let ranges = [
            ("temperature", self.temperature, 0.0..=f64::MAX, "a finite number of at least 0"),
            ("top_p", self.top_p, 0.0_f64.next_up()..=1.0, "a number above 0 and at most 1"),
            ("min_p", self.min_p, 0.0..=1.0, "a number from 0 to 1"),
        ];
        match ranges.into_iter().find(|(_, value, range, _)| !range.contains(value)) {
            Some((field, value, _, expected)) => Err(SpeculateError::Parameter { field, value, expected }),
            None => Ok(()),
        }
    }
}

/// Distribution of one token over the vocabulary.
#[derive(Debug, Clone, PartialEq)]
pub enum Distribution {
    /// All mass on one token.
    OneHot(u32),
    /// One probability per vocabulary token, non-negative with sum 1.
    Dense(Vec<f32>),
    /// One probability per token of a part of the vocabulary, non-negative with sum 1; every other token has none.
    Subset {
        /// The part, ascending.
        tokens: Arc<[u32]>,
        /// Probability of each.
        probs: Vec<f32>,
    },
}

impl Distribution {
    /// Distribution of a row of logits under `params`: the softmax of `logits / temperature` after the filters, in f32 with
    /// the normaliser summed in f64. Greedy decoding, and top-k of 1, put all mass on the largest logit, the first of equals.
    ///
    /// Equal logits at the edge of top-k or top-p are kept in the order of their token ids.
    ///
    /// # Shapes
    /// `logits`: `[vocab]`.
    ///
    /// # Errors
    /// A parameter outside its range, an empty row, a NaN logit, or an infinite maximum.
    pub fn from_logits(logits: &[f32], params: &SamplingParams) -> Result<Self, SpeculateError> {
        params.validate()?;
        let top = argmax_first(logits)?;
        if params.is_greedy() || params.top_k == 1 {
            return Ok(Self::OneHot(top));
        }
        let maximum = logits[top as usize];
        // The largest weight is exactly 1, which is what min-p is relative to.
        let mut weights = logit_row::powers(logits, maximum, params.temperature as f32);
        if let Some(kept) = kept_tokens(logits, &weights, params) {
            let mut filtered = vec![0.0; weights.len()];
            for token in kept {
                filtered[token as usize] = weights[token as usize];
            }
            weights = filtered;
        }
        let total = sum(&weights) as f32;
        for weight in &mut weights {
            *weight /= total;
        }
        Ok(Self::Dense(weights))
    }

    /// Takes probabilities from elsewhere, such as an n-gram table.
    ///
    /// # Errors
    /// An empty row, a negative or NaN entry, or a sum further than 1e-3 from 1.
    pub fn from_probs(probs: Vec<f32>) -> Result<Self, SpeculateError> {
        if probs.is_empty() {
            return Err(SpeculateError::EmptyRow);
        }
        let (sum, smallest) = (sum(&probs), probs.iter().copied().min_by(f32::total_cmp).unwrap_or(f32::NAN));
        if smallest < 0.0 || (sum - 1.0).abs() > 1e-3 || sum.is_nan() {
            return Err(SpeculateError::NotADistribution { sum, smallest });
        }
        Ok(Self::Dense(probs))
    }

    /// A distribution over the positions of `tokens`, as one over the tokens that stand there.
    ///
    /// # Shapes
    /// `tokens`: as many as `self` has entries, ascending.
    ///
    /// # Errors
    /// The lengths differ, a one-hot position is outside `tokens`, or this is one of tokens already.
    pub fn over(self, tokens: &Arc<[u32]>) -> Result<Self, SpeculateError> {
        let differs = |found| SpeculateError::BlockShape {
            tokens: 1,
            what: "number of probabilities of the draft row",
            found,
            expected: tokens.len(),
        };
        match self {
            Self::OneHot(position) => match tokens.get(position as usize) {
                Some(&token) => Ok(Self::OneHot(token)),
                None => Err(differs(position as usize + 1)),
            },
            Self::Dense(probs) if probs.len() == tokens.len() => Ok(Self::Subset { tokens: tokens.clone(), probs }),
            Self::Dense(probs) | Self::Subset { probs, .. } => Err(differs(probs.len())),
        }
    }

    /// Probability of a token; 0 for a token outside the vocabulary.
    pub fn prob(&self, token: u32) -> f32 {
        match self {
            Self::OneHot(only) => f32::from(u8::from(*only == token)),
            Self::Dense(probs) => probs.get(token as usize).copied().unwrap_or(0.0),
            Self::Subset { tokens, probs } => tokens.binary_search(&token).map_or(0.0, |position| probs[position]),
        }
    }

    /// The token at quantile `u` in [0, 1) of the cumulative distribution in token order. A token of probability zero is
    /// never returned, however close `u` is to 1.
    pub fn sample(&self, u: f64) -> u32 {
        match self {
            Self::OneHot(only) => *only,
            Self::Dense(probs) => position_at(probs, u) as u32,
            Self::Subset { tokens, probs } => tokens[position_at(probs, u)],
        }
    }
}

/// Position at quantile `u` of the cumulative sum.
fn position_at(probs: &[f32], u: f64) -> usize {
    const CHUNK: usize = 1024;
    let masses: Vec<f64> = probs.chunks(CHUNK).map(sum).collect();
    let mut rest = u * masses.iter().sum::<f64>();
    // Rounding can carry `rest` past the end of a chunk or of the row: then the last token with mass takes it.
    for (number, (chunk, &mass)) in probs.chunks(CHUNK).zip(&masses).enumerate() {
        if rest < mass {
            for (offset, &prob) in chunk.iter().enumerate() {
                rest -= f64::from(prob);
                if rest < 0.0 && prob > 0.0 {
                    return number * CHUNK + offset;
                }
            }
            return number * CHUNK + last_positive(chunk);
        }
        rest -= mass;
    }
    last_positive(probs)
}

/// Index of the largest logit, the first of equals.
///
/// # Errors
/// An empty row, a NaN logit, or an infinite maximum.
pub fn argmax_first(logits: &[f32]) -> Result<u32, SpeculateError> {
    match logit_row::argmax(logits) {
        None => Err(SpeculateError::EmptyRow),
        Some((token, value)) if value.is_nan() => Err(SpeculateError::NanLogit { token }),
        Some((_, value)) if value.is_infinite() => Err(SpeculateError::InfiniteMaximum { value }),
        Some((token, _)) => Ok(token as u32),
    }
}

/// Tokens left by top-k, top-p and min-p, or `None` if no filter is on. `weights` are unnormalised, their maximum 1.
fn kept_tokens(logits: &[f32], weights: &[f32], params: &SamplingParams) -> Option<Vec<u32>> {
    let use_top_k = params.top_k > 0 && params.top_k < logits.len();
    let use_top_p = params.top_p < 1.0;
    if !use_top_k && !use_top_p && params.min_p == 0.0 {
        return None;
    }
    let weight = |token: u32| weights[token as usize];
    let most_likely_first =
        |a: &u32, b: &u32| -> Ordering { logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b)) };
    let mut kept: Vec<u32> = (0..logits.len() as u32).collect();
    if use_top_k {
        kept.select_nth_unstable_by(params.top_k - 1, most_likely_first);
        kept.truncate(params.top_k);
    }
    if use_top_p {
        let total: f64 = kept.iter().map(|&token| f64::from(weight(token))).sum();
        // All tokens below this floor together hold less than 1 - top_p, so the nucleus lies above it: sort only that part.
        let floor = (1.0 - params.top_p) * total / kept.len() as f64;
        kept.retain(|&token| f64::from(weight(token)) >= floor);
        kept.sort_unstable_by(most_likely_first);
        let mut mass = 0.0;
        let nucleus = kept.iter().take_while(|&&token| {
            let wanted = mass < params.top_p * total;
            mass += f64::from(weight(token));
            wanted
        });
        let size = nucleus.count();
        kept.truncate(size);
    }
    kept.retain(|&token| f64::from(weight(token)) >= params.min_p);
    Some(kept)
}

/// Sum in f64 over independent lanes.
pub(super) fn sum(values: &[f32]) -> f64 {
    const LANES: usize = 8;
    let mut lanes = [0.0_f64; LANES];
    let chunks = values.chunks_exact(LANES);
    let tail: f64 = chunks.remainder().iter().copied().map(f64::from).sum();
    for chunk in chunks {
        for lane in 0..LANES {
            lanes[lane] += f64::from(chunk[lane]);
        }
    }
    lanes.iter().sum::<f64>() + tail
}

fn last_positive(probs: &[f32]) -> usize {
    probs.iter().rposition(|&prob| prob > 0.0).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn dense(logits: &[f32], params: SamplingParams) -> Vec<f32> {
        match Distribution::from_logits(logits, &params).unwrap() {
            Distribution::Dense(probs) => probs,
            other => panic!("{other:?}"),
        }
    }

    fn support(probs: &[f32]) -> Vec<usize> {
        (0..probs.len()).filter(|&token| probs[token] > 0.0).collect()
    }

    #[test]
    fn parameters_outside_their_range_are_named() {
        let default = SamplingParams::default();
        let cases = [
            ("temperature", SamplingParams { temperature: -0.1, ..default }),
            ("temperature", SamplingParams { temperature: f64::NAN, ..default }),
            ("temperature", SamplingParams { temperature: f64::INFINITY, ..default }),
            ("top_p", SamplingParams { top_p: 0.0, ..default }),
            ("top_p", SamplingParams { top_p: 1.01, ..default }),
            ("min_p", SamplingParams { min_p: -0.5, ..default }),
            ("min_p", SamplingParams { min_p: f64::NAN, ..default }),
        ];
        for (name, params) in cases {
            let error = Distribution::from_logits(&[1.0, 2.0], &params).unwrap_err();
            assert!(matches!(error, SpeculateError::Parameter { field, .. } if field == name), "{error}");
            assert!(error.hint().unwrap().contains(name));
        }
        // The smallest numbers there are do for a range that is open at 0.
        let least = SamplingParams { temperature: f64::from_bits(1), top_p: f64::from_bits(1), ..default };
        assert_eq!(Distribution::from_logits(&[1.0, 2.0], &least).unwrap().prob(1), 1.0);
    }

    #[test]
    fn unusable_rows_are_errors() {
        let draw = |logits: &[f32]| Distribution::from_logits(logits, &SamplingParams::default()).unwrap_err();
        let mut long = vec![0.0; 100];
        long[37] = f32::NAN;
        assert_eq!(draw(&[]), SpeculateError::EmptyRow);
        assert_eq!(draw(&long), SpeculateError::NanLogit { token: 37 });
        assert_eq!(draw(&[0.0, f32::NAN]), SpeculateError::NanLogit { token: 1 });
        assert_eq!(draw(&[f32::NAN; 16]), SpeculateError::NanLogit { token: 0 });
        assert_eq!(draw(&[f32::NEG_INFINITY; 20]), SpeculateError::InfiniteMaximum { value: f32::NEG_INFINITY });
        assert_eq!(draw(&[0.0, f32::INFINITY]), SpeculateError::InfiniteMaximum { value: f32::INFINITY });
        assert!(Distribution::from_probs(vec![0.5, 0.6]).is_err());
        assert!(Distribution::from_probs(vec![1.5, -0.5]).is_err());
        assert!(Distribution::from_probs(vec![f32::NAN, 1.0]).is_err());
    }

    #[test]
    fn a_masked_token_has_no_probability() {
        let probs = dense(&[0.0, f32::NEG_INFINITY, 0.0], SamplingParams::default());
        assert_eq!(probs, [0.5, 0.0, 0.5]);
    }

    #[test]
    fn filters_apply_in_order() {
        // Probabilities 0.4, 0.3, 0.2, 0.1.
        let logits = [0.4_f32.ln(), 0.3_f32.ln(), 0.2_f32.ln(), 0.1_f32.ln()];
        let default = SamplingParams::default();
        let kept = |params| support(&dense(&logits, params));
        assert_eq!(kept(SamplingParams { top_k: 3, ..default }), [0, 1, 2]);
        assert_eq!(kept(SamplingParams { top_p: 0.69, ..default }), [0, 1]);
        assert_eq!(kept(SamplingParams { top_p: 0.71, ..default }), [0, 1, 2]);
        assert_eq!(kept(SamplingParams { top_p: 0.1, ..default }), [0]);
        assert_eq!(kept(SamplingParams { min_p: 0.45, ..default }), [0, 1, 2]);
        assert_eq!(kept(SamplingParams { min_p: 1.0, ..default }), [0]);
        // 0.6 of the whole needs two tokens and so does 0.6 of the three that top-k leaves; 0.8 of them no longer needs a third.
        assert_eq!(kept(SamplingParams { top_p: 0.75, ..default }), [0, 1, 2]);
        assert_eq!(kept(SamplingParams { top_k: 3, top_p: 0.75, ..default }), [0, 1]);
        let probs = dense(&logits, SamplingParams { top_k: 2, ..default });
        assert!((probs[0] - 4.0 / 7.0).abs() < 1e-6 && (probs[1] - 3.0 / 7.0).abs() < 1e-6);
    }

    #[test]
    fn top_p_and_min_p_see_the_scaled_distribution() {
        let logits = [0.4_f32.ln(), 0.3_f32.ln(), 0.2_f32.ln(), 0.1_f32.ln()];
        let sharp = SamplingParams { temperature: 0.1, ..SamplingParams::default() };
        assert_eq!(support(&dense(&logits, SamplingParams { top_p: 0.9, ..sharp })), [0]);
        assert_eq!(support(&dense(&logits, SamplingParams { min_p: 0.05, ..sharp })), [0, 1]);
    }

    #[test]
    fn ties_are_kept_in_token_order() {
        let params = SamplingParams { top_k: 2, ..SamplingParams::default() };
        assert_eq!(support(&dense(&[0.0, 3.0, 1.0, 1.0, 1.0], params)), [1, 2]);
        let params = SamplingParams { top_p: 0.5, ..SamplingParams::default() };
        assert_eq!(support(&dense(&[1.0; 4], params)), [0, 1]);
    }

    #[test]
    fn a_quantile_never_falls_on_a_token_without_mass() {
        let mut probs = vec![0.0; 5000];
        (probs[100], probs[3000]) = (0.25, 0.75);
        let distribution = Distribution::from_probs(probs).unwrap();
        let near_one = 1.0_f64.next_down();
        let drawn = [0.0, 0.249_999, 0.25, 0.5, near_one, 1.0].map(|u| distribution.sample(u));
        assert_eq!(drawn, [100, 100, 3000, 3000, 3000, 3000]);
        // Sums to a little less than 1, ends in zeros.
        let thirds = Distribution::Dense(vec![0.0, 0.333_333, 0.333_333, 0.333_333, 0.0, 0.0]);
        assert_eq!([0.0, near_one, 1.0].map(|u| thirds.sample(u)), [1, 3, 3]);
    }

    fn any_params() -> impl Strategy<Value = SamplingParams> {
        (0.05_f64..3.0, 0_usize..80, 0.01_f64..=1.0, 0.0_f64..=1.0)
            .prop_map(|(temperature, top_k, top_p, min_p)| SamplingParams { temperature, top_k, top_p, min_p })
    }

    proptest! {
        #[test]
        fn argmax_is_the_first_maximum(logits in prop::collection::vec((-4_i8..4).prop_map(f32::from), 1..70)) {
            let mut expected = 0;
            for token in 0..logits.len() {
                if logits[token] > logits[expected] {
                    expected = token;
                }
            }
            prop_assert_eq!(argmax_first(&logits).unwrap(), expected as u32);
            let greedy = Distribution::from_logits(&logits, &SamplingParams::greedy()).unwrap();
            prop_assert_eq!(greedy, Distribution::OneHot(expected as u32));
        }

        #[test]
        fn probabilities_sum_to_one(logits in prop::collection::vec(-30_f32..30.0, 1..70), params in any_params()) {
            if let Distribution::Dense(probs) = Distribution::from_logits(&logits, &params).unwrap() {
                prop_assert!((sum(&probs) - 1.0).abs() < 1e-5);
                prop_assert!(probs[argmax_first(&logits).unwrap() as usize] > 0.0);
            } else {
                prop_assert_eq!(params.top_k, 1);
            }
        }

        #[test]
        fn top_k_keeps_k_and_drops_none_above_a_kept_one(
            logits in prop::collection::vec((-4_i8..4).prop_map(f32::from), 3..70),
            top_k in 2_usize..80,
        ) {
            let probs = dense(&logits, SamplingParams { top_k, ..SamplingParams::default() });
            let kept = support(&probs);
            prop_assert_eq!(kept.len(), top_k.min(logits.len()));
            let lowest = kept.iter().map(|&token| logits[token]).fold(f32::INFINITY, f32::min);
            prop_assert!((0..logits.len()).all(|token| probs[token] > 0.0 || logits[token] <= lowest));
        }

        #[test]
        fn top_p_keeps_the_smallest_sufficient_set(
            logits in prop::collection::vec(-3_f32..3.0, 2..70),
            top_p in 0.01_f64..1.0,
        ) {
            let whole = dense(&logits, SamplingParams::default());
            let kept = support(&dense(&logits, SamplingParams { top_p, ..SamplingParams::default() }));
            let mass: f64 = kept.iter().map(|&token| f64::from(whole[token])).sum();
            let least = kept.iter().map(|&token| f64::from(whole[token])).fold(1.0, f64::min);
            prop_assert!(mass >= top_p - 1e-5 && mass - least < top_p + 1e-5, "mass {}, least {}", mass, least);
        }

        #[test]
        fn a_drawn_token_has_mass(
            logits in prop::collection::vec(-30_f32..30.0, 2..70),
            params in any_params(),
            u in 0.0_f64..1.0,
        ) {
            let distribution = Distribution::from_logits(&logits, &params).unwrap();
            prop_assert!(distribution.prob(distribution.sample(u)) > 0.0);
            prop_assert!(distribution.prob(distribution.sample(1.0_f64.next_down())) > 0.0);
        }
    }
}
