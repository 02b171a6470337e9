//! Weights packed into panels of 32 outputs, and the walk over rows and panels.
//!
//! A panel holds, for each input k, its 32 outputs' weights side by side: `panel[k][0..32]` (four inputs at a time in
//! eight bits; see [`super::int4`] for four). Threads share the panels; the kernels of [`super::float`], [`super::int8`] and
//! [`super::int4`] compute a few rows of one panel. Every output is computed in one order of operations that does not
//! depend on the number of rows or threads.

use std::ops::Range;

use candle_core::{Result, bail};
use half::bf16;
use rayon::prelude::*;

use super::aligned::Aligned;
#[cfg(target_arch = "x86_64")]
use super::amx::Tiles;
use super::float::{tile_bf16, tile_f32};
use super::int4::{self, Int4Panels, Int4Rows};
use super::int8::{self, Int8Panels, RoundedRows};
use crate::rows::Rows;
use crate::simd::{Level, level};
use crate::threads::{self, Shared};

/// Outputs per panel.
pub const PANEL: usize = 32;
/// Rows per register tile (AVX-512: 12 × 2 accumulators of 16 lanes).
pub(super) const TILE_ROWS: usize = 12;
/// Rows that any kernel takes at a time.
const MOST_TILE_ROWS: usize = 16;
/// Rows walked per pass over a thread's panels, so that they stay in the second-level cache.
const ROWS_PER_PASS: usize = 96;

/// How weights are stored, and what arithmetic follows from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Precision {
    /// 4 bytes a weight, arithmetic in f32.
    F32,
    /// 2 bytes a weight (rounded to bfloat16), widened when loaded; arithmetic in f32.
    Bf16,
    /// 1 byte a weight with a scale per output and 128 inputs. Activations are rounded to 16 bits per row, sums of a group
    /// are exact integers, scaled and added in f32.
    Q8,
    /// Half a byte a weight with a step and a minimum, in half precision, per output and 32 inputs, for weights that have this form:
    /// those of a file in Q4_0 or Q4_1 keep their values, those of Q4_K but for that. Layers with other weights, also in one of several
    /// that are fused, are packed as `Q8`. Activations as in `Q8`.
    Q4,
}

impl Precision {
    /// Name in recipes and tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::Q8 => "q8",
            Self::Q4 => "q4",
        }
    }
}

