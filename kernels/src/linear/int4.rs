//! Weights in four bits, as they are in GGUF files: panels of 32 outputs, sums in integers.
//!
//! A weight is w = d·q + m with q in 0 … 15 and one step d and one minimum m, in half precision, per output and group of 32
//! inputs. The Q4_0, Q4_1 and Q4_K formats all have this form, so the panels find it again in the values of such a file: those of
//! Q4_0 and Q4_1 as they are, those of Q4_K, whose steps and minima are products, to half precision. Weights that are not of this
//! form are refused ([`Int4Panels::pack`]), never rounded to it.
//!
//! An activation row is rounded to 16 bits with one scale, as in [`super::int8`]: x ≈ s·(256·high + low), both bytes signed.
//! The sum of a group is exact in 32-bit integers and in f32, so that y = s · Σ_g (d_g · Σ q·x + m_g · Σ x) has one order of
//! operations, the groups', and all kernels for processors with FMA give the same bits for a row, whatever the rows around it.
//!
//! Panels hold blocks of 16 outputs and 32 inputs: four lines of 64 bytes, in each the weights of four inputs of every output
//! in the low half-bytes and of the next four in the high ones, then 16 steps and 16 minima.

use std::mem::MaybeUninit;

use half::f16;
use rayon::prelude::*;

use super::aligned::Aligned;
use super::int8::{AMX_ROWS, IntLevel, MOST, RoundedRows, magnitude, rounded};
use super::packed::PANEL;
use crate::multiversion;
use crate::rows::Rows;
use crate::threads::Shared;

/// Inputs that share a step and a minimum; rows are padded to an even number of groups.
pub(super) const GROUP: usize = 32;
/// Outputs of a block.
pub(super) const HALF: usize = PANEL / 2;
/// Bytes of a line of a block.
pub(super) const LINE: usize = 64;
/// Lines of a block.
pub(super) const LINES: usize = HALF * GROUP / 2 / LINE;
/// Bytes of a block: the weights, then steps and minima.
pub(super) const BLOCK: usize = LINES * LINE + 2 * 2 * HALF;
/// Rows of a register tile of VNNI.
pub(super) const VNNI_ROWS: usize = 8;
/// Largest error of a value that its group represents, as a part of the group's largest magnitude: room for steps and minima
/// in half precision, and half of what eight-bit weights lose.
const TOLERANCE: f32 = 1.0 / 512.0;

/// Packed weights.
#[derive(Debug)]
pub(super) struct Int4Panels {
    /// `[panel][2][group][BLOCK]`
    blocks: Aligned<u8>,
    groups: usize,
    level: IntLevel,
}

/// Activation rows for the four-bit kernels.
pub(super) struct Int4Rows {
    /// Of each row all high bytes, then all low bytes.
    pub(super) rounded: RoundedRows,
    /// Σ of the rounded values of each group, `[row][group]`, with [`AMX_ROWS`] rows more.
    sums: Vec<f32>,
}

/// The best kernels of this processor.
fn level() -> IntLevel {
    match IntLevel::detect() {
        #[cfg(target_arch = "x86_64")]
        IntLevel::Avx2 if !is_x86_feature_detected!("f16c") => IntLevel::Portable,
        level => level,
    }
}

/// A few activation rows.
#[derive(Clone, Copy)]
pub(super) struct TileRows<'a> {
    /// Bytes of the rows; see [`Int4Rows`].
    pub(super) values: &'a [u8],
    /// `[row][group]`
    pub(super) sums: &'a [f32],
    pub(super) count: usize,
    pub(super) groups: usize,
}

/// A group of weights in four bits.
#[derive(Debug, Clone, Copy)]
struct Group {
    /// Negative where the values count down.
    step: f16,
    /// The value of 0.
    minimum: f16,
    values: [u8; GROUP],
    /// Largest distance of a value from the weight that it stands for.
    error: f32,
}

