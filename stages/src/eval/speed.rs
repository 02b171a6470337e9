//! Speed of decoding and its comparison with plain decoding, with bootstrap intervals over prompts.

use deepspec_models::speculate::{CounterRng, Stream};
use serde::{Deserialize, Serialize};

use super::cost::RoundTime;

/// Resamples of a bootstrap interval.
const RESAMPLES: u64 = 2000;
/// Ends of the 95 % interval.
const TAILS: (f64, f64) = (0.025, 0.975);

/// Time and output of one prompt. With several sequences at once, the time of their common run is shared out among them
/// in proportion to their tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Timing {
    /// Output tokens.
    pub tokens: usize,
    /// From submission to the last token, in seconds.
    pub wall_s: f64,
    /// From submission to the first token, in seconds.
    pub first_token_s: f64,
    /// Share of the drafter, in seconds.
    pub draft_s: f64,
    /// Share of the target's forward passes, in seconds.
    pub target_s: f64,
    /// Share of everything else, in seconds.
    pub other_s: f64,
    /// Of these, what its rounds took.
    #[serde(default)]
    pub rounds: RoundTime,
}

impl Timing {
    fn ms_per_token(&self) -> f64 {
        1e3 * self.wall_s / self.tokens as f64
    }
}

/// Speed over a number of prompts; `None` where no token was made.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Speed {
    /// Prompts with at least one output token.
    pub prompts: usize,
    /// Output tokens.
    pub tokens: u64,
    /// Wall-clock time, in seconds.
    pub wall_s: f64,
    /// Tokens / wall-clock time.
    pub tokens_per_s: Option<f64>,
    /// Milliseconds per token, over prompts.
    pub ms_per_token: Option<Spread>,
    /// Median time to the first token, in milliseconds.
    pub first_token_ms: Option<f64>,
    /// Where the time went.
    pub split: Option<TimeSplit>,
}

/// Mean, quantiles and spread of a sample.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// Arithmetic mean.
    pub mean: f64,
    /// Median.
    pub p50: f64,
    /// 99th percentile, linear between values.
    pub p99: f64,
    /// Standard deviation of the sample (n − 1); 0 for one value.
    pub std: f64,
}

/// Shares of the time, which sum to 1.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct TimeSplit {
    /// Drafting.
    pub draft: f64,
    /// The target's forward passes: prompts and verification.
    pub target: f64,
    /// Accepting, committing, bookkeeping.
    pub other: f64,
}

/// Speed relative to plain decoding of the same prompts; above 1 is faster.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Speedup {
    /// Ratio of tokens/s over all prompts.
    pub totals: Interval,
    /// Ratio of median ms/token.
    pub medians: Interval,
}

/// A value with its 95 % interval; `None` for the ends with fewer than two prompts.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Interval {
    /// The value measured.
    pub value: f64,
    /// Lower end.
    pub low: Option<f64>,
    /// Upper end.
    pub high: Option<f64>,
}

impl Speed {
    /// Speed over prompts.
    pub fn of(timings: &[Timing]) -> Self {
        let timings: Vec<&Timing> = timings.iter().filter(|timing| timing.tokens > 0).collect();
        let sum = |part: fn(&Timing) -> f64| timings.iter().map(|timing| part(timing)).sum::<f64>();
        let tokens = timings.iter().map(|timing| timing.tokens as u64).sum();
        let (wall_s, draft, target, other) =
            (sum(|t| t.wall_s), sum(|t| t.draft_s), sum(|t| t.target_s), sum(|t| t.other_s));
        let phases = draft + target + other;
        Self {
            prompts: timings.len(),
            tokens,
            wall_s,
            tokens_per_s: (wall_s > 0.0).then(|| tokens as f64 / wall_s),
            ms_per_token: Spread::of(timings.iter().map(|timing| timing.ms_per_token()).collect()),
            first_token_ms: Spread::of(timings.iter().map(|timing| 1e3 * timing.first_token_s).collect())
                .map(|s| s.p50),
            split: (phases > 0.0).then(|| TimeSplit {
                draft: draft / phases,
                target: target / phases,
                other: other / phases,
            }),
        }
    }
}

impl Spread {
    /// Statistics of values; `None` without any.
    pub fn of(mut values: Vec<f64>) -> Option<Self> {
        if values.is_empty() {
            return None;
        }
        values.sort_unstable_by(f64::total_cmp);
        let count = values.len() as f64;
        let mean = values.iter().sum::<f64>() / count;
        let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
        let std = (squares / (count - 1.0).max(1.0)).sqrt();
        Some(Self { mean, p50: quantile(&values, 0.5), p99: quantile(&values, 0.99), std })
    }
}

/// Compares paired timings (plain, other) of the same prompts; `None` if no pair has tokens on both sides.
///
/// The interval resamples prompts with replacement. Its draws depend on `seed` and the number of prompts alone.
pub fn speedup(pairs: &[(Timing, Timing)], seed: u64) -> Option<Speedup> {
    let pairs: Vec<_> =
        pairs.iter().filter(|(plain, other)| plain.wall_s > 0.0 && other.wall_s > 0.0).copied().collect();
    let pairs: Vec<_> = pairs.into_iter().filter(|(plain, other)| plain.tokens > 0 && other.tokens > 0).collect();
    if pairs.is_empty() {
        return None;
    }
    let measured = ratios(&pairs);
    let (mut totals, mut medians) = (Vec::new(), Vec::new());
    if pairs.len() > 1 {
        for repetition in 0..RESAMPLES {
            let draws = CounterRng::new(seed, Stream::Resample, repetition);
            let resampled: Vec<_> =
                (0..pairs.len() as u64).map(|i| pairs[draws.below(i, pairs.len() as u64) as usize]).collect();
            let (total, median) = ratios(&resampled);
            totals.push(total);
            medians.push(median);
        }
    }
    Some(Speedup { totals: interval(measured.0, totals), medians: interval(measured.1, medians) })
}