#[derive(Debug)]
enum Panels {
    F32(Aligned<f32>),
    Bf16(Aligned<bf16>),
    Int8(Int8Panels),
    Int4(Int4Panels),
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
                let mut data = Aligned::<f32>::zeros(panels * inputs * PANEL);
                data.par_chunks_mut(inputs * PANEL).enumerate().for_each(|(i, p)| fill(i, &mut |at, w| p[at] = w));
                Panels::F32(data)
            }
            Precision::Bf16 => {
                let mut data = Aligned::<bf16>::zeros(panels * inputs * PANEL);
                data.par_chunks_mut(inputs * PANEL)
                    .enumerate()
                    .for_each(|(i, p)| fill(i, &mut |at, w| p[at] = bf16::from_f32(w)));
                Panels::Bf16(data)
            }
            Precision::Q8 => Panels::Int8(Int8Panels::pack(inputs, outputs, row)),
            Precision::Q4 => match Int4Panels::pack(inputs, outputs, row) {
                Some(panels) => Panels::Int4(panels),
                None => Panels::Int8(Int8Panels::pack(inputs, outputs, row)),
            },
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

    /// How the weights are stored, which differs from what was asked for where that was [`Precision::Q4`] and they are not in four
    /// bits.
    pub fn precision(&self) -> Precision {
        match &self.panels {
            Panels::F32(_) => Precision::F32,
            Panels::Bf16(_) => Precision::Bf16,
            Panels::Int8(_) => Precision::Q8,
            Panels::Int4(_) => Precision::Q4,
        }
    }

    /// Bytes that the packed weights take.
    pub fn bytes(&self) -> usize {
        match &self.panels {
            Panels::F32(data) => data.len() * 4,
            Panels::Bf16(data) => data.len() * 2,
            Panels::Int8(panels) => panels.bytes(),
            Panels::Int4(panels) => panels.bytes(),
        }
    }

    /// The panels `[outputs/32][inputs][32]`, where they are f32 and there is no bias.
    pub(crate) fn plain_panels(&self) -> Option<&[f32]> {
        match (&self.panels, &self.bias) {
            (Panels::F32(data), None) => Some(data),
            _ => None,
        }
    }

    /// x Wᵀ + b for all rows of `x`, row-major `[rows, outputs]`.
    pub(crate) fn forward_rows(&self, x: Rows<'_>) -> Vec<f32> {
        let len = x.count * self.outputs;
        let mut y = Vec::with_capacity(len);
        self.forward_into(x, y.as_mut_ptr());
        // SAFETY: every output of every row has been written.
        unsafe { y.set_len(len) };
        y
    }

    /// Writes all outputs of all rows to `y`, which has room for them.
    fn forward_into(&self, x: Rows<'_>, y: *mut f32) {
        assert_eq!(x.cols, self.inputs, "input rows have the layer's width");
        let panels = self.outputs.div_ceil(PANEL);
        let work = x.count * self.inputs * self.outputs;
        let shares = if work < 1 << 15 { 1 } else { threads::count().min(panels) };
        let out = Shared::new(y);
        let kernel = self.kernel(x);
        threads::run(shares, |share| {
            let _tiles = kernel.configure();
            let mut tile = [[0f32; PANEL]; MOST_TILE_ROWS];
            let (from, to) = (panels * share / shares, panels * (share + 1) / shares);
            let mut first = 0;
            while first < x.count {
                let last = (first + ROWS_PER_PASS).min(x.count);
                for panel in from..to {
                    self.panel_rows(&kernel, panel, first..last, &mut tile, &out);
                }
                first = last;
            }
        });
    }

    fn kernel<'a>(&'a self, x: Rows<'a>) -> Kernel<'a> {
        match &self.panels {
            Panels::F32(data) => Kernel::F32 { data, x },
            Panels::Bf16(data) => Kernel::Bf16 { data, x },
            Panels::Int8(panels) => Kernel::Int8 { panels, rows: panels.quantise(x) },
            Panels::Int4(panels) => Kernel::Int4 { panels, rows: panels.quantise(x) },
        }
    }

    /// Outputs of one panel for some rows, worked out in `tile`.
    fn panel_rows(
        &self,
        kernel: &Kernel<'_>,
        panel: usize,
        rows: Range<usize>,
        tile: &mut [[f32; PANEL]; MOST_TILE_ROWS],
        out: &Shared<f32>,
    ) {
        let column = panel * PANEL;
        let width = PANEL.min(self.outputs - column);
        let span = panel * self.inputs * PANEL..(panel + 1) * self.inputs * PANEL;
        let Range { start: mut row, end } = rows;
        while row < end {
            let rows = kernel.tile_rows().min(end - row);
            match kernel {
                Kernel::F32 { data, x } => {
                    tile[..rows].fill([0.0; PANEL]);
                    tile_f32(self.level, &data[span.clone()], &tile_slices(x, row, rows)[..rows], tile);
                }
                Kernel::Bf16 { data, x } => {
                    tile[..rows].fill([0.0; PANEL]);
                    tile_bf16(self.level, &data[span.clone()], &tile_slices(x, row, rows)[..rows], tile);
                }
                Kernel::Int8 { panels, rows: x } => panels.tile(x, panel, row, rows, tile),
                Kernel::Int4 { panels, rows: x } => panels.tile(x, panel, row, rows, tile),
            }
            for (i, values) in tile[..rows].iter_mut().enumerate() {
                if let Some(rounded) = kernel.rounded() {
                    scale(values, rounded.scale(row + i));
                }
                if let Some(bias) = &self.bias {
                    for (value, bias) in values.iter_mut().zip(&bias[column..column + width]) {
                        *value += bias;
                    }
                }
            }
            let at = |i: usize| (row + i) * self.outputs + column;
            // Two loops: of one, the compiler makes calls of a routine that copies any length.
            if width == PANEL {
                for (i, values) in tile[..rows].iter().enumerate() {
                    // SAFETY: rows and columns are in range, and each (row, panel) pair is written by exactly one thread.
                    unsafe { out.write_array(at(i), values) };
                }
            } else {
                for (i, values) in tile[..rows].iter().enumerate() {
                    // SAFETY: as above.
                    unsafe { out.write(at(i), &values[..width]) };
                }
            }
            row += rows;
        }
    }
}

