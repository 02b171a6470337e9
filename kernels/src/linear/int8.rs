//! Weights in eight bits: panels of 32 outputs, sums in integers.
//!
//! A weight is w ≈ s·q with q in −127 … 127 and one scale per output and group of 128 inputs. An activation row is rounded
//! to 16 bits with one scale: activations have outliers, and eight bits for them would cost more accuracy than eight bits
//! for the weights do. Products of a group are added in 32-bit integers, which is exact in any order, then scaled and
//! added to the output group by group: y = s_x · Σ_g s_wg · (Σ_k q_x·q_w). So all kernels for processors with FMA give the
//! same bits for a row, whatever the rows around it.
//!
//! Panels hold four inputs of each output side by side, `panel[k/4][32][4]`, which is what both the VNNI instruction and
//! the AMX tile unit read. These multiply unsigned by signed bytes, so there an activation is q + 32896 = 256·high + low,
//! in two bytes with a sum each; the surplus 32896·Σ q_w is known from the packed weights.

use std::mem::MaybeUninit;

use rayon::prelude::*;

use super::aligned::Aligned;
use super::packed::PANEL;
use crate::multiversion;
use crate::rows::Rows;
use crate::threads::{self, Shared};

/// Inputs that share a scale; the last group of a row may be shorter. The surplus of a group's sums, at most
/// 128 · 65535 · 127, still fits 32 bits.
pub(super) const GROUP: usize = 128;
/// Inputs of one step of the AMX unit; rows are padded to whole steps.
pub(super) const STEP: usize = 64;
/// Bytes of one panel's weights per step.
pub(super) const STEP_BYTES: usize = STEP * PANEL;
/// Largest magnitude of a rounded activation: 127·256 + 127.
pub(super) const MOST: f32 = 32639.0;
/// What makes it unsigned: 128·256 + 128.
pub(super) const SHIFT: i32 = 32896;
/// Rows of an AMX tile.
pub(super) const AMX_ROWS: usize = 16;
/// Rows of a register tile of VNNI: 6 × 2 bytes × 2 accumulators of 16 lanes.
pub(super) const VNNI_ROWS: usize = 6;
/// Rows from which the tile unit is faster than VNNI.
const AMX_FROM: usize = 3;

/// Instruction set of the integer kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum IntLevel {
    /// AVX-512 VNNI, and AMX tiles for more than a few rows.
    Amx,
    /// AVX-512 VNNI.
    Vnni,
    /// AVX2.
    Avx2,
    /// The platform's baseline.
    Portable,
}

impl IntLevel {
    /// Best one of this processor.
    pub(crate) fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            use crate::simd::{Level, level};
            match level() {
                Level::Avx512 if is_x86_feature_detected!("avx512vnni") => {
                    return if super::amx::usable() { Self::Amx } else { Self::Vnni };
                }
                Level::Avx512 | Level::Avx2 => return Self::Avx2,
                Level::Portable => {}
            }
        }
        Self::Portable
    }

    /// Name as printed in banners.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Amx => "amx",
            Self::Vnni => "avx512-vnni",
            Self::Avx2 => "avx2",
            Self::Portable => "portable",
        }
    }

    fn splits_bytes(self) -> bool {
        matches!(self, Self::Amx | Self::Vnni)
    }
}

/// Packed weights.
#[derive(Debug)]
pub(super) struct Int8Panels {
    /// `[panel][k/4][32][4]`
    weights: Aligned<i8>,
    /// `[panel][group][32]`
    scales: Aligned<f32>,
    /// Σ q of each group, `[panel][group][32]`
    sums: Aligned<i16>,
    /// Inputs, padded to whole steps.
    depth: usize,
    groups: usize,
    level: IntLevel,
}

/// One panel.
#[derive(Clone, Copy)]
pub(super) struct Panel<'a> {
    /// `[k/4][32][4]`
    pub(super) weights: &'a [i8],
    /// `[group][32]`
    pub(super) scales: &'a [f32],
    /// `[group][32]`
    pub(super) sums: &'a [i16],
}

/// Activation rows in 16 bits, for the kernels of either width of weights.
pub(super) struct RoundedRows {
    /// The bytes of each row, for the AMX unit padded to whole tiles.
    pub(super) values: Aligned<u8>,
    scales: Vec<f32>,
    amx: bool,
}