multiversion! {
    /// The group's four-bit form, if it has one: the value at either end counts as 0, and the other end is 1 to 15 steps away, as
    /// the values may leave an end of their scale unused. The closest of all is chosen.
    fn four_bits(group: &[f32]) -> Option<Group> {
        let (low, high) = group.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(l, h), &w| (l.min(w), h.max(w)));
        let mut weights = [low; GROUP];
        weights[..group.len()].copy_from_slice(group);
        let mut best: Option<Group> = None;
        for steps in (1..=15).rev() {
            for (from, to) in [(low, high), (high, low)] {
                let found = spaced(&weights, from, (to - from) / steps as f32);
                if best.is_none_or(|best| found.error < best.error) {
                    best = Some(found);
                }
                if found.error == 0.0 {
                    return best;
                }
            }
        }
        let most = low.abs().max(high.abs()) * TOLERANCE;
        // A group with what is not a number has an error that is not one either.
        best.filter(|best| best.error <= most && most.is_finite())
    }
}

/// The group as multiples of a step from a minimum.
#[inline(always)]
#[expect(clippy::inline_always, reason = "called inside multiversioned loops")]
fn spaced(weights: &[f32; GROUP], minimum: f32, step: f32) -> Group {
    let (minimum, step) = (f16::from_f32(minimum), f16::from_f32(step));
    let (base, width) = (minimum.to_f32(), step.to_f32());
    let inverse = if width == 0.0 { 0.0 } else { 1.0 / width };
    let mut values = [0u8; GROUP];
    let mut errors = [0f32; GROUP];
    for ((value, error), &w) in values.iter_mut().zip(&mut errors).zip(weights) {
        let steps = ((w - base) * inverse).clamp(0.0, 15.0);
        // 1.5·2²³ shifts the integer part of a sum to the lowest bits.
        let rounded = steps + 12_582_912.0;
        *value = rounded.to_bits() as u8;
        *error = (rounded - 12_582_912.0) * width + base - w;
    }
    Group { step, minimum, values, error: magnitude(&errors) }
}