/// Ratio of tokens/s over all pairs, and ratio of median ms/token.
fn ratios(pairs: &[(Timing, Timing)]) -> (f64, f64) {
    let rate = |side: fn(&(Timing, Timing)) -> &Timing| {
        let (tokens, seconds) = pairs.iter().map(side).fold((0, 0.0), |(n, s), t| (n + t.tokens, s + t.wall_s));
        tokens as f64 / seconds
    };
    let median = |side: fn(&(Timing, Timing)) -> &Timing| {
        let mut values: Vec<f64> = pairs.iter().map(side).map(Timing::ms_per_token).collect();
        values.sort_unstable_by(f64::total_cmp);
        quantile(&values, 0.5)
    };
    (rate(|pair| &pair.1) / rate(|pair| &pair.0), median(|pair| &pair.0) / median(|pair| &pair.1))
}

fn interval(value: f64, mut resampled: Vec<f64>) -> Interval {
    resampled.sort_unstable_by(f64::total_cmp);
    let end = |share| (!resampled.is_empty()).then(|| quantile(&resampled, share));
    Interval { value, low: end(TAILS.0), high: end(TAILS.1) }
}

/// Quantile of ascending values, at least one, linear between them.
fn quantile(sorted: &[f64], share: f64) -> f64 {
    let place = share * (sorted.len() - 1) as f64;
    let below = place as usize;
    let above = (below + 1).min(sorted.len() - 1);
    sorted[below] + (sorted[above] - sorted[below]) * (place - below as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timing(tokens: usize, wall_s: f64) -> Timing {
        Timing {
            tokens,
            wall_s,
            first_token_s: wall_s / 4.0,
            draft_s: 0.0,
            target_s: 0.75 * wall_s,
            other_s: 0.25 * wall_s,
            rounds: RoundTime::default(),
        }
    }

    #[test]
    fn known_speed_by_hand() {
        let speed = Speed::of(&[timing(10, 1.0), timing(10, 2.0), timing(20, 6.0), timing(0, 5.0)]);
        assert_eq!((speed.prompts, speed.tokens, speed.wall_s), (3, 40, 9.0));
        assert_eq!(speed.tokens_per_s, Some(40.0 / 9.0));
        let spread = speed.ms_per_token.unwrap();
        assert_eq!((spread.mean, spread.p50, spread.std), (200.0, 200.0, 100.0));
        assert!((spread.p99 - 298.0).abs() < 1e-9);
        assert_eq!(speed.first_token_ms, Some(500.0));
        assert_eq!(speed.split, Some(TimeSplit { draft: 0.0, target: 0.75, other: 0.25 }));
        assert_eq!(Speed::of(&[]).tokens_per_s, None);
    }

    #[test]
    fn known_speedup_by_hand() {
        // ms/token: plain 100, 300, 200; other 50, 300, 100.
        let pairs = [
            (timing(10, 1.0), timing(10, 0.5)),
            (timing(10, 3.0), timing(20, 6.0)),
            (timing(10, 2.0), timing(10, 1.0)),
        ];
        let found = speedup(&pairs, 1).unwrap();
        assert!((found.totals.value - (40.0 / 7.5) / (30.0 / 6.0)).abs() < 1e-12);
        assert!((found.medians.value - 2.0).abs() < 1e-12);
        let (low, high) = (found.totals.low.unwrap(), found.totals.high.unwrap());
        assert!(low >= 0.93 && low < found.totals.value && found.totals.value < high && high <= 2.01, "{low} {high}");
    }

    #[test]
    fn intervals_depend_on_the_seed_alone() {
        let pair = |i: u32| (timing(10, f64::from(i)), timing(10, f64::from(i * 7 % 31 + 1)));
        let pairs: Vec<_> = (1..30).map(pair).collect();
        let found = speedup(&pairs, 1).unwrap();
        assert_eq!(speedup(&pairs, 1), Some(found));
        let other = speedup(&pairs, 2).unwrap();
        assert_eq!(other.totals.value, found.totals.value);
        assert_ne!(other.totals.low, found.totals.low);
    }

    #[test]
    fn equal_ratios_give_an_interval_without_width() {
        let pairs: Vec<_> = (1..20).map(|i| (timing(10, f64::from(i)), timing(10, f64::from(i) / 2.0))).collect();
        let Interval { value, low, high } = speedup(&pairs, 7).unwrap().totals;
        assert_eq!((value, low, high), (2.0, Some(2.0), Some(2.0)));
        let one = speedup(&pairs[..1], 7).unwrap();
        assert_eq!((one.totals.value, one.totals.low, one.medians.high), (2.0, None, None));
        assert_eq!(speedup(&[(timing(0, 1.0), timing(1, 1.0))], 7), None);
    }
}
