//! Random numbers as a pure function of (seed, purpose, position, index): no state, no order of calls.
//!
//! A request's draws therefore do not depend on what else is in the batch, on threads, or on how a run was split by a resume.
//! The generator is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): ten rounds of
//! multiply and xor that turn a 128-bit counter into 128 random bits under a 64-bit key.
//!
//! Key: the seed. Counter: words 0 and 1 hold the block index (56 bits) and the purpose (8 bits), words 2 and 3 the position.

use std::collections::BTreeSet;

/// Purpose of a draw. Draws of different purposes are independent under one seed.
///
/// The numbers are part of every recorded result: never renumber, only add.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Stream {
    /// Choice of a draft token; position = position of the token in its sequence.
    Draft = 1,
    /// Accept-or-reject test of a draft token; position = position of the token in its sequence.
    Accept = 2,
    /// Token taken from the target: residual, bonus, or plain decoding; position = position of the token in its sequence.
    Target = 3,
    /// Anchors of a training sequence; position = global sample number.
    Anchors = 4,
    /// Order of a data set; position = epoch.
    Shuffle = 5,
    /// Initial weights; position = number of the tensor, index = element.
    Init = 6,
    /// Choice of evaluation prompts; position = number of the task.
    Prompts = 7,
    /// Random resampling in statistics, such as a bootstrap interval; position = repetition.
    Resample = 8,
}

/// The seed of the `number`-th of several texts that share a seed, such as the choices of one request; the first one's is the
/// shared seed itself.
///
/// A sum of both would give the second text of one seed the draws of the first text of the next. Here the numbers go through
/// the mixing function of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014),
/// so that neighbours have nothing to do with each other.
pub const fn derived_seed(seed: u64, number: u64) -> u64 {
    if number == 0 { seed } else { mixed(seed ^ mixed(number)) }
}

/// One step of SplitMix64.
const fn mixed(value: u64) -> u64 {
    let value = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let value = (value ^ value >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let value = (value ^ value >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    value ^ value >> 31
}

/// The draws of one (seed, purpose, position); each method takes the index of the draw.
///
/// Draws of different kinds (`u32_at`, `u64_at`, `normal`) at nearby indices share bits: use one kind per key.
///
/// ```
/// use deepspec_models::speculate::{CounterRng, Stream};
/// let draws = CounterRng::new(42, Stream::Accept, 17);
/// assert_eq!(draws.uniform_f64(0), draws.uniform_f64(0));
/// assert_ne!(draws.uniform_f64(0), draws.uniform_f64(1));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CounterRng {
    seed: u64,
    stream: Stream,
    position: u64,
}

impl CounterRng {
    /// The draws of one key.
    pub const fn new(seed: u64, stream: Stream, position: u64) -> Self {
        Self { seed, stream, position }
    }

    /// 32 random bits; four indices share one block.
    pub fn u32_at(&self, index: u64) -> u32 {
        self.block(index / 4)[(index % 4) as usize]
    }

    /// 64 random bits; two indices share one block.
    pub fn u64_at(&self, index: u64) -> u64 {
        let pair = self.pair(index / 2);
        if index.is_multiple_of(2) { pair.0 } else { pair.1 }
    }

    /// Uniform in [0, 1), a multiple of 2^-24.
    pub fn uniform_f32(&self, index: u64) -> f32 {
        (self.u32_at(index) >> 8) as f32 * (1.0 / (1 << 24) as f32)
    }

    /// Uniform in [0, 1), a multiple of 2^-53.
    pub fn uniform_f64(&self, index: u64) -> f64 {
        unit_interval(self.u64_at(index))
    }

    /// Uniform integer in `0..bound`, or 0 when `bound` is 0. The bias is below `bound` / 2^64.
    pub fn below(&self, index: u64, bound: u64) -> u64 {
        ((u128::from(self.u64_at(index)) * u128::from(bound)) >> 64) as u64
    }

    /// Standard normal by the Box–Muller transform, one block per draw.
    pub fn normal(&self, index: u64) -> f64 {
        let (radius_bits, angle_bits) = self.pair(index);
        let radius = (-2.0 * (1.0 - unit_interval(radius_bits)).ln()).sqrt();
        radius * (std::f64::consts::TAU * unit_interval(angle_bits)).cos()
    }

    /// `count` different numbers of `0..population`, ascending, every subset equally likely (Floyd's algorithm). All of them
    /// when `count` is not below `population`.
    pub fn choose_sorted(&self, population: usize, count: usize) -> Vec<usize> {
        let mut chosen = BTreeSet::new();
        for last in population.saturating_sub(count)..population {
            let candidate = self.below(last as u64, last as u64 + 1) as usize;
            if !chosen.insert(candidate) {
                chosen.insert(last);
            }
        }
        chosen.into_iter().collect()
    }

    /// Puts `items` into a random order, every order equally likely (Fisher–Yates).
    pub fn shuffle<T>(&self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last as u64, last as u64 + 1) as usize);
        }
    }

    fn pair(&self, index: u64) -> (u64, u64) {
        let [a, b, c, d] = self.block(index);
        (u64::from(b) << 32 | u64::from(a), u64::from(d) << 32 | u64::from(c))
    }

    fn block(&self, index: u64) -> [u32; 4] {
        let word = u64::from(self.stream as u8) << 56 | index & ((1 << 56) - 1);
        let counter = [word as u32, (word >> 32) as u32, self.position as u32, (self.position >> 32) as u32];
        philox4x32_10(counter, [self.seed as u32, (self.seed >> 32) as u32])
    }
}