/// Panels and the rows they meet, in the form that their kernel reads.
enum Kernel<'a> {
    F32 { data: &'a [f32], x: Rows<'a> },
    Bf16 { data: &'a [bf16], x: Rows<'a> },
    Int8 { panels: &'a Int8Panels, rows: RoundedRows },
    Int4 { panels: &'a Int4Panels, rows: Int4Rows },
}

impl Kernel<'_> {
    fn tile_rows(&self) -> usize {
        match self {
            Self::F32 { .. } | Self::Bf16 { .. } => TILE_ROWS,
            Self::Int8 { rows, .. } => rows.tile_rows(int8::VNNI_ROWS),
            Self::Int4 { rows, .. } => rows.rounded.tile_rows(int4::VNNI_ROWS),
        }
    }

    /// The activation rows of kernels that multiply integers.
    fn rounded(&self) -> Option<&RoundedRows> {
        match self {
            Self::F32 { .. } | Self::Bf16 { .. } => None,
            Self::Int8 { rows, .. } => Some(rows),
            Self::Int4 { rows, .. } => Some(&rows.rounded),
        }
    }

    /// Prepares this thread.
    #[cfg(target_arch = "x86_64")]
    fn configure(&self) -> Option<Tiles> {
        let rows = self.rounded().filter(|rows| rows.amx())?;
        let inputs = if matches!(self, Self::Int4 { .. }) { int4::GROUP } else { int8::STEP };
        // SAFETY: rows are meant for the unit only where it is usable.
        Some(unsafe { Tiles::configure(rows.count(), inputs) })
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn configure(&self) {}
}

fn scale(values: &mut [f32; PANEL], factor: f32) {
    for value in values {
        *value *= factor;
    }
}

fn tile_slices<'a>(x: &Rows<'a>, first: usize, rows: usize) -> [&'a [f32]; TILE_ROWS] {
    std::array::from_fn(|i| if i < rows { x.row(first + i) } else { &[] as &[f32] })
}

#[cfg(test)]
mod tests {
    use candle_core::quantized::{GgmlDType, QTensor};
    use candle_core::{Device, Tensor};
    use half::f16;
    use proptest::prelude::*;

