//! Weights packed into panels of 32 outputs, and the matrix kernel over them.
//!
//! A panel holds, for each input k, its 32 outputs' weights side by side: `panel[k][0..32]`. The kernel keeps a tile of
//! up to [`TILE_ROWS`] rows × 32 outputs in registers and walks k once, so each weight is loaded once per tile and
//! serves all its rows. Every output is one chain of fused multiply-adds over k = 0, 1, 2, … (a multiply and an add on
//! processors without FMA): the order does not depend on the number of rows or threads.

use candle_core::{Result, bail};
use half::bf16;
use rayon::prelude::*;

use crate::rows::Rows;
use crate::simd::{Level, level};
use crate::threads;

/// Outputs per panel.
const PANEL: usize = 32;
/// Rows per register tile (AVX-512: 12 × 2 accumulators of 16 lanes).
const TILE_ROWS: usize = 12;
/// Rows walked per pass over a thread's panels, so that they stay in the second-level cache.
const ROWS_PER_PASS: usize = 96;

/// How weights are stored in memory. Arithmetic is f32 in both.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Precision {
    /// 4 bytes a weight.
    F32,
    /// 2 bytes a weight (rounded to bfloat16), widened when loaded.
    Bf16,
}

#[derive(Debug)]
enum Panels {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
}

/// Packed weights of one (or several fused) linear layers.
#[derive(Debug)]
pub struct Packed {
    panels: Panels,
    bias: Option<Vec<f32>>,
    inputs: usize,
    outputs: usize,
    level: Level,
}

impl Packed {
    /// Packs weights given as row-major `[out, inputs]` slices, stacked along the outputs.
    ///
    /// # Errors
    /// When a slice is not a whole number of rows or the bias has another length than the outputs.
    pub fn new(weights: &[&[f32]], inputs: usize, bias: Option<Vec<f32>>, precision: Precision) -> Result<Self> {
        if inputs == 0 || weights.iter().any(|w| w.len() % inputs != 0) {
            bail!("weights are no whole number of rows of {inputs} inputs");
        }
        let outputs: usize = weights.iter().map(|w| w.len() / inputs).sum();
        if let Some(bias) = &bias
            && bias.len() != outputs
        {
            bail!("bias has {} elements for {outputs} outputs", bias.len());
        }
        let row = |mut output: usize| {
            for weight in weights {
                let rows = weight.len() / inputs;
                if output < rows {
                    return &weight[output * inputs..(output + 1) * inputs];
                }
                output -= rows;
            }
            unreachable!("output index is below the number of outputs")
        };
        let panels = outputs.div_ceil(PANEL);
        let fill = |panel: usize, write: &mut dyn FnMut(usize, f32)| {
            for lane in 0..PANEL.min(outputs - panel * PANEL) {
                for (k, &weight) in row(panel * PANEL + lane).iter().enumerate() {
                    write(k * PANEL + lane, weight);
                }
            }
        };
        let panels = match precision {
            Precision::F32 => {
                let mut data = vec![0f32; panels * inputs * PANEL];
                data.par_chunks_mut(inputs * PANEL).enumerate().for_each(|(i, p)| fill(i, &mut |at, w| p[at] = w));
                Panels::F32(data)
            }
            Precision::Bf16 => {
                let mut data = vec![bf16::ZERO; panels * inputs * PANEL];
                data.par_chunks_mut(inputs * PANEL)
                    .enumerate()
                    .for_each(|(i, p)| fill(i, &mut |at, w| p[at] = bf16::from_f32(w)));
                Panels::Bf16(data)
            }
        };
        Ok(Self { panels, bias, inputs, outputs, level: level() })
    }

    /// Width of the input rows.
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// Width of the output rows.
    pub fn outputs(&self) -> usize {
        self.outputs
    }

    /// Bytes that the packed weights take.
    pub fn bytes(&self) -> usize {
        match &self.panels {
            Panels::F32(data) => data.len() * 4,
            Panels::Bf16(data) => data.len() * 2,
        }
    }

    /// y = x Wᵀ + b for all rows of `x`; `y` is row-major `[rows, outputs]`.
    pub(crate) fn forward(&self, x: Rows<'_>, y: &mut [f32]) {
        assert_eq!(x.cols, self.inputs, "input rows have the layer's width");
        assert_eq!(y.len(), x.count * self.outputs, "output holds all rows");
        let panels = self.outputs.div_ceil(PANEL);
        let work = x.count * self.inputs * self.outputs;
        let shares = if work < 1 << 15 { 1 } else { threads::count().min(panels) };
        let out = Out { data: y.as_mut_ptr(), stride: self.outputs };
        let run = |share: usize| {
            let (from, to) = (panels * share / shares, panels * (share + 1) / shares);
            let mut first = 0;
            while first < x.count {
                let last = (first + ROWS_PER_PASS).min(x.count);
                for panel in from..to {
                    self.panel_rows(x, panel, first, last, &out);
                }
                first = last;
            }
        };
        threads::run(shares, run);
    }