/// Top 53 bits as a number in [0, 1).
fn unit_interval(bits: u64) -> f64 {
    (bits >> 11) as f64 * (1.0 / (1_u64 << 53) as f64)
}

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
/// Key increments: the golden ratio and the square root of 3 minus 1, as 32-bit fractions.
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

fn philox4x32_10(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let first = u64::from(MULTIPLIERS[0]) * u64::from(counter[0]);
        let second = u64::from(MULTIPLIERS[1]) * u64::from(counter[2]);
        counter = [
            (second >> 32) as u32 ^ counter[1] ^ key[0],
            second as u32,
            (first >> 32) as u32 ^ counter[3] ^ key[1],
            first as u32,
        ];
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
    }
    counter
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Known answers published with the algorithm.
    #[test]
    fn philox_gives_the_published_answers() {
        let cases = [
            ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            ([u32::MAX; 4], [u32::MAX; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ];
        for (counter, key, expected) in cases {
            assert_eq!(philox4x32_10(counter, key), expected);
        }
    }

    #[test]
    fn every_part_of_the_key_changes_the_draw() {
        let keys = [
            (1, Stream::Draft, 0, 0),
            (1 << 32, Stream::Draft, 0, 0),
            (1, Stream::Accept, 0, 0),
            (1, Stream::Target, 0, 0),
            (1, Stream::Draft, 1, 0),
            (1, Stream::Draft, 1 << 32, 0),
            (1, Stream::Draft, 0, 1),
            (1, Stream::Draft, 0, 1 << 40),
        ];
        let draws: BTreeSet<u64> = keys
            .iter()
            .map(|&(seed, stream, position, index)| CounterRng::new(seed, stream, position).u64_at(index))
            .collect();
        assert_eq!(draws.len(), keys.len());
    }

    /// The first numbers of the generator with seed 0, as published with it.
    #[test]
    fn mixing_gives_the_published_answers() {
        let weyl = 0x9E37_79B9_7F4A_7C15_u64;
        let found = [0, 1, 2].map(|step| mixed(weyl.wrapping_mul(step)));
        assert_eq!(found, [0xE220_A839_7B1D_CDAF, 0x6E78_9E6A_A1B9_65F4, 0x06C4_5D18_8009_454F]);
    }

    #[test]
    fn texts_of_neighbouring_seeds_share_no_draws() {
        let seeds = (0..128).chain([u64::MAX - 1, u64::MAX, 1 << 63, (1 << 63) - 1]);
        let mut found = BTreeSet::new();
        let mut first_draws = BTreeSet::new();
        let mut pairs = 0;
        for seed in seeds {
            assert_eq!(derived_seed(seed, 0), seed, "the first text has the seed itself");
            for number in 0..128 {
                let derived = derived_seed(seed, number);
                found.insert(derived);
                first_draws.insert(CounterRng::new(derived, Stream::Target, 0).u64_at(0));
                pairs += 1;
            }
        }
        assert_eq!((found.len(), first_draws.len()), (pairs, pairs));
    }

    #[test]
    fn recorded_results_stay_reproducible() {
        let draws = CounterRng::new(42, Stream::Accept, 7);
        let direct = philox4x32_10([0, 2 << 24, 7, 0], [42, 0]);
        assert_eq!([0, 1, 2, 3].map(|index| draws.u32_at(index)), direct);
        assert_eq!(draws.u64_at(1), u64::from(direct[3]) << 32 | u64::from(direct[2]));
    }

    #[test]
    fn uniforms_stay_below_one() {
        assert!(unit_interval(u64::MAX) < 1.0);
        assert_eq!(unit_interval(0), 0.0);
    }

    #[test]
    fn moments_are_those_of_the_distribution() {
        const DRAWS: u64 = 200_000;
        let rng = CounterRng::new(3, Stream::Init, 0);
        let mean = |value: &dyn Fn(u64) -> f64| (0..DRAWS).map(value).sum::<f64>() / DRAWS as f64;
        // Bounds are five standard errors of each mean.
        assert!((mean(&|i| rng.uniform_f64(i)) - 0.5).abs() < 0.0033);
        assert!((mean(&|i| f64::from(rng.uniform_f32(i))) - 0.5).abs() < 0.0033);
        assert!((mean(&|i| rng.uniform_f64(i) * rng.uniform_f64(i + 1)) - 0.25).abs() < 0.0026);
        assert!(mean(&|i| rng.normal(i)).abs() < 0.0112);
        assert!((mean(&|i| rng.normal(i).powi(2)) - 1.0).abs() < 0.0159);
        assert!((mean(&|i| rng.normal(i).powi(4)) - 3.0).abs() < 0.11);
    }

    #[test]
    fn every_subset_and_every_order_is_equally_likely() {
        const DRAWS: usize = 60_000;
        let mut subsets = std::collections::BTreeMap::new();
        let mut orders = std::collections::BTreeMap::new();
        for position in 0..DRAWS as u64 {
            *subsets.entry(CounterRng::new(9, Stream::Anchors, position).choose_sorted(5, 2)).or_insert(0_usize) += 1;
            let mut items = [0, 1, 2];
            CounterRng::new(9, Stream::Shuffle, position).shuffle(&mut items);
            *orders.entry(items).or_insert(0_usize) += 1;
        }
        assert_eq!((subsets.len(), orders.len()), (10, 6));
        // Five standard deviations of a binomial count.
        assert!(subsets.values().all(|&count| count.abs_diff(DRAWS / 10) < 368), "{subsets:?}");
        assert!(orders.values().all(|&count| count.abs_diff(DRAWS / 6) < 457), "{orders:?}");
    }

    proptest! {
        #[test]
        fn choose_sorted_gives_distinct_numbers_in_order(seed: u64, population in 0_usize..300, count in 0_usize..300) {
            let chosen = CounterRng::new(seed, Stream::Anchors, 0).choose_sorted(population, count);
            prop_assert_eq!(chosen.len(), count.min(population));
            prop_assert!(chosen.is_sorted_by(|a, b| a < b));
            prop_assert!(chosen.iter().all(|&number| number < population));
        }

        #[test]
        fn shuffle_keeps_every_item(seed: u64, length in 0_usize..200) {
            let mut items: Vec<usize> = (0..length).collect();
            CounterRng::new(seed, Stream::Shuffle, 0).shuffle(&mut items);
            items.sort_unstable();
            prop_assert!(items.into_iter().eq(0..length));
        }

        #[test]
        fn below_stays_below(seed: u64, index in 0_u64..1000, bound in 1_u64..) {
            prop_assert!(CounterRng::new(seed, Stream::Shuffle, 0).below(index, bound) < bound);
        }
    }
}
