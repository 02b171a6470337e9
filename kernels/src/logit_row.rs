//! Passes over one row of logits, which sampling makes for every token: first maximum, gap below it, powers.

use crate::multiversion;

const LANES: usize = 16;

/// Position and value of the largest element, the first of equals; of the first NaN, if there is one. `None` for an empty
/// row.
pub fn argmax(row: &[f32]) -> Option<(usize, f32)> {
    let (maximum, has_nan) = maximum(row);
    let at = if has_nan { row.iter().position(|value| value.is_nan()) } else { position(row, maximum) };
    at.map(|at| (at, row[at]))
}

/// Gap between the two largest elements, 0 where the largest stands twice; infinite with fewer than two, and where the
/// second is negative infinity. NaN elements are ignored.
pub fn top_gap(row: &[f32]) -> f32 {
    let [best, second] = top_two(row);
    if second == f32::NEG_INFINITY { f32::INFINITY } else { best - second }
}

/// e^((x − shift) / temperature) of every element, which must be at most `shift`: rounded from a value whose relative
/// error is below 1e-11, since residuals of nearly equal distributions live off the last bit.
pub fn powers(row: &[f32], shift: f32, temperature: f32) -> Vec<f32> {
    let mut powers = row.to_vec();
    raise(&mut powers, shift, temperature);
    powers
}

/// e^x for x of at most 0, in f64 arithmetic without a branch: 2^n · e^r with |r| ≤ ½ ln 2 and the series up to r^9.
#[inline(always)]
fn power(x: f32) -> f32 {
    const ROUND: f64 = 6_755_399_441_055_744.0; // 1.5 · 2^52: adding it leaves an integer in the low mantissa bits
    const SERIES: [f64; 9] =
        [1.0 / 362_880.0, 1.0 / 40_320.0, 1.0 / 5_040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0];
    // Below this the result rounds to 0.
    let x = if x < -110.0 { -110.0 } else { x };
    let shifted = f64::from(x) * std::f64::consts::LOG2_E + ROUND;
    let r = f64::from(x) - (shifted - ROUND) * std::f64::consts::LN_2;
    let mut value = SERIES[0];
    for coefficient in &SERIES[1..] {
        value = value * r + coefficient;
    }
    let exponent = shifted.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(1023) << 52;
    ((value * r + 1.0) * f64::from_bits(exponent)) as f32
}

multiversion! {
    /// The largest element, without regard to NaN, and whether there is a NaN.
    fn maximum(row: &[f32]) -> (f32, bool) {
        let (mut lanes, mut nans) = ([f32::NEG_INFINITY; LANES], [0_u32; LANES]);
        let chunks = row.chunks_exact(LANES);
        let tail = chunks.remainder();
        for chunk in chunks {
            for lane in 0..LANES {
                let value = chunk[lane];
                lanes[lane] = if value > lanes[lane] { value } else { lanes[lane] };
                nans[lane] |= u32::from(value.is_nan());
            }
        }
        let largest = lanes.iter().chain(tail).copied().fold(f32::NEG_INFINITY, f32::max);
        (largest, nans.iter().any(|&nan| nan > 0) || tail.iter().any(|value| value.is_nan()))
    }
}

multiversion! {
    fn position(row: &[f32], wanted: f32) -> Option<usize> {
        const BLOCK: usize = 256;
        // Whole blocks are compared without a branch, then the one with the value is searched.
        for (number, block) in row.chunks(BLOCK).enumerate() {
            let mut found = 0_u32;
            for &value in block {
                found |= u32::from(value == wanted);
            }
            if found > 0 {
                return block.iter().position(|&value| value == wanted).map(|at| number * BLOCK + at);
            }
        }
        None
    }
}

multiversion! {
    fn top_two(row: &[f32]) -> [f32; 2] {
        let (mut best, mut second) = ([f32::NEG_INFINITY; LANES], [f32::NEG_INFINITY; LANES]);
        let chunks = row.chunks_exact(LANES);
        let tail = chunks.remainder();
        for chunk in chunks {
            for lane in 0..LANES {
                let value = chunk[lane];
                let lower = if value > best[lane] { best[lane] } else { value };
                best[lane] = if value > best[lane] { value } else { best[lane] };
                second[lane] = if lower > second[lane] { lower } else { second[lane] };
            }
        }
        let mut top = [f32::NEG_INFINITY; 2];
        for &value in best.iter().chain(&second).chain(tail) {
            if value > top[0] {
                top = [value, top[0]];
            } else if value > top[1] {
                top[1] = value;
            }
        }
        top
    }
}

multiversion! {
    fn raise(row: &mut [f32], shift: f32, temperature: f32) {
        for value in row.iter_mut() {
            *value = power((*value - shift) / temperature);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows of many lengths with equal values, so that ties and every remainder occur.
    fn rows() -> impl Iterator<Item = Vec<f32>> {
        (1..600_usize).map(|n| (0..n).map(|i| ((i * 7919 + n * 31) % 97) as f32 / 8.0 - 6.0).collect())
    }

    #[test]
    fn argmax_is_the_first_maximum() {
        for row in rows() {
            let mut expected = 0;
            for i in 1..row.len() {
                if row[i] > row[expected] {
                    expected = i;
                }
            }
            assert_eq!(argmax(&row), Some((expected, row[expected])));
            let at = row.len() / 2;
            let mut broken = row;
            broken[at] = f32::NAN;
            let last = broken.len() - 1;
            broken[last] = f32::NAN;
            let (found, value) = argmax(&broken).unwrap();
            assert!(found == at && value.is_nan());
        }
        assert_eq!(argmax(&[]), None);
        assert_eq!(argmax(&[f32::NEG_INFINITY; 40]), Some((0, f32::NEG_INFINITY)));
    }

    #[test]
    fn the_gap_is_that_of_a_sorted_row() {
        for row in rows().filter(|row| row.len() > 1) {
            let mut sorted = row.clone();
            sorted.sort_unstable_by(|a, b| b.total_cmp(a));
            assert_eq!(top_gap(&row), sorted[0] - sorted[1], "{row:?}");
        }
        assert_eq!(top_gap(&[1.0]), f32::INFINITY);
        assert_eq!(top_gap(&[1.0, f32::NEG_INFINITY]), f32::INFINITY);
        assert_eq!(top_gap(&[2.0, 1.0, 2.0]), 0.0);
    }

    #[test]
    fn powers_are_those_of_f64_rounded() {
        let row: Vec<f32> = (0..12_000).map(|i| -(i as f32) / 100.0).collect();
        for (found, x) in powers(&row, 0.0, 1.0).into_iter().zip(&row) {
            let expected = f64::from(*x).exp();
            // Half a unit in the last place, or half the smallest number.
            assert!((f64::from(found) - expected).abs() <= (expected * 6.0e-8).max(7.1e-46), "e^{x} is {found}");
        }
        let scaled = powers(&[3.0, 1.0, f32::NEG_INFINITY], 3.0, 0.5);
        assert_eq!((scaled[0], scaled[2]), (1.0, 0.0));
        assert_eq!(scaled[1], (-4.0_f64).exp() as f32);
    }
}