    fn panel_rows(&self, x: Rows<'_>, panel: usize, first: usize, last: usize, out: &Out) {
        let column = panel * PANEL;
        let width = PANEL.min(self.outputs - column);
        let span = panel * self.inputs * PANEL..(panel + 1) * self.inputs * PANEL;
        let mut row = first;
        while row < last {
            let rows = TILE_ROWS.min(last - row);
            let mut a: [&[f32]; TILE_ROWS] = [&[]; TILE_ROWS];
            for (i, slot) in a.iter_mut().enumerate().take(rows) {
                *slot = x.row(row + i);
            }
            let mut tile = [[0f32; PANEL]; TILE_ROWS];
            match &self.panels {
                Panels::F32(data) => tile_f32(self.level, &data[span.clone()], &a[..rows], &mut tile),
                Panels::Bf16(data) => tile_bf16(self.level, &data[span.clone()], &a[..rows], &mut tile),
            }
            for (i, values) in tile[..rows].iter_mut().enumerate() {
                if let Some(bias) = &self.bias {
                    for (value, bias) in values.iter_mut().zip(&bias[column..column + width]) {
                        *value += bias;
                    }
                }
                // SAFETY: rows and columns are in range, and each (row, panel) pair is written by exactly one thread.
                unsafe { out.store(row + i, column, &values[..width]) };
            }
            row += rows;
        }
    }
}

/// Output matrix that threads write disjoint columns of.
struct Out {
    data: *mut f32,
    stride: usize,
}

// SAFETY: `store` is only called with disjoint destinations by different threads.
unsafe impl Sync for Out {}

impl Out {
    /// # Safety
    /// The destination must lie inside the matrix and be written by no other thread at the same time.
    unsafe fn store(&self, row: usize, column: usize, values: &[f32]) {
        // SAFETY: promised by the caller.
        unsafe {
            std::ptr::copy_nonoverlapping(values.as_ptr(), self.data.add(row * self.stride + column), values.len());
        }
    }
}

type Tile = [[f32; PANEL]; TILE_ROWS];