    use super::super::Linear;
    use super::super::int8::IntLevel;
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
        packed.forward_rows(Rows::new("test", storage, layout).unwrap())
    }

    /// A row rounded to multiples of its largest magnitude / `levels`, with the roundings of the kernels.
    fn rounded(row: &[f32], levels: f32) -> Vec<f64> {
        let largest = row.iter().fold(0f32, |a, w| a.max(w.abs()));
        let inverse = if largest > 0.0 { levels / largest } else { 0.0 };
        row.iter().map(|w| f64::from((w * inverse).round_ties_even()) * f64::from(largest / levels)).collect()
    }

    /// The output of one row and one weight row in f64, with the rounding that the precision asks for.
    fn reference(x: &[f32], w: &[f32], precision: Precision) -> f64 {
        let dot =
            |a: &mut dyn Iterator<Item = f64>, b: &mut dyn Iterator<Item = f64>| a.zip(b).map(|(a, b)| a * b).sum();
        match precision {
            Precision::F32 => dot(&mut x.iter().map(|&x| x.into()), &mut w.iter().map(|&w| w.into())),
            Precision::Bf16 => {
                dot(&mut x.iter().map(|&x| x.into()), &mut w.iter().map(|&w| bf16::from_f32(w).to_f32().into()))
            }
            Precision::Q8 => {
                let w: Vec<f64> = w.chunks(128).flat_map(|group| rounded(group, 127.0)).collect();
                dot(&mut rounded(x, 32639.0).into_iter(), &mut w.into_iter())
            }
            Precision::Q4 => dot(&mut rounded(x, 32639.0).into_iter(), &mut w.iter().map(|&w| w.into())),
        }
    }

    const PRECISIONS: [Precision; 4] = [Precision::F32, Precision::Bf16, Precision::Q8, Precision::Q4];

    /// Weights `[outputs, inputs]`; in four bits with steps and minima of half precision where the precision is `Q4`.
    fn random_weights(seed: u64, inputs: usize, outputs: usize, precision: Precision) -> Vec<f32> {
        let mut weights = random(seed, outputs * inputs);
        if precision == Precision::Q4 {
            for (i, group) in weights.chunks_mut(inputs).flat_map(|row| row.chunks_mut(32)).enumerate() {
                let step = f16::from_f32(0.03 + (i % 7) as f32 * 0.01).to_f32();
                let minimum = f16::from_f32((i % 5) as f32 * 0.1 - 0.6).to_f32();
                for w in group {
                    *w = step * ((*w + 1.0) * 7.99).floor() + minimum;
                }
            }
        }
        weights
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(96))]
        #[test]
        fn matches_f64_and_does_not_depend_on_the_batch(
            seed in any::<u64>(), rows in 1usize..70, inputs in 1usize..200, outputs in 1usize..140, kind in 0usize..4,
        ) {
            let precision = PRECISIONS[kind];
            let weights = random_weights(seed, inputs, outputs, precision);
            let x = random(seed ^ 1, rows * inputs);
            let bias = random(seed ^ 2, outputs);
            let packed = Packed::new(&[&weights], inputs, Some(bias.clone()), precision).unwrap();
            prop_assert_eq!(packed.precision(), precision);
            let y = run(&packed, &x, rows);
            for row in 0..rows {
                let x = &x[row * inputs..(row + 1) * inputs];
                let alone = run(&packed, x, 1);
                prop_assert_eq!(&alone[..], &y[row * outputs..(row + 1) * outputs], "row {} depends on its batch", row);
                for output in 0..outputs {
                    let w = &weights[output * inputs..(output + 1) * inputs];
                    let expected = f64::from(bias[output]) + reference(x, w, precision);
                    // In eight bits, a value half-way between two steps may fall to either side; in four, where a group has few
                    // values, another grid than the one that made them may be found, as close as half precision is.
                    let tolerance = match precision {
                        Precision::F32 | Precision::Bf16 => 1e-4,
                        Precision::Q8 => 1e-3,
                        Precision::Q4 => 1e-2,
                    };
                    prop_assert!(
                        (f64::from(alone[output]) - expected).abs() < tolerance,
                        "{} against {}",
                        alone[output],
                        expected
                    );
                }
            }
        }
    }

    #[test]
    fn every_instruction_set_gives_the_same_result() {
        let (inputs, outputs) = (177, 70);
        for rows in [1, 2, 3, 13, 16, 17, 35, 64, 100] {
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
            for precision in [Precision::Q8, Precision::Q4] {
                let weights = random_weights(3, inputs, outputs, precision);
                let mut packed = Packed::new(&[&weights], inputs, None, precision).unwrap();
                assert_eq!(packed.precision(), precision);
                let best = run(&packed, &x, rows);
                let lower: &[IntLevel] = match IntLevel::detect() {
                    IntLevel::Amx => &[IntLevel::Vnni, IntLevel::Avx2],
                    IntLevel::Vnni => &[IntLevel::Avx2],
                    IntLevel::Avx2 | IntLevel::Portable => &[],
                };
                for &level in lower.iter().chain(&[IntLevel::Portable]) {
                    match &mut packed.panels {
                        Panels::Int8(panels) => panels.set_level(level),
                        Panels::Int4(panels) => panels.set_level(level),
                        Panels::F32(_) | Panels::Bf16(_) => unreachable!("packed in integers"),
                    }
                    let other = run(&packed, &x, rows);
                    if level == IntLevel::Portable {
                        assert!(
                            best.iter().zip(&other).all(|(a, b)| (a - b).abs() < 1e-4),
                            "portable differs by more than rounding"
                        );
                    } else {
                        assert_eq!(best, other, "{precision:?} on {level:?} at {rows} rows");
                    }
                }
            }
        }
    }

    #[test]
    fn integers_keep_what_is_not_a_number_and_stay_close_to_f32() {
        let (inputs, outputs) = (576, 64);
        let (weights, mut x) = (random(5, inputs * outputs), random(6, inputs));
        let packed = |precision| Packed::new(&[&weights], inputs, None, precision).unwrap();
        let (exact, quantised) = (run(&packed(Precision::F32), &x, 1), run(&packed(Precision::Q8), &x, 1));
        let norm = |v: &mut dyn Iterator<Item = f32>| v.map(|v| v * v).sum::<f32>().sqrt();
        let error = norm(&mut exact.iter().zip(&quantised).map(|(a, b)| a - b)) / norm(&mut exact.iter().copied());
        assert!(error < 0.01, "relative error {error}");
        x[100] = f32::NAN;
        for precision in [Precision::Q8, Precision::Q4] {
            let weights = random_weights(5, inputs, outputs, precision);
            let packed = Packed::new(&[&weights], inputs, None, precision).unwrap();
            for rows in [1, 4] {
                assert!(run(&packed, &x.repeat(rows), rows).iter().all(|y| y.is_nan()), "{precision:?}");
                let zeros = vec![0.0; inputs * rows];
                assert!(run(&packed, &zeros, rows).iter().all(|&y| y == 0.0), "{precision:?}");
            }
        }
    }

    #[test]
    fn four_bit_formats_are_recognised_by_their_values() {
        let (inputs, outputs) = (512, 40);
        let (weights, x) = (random(7, inputs * outputs), random(8, inputs));
        let weights = Tensor::from_vec(weights, (outputs, inputs), &Device::Cpu).unwrap();
        for (format, precision) in [
            (GgmlDType::Q4_0, Precision::Q4),
            (GgmlDType::Q4_1, Precision::Q4),
            (GgmlDType::Q4K, Precision::Q4),
            (GgmlDType::Q5_1, Precision::Q8),
            (GgmlDType::Q6K, Precision::Q8),
            (GgmlDType::Q8_0, Precision::Q8),
        ] {
            let stored = QTensor::quantize(&weights, format).unwrap().dequantize(&Device::Cpu).unwrap();
            let stored: Vec<f32> = stored.flatten_all().unwrap().to_vec1().unwrap();
            let packed = Packed::new(&[&stored], inputs, None, Precision::Q4).unwrap();
            assert_eq!(packed.precision(), precision, "{format:?}");
            let y = run(&packed, &x, 1);
            for (y, w) in y.iter().zip(stored.chunks(inputs)) {
                let expected: f64 = w.iter().zip(&x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
                // Half precision and 16-bit activations in four bits; rounded weights in eight.
                let tolerance = if precision == Precision::Q4 { 1e-2 } else { 0.2 };
                assert!((f64::from(*y) - expected).abs() < tolerance, "{format:?}: {y} against {expected}");
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