impl RoundedRows {
    /// Rounds all rows with `round`, which gets a row's number and values, fills its `bytes` and returns its scale.
    pub(super) fn new(
        x: Rows<'_>,
        level: IntLevel,
        bytes: usize,
        round: impl Fn(usize, &[f32], &mut [MaybeUninit<u8>]) -> f32 + Sync,
    ) -> Self {
        let amx = level == IntLevel::Amx && x.count >= AMX_FROM;
        // The unit is configured for the few rows of a small batch, and reads whole tiles of a larger one.
        let padded = if amx && x.count > AMX_ROWS / 2 { x.count.next_multiple_of(AMX_ROWS) } else { x.count };
        // SAFETY: the shares below write every row, the ones that pad included.
        let mut values = unsafe { Aligned::<u8>::unfilled(padded * bytes) };
        let mut scales = vec![0f32; x.count];
        let (out, out_scales) = (Shared::new(values.start().cast()), Shared::new(scales.as_mut_ptr()));
        let shares = if x.count * x.cols < threads::DEAR_WORTH_SHARING { 1 } else { threads::count() };
        threads::run(shares, |share| {
            for i in padded * share / shares..padded * (share + 1) / shares {
                // SAFETY: rows lie inside the arrays, and each is written by exactly one share.
                let values = unsafe { out.part(i * bytes, bytes) };
                if i < x.count {
                    // SAFETY: as above.
                    unsafe { out_scales.write(i, &[round(i, x.row(i), values)]) };
                } else {
                    values.fill(MaybeUninit::new(0));
                }
            }
        });
        Self { values, scales, amx }
    }

    /// Whether the tile unit takes these rows.
    pub(super) fn amx(&self) -> bool {
        self.amx
    }

    /// Number of rows, without those that pad.
    pub(super) fn count(&self) -> usize {
        self.scales.len()
    }

    /// What the outputs of a row are to be multiplied by.
    pub(super) fn scale(&self, row: usize) -> f32 {
        self.scales[row]
    }

    /// Rows that the kernels take at a time, where those of VNNI, AVX2 and portable code take `vnni`.
    pub(super) fn tile_rows(&self, vnni: usize) -> usize {
        if self.amx { AMX_ROWS } else { vnni }
    }
}

/// A few activation rows: `values` holds 2·depth bytes a row.
#[derive(Clone, Copy)]
pub(super) struct TileRows<'a> {
    /// Bytes of the rows; see [`Int8Panels::quantise`].
    pub(super) values: &'a [u8],
    pub(super) count: usize,
    /// Inputs, padded to whole steps.
    pub(super) depth: usize,
}