impl Int4Panels {
    /// Packs weights whose values are of the four-bit form, and says no to others; `row(output)` gives an output's weights.
    pub(super) fn pack<'a>(inputs: usize, outputs: usize, row: impl Fn(usize) -> &'a [f32] + Sync) -> Option<Self> {
        // The tile unit takes them in pairs.
        let groups = inputs.div_ceil(GROUP).next_multiple_of(2);
        let mut blocks = Aligned::<u8>::zeros(outputs.div_ceil(PANEL) * 2 * groups * BLOCK);
        let all = blocks.par_chunks_mut(groups * BLOCK).enumerate().all(|(half, blocks)| {
            let first = (half * HALF).min(outputs);
            (first..(first + HALF).min(outputs)).enumerate().all(|(lane, output)| {
                let parts = row(output).chunks(GROUP);
                blocks.chunks_exact_mut(BLOCK).zip(parts).all(|(block, part)| {
                    let Some(Group { step, minimum, values, .. }) = four_bits(part) else { return false };
                    for (k, value) in values.into_iter().enumerate().take(part.len()) {
                        block[k / 8 * LINE + lane * 4 + k % 4] |= value << (k / 4 % 2 * 4);
                    }
                    let (_, scales) = block.split_at_mut(LINES * LINE);
                    scales[2 * lane..][..2].copy_from_slice(&step.to_le_bytes());
                    scales[2 * (HALF + lane)..][..2].copy_from_slice(&minimum.to_le_bytes());
                    true
                })
            })
        });
        all.then(|| Self { blocks, groups, level: level() })
    }

    /// Bytes that the panels take.
    pub(super) fn bytes(&self) -> usize {
        self.blocks.len()
    }

    /// Runs them on other kernels.
    #[cfg(test)]
    pub(super) fn set_level(&mut self, level: IntLevel) {
        self.level = level;
    }

    /// Rounds activation rows to 16 bits.
    pub(super) fn quantise(&self, x: Rows<'_>) -> Int4Rows {
        // The tile unit's kernel reads some rows more than there are.
        let mut sums = vec![0f32; (x.count + AMX_ROWS) * self.groups];
        let out = Shared::new(sums.as_mut_ptr());
        let rounded = RoundedRows::new(x, self.level, 2 * GROUP * self.groups, |i, x, values| {
            // SAFETY: rows lie inside the array, and each is written by exactly one share.
            round_signed(x, values, unsafe { out.part(i * self.groups, self.groups) })
        });
        Int4Rows { rounded, sums }
    }

    /// Outputs of one panel for rows `first..first + count`, at most [`RoundedRows::tile_rows`] of them, before the rows' scales.
    pub(super) fn tile(&self, rows: &Int4Rows, panel: usize, first: usize, count: usize, tile: &mut [[f32; PANEL]]) {
        let groups = self.groups;
        let values = &rows.rounded.values[first * 2 * GROUP * groups..];
        let x = TileRows { values, sums: &rows.sums[first * groups..], count, groups };
        let span = groups * BLOCK;
        for half in 0..2 {
            let blocks = &self.blocks[(panel * 2 + half) * span..][..span];
            match self.level {
                #[cfg(target_arch = "x86_64")]
                // SAFETY: the level says that the unit may be used, and the caller has configured it for the batch of these rows.
                IntLevel::Amx if rows.rounded.amx() => unsafe { super::amx4::tile(blocks, x, half, tile) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: the level says that the processor has these features.
                IntLevel::Amx | IntLevel::Vnni => unsafe { x86::vnni(blocks, x, half, tile) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: as above.
                IntLevel::Avx2 => unsafe { x86::avx2(blocks, x, half, tile) },
                _ => portable(blocks, x, half, tile),
            }
        }
    }
}

multiversion! {
    /// Rounds a row to high bytes, then low bytes, with zeros at the end of both where the row is shorter, and the sums of its groups;
    /// returns its scale, NaN for a row that holds one.
    fn round_signed(x: &[f32], out: &mut [MaybeUninit<u8>], sums: &mut [f32]) -> f32 {
        let largest = magnitude(x);
        let inverse = if largest > 0.0 { MOST / largest } else { 0.0 };
        let (high, low) = out.split_at_mut(out.len() / 2);
        let groups = high.chunks_exact_mut(GROUP).zip(low.chunks_exact_mut(GROUP)).zip(sums);
        // The last group may be one that pads.
        let parts = x.chunks(GROUP).chain(std::iter::repeat(&[][..]));
        for (((high, low), sum), part) in groups.zip(parts) {
            let mut total = 0i32;
            let ((high, high_end), (low, low_end)) = (high.split_at_mut(part.len()), low.split_at_mut(part.len()));
            for ((x, high), low) in part.iter().zip(high).zip(low) {
                let value = rounded(*x, inverse);
                total += i32::from(value.cast_signed());
                let shifted = value.wrapping_add(128);
                high.write((shifted >> 8) as u8);
                low.write(shifted as u8 ^ 128);
            }
            high_end.fill(MaybeUninit::new(0));
            low_end.fill(MaybeUninit::new(0));
            *sum = total as f32;
        }
        largest / MOST
    }
}

fn portable(blocks: &[u8], x: TileRows<'_>, half: usize, tile: &mut [[f32; PANEL]]) {
    let depth = x.groups * GROUP;
    let rows = x.values.chunks_exact(2 * depth).zip(x.sums.chunks_exact(x.groups));
    for (tile, (row, sums)) in tile.iter_mut().zip(rows).take(x.count) {
        let out = &mut tile[half * HALF..][..HALF];
        out.fill(0.0);
        let (high, low) = row.split_at(depth);
        let groups = high.chunks_exact(GROUP).zip(low.chunks_exact(GROUP)).zip(sums);
        for (block, ((high, low), sum)) in blocks.chunks_exact(BLOCK).zip(groups) {
            let (weights, scales) = block.split_at(LINES * LINE);
            let (steps, minima) = scales.split_at(2 * HALF);
            for (lane, out) in out.iter_mut().enumerate() {
                let mut products = 0i32;
                for k in 0..GROUP {
                    let q = weights[k / 8 * LINE + lane * 4 + k % 4] >> (k / 4 % 2 * 4) & 15;
                    let x = i32::from(high[k].cast_signed()) * 256 + i32::from(low[k].cast_signed());
                    products += i32::from(q) * x;
                }
                let half_at = |bytes: &[u8]| f16::from_le_bytes([bytes[2 * lane], bytes[2 * lane + 1]]).to_f32();
                *out += products as f32 * half_at(steps);
                *out += sum * half_at(minima);
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    //! Register tiles for AVX-512 VNNI (rows × 16) and AVX2 (rows × 8, twice).

    use std::arch::x86_64::{
        _MM_HINT_T0, _mm_loadu_si128, _mm_prefetch, _mm256_add_epi16, _mm256_add_epi32, _mm256_and_si256,
        _mm256_cvtepi32_ps, _mm256_cvtph_ps, _mm256_fmadd_ps, _mm256_loadu_si256, _mm256_madd_epi16,
        _mm256_maddubs_epi16, _mm256_set1_epi8, _mm256_set1_epi16, _mm256_set1_epi32, _mm256_set1_ps,
        _mm256_setzero_ps, _mm256_setzero_si256, _mm256_slli_epi32, _mm256_srli_epi16, _mm256_storeu_ps,
        _mm512_add_epi32, _mm512_and_si512, _mm512_cvtepi32_ps, _mm512_cvtph_ps, _mm512_dpbusd_epi32, _mm512_fmadd_ps,
        _mm512_loadu_si512, _mm512_set1_epi8, _mm512_set1_epi32, _mm512_set1_ps, _mm512_setzero_ps,
        _mm512_setzero_si512, _mm512_slli_epi32, _mm512_srli_epi16, _mm512_storeu_ps,
    };

    use super::{BLOCK, GROUP, HALF, LINE, LINES, PANEL, TileRows, VNNI_ROWS};

    /// Bytes that weights are fetched ahead.
    const AHEAD: usize = 4096;

    fn check(blocks: &[u8], x: TileRows<'_>, half: usize, tile: &[[f32; PANEL]]) {
        assert!(blocks.len() == x.groups * BLOCK && x.values.len() >= x.count * 2 * GROUP * x.groups);
        assert!(x.sums.len() >= x.count * x.groups && tile.len() >= x.count && half < 2);
    }

    /// # Safety
    /// The processor has AVX-512 VNNI.
    pub(super) unsafe fn vnni(blocks: &[u8], x: TileRows<'_>, half: usize, tile: &mut [[f32; PANEL]]) {
        check(blocks, x, half, tile);
        match x.count {
            // SAFETY: promised by the caller; the lengths are checked.
            1 => unsafe { vnni_rows::<1>(blocks, x, half, tile) },
            // SAFETY: as above.
            2 => unsafe { vnni_rows::<2>(blocks, x, half, tile) },
            // SAFETY: as above.
            3 => unsafe { vnni_rows::<3>(blocks, x, half, tile) },
            // SAFETY: as above.
            4 => unsafe { vnni_rows::<4>(blocks, x, half, tile) },
            // SAFETY: as above.
            5 => unsafe { vnni_rows::<5>(blocks, x, half, tile) },
            // SAFETY: as above.
            6 => unsafe { vnni_rows::<6>(blocks, x, half, tile) },
            // SAFETY: as above.
            7 => unsafe { vnni_rows::<7>(blocks, x, half, tile) },
            // SAFETY: as above.
            VNNI_ROWS => unsafe { vnni_rows::<VNNI_ROWS>(blocks, x, half, tile) },
            rows => unreachable!("{rows} rows in a tile of {VNNI_ROWS}"),
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    unsafe fn vnni_rows<const R: usize>(blocks: &[u8], x: TileRows<'_>, half: usize, tile: &mut [[f32; PANEL]]) {
        let depth = x.groups * GROUP;
        let mut block = blocks.as_ptr();
        let mut values = x.values.as_ptr();
        let mut totals = x.sums.as_ptr();
        let nibble = _mm512_set1_epi8(15);
        let mut out = [_mm512_setzero_ps(); R];
        for _ in 0..x.groups {
            // SAFETY: the lengths are checked by the caller: blocks of all groups, R rows of values and sums.
            unsafe {
                let (mut high, mut low) = ([_mm512_setzero_si512(); R], [_mm512_setzero_si512(); R]);
                _mm_prefetch::<_MM_HINT_T0>(block.wrapping_add(AHEAD + LINES * LINE).cast());
                for line in 0..LINES {
                    _mm_prefetch::<_MM_HINT_T0>(block.wrapping_add(AHEAD + line * LINE).cast());
                    let both = _mm512_loadu_si512(block.add(line * LINE).cast());
                    let quads =
                        [_mm512_and_si512(both, nibble), _mm512_and_si512(_mm512_srli_epi16::<4>(both), nibble)];
                    for (i, quad) in quads.into_iter().enumerate() {
                        for r in 0..R {
                            let at = values.add(r * 2 * depth + (2 * line + i) * 4);
                            let x_high = _mm512_set1_epi32(at.cast::<i32>().read_unaligned());
                            let x_low = _mm512_set1_epi32(at.add(depth).cast::<i32>().read_unaligned());
                            high[r] = _mm512_dpbusd_epi32(high[r], quad, x_high);
                            low[r] = _mm512_dpbusd_epi32(low[r], quad, x_low);
                        }
                    }
                }
                let scales = block.add(LINES * LINE);
                let steps = _mm512_cvtph_ps(_mm256_loadu_si256(scales.cast()));
                let minima = _mm512_cvtph_ps(_mm256_loadu_si256(scales.add(2 * HALF).cast()));
                for r in 0..R {
                    let sum = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32::<8>(high[r]), low[r]));
                    let total = _mm512_set1_ps(*totals.add(r * x.groups));
                    out[r] = _mm512_fmadd_ps(total, minima, _mm512_fmadd_ps(sum, steps, out[r]));
                }
                block = block.add(BLOCK);
                values = values.add(GROUP);
                totals = totals.add(1);
            }
        }
        for (row, out) in tile.iter_mut().zip(out) {
            // SAFETY: a tile row holds two halves of 16 values.
            unsafe { _mm512_storeu_ps(row.as_mut_ptr().add(half * HALF), out) };
        }
    }

    /// # Safety
    /// The processor has AVX2, FMA and F16C.
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) unsafe fn avx2(blocks: &[u8], x: TileRows<'_>, half: usize, tile: &mut [[f32; PANEL]]) {
        check(blocks, x, half, tile);
        let depth = x.groups * GROUP;
        let nibble = _mm256_set1_epi8(15);
        for (r, row) in tile.iter_mut().enumerate().take(x.count) {
            for quarter in 0..2 {
                let mut out = _mm256_setzero_ps();
                for g in 0..x.groups {
                    // SAFETY: the lengths are checked above.
                    unsafe {
                        let block = blocks.as_ptr().add(g * BLOCK);
                        let values = x.values.as_ptr().add(r * 2 * depth);
                        // A pair of products is at most 2·15·128, and eight pairs still fit 16 bits.
                        let (mut high, mut low) = (_mm256_setzero_si256(), _mm256_setzero_si256());
                        for line in 0..LINES {
                            let both = _mm256_loadu_si256(block.add(line * LINE + quarter * LINE / 2).cast());
                            let quads = [
                                _mm256_and_si256(both, nibble),
                                _mm256_and_si256(_mm256_srli_epi16::<4>(both), nibble),
                            ];
                            for (i, quad) in quads.into_iter().enumerate() {
                                let at = values.add(g * GROUP + (2 * line + i) * 4);
                                let x_high = _mm256_set1_epi32(at.cast::<i32>().read_unaligned());
                                let x_low = _mm256_set1_epi32(at.add(depth).cast::<i32>().read_unaligned());
                                high = _mm256_add_epi16(high, _mm256_maddubs_epi16(quad, x_high));
                                low = _mm256_add_epi16(low, _mm256_maddubs_epi16(quad, x_low));
                            }
                        }
                        let ones = _mm256_set1_epi16(1);
                        let (high, low) = (_mm256_madd_epi16(high, ones), _mm256_madd_epi16(low, ones));
                        let sum = _mm256_cvtepi32_ps(_mm256_add_epi32(_mm256_slli_epi32::<8>(high), low));
                        let scales = block.add(LINES * LINE + quarter * HALF);
                        let steps = _mm256_cvtph_ps(_mm_loadu_si128(scales.cast()));
                        let minima = _mm256_cvtph_ps(_mm_loadu_si128(scales.add(2 * HALF).cast()));
                        let total = _mm256_set1_ps(x.sums[r * x.groups + g]);
                        out = _mm256_fmadd_ps(total, minima, _mm256_fmadd_ps(sum, steps, out));
                    }
                }
                // SAFETY: a tile row holds four parts of 8 values.
                unsafe { _mm256_storeu_ps(row.as_mut_ptr().add(half * HALF + quarter * 8), out) };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values as each of the formats makes them, with levels of 1 to 13.
    #[test]
    fn groups_of_four_bit_files_are_found_again() {
        let half = |x: f32| f16::from_f32(x).to_f32();
        let levels: [f32; GROUP] = std::array::from_fn(|i| (1 + i * 7 % 13) as f32);
        let q4_1 = |d: f32, m: f32| levels.map(|q| half(d) * q + half(m));
        // Q4_0 counts from −8, also with steps below zero.
        let q4_0 = |d: f32| levels.map(|q| half(d) * (q - 1.0 - 8.0));
        let offset = levels.map(|q| 100.0 + 0.25 * q);
        for exact in [q4_1(0.0371, -0.213), q4_1(0.25, 7.0), q4_0(0.0613), q4_0(-0.0613), offset, [0.25; GROUP]] {
            let found = four_bits(&exact).expect("a group of four bits");
            assert_eq!(found.error, 0.0, "{exact:?}: {found:?}");
            let again = found.values.map(|q| found.step.to_f32() * f32::from(q) + found.minimum.to_f32());
            assert_eq!(again, exact);
        }
        // Q4_K multiplies half-precision numbers by integers, which half precision cannot hold.
        let (d, m) = (half(0.00113) * 47.0, half(0.0037) * 53.0);
        let q4_k = levels.map(|q| d * q - m);
        let found = four_bits(&q4_k).expect("Q4_K has this form");
        // Half a unit in the last place of the step, fifteen times, and one of the minimum.
        assert!(found.error < 15.0 * d / 2048.0 + m / 2048.0, "{found:?}");
        assert!(four_bits(&[0.5, 0.25, 0.0]).is_some());
    }

    #[test]
    fn other_values_are_refused() {
        let q8: Vec<f32> = (0..32).map(|i| (i * 37 % 255) as f32 - 127.0).collect();
        assert!(four_bits(&q8).is_none());
        for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e30] {
            for group in [[odd, 0.0, 1.0], [1.0, 0.0, odd]] {
                assert!(four_bits(&group).is_none(), "{group:?}");
            }
        }
        let rows = [vec![0.0; 32], q8];
        assert!(Int4Panels::pack(32, 2, |output| &rows[output]).is_none());
    }
}