fn tile_f32(level: Level, panel: &[f32], a: &[&[f32]], tile: &mut Tile) {
    match level {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `level` says that the processor has these features; every row of `a` is as long as the panel is deep.
        Level::Avx512 => unsafe { x86::avx512_f32(panel, a, tile) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Level::Avx2 => unsafe { x86::avx2_f32(panel, a, tile) },
        _ => tile_portable(panel, |w| *w, a, tile),
    }
}

fn tile_bf16(level: Level, panel: &[bf16], a: &[&[f32]], tile: &mut Tile) {
    match level {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as in `tile_f32`.
        Level::Avx512 => unsafe { x86::avx512_bf16(panel, a, tile) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Level::Avx2 => unsafe { x86::avx2_bf16(panel, a, tile) },
        _ => tile_portable(panel, |w| w.to_f32(), a, tile),
    }
}

fn tile_portable<W>(panel: &[W], widen: impl Fn(&W) -> f32, a: &[&[f32]], tile: &mut Tile) {
    for (row, sums) in a.iter().zip(tile.iter_mut()) {
        for (&x, weights) in row.iter().zip(panel.chunks_exact(PANEL)) {
            for (sum, weight) in sums.iter_mut().zip(weights) {
                *sum += x * widen(weight);
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    //! Register tiles for AVX-512 (rows × 32) and AVX2 (rows × 16, twice a panel).

    use std::arch::x86_64::{
        _MM_HINT_T0, _mm_loadu_si128, _mm_prefetch, _mm256_castsi256_ps, _mm256_cvtepu16_epi32, _mm256_fmadd_ps,
        _mm256_loadu_ps, _mm256_loadu_si256, _mm256_set1_ps, _mm256_setzero_ps, _mm256_slli_epi32, _mm256_storeu_ps,
        _mm512_castsi512_ps, _mm512_cvtepu16_epi32, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_set1_ps,
        _mm512_setzero_ps, _mm512_slli_epi32, _mm512_storeu_ps,
    };

    use half::bf16;

    use super::{PANEL, Tile};

    /// Steps of k that weights are fetched ahead.
    const AHEAD: usize = 32;

    /// Defines `$name(panel, a, tile)` for panels of `$weight`: `$kernel::<R>` on tiles of R = 1 … `$most` rows.
    macro_rules! tiles {
        ($name:ident, $kernel:ident, $weight:ty, $most:literal, [$($rows:literal),+]) => {
            /// # Safety
            /// The processor has the features; the panel is `a[i].len()` deep for every row.
            pub(super) unsafe fn $name(panel: &[$weight], a: &[&[f32]], tile: &mut Tile) {
                let mut done = 0;
                while done < a.len() {
                    let rows = (a.len() - done).min($most);
                    let (a, tile) = (&a[done..done + rows], &mut tile[done..done + rows]);
                    debug_assert!(a.iter().all(|row| row.len() * PANEL == panel.len()));
                    match rows {
                        // SAFETY: promised by the caller.
                        $($rows => unsafe { $kernel::<$rows>(panel, a, tile) },)+
                        _ => unreachable!("a tile has at most {} rows", $most),
                    }
                    done += rows;
                }
            }
        };
    }

    macro_rules! avx512_kernel {
        ($kernel:ident, $weight:ty, |$p:ident| $load:expr) => {
            #[target_feature(enable = "avx512f")]
            unsafe fn $kernel<const R: usize>(panel: &[$weight], a: &[&[f32]], tile: &mut [[f32; PANEL]]) {
                let depth = panel.len() / PANEL;
                let mut rows = [std::ptr::null(); R];
                for (pointer, row) in rows.iter_mut().zip(a) {
                    *pointer = row.as_ptr();
                }
                let mut sums = [[_mm512_setzero_ps(); 2]; R];
                let mut weights = panel.as_ptr();
                for k in 0..depth {
                    // SAFETY: k < depth, which is the length of each row and the number of 32-weight steps in the panel.
                    unsafe {
                        // The hardware prefetcher stops at page borders; a hint past the end of the panel is harmless.
                        _mm_prefetch::<_MM_HINT_T0>(weights.wrapping_add(AHEAD * PANEL).cast());
                        if size_of::<$weight>() == 4 {
                            _mm_prefetch::<_MM_HINT_T0>(weights.wrapping_add(AHEAD * PANEL + 16).cast());
                        }
                        let $p = weights;
                        let low = $load;
                        let $p = weights.add(16);
                        let high = $load;
                        for r in 0..R {
                            let x = _mm512_set1_ps(*rows[r].add(k));
                            sums[r][0] = _mm512_fmadd_ps(x, low, sums[r][0]);
                            sums[r][1] = _mm512_fmadd_ps(x, high, sums[r][1]);
                        }
                        weights = weights.add(PANEL);
                    }
                }
                for (out, sum) in tile.iter_mut().zip(&sums) {
                    // SAFETY: a tile row holds 32 values.
                    unsafe {
                        _mm512_storeu_ps(out.as_mut_ptr(), sum[0]);
                        _mm512_storeu_ps(out.as_mut_ptr().add(16), sum[1]);
                    }
                }
            }
        };
    }

    macro_rules! avx2_kernel {
        ($kernel:ident, $weight:ty, |$p:ident| $load:expr) => {
            #[target_feature(enable = "avx2,fma")]
            unsafe fn $kernel<const R: usize>(panel: &[$weight], a: &[&[f32]], tile: &mut [[f32; PANEL]]) {
                let depth = panel.len() / PANEL;
                for half in [0, PANEL / 2] {
                    let mut sums = [[_mm256_setzero_ps(); 2]; R];
                    for k in 0..depth {
                        // SAFETY: k < depth, which is the length of each row and the number of 32-weight steps in the panel.
                        unsafe {
                            let $p = panel.as_ptr().add(k * PANEL + half);
                            let low = $load;
                            let $p = panel.as_ptr().add(k * PANEL + half + 8);
                            let high = $load;
                            for r in 0..R {
                                let x = _mm256_set1_ps(*a.get_unchecked(r).get_unchecked(k));
                                sums[r][0] = _mm256_fmadd_ps(x, low, sums[r][0]);
                                sums[r][1] = _mm256_fmadd_ps(x, high, sums[r][1]);
                            }
                        }
                    }
                    for (out, sum) in tile.iter_mut().zip(&sums) {
                        // SAFETY: a tile row holds 32 values, `half` is 0 or 16.
                        unsafe {
                            _mm256_storeu_ps(out.as_mut_ptr().add(half), sum[0]);
                            _mm256_storeu_ps(out.as_mut_ptr().add(half + 8), sum[1]);
                        }
                    }
                }
            }
        };
    }

    avx512_kernel!(avx512_f32_rows, f32, |p| _mm512_loadu_ps(p));
    avx512_kernel!(avx512_bf16_rows, bf16, |p| _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(
        _mm256_loadu_si256(p.cast())
    ))));
    avx2_kernel!(avx2_f32_rows, f32, |p| _mm256_loadu_ps(p));
    avx2_kernel!(avx2_bf16_rows, bf16, |p| _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(
        _mm_loadu_si128(p.cast())
    ))));

    tiles!(avx512_f32, avx512_f32_rows, f32, 12, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]);
    tiles!(avx512_bf16, avx512_bf16_rows, bf16, 12, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]);
    tiles!(avx2_f32, avx2_f32_rows, f32, 6, [1, 2, 3, 4, 5, 6]);
    tiles!(avx2_bf16, avx2_bf16_rows, bf16, 6, [1, 2, 3, 4, 5, 6]);
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Tensor};
    use proptest::prelude::*;

    use super::super::Linear;
    use super::*;

    fn random(seed: u64, n: usize) -> Vec<f32> {
        let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        (0..n)
            .map(|_| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                (state >> 40) as f32 / (1 << 23) as f32 - 1.0
            })
            .collect()
    }

    fn run(packed: &Packed, x: &[f32], rows: usize) -> Vec<f32> {
        let x = Tensor::from_slice(x, (rows, packed.inputs()), &Device::Cpu).unwrap();
        let (storage, layout) = x.storage_and_layout();
        let candle_core::Storage::Cpu(storage) = &*storage else { unreachable!() };
        let mut y = vec![0f32; rows * packed.outputs()];
        packed.forward(Rows::new("test", storage, layout).unwrap(), &mut y);
        y
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn matches_f64_and_does_not_depend_on_the_batch(
            seed in any::<u64>(), rows in 1usize..40, inputs in 1usize..90, outputs in 1usize..140, bf16_stored in any::<bool>(),
        ) {
            let weights = random(seed, outputs * inputs);
            let x = random(seed ^ 1, rows * inputs);
            let bias = random(seed ^ 2, outputs);
            let precision = if bf16_stored { Precision::Bf16 } else { Precision::F32 };
            let packed = Packed::new(&[&weights], inputs, Some(bias.clone()), precision).unwrap();
            let y = run(&packed, &x, rows);
            for row in 0..rows {
                let alone = run(&packed, &x[row * inputs..(row + 1) * inputs], 1);
                prop_assert_eq!(&alone[..], &y[row * outputs..(row + 1) * outputs], "row {} depends on its batch", row);
                for output in 0..outputs {
                    let mut expected = f64::from(bias[output]);
                    for k in 0..inputs {
                        let w = weights[output * inputs + k];
                        let w = if bf16_stored { bf16::from_f32(w).to_f32() } else { w };
                        expected += f64::from(x[row * inputs + k]) * f64::from(w);
                    }
                    prop_assert!((f64::from(alone[output]) - expected).abs() < 1e-4, "{} against {}", alone[output], expected);
                }
            }
        }
    }

    #[test]
    fn every_instruction_set_gives_the_same_result() {
        let (inputs, outputs, rows) = (77, 70, 13);
        let (weights, x) = (random(3, inputs * outputs), random(4, inputs * rows));
        for precision in [Precision::F32, Precision::Bf16] {
            let mut packed = Packed::new(&[&weights], inputs, None, precision).unwrap();
            let best = run(&packed, &x, rows);
            if packed.level == Level::Avx512 {
                packed.level = Level::Avx2;
                assert_eq!(best, run(&packed, &x, rows), "AVX2 differs from AVX-512");
            }
            packed.level = Level::Portable;
            for (a, b) in best.iter().zip(run(&packed, &x, rows)) {
                assert!((a - b).abs() < 1e-4, "{a} against {b}");
            }
        }
    }

    #[test]
    fn fused_weights_are_stacked() {
        let device = Device::Cpu;
        let a = Tensor::new(&[[1f32, 2.0], [3.0, 4.0]], &device).unwrap();
        let b = Tensor::new(&[[5f32, 6.0]], &device).unwrap();
        let layer = Linear::frozen(&[&a, &b], None, Precision::F32).unwrap();
        let y = layer.forward(&Tensor::new(&[[1f32, 10.0]], &device).unwrap()).unwrap();
        assert_eq!(y.to_vec2::<f32>().unwrap(), [[21.0, 43.0, 65.0]]);
        assert!(layer.forward(&Tensor::new(&[[1f32, 2.0, 3.0]], &device).unwrap()).is_err());
    }
}
