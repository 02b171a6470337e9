//! Speed of decoding and its comparison with plain decoding, with bootstrap intervals over prompts and over the pieces of each
//! answer, which plain decoding and the proposer take in turn.

use deepspec_models::speculate::{CounterRng, Stream};
use serde::{Deserialize, Serialize};

use super::cost::RoundTime;

/// Resamples of a bootstrap interval.
const RESAMPLES: u64 = 2000;
/// Parts of a run whose plain passes are compared.
const QUARTERS: usize = 4;
/// Ends of the 95 % interval.
const TAILS: (f64, f64) = (0.025, 0.975);

/// A stretch of an answer that was decoded without a pause. The proposers take turns piece by piece, so that the pieces with the
/// same number were decoded within moments of each other.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Piece {
    /// Output tokens.
    pub tokens: usize,
    /// Wall-clock time, in seconds.
    pub wall_s: f64,
}

/// Time and output of one prompt. With several sequences at once, the time of their common run is shared out among them
/// in proportion to their tokens.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Timing {
    /// Output tokens.
    pub tokens: usize,
    /// From submission to the last token, in seconds, without the turns of the other proposers.
    pub wall_s: f64,
    /// From submission to the first token, in seconds, counted alike.
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
    /// Its pieces, which add up to its tokens and its time.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pieces: Vec<Piece>,
    /// Median time of a plain pass over a context of fixed length just before the prompt, in seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pass_s: Option<f64>,
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
    /// Prompts with tokens on both sides.
    #[serde(default)]
    pub prompts: usize,
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
    pub fn of(timings: &[&Timing]) -> Self {
        let timings: Vec<&Timing> = timings.iter().copied().filter(|timing| timing.tokens > 0).collect();
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
/// The interval resamples prompts with replacement, and of each drawn prompt its pairs of pieces. Its draws depend on `seed` and
/// the numbers of prompts and pieces alone.
pub fn speedup(pairs: &[(&Timing, &Timing)], seed: u64) -> Option<Speedup> {
    let is_measured = |timing: &Timing| timing.wall_s > 0.0 && timing.tokens > 0;
    let both = pairs.iter().filter(|(plain, other)| is_measured(plain) && is_measured(other));
    let prompts: Vec<Vec<[Piece; 2]>> = both.map(|(plain, other)| paired(plain, other)).collect();
    if prompts.is_empty() {
        return None;
    }
    let measured = ratios(&prompts.iter().map(|pieces| sum(pieces)).collect::<Vec<_>>());
    let (mut totals, mut medians) = (Vec::new(), Vec::new());
    if prompts.len() > 1 {
        for repetition in 0..RESAMPLES {
            let draws = CounterRng::new(seed, Stream::Resample, repetition);
            let mut drawn = 0;
            let mut draw = |among: usize| {
                drawn += 1;
                draws.below(drawn - 1, among as u64) as usize
            };
            let mut resampled = Vec::with_capacity(prompts.len());
            let mut pieces = Vec::new();
            for _ in 0..prompts.len() {
                let prompt = &prompts[draw(prompts.len())];
                pieces.clear();
                pieces.extend((0..prompt.len()).map(|_| prompt[draw(prompt.len())]));
                resampled.push(sum(&pieces));
            }
            let (total, median) = ratios(&resampled);
            totals.push(total);
            medians.push(median);
        }
    }
    let prompts = prompts.len();
    Some(Speedup { totals: interval(measured.0, totals), medians: interval(measured.1, medians), prompts })
}

/// Pieces of plain decoding beside those of the other proposer. Where one answer has more, its last ones count as one.
fn paired(plain: &Timing, other: &Timing) -> Vec<[Piece; 2]> {
    let whole = |timing: &Timing| vec![Piece { tokens: timing.tokens, wall_s: timing.wall_s }];
    let pieces = |timing: &Timing| if timing.pieces.is_empty() { whole(timing) } else { timing.pieces.clone() };
    let (mut plain, mut other) = (pieces(plain), pieces(other));
    let count = plain.len().min(other.len());
    for pieces in [&mut plain, &mut other] {
        let rest = pieces.drain(count..).fold(Piece::default(), Piece::and);
        pieces[count - 1] = pieces[count - 1].and(rest);
    }
    plain.into_iter().zip(other).map(|(plain, other)| [plain, other]).collect()
}

impl Piece {
    fn and(self, next: Self) -> Self {
        Self { tokens: self.tokens + next.tokens, wall_s: self.wall_s + next.wall_s }
    }

    fn ms_per_token(self) -> f64 {
        1e3 * self.wall_s / self.tokens as f64
    }
}

fn sum(pieces: &[[Piece; 2]]) -> [Piece; 2] {
    pieces.iter().fold([Piece::default(); 2], |sum, pair| [sum[0].and(pair[0]), sum[1].and(pair[1])])
}

/// Ratio of tokens/s over all prompts, and ratio of median ms/token.
fn ratios(prompts: &[[Piece; 2]]) -> (f64, f64) {
    let [plain, other] = sum(prompts);
    let median = |side: usize| {
        let mut values: Vec<f64> = prompts.iter().map(|pair| pair[side].ms_per_token()).collect();
        values.sort_unstable_by(f64::total_cmp);
        quantile(&values, 0.5)
    };
    (plain.ms_per_token() / other.ms_per_token(), median(0) / median(1))
}

/// How far plain passes over a context of fixed length drifted in the course of a run: the medians of its quarters, largest /
/// smallest − 1. `None` where no two of them were timed per quarter.
pub fn drift(timings: &[&Timing]) -> Option<f64> {
    let passes: Vec<f64> = timings.iter().filter_map(|timing| timing.pass_s).collect();
    if passes.len() < 2 * QUARTERS {
        return None;
    }
    let quarter = |i: usize| {
        let mut part = passes[i * passes.len() / QUARTERS..(i + 1) * passes.len() / QUARTERS].to_vec();
        part.sort_unstable_by(f64::total_cmp);
        quantile(&part, 0.5)
    };
    let medians: Vec<f64> = (0..QUARTERS).map(quarter).collect();
    let (least, most) = medians.iter().fold((f64::INFINITY, 0.0_f64), |(least, most), &m| (least.min(m), most.max(m)));
    (least > 0.0).then(|| most / least - 1.0)
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
            target_s: 0.75 * wall_s,
            other_s: 0.25 * wall_s,
            ..Timing::default()
        }
    }

    fn compare(pairs: &[(Timing, Timing)], seed: u64) -> Option<Speedup> {
        speedup(&pairs.iter().map(|(plain, other)| (plain, other)).collect::<Vec<_>>(), seed)
    }

    #[test]
    fn known_speed_by_hand() {
        let timings = [timing(10, 1.0), timing(10, 2.0), timing(20, 6.0), timing(0, 5.0)];
        let speed = Speed::of(&timings.iter().collect::<Vec<_>>());
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
        let found = compare(&pairs, 1).unwrap();
        assert!((found.totals.value - (40.0 / 7.5) / (30.0 / 6.0)).abs() < 1e-12);
        assert!((found.medians.value - 2.0).abs() < 1e-12);
        let (low, high) = (found.totals.low.unwrap(), found.totals.high.unwrap());
        assert!(low >= 0.93 && low < found.totals.value && found.totals.value < high && high <= 2.01, "{low} {high}");
    }

    #[test]
    fn intervals_depend_on_the_seed_alone() {
        let pair = |i: u32| (timing(10, f64::from(i)), timing(10, f64::from(i * 7 % 31 + 1)));
        let pairs: Vec<_> = (1..30).map(pair).collect();
        let found = compare(&pairs, 1).unwrap();
        assert_eq!(compare(&pairs, 1), Some(found));
        let other = compare(&pairs, 2).unwrap();
        assert_eq!(other.totals.value, found.totals.value);
        assert_ne!(other.totals.low, found.totals.low);
    }

    #[test]
    fn equal_ratios_give_an_interval_without_width() {
        let pairs: Vec<_> = (1..20).map(|i| (timing(10, f64::from(i)), timing(10, f64::from(i) / 2.0))).collect();
        let found = compare(&pairs, 7).unwrap();
        let Interval { value, low, high } = found.totals;
        assert_eq!((value, low, high, found.prompts), (2.0, Some(2.0), Some(2.0), 19));
        let one = compare(&pairs[..1], 7).unwrap();
        assert_eq!((one.totals.value, one.totals.low, one.medians.high), (2.0, None, None));
        assert_eq!(compare(&[(timing(0, 1.0), timing(1, 1.0))], 7), None);
    }

    /// All prompts have the same speedup, their pieces have not.
    #[test]
    fn an_interval_sees_how_pieces_scatter_within_prompts() {
        let with = |walls: [f64; 4]| Timing {
            pieces: walls.map(|wall_s| Piece { tokens: 5, wall_s }).to_vec(),
            ..timing(20, walls.iter().sum())
        };
        let pairs: Vec<_> = (0..12).map(|_| (with([1.0; 4]), with([0.4, 1.6, 0.6, 1.4]))).collect();
        let found = compare(&pairs, 3).unwrap().totals;
        assert!(
            (found.value - 1.0).abs() < 1e-12 && found.low.unwrap() < 0.95 && found.high.unwrap() > 1.05,
            "{found:?}"
        );
        let whole: Vec<_> = (0..12).map(|_| (timing(20, 4.0), timing(20, 4.0))).collect();
        assert_eq!(compare(&whole, 3).unwrap().totals.low, Some(1.0));
    }

    #[test]
    fn pieces_without_a_partner_count_with_the_last_one_that_has_one() {
        let piece = |tokens, wall_s| Piece { tokens, wall_s };
        let plain = Timing { pieces: vec![piece(4, 1.0), piece(4, 2.0), piece(1, 0.5)], ..timing(9, 3.5) };
        let other = Timing { pieces: vec![piece(6, 1.0), piece(6, 1.5)], ..timing(12, 2.5) };
        assert_eq!(paired(&plain, &other), [[piece(4, 1.0), piece(6, 1.0)], [piece(5, 2.5), piece(6, 1.5)]]);
        assert_eq!(paired(&plain, &timing(3, 1.0)), [[piece(9, 3.5), piece(3, 1.0)]]);
    }

    #[test]
    fn drift_is_that_of_plain_passes_over_the_quarters_of_a_run() {
        let of = |passes: &[f64]| {
            let timings: Vec<Timing> =
                passes.iter().map(|&pass| Timing { pass_s: Some(pass), ..timing(1, 1.0) }).collect();
            drift(&timings.iter().collect::<Vec<_>>())
        };
        assert!(of(&[2.0; 8]).unwrap().abs() < 1e-12);
        // One slow moment is no drift; a machine that stays slower is.
        assert!(of(&[1.0, 1.0, 1.0, 9.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]).unwrap() < 1e-12);
        assert!((of(&[1.0, 1.0, 1.0, 1.0, 1.2, 1.2, 1.2, 1.2]).unwrap() - 0.2).abs() < 1e-12);
        assert!((of(&[1.3, 1.3, 1.2, 1.2, 1.1, 1.1, 1.0, 1.0]).unwrap() - 0.3).abs() < 1e-12);
        assert_eq!(of(&[1.0; 7]), None);
        assert_eq!(drift(&[&timing(1, 1.0); 9]), None);
    }
}