impl Int8Panels {
    /// Quantises and packs; `row(output)` gives an output's weights.
    pub(super) fn pack<'a>(inputs: usize, outputs: usize, row: impl Fn(usize) -> &'a [f32] + Sync) -> Self {
        let depth = inputs.next_multiple_of(STEP);
        let groups = depth.div_ceil(GROUP);
        let panels = outputs.div_ceil(PANEL);
        let mut weights = Aligned::<i8>::zeros(panels * depth * PANEL);
        let mut scales = Aligned::<f32>::zeros(panels * groups * PANEL);
        let mut sums = Aligned::<i16>::zeros(panels * groups * PANEL);
        let parts = weights
            .par_chunks_mut(depth * PANEL)
            .zip(scales.par_chunks_mut(groups * PANEL))
            .zip(sums.par_chunks_mut(groups * PANEL));
        parts.enumerate().for_each(|(panel, ((weights, scales), sums))| {
            for lane in 0..PANEL.min(outputs - panel * PANEL) {
                for (g, part) in row(panel * PANEL + lane).chunks(GROUP).enumerate() {
                    let largest = magnitude(part);
                    let inverse = if largest > 0.0 { 127.0 / largest } else { 0.0 };
                    scales[g * PANEL + lane] = largest / 127.0;
                    for (k, &w) in part.iter().enumerate() {
                        let q = rounded(w, inverse) as i8;
                        sums[g * PANEL + lane] += i16::from(q);
                        weights[g * GROUP * PANEL + k / 4 * 4 * PANEL + lane * 4 + k % 4] = q;
                    }
                }
            }
        });
        Self { weights, scales, sums, depth, groups, level: IntLevel::detect() }
    }

    /// Bytes that the panels take.
    pub(super) fn bytes(&self) -> usize {
        self.weights.len() + self.scales.len() * 4 + self.sums.len() * 2
    }

    /// Runs them on other kernels.
    #[cfg(test)]
    pub(super) fn set_level(&mut self, level: IntLevel) {
        self.level = level;
    }

    fn panel(&self, panel: usize) -> Panel<'_> {
        let span = panel * self.groups * PANEL..(panel + 1) * self.groups * PANEL;
        Panel {
            weights: &self.weights[panel * self.depth * PANEL..(panel + 1) * self.depth * PANEL],
            scales: &self.scales[span.clone()],
            sums: &self.sums[span],
        }
    }

    /// Rounds activation rows to 16 bits: all high bytes, then all low bytes, or pairs of bytes for AVX2 and portable code.
    pub(super) fn quantise(&self, x: Rows<'_>) -> RoundedRows {
        let round = if self.level.splits_bytes() { round_split } else { round_pairs };
        RoundedRows::new(x, self.level, 2 * self.depth, |_, x, out| round(x, out))
    }

    /// Outputs of one panel for rows `first..first + count`, at most [`RoundedRows::tile_rows`] of them, before the rows'
    /// scales.
    pub(super) fn tile(&self, rows: &RoundedRows, panel: usize, first: usize, count: usize, tile: &mut [[f32; PANEL]]) {
        let x = TileRows { values: &rows.values[first * 2 * self.depth..], count, depth: self.depth };
        let panel = self.panel(panel);
        match self.level {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the level says that the unit may be used, and the caller has configured it for the batch of these rows.
            IntLevel::Amx if rows.amx => unsafe { super::amx::tile(panel, x, tile) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the level says that the processor has these features.
            IntLevel::Amx | IntLevel::Vnni => unsafe { x86::vnni(panel, x, tile) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            IntLevel::Avx2 => unsafe { x86::avx2(panel, x, tile) },
            _ => portable(panel, x, tile),
        }
    }
}

/// Largest magnitude; NaN if there is one.
#[inline(always)]
#[expect(clippy::inline_always, reason = "called inside multiversioned loops")]
pub(super) fn magnitude(x: &[f32]) -> f32 {
    // The bits of magnitudes are ordered as the magnitudes are, and NaN lies above all.
    let mut largest = 0u32;
    for x in x {
        largest = largest.max(x.to_bits() & 0x7FFF_FFFF);
    }
    f32::from_bits(largest)
}

/// q in the low 16 bits: 1.5·2²³ shifts the integer part of a sum there, rounded to nearest even.
#[inline(always)]
#[expect(clippy::inline_always, reason = "called inside multiversioned loops")]
pub(super) fn rounded(x: f32, inverse: f32) -> u16 {
    (x * inverse + 12_582_912.0).to_bits() as u16
}

multiversion! {
    /// Rounds a row to high bytes, then low bytes, of q + 32896, with zeros at the end of both where the row is shorter; returns its
    /// scale, NaN for a row that holds one.
    fn round_split(x: &[f32], out: &mut [MaybeUninit<u8>]) -> f32 {
        let largest = magnitude(x);
        let inverse = if largest > 0.0 { MOST / largest } else { 0.0 };
        let (high, low) = out.split_at_mut(out.len() / 2);
        let ((high, high_end), (low, low_end)) = (high.split_at_mut(x.len()), low.split_at_mut(x.len()));
        for ((x, high), low) in x.iter().zip(high).zip(low) {
            let shifted = rounded(*x, inverse).wrapping_add(SHIFT as u16);
            high.write((shifted >> 8) as u8);
            low.write(shifted as u8);
        }
        high_end.fill(MaybeUninit::new(0));
        low_end.fill(MaybeUninit::new(0));
        largest / MOST
    }
}

multiversion! {
    /// Rounds a row to pairs of bytes that hold q, with zeros at the end where the row is shorter; returns its scale, NaN for a row
    /// that holds one.
    fn round_pairs(x: &[f32], out: &mut [MaybeUninit<u8>]) -> f32 {
        let largest = magnitude(x);
        let inverse = if largest > 0.0 { MOST / largest } else { 0.0 };
        let (pairs, end) = out.split_at_mut(2 * x.len());
        for (x, pair) in x.iter().zip(pairs.chunks_exact_mut(2)) {
            let [first, second] = rounded(*x, inverse).to_ne_bytes();
            pair[0].write(first);
            pair[1].write(second);
        }
        end.fill(MaybeUninit::new(0));
        largest / MOST
    }
}

fn portable(panel: Panel<'_>, x: TileRows<'_>, tile: &mut [[f32; PANEL]]) {
    for (row, out) in x.values.chunks_exact(2 * x.depth).zip(tile).take(x.count) {
        out.fill(0.0);
        let groups = panel.weights.chunks(GROUP * PANEL).zip(panel.scales.chunks_exact(PANEL));
        for ((weights, scales), row) in groups.zip(row.chunks(2 * GROUP)) {
            let mut sums = [0i32; PANEL];
            for (weights, x) in weights.chunks_exact(4 * PANEL).zip(row.chunks_exact(8)) {
                for (sum, w) in sums.iter_mut().zip(weights.chunks_exact(4)) {
                    for (w, x) in w.iter().zip(x.chunks_exact(2)) {
                        *sum += i32::from(*w) * i32::from(i16::from_ne_bytes([x[0], x[1]]));
                    }
                }
            }
            for ((out, sum), scale) in out.iter_mut().zip(sums).zip(scales) {
                *out += sum as f32 * scale;
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    //! Register tiles for AVX-512 VNNI (rows × 32) and AVX2 (rows × 8, four times a panel).

    use std::arch::x86_64::{
        _MM_HINT_T0, _mm_loadl_epi64, _mm_prefetch, _mm256_add_epi32, _mm256_broadcastq_epi64, _mm256_castsi256_si128,
        _mm256_cvtepi8_epi16, _mm256_cvtepi32_ps, _mm256_extracti128_si256, _mm256_fmadd_ps, _mm256_hadd_epi32,
        _mm256_loadu_ps, _mm256_loadu_si256, _mm256_madd_epi16, _mm256_permute4x64_epi64, _mm256_setzero_ps,
        _mm256_setzero_si256, _mm256_storeu_ps, _mm512_add_epi32, _mm512_cvtepi16_epi32, _mm512_cvtepi32_ps,
        _mm512_dpbusd_epi32, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_loadu_si512, _mm512_mullo_epi32,
        _mm512_set1_epi32, _mm512_setzero_ps, _mm512_setzero_si512, _mm512_slli_epi32, _mm512_storeu_ps,
        _mm512_sub_epi32,
    };

    use super::{GROUP, PANEL, Panel, SHIFT, TileRows, VNNI_ROWS};

    /// Bytes that weights are fetched ahead.
    const AHEAD: usize = 4096;

    fn check(panel: Panel<'_>, x: TileRows<'_>, tile: &[[f32; PANEL]]) {
        assert!(panel.weights.len() == x.depth * PANEL && x.values.len() >= x.count * 2 * x.depth);
        assert!(panel.scales.len() == x.depth.div_ceil(GROUP) * PANEL && panel.sums.len() == panel.scales.len());
        assert!(tile.len() >= x.count);
    }

    /// # Safety
    /// The processor has AVX-512 VNNI.
    pub(super) unsafe fn vnni(panel: Panel<'_>, x: TileRows<'_>, tile: &mut [[f32; PANEL]]) {
        check(panel, x, tile);
        match x.count {
            // SAFETY: promised by the caller; the lengths are checked.
            1 => unsafe { vnni_rows::<1>(panel, x, tile) },
            // SAFETY: as above.
            2 => unsafe { vnni_rows::<2>(panel, x, tile) },
            // SAFETY: as above.
            3 => unsafe { vnni_rows::<3>(panel, x, tile) },
            // SAFETY: as above.
            4 => unsafe { vnni_rows::<4>(panel, x, tile) },
            // SAFETY: as above.
            5 => unsafe { vnni_rows::<5>(panel, x, tile) },
            // SAFETY: as above.
            VNNI_ROWS => unsafe { vnni_rows::<VNNI_ROWS>(panel, x, tile) },
            rows => unreachable!("{rows} rows in a tile of {VNNI_ROWS}"),
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    unsafe fn vnni_rows<const R: usize>(panel: Panel<'_>, x: TileRows<'_>, tile: &mut [[f32; PANEL]]) {
        let depth = x.depth;
        let mut weights = panel.weights.as_ptr();
        let mut values = x.values.as_ptr();
        let mut out = [[_mm512_setzero_ps(); 2]; R];
        for g in 0..depth.div_ceil(GROUP) {
            // SAFETY: the lengths are checked by the caller: 32 scales and sums per group, R rows of 2·depth.
            unsafe {
                let zero = _mm512_setzero_si512();
                let (mut high, mut low) = ([[zero; 2]; R], [[zero; 2]; R]);
                for _ in 0..GROUP.min(depth - g * GROUP) / 4 {
                    _mm_prefetch::<_MM_HINT_T0>(weights.wrapping_add(AHEAD));
                    _mm_prefetch::<_MM_HINT_T0>(weights.wrapping_add(AHEAD + 64));
                    let w = [_mm512_loadu_si512(weights.cast()), _mm512_loadu_si512(weights.add(64).cast())];
                    for r in 0..R {
                        let at = values.add(r * 2 * depth);
                        let x_high = _mm512_set1_epi32(at.cast::<i32>().read_unaligned());
                        let x_low = _mm512_set1_epi32(at.add(depth).cast::<i32>().read_unaligned());
                        for half in 0..2 {
                            high[r][half] = _mm512_dpbusd_epi32(high[r][half], x_high, w[half]);
                            low[r][half] = _mm512_dpbusd_epi32(low[r][half], x_low, w[half]);
                        }
                    }
                    weights = weights.add(4 * PANEL);
                    values = values.add(4);
                }
                for half in 0..2 {
                    let at = g * PANEL + half * 16;
                    let scale = _mm512_loadu_ps(panel.scales.as_ptr().add(at));
                    let sums = _mm512_cvtepi16_epi32(_mm256_loadu_si256(panel.sums.as_ptr().add(at).cast()));
                    let surplus = _mm512_mullo_epi32(sums, _mm512_set1_epi32(SHIFT));
                    for r in 0..R {
                        let sum = _mm512_add_epi32(_mm512_slli_epi32::<8>(high[r][half]), low[r][half]);
                        let sum = _mm512_cvtepi32_ps(_mm512_sub_epi32(sum, surplus));
                        out[r][half] = _mm512_fmadd_ps(sum, scale, out[r][half]);
                    }
                }
            }
        }
        for (row, out) in tile.iter_mut().zip(out) {
            // SAFETY: a tile row holds 32 values.
            unsafe {
                _mm512_storeu_ps(row.as_mut_ptr(), out[0]);
                _mm512_storeu_ps(row.as_mut_ptr().add(16), out[1]);
            }
        }
    }

    /// # Safety
    /// The processor has AVX2 and FMA.
    #[target_feature(enable = "avx2,fma")]
    pub(super) unsafe fn avx2(panel: Panel<'_>, x: TileRows<'_>, tile: &mut [[f32; PANEL]]) {
        check(panel, x, tile);
        for (r, row) in tile.iter_mut().enumerate().take(x.count) {
            for eighth in 0..PANEL / 8 {
                let mut out = _mm256_setzero_ps();
                for g in 0..x.depth.div_ceil(GROUP) {
                    // Products of two neighbouring inputs are added by one instruction in 32 bits, which cannot overflow.
                    let mut sums = [_mm256_setzero_si256(); 2];
                    for quad in g * GROUP / 4..((g + 1) * GROUP).min(x.depth) / 4 {
                        // SAFETY: the lengths are checked above.
                        unsafe {
                            let weights = panel.weights.as_ptr().add(quad * 4 * PANEL + eighth * 32);
                            let weights = _mm256_loadu_si256(weights.cast());
                            let x = _mm_loadl_epi64(x.values.as_ptr().add(r * 2 * x.depth + quad * 8).cast());
                            let x = _mm256_broadcastq_epi64(x);
                            let low = _mm256_cvtepi8_epi16(_mm256_castsi256_si128(weights));
                            let high = _mm256_cvtepi8_epi16(_mm256_extracti128_si256::<1>(weights));
                            sums[0] = _mm256_add_epi32(sums[0], _mm256_madd_epi16(low, x));
                            sums[1] = _mm256_add_epi32(sums[1], _mm256_madd_epi16(high, x));
                        }
                    }
                    // Pairs of neighbours, outputs 0 1 4 5 2 3 6 7, put in order.
                    let sum = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_hadd_epi32(sums[0], sums[1]));
                    // SAFETY: as above.
                    let scale = unsafe { _mm256_loadu_ps(panel.scales.as_ptr().add(g * PANEL + eighth * 8)) };
                    out = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), scale, out);
                }
                // SAFETY: a tile row holds 32 values.
                unsafe { _mm256_storeu_ps(row.as_mut_ptr().add(eighth * 8), out) };
            }
        }
    }
}
