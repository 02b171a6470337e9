//! The CUDA kernels, emulated on the CPU, against the CPU operations over random shapes (feature `simt`).
#![cfg(feature = "simt")]
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use candle_core::{Device, Result, Tensor};
use deepspec_kernels::adamw::{AdamWStep, Moments, adamw, square_sum};
use deepspec_kernels::attention::HeadLayout;
use deepspec_kernels::attention::block::{BlockAttention, BlockSpan};
use deepspec_kernels::attention::ragged::{CacheSide, RaggedAttention, Segment, Visibility, cache_shapes};
use deepspec_kernels::device::attention::{BlockCall, BlockSequence, RaggedCall};
use deepspec_kernels::device::linear::{Stored, Weight};
use deepspec_kernels::device::vocab_loss::{Heads, LossCall, Row};
use deepspec_kernels::device::{self, Backend, Matrix, View};
use deepspec_kernels::linear::{Linear, Packed, Precision};
use deepspec_kernels::simt::Simt;
use deepspec_kernels::verify::{DraftBlock, argmax_first, verify_blocks};
use deepspec_kernels::vocab_loss::{LossRow, VocabLoss};

/// Draws of one test case.
struct Random(u64);

impl Random {
    fn new(case: u64) -> Self {
        Self(case.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// An integer from `from` to `to` inclusive.
    fn size(&mut self, from: usize, to: usize) -> usize {
        from + (self.next() >> 33) as usize % (to + 1 - from)
    }

    /// Values in (−1, 1).
    fn values(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0).collect()
    }
}

fn tensor(data: &[f32], rows: usize) -> Tensor {
    Tensor::from_slice(data, (rows, data.len() / rows), &Device::Cpu).unwrap()
}

fn values(t: &Tensor) -> Vec<f32> {
    t.flatten_all().unwrap().to_vec1().unwrap()
}

/// A leaf that gradients flow to.
fn leaf(data: &[f32], rows: usize) -> candle_core::Var {
    candle_core::Var::from_tensor(&tensor(data, rows)).unwrap()
}

fn assert_close(what: &str, got: &[f32], expected: &[f32], tolerance: f32) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        let error = (got - expected).abs();
        assert!(error <= tolerance * expected.abs().max(1.0), "{what}[{i}]: {got}, expected {expected}");
    }
}

/// The gradient of Σ y · c in `var`.
fn gradient(y: &Tensor, c: &[f32], vars: &[&candle_core::Var]) -> Vec<Vec<f32>> {
    let c = Tensor::from_slice(c, y.shape(), &Device::Cpu).unwrap();
    let grads = (y * c).unwrap().sum_all().unwrap().backward().unwrap();
    vars.iter().map(|v| values(grads.get(v).unwrap())).collect()
}

#[test]
fn rms_norm() {
    for case in 0..12 {
        let mut random = Random::new(case);
        let (rows, cols) = (random.size(1, 200), random.size(1, 70) * if case % 2 == 0 { 4 } else { 1 });
        let (x, w, g) = (random.values(rows * cols), random.values(cols), random.values(rows * cols));
        let (xt, wt) = (leaf(&x, rows), leaf(&w, 1));
        let wt = candle_core::Var::from_tensor(&wt.reshape(cols).unwrap()).unwrap();
        let expected = deepspec_kernels::rms_norm(&xt, &wt, 1e-5).unwrap();
        let views = (Simt::view(&x, cols), Simt::view(&w, cols), Simt::view(&g, cols));
        let y = device::rms_norm::forward(&Simt, &views.0, &views.1, 1e-5).unwrap();
        assert_close("y", &Simt.download(&y).unwrap(), &values(&expected), 1e-5);
        let got = device::rms_norm::backward(&Simt, &views.0, &views.1, &views.2, 1e-5).unwrap();
        let expected = gradient(&expected, &g, &[&xt, &wt]);
        assert_close("gradients", &Simt.download(&got).unwrap(), &expected.concat(), 1e-4);
    }
}

#[test]
fn rows_may_be_a_slice_of_wider_ones() {
    let mut random = Random::new(1);
    let (rows, cols, wide) = (5, 12, 20);
    let (x, w) = (random.values(rows * wide), random.values(cols));
    let part = tensor(&x, rows).narrow(1, 4, cols).unwrap();
    let expected = deepspec_kernels::rms_norm(&part, &tensor(&w, 1).reshape(cols).unwrap(), 1e-5).unwrap();
    let view = View { address: x[4..].as_ptr() as u64, stride: wide, count: rows, cols };
    let y = device::rms_norm::forward(&Simt, &view, &Simt::view(&w, cols), 1e-5).unwrap();
    assert_close("y", &Simt.download(&y).unwrap(), &values(&expected), 1e-5);
}

#[test]
fn rope() {
    for case in 0..12 {
        let mut random = Random::new(case);
        let (rows, heads, pairs) = (random.size(1, 9), random.size(1, 4), random.size(1, 40));
        let head_dim = 2 * pairs + random.size(0, 3);
        let positions: Vec<usize> = (0..rows).map(|i| 37 * i + 3).collect();
        let frequencies: Vec<f32> = (0..pairs).map(|i| 1e4f32.powf(-(i as f32) / pairs as f32)).collect();
        let angles = deepspec_kernels::rope::RopeFrequencies::new(frequencies.clone(), head_dim).at(&positions);
        let table = |f: fn(f64) -> f64| -> Vec<f32> {
            positions.iter().flat_map(|&p| frequencies.iter().map(move |w| f(f64::from(p as f32 * w)) as f32)).collect()
        };
        let (cosines, sines) = (table(f64::cos), table(f64::sin));
        let tables = [cosines.as_ptr() as u64, sines.as_ptr() as u64];
        let (x, g) = (random.values(rows * heads * head_dim), random.values(rows * heads * head_dim));
        let xt = leaf(&x, rows);
        let expected = angles.apply(&xt).unwrap();
        let run = |x: &[f32], inverse| {
            let view = Simt::view(x, heads * head_dim);
            Simt.download(&device::elementwise::rope(&Simt, &view, tables, head_dim, pairs, inverse).unwrap()).unwrap()
        };
        assert_close("y", &run(&x, false), &values(&expected), 1e-6);
        assert_close("dx", &run(&g, true), &gradient(&expected, &g, &[&xt])[0], 1e-6);
    }
}

#[test]
fn silu_mul() {
    for case in 0..12 {
        let mut random = Random::new(case);
        let (rows, cols) = (random.size(1, 20), random.size(1, 100) * if case % 2 == 0 { 4 } else { 1 });
        let [gate, up, g] = [(); 3].map(|()| random.values(rows * cols));
        let gate: Vec<f32> = gate.iter().map(|v| v * 8.0).collect();
        let (gt, ut) = (leaf(&gate, rows), leaf(&up, rows));
        let expected = deepspec_kernels::silu_mul(&gt, &ut).unwrap();
        let [gate, up, grad] = [&gate, &up, &g].map(|data| Simt::view(data, cols));
        let y = device::elementwise::silu_mul(&Simt, &gate, &up).unwrap();
        assert_close("y", &Simt.download(&y).unwrap(), &values(&expected), 1e-5);
        let got = device::elementwise::silu_mul_backward(&Simt, &gate, &up, &grad).unwrap();
        assert_close("gradients", &Simt.download(&got).unwrap(), &gradient(&expected, &g, &[&gt, &ut]).concat(), 1e-5);
    }
}

#[test]
fn adamw_and_squared_norm() {
    for (case, count) in [1, 3, 1024, 1027, 40_001].into_iter().enumerate() {
        let mut random = Random::new(case as u64);
        let (p, g) = (random.values(count), random.values(count));
        let mut moments = Moments::zeros(count);
        let expected = tensor(&p, 1);
        let buffers = [Simt.upload(&p), Simt.upload(&g), Simt.zeros(count), Simt.zeros(count)].map(Result::unwrap);
        let [parameter, gradient, first, second] = [0, 1, 2, 3].map(|i| Simt.address(&buffers[i]));
        for step in 1..4 {
            let step = AdamWStep {
                lr: 1e-2,
                beta1: 0.9,
                beta2: 0.999,
                eps: 1e-8,
                weight_decay: 0.1,
                step,
                gradient_scale: 0.5,
            };
            adamw(&expected, &tensor(&g, 1), &mut moments, &step).unwrap();
            device::elementwise::adamw(&Simt, parameter, gradient, [first, second], count, &step).unwrap();
        }
        let [m, v] = moments.values().unwrap();
        assert_close("parameter", &Simt.download(&buffers[0]).unwrap(), &values(&expected), 1e-6);
        assert_close("first moment", &Simt.download(&buffers[2]).unwrap(), &m, 1e-6);
        assert_close("second moment", &Simt.download(&buffers[3]).unwrap(), &v, 1e-6);
        let expected = square_sum(&tensor(&g, 1)).unwrap();
        let got = device::elementwise::square_sum(&Simt, gradient, count).unwrap();
        assert!((got - expected).abs() < 1e-9 * expected, "{got}, expected {expected}");
    }
}

#[test]
fn linear_of_few_rows() {
    for case in 0..24 {
        let mut random = Random::new(case);
        let (rows, outputs) = (random.size(1, 20), random.size(1, 70));
        let inputs = random.size(1, 80) * if case % 2 == 0 { 8 } else { 1 };
        let weight = random.values(outputs * inputs);
        let (x, bias) = (random.values(rows * inputs), random.values(outputs));
        for stored in [Stored::F32, Stored::Bf16] {
            let narrow: Vec<half::bf16> = weight.iter().map(|w| half::bf16::from_f32(*w)).collect();
            let (wide, narrow) = (Simt.upload(&weight).unwrap(), Simt.upload(&narrow).unwrap());
            let (precision, address) = match stored {
                Stored::F32 => (Precision::F32, Simt.address(&wide)),
                Stored::Bf16 => (Precision::Bf16, Simt.address(&narrow)),
            };
            let bias_at = if case % 3 == 0 { 0 } else { bias.as_ptr() as u64 };
            let weights = Weight { address, stored, bias: bias_at, inputs, outputs };
            let run = |x: &[f32]| {
                let x = Simt.upload(x).unwrap();
                Simt.download(&device::linear::forward(&Simt, &x.rows(inputs), &weights).unwrap()).unwrap()
            };
            let y = run(&x);
            let bias = (bias_at != 0).then(|| tensor(&bias, 1).reshape(outputs).unwrap());
            let layer = Linear::frozen(&[&tensor(&weight, outputs)], bias.as_ref(), precision).unwrap();
            assert_close("y", &y, &values(&layer.forward(&tensor(&x, rows)).unwrap()), 1e-5);
            for row in 0..rows {
                let alone = run(&x[row * inputs..(row + 1) * inputs]);
                assert_eq!(alone, y[row * outputs..(row + 1) * outputs], "row {row} depends on the others");
            }
        }
    }
}

#[test]
fn ragged_attention() {
    let dims = [8, 20, 64, 80, 160, 33];
    for case in 0..18u64 {
        let mut random = Random::new(case);
        let head_dim = dims[case as usize % dims.len()];
        let (kv_heads, group) = (random.size(1, 2), random.size(1, 4));
        let heads = HeadLayout { heads: kv_heads * group, kv_heads, head_dim };
        let capacity = [96, 101, 600][case as usize % 3];
        let (width, slots) = (kv_heads * head_dim, 3);
        let mut segments = Vec::new();
        for slot in [2, 0] {
            let len = random.size(1, 7);
            segments.push(Segment { slot, start: random.size(0, capacity - len), len });
        }
        let rows: usize = segments.iter().map(|s| s.len).sum();
        let causal = case % 4 != 0;
        let window = if case / 2 % 2 == 0 { None } else { Some(random.size(0, 60)) };
        let visibility = if causal { Visibility::Causal } else { Visibility::WholeSegment };
        let op = RaggedAttention { segments: segments.clone().into(), capacity, heads, visibility, window };
        // Caches full of what other sequences left, then the new rows.
        let caches = cache_shapes(slots, capacity, heads).map(|(rows, cols)| tensor(&random.values(rows * cols), rows));
        let [keys, v_cache] = [0, 1].map(|i| Simt.upload(&values(&caches[i])).unwrap());
        let [new_keys, new_values] = [(); 2].map(|()| random.values(rows * width));
        op.store(&tensor(&new_keys, rows), &tensor(&new_values, rows), &caches[0], &caches[1]).unwrap();
        let call = RaggedCall { segments: &segments, capacity, heads, causal, window };
        for (side, new, cache) in [(CacheSide::Keys, &new_keys, &keys), (CacheSide::Values, &new_values, &v_cache)] {
            device::attention::store(&Simt, &call, side, &Simt::view(new, width), Simt.address(cache)).unwrap();
        }
        let [keys, v_cache] = [keys, v_cache].map(|cache| Simt.download(&cache).unwrap());
        assert_eq!(keys, values(&caches[0]), "stored keys");
        assert_eq!(v_cache, values(&caches[1]), "stored values");

        let q: Vec<f32> = random.values(rows * heads.heads * head_dim).iter().map(|v| v * 4.0).collect();
        let expected = values(&op.forward(&tensor(&q, rows), &caches[0], &caches[1]).unwrap());
        let run = |q: &[f32], segments: &[Segment]| {
            let call = RaggedCall { segments, capacity, heads, causal, window };
            let [q, k, v] = [q, &keys, &v_cache].map(|data| Simt.upload(data).unwrap());
            let caches = [Simt.address(&k), Simt.address(&v)];
            let y = device::attention::ragged(&Simt, &call, &q.rows(heads.heads * head_dim), caches).unwrap();
            Simt.download(&y).unwrap()
        };
        let y = run(&q, &segments);
        assert_close("y", &y, &expected, 1e-4);
        let first = segments[0].len * heads.heads * head_dim;
        assert_eq!(run(&q[first..], &segments[1..]), y[first..], "a row depends on other segments");
        if causal {
            let alone = (0..segments[0].len).map(|i| Segment { start: segments[0].start + i, len: 1, ..segments[0] });
            for (i, segment) in alone.enumerate() {
                let row = i * heads.heads * head_dim..(i + 1) * heads.heads * head_dim;
                assert_eq!(run(&q[row.clone()], &[segment]), y[row], "row {i} depends on its segment");
            }
        }
        // Enough copies of a segment that its keys are no longer spread over blocks.
        let many: Vec<Segment> = (0..128).map(|_| segments[1]).collect();
        if case % 3 == 2 && segments[1].len < 3 {
            let y_many = run(&q[first..].repeat(128), &many);
            assert_eq!(y_many[..y.len() - first], y[first..], "spread and unspread keys differ");
        }
    }
}

#[test]
fn ragged_attention_over_a_ring() {
    for case in 0..8u64 {
        let mut random = Random::new(case + 100);
        let head_dim = [8, 33, 64, 128][case as usize % 4];
        let heads = HeadLayout { heads: 4, kv_heads: 2, head_dim };
        let (width, capacity, window) = (2 * head_dim, 96, random.size(1, 80));
        // Positions far beyond the capacity, at any place in the ring.
        let segments = [2, 0].map(|slot| Segment { slot, start: random.size(100, 1400), len: random.size(1, 7) });
        let rows: usize = segments.iter().map(|s| s.len).sum();
        let causal = case % 2 == 0;
        let visibility = if causal { Visibility::Causal } else { Visibility::WholeSegment };
        let window = Some(window);
        let op = RaggedAttention { segments: segments.into(), capacity, heads, visibility, window };
        let caches = cache_shapes(3, capacity, heads).map(|(rows, cols)| tensor(&random.values(rows * cols), rows));
        let [keys, v_cache] = [0, 1].map(|i| Simt.upload(&values(&caches[i])).unwrap());
        let [new_keys, new_values] = [(); 2].map(|()| random.values(rows * width));
        op.store(&tensor(&new_keys, rows), &tensor(&new_values, rows), &caches[0], &caches[1]).unwrap();
        let call = RaggedCall { segments: &segments, capacity, heads, causal, window };
        for (side, new, cache) in [(CacheSide::Keys, &new_keys, &keys), (CacheSide::Values, &new_values, &v_cache)] {
            device::attention::store(&Simt, &call, side, &Simt::view(new, width), Simt.address(cache)).unwrap();
        }
        let addresses = [Simt.address(&keys), Simt.address(&v_cache)];
        let q = random.values(rows * heads.heads * head_dim);
        let y = device::attention::ragged(&Simt, &call, &Simt::view(&q, heads.heads * head_dim), addresses).unwrap();
        let expected = values(&op.forward(&tensor(&q, rows), &caches[0], &caches[1]).unwrap());
        assert_eq!(Simt.download(&keys).unwrap(), values(&caches[0]), "stored keys");
        assert_eq!(Simt.download(&v_cache).unwrap(), values(&caches[1]), "stored values");
        assert_close("y", &Simt.download(&y).unwrap(), &expected, 1e-4);
    }
}

#[test]
fn block_attention() {
    let dims = [8, 20, 64, 80, 160, 33];
    for case in 0..12u64 {
        let mut random = Random::new(case);
        let head_dim = dims[case as usize % dims.len()];
        let (kv_heads, group, size) = (random.size(1, 2), random.size(1, 4), random.size(1, 7));
        let heads = HeadLayout { heads: kv_heads * group, kv_heads, head_dim };
        let (mut sequences, mut context, mut rows) = (Vec::new(), 0, 0);
        for _ in 0..2 {
            let length = random.size(0, 70);
            let blocks: Vec<BlockSpan> = (0..random.size(1, 4))
                .map(|_| {
                    let end = random.size(0, length);
                    let start = random.size(0, end);
                    rows += size;
                    let sees_itself = random.size(0, 4) > 0;
                    BlockSpan { context: context + start..context + end, rows: rows - size..rows, sees_itself }
                })
                .collect();
            sequences.push((context..context + length, blocks));
            context += length;
        }
        let pattern = BlockAttention::new(sequences.clone(), heads).unwrap();
        let row_ranges: Vec<_> = sequences.iter().map(|(_, b)| b[0].rows.start..b.last().unwrap().rows.end).collect();
        let call = BlockCall {
            sequences: sequences
                .iter()
                .zip(&row_ranges)
                .map(|((context, blocks), rows)| BlockSequence { context, rows, blocks })
                .collect(),
            context_rows: context,
            block_rows: rows,
            heads,
        };
        let (wide, width) = (heads.heads * head_dim, kv_heads * head_dim);
        let q: Vec<f32> = random.values(rows * wide).iter().map(|v| v * 4.0).collect();
        let [k, v] = [(); 2].map(|()| random.values((context + rows) * width));
        let grad = random.values(rows * wide);
        let (qt, kt, vt) = (leaf(&q, rows), leaf(&k, context + rows), leaf(&v, context + rows));
        let expected = pattern.forward(&qt, &kt, &vt).unwrap();
        let buffers = [&q, &k, &v, &grad].map(|data| Simt.upload(data).unwrap());
        let views = [(0, wide), (1, width), (2, width), (3, wide)].map(|(i, cols)| buffers[i].rows(cols));
        let y = device::attention::block(&Simt, &call, &views[0], &views[1], &views[2]).unwrap();
        assert_close("y", &Simt.download(&y).unwrap(), &values(&expected), 1e-5);
        let got = device::attention::block_backward(&Simt, &call, &views[0], &views[1], &views[2], &views[3]).unwrap();
        let expected = gradient(&expected, &grad, &[&qt, &kt, &vt]).concat();
        assert_close("gradients", &Simt.download(&got).unwrap(), &expected, 1e-4);
    }
}

/// Probabilities from draws, some of them zero.
fn distribution(random: &mut Random, n: usize) -> Vec<f32> {
    let weights: Vec<f32> = random.values(n).iter().map(|v| (4.0 * v).exp() * f32::from(u8::from(*v > -0.5))).collect();
    let total: f32 = weights.iter().sum::<f32>().max(1e-30);
    weights.iter().map(|w| w / total).collect()
}

#[test]
fn verification() {
    for case in 0..20 {
        let mut random = Random::new(case);
        let vocab = random.size(1, 3000);
        let lengths: Vec<usize> = (0..random.size(1, 4)).map(|_| random.size(0, 5)).collect();
        let count: usize = lengths.iter().sum();
        let draft: Vec<f32> = (0..count).flat_map(|_| distribution(&mut random, vocab)).collect();
        let mut target: Vec<f32> = (0..count + lengths.len()).flat_map(|_| distribution(&mut random, vocab)).collect();
        let tokens: Vec<u32> = (0..count).map(|_| random.size(0, vocab - 1) as u32).collect();
        if case % 2 == 0 && count > 0 && lengths[0] > 0 {
            // Equal rows but for the proposed token: if it is rejected, the residual has no mass.
            target[..vocab].copy_from_slice(&draft[..vocab]);
            target[tokens[0] as usize] *= 0.5;
        }
        let mut uniform = |n: usize| -> Vec<f64> { (0..n).map(|_| f64::from(random.values(1)[0].abs())).collect() };
        let (accept, next) = (uniform(count), uniform(count + lengths.len()));
        let (mut blocks, mut d, mut t) = (Vec::new(), 0, 0);
        for &length in &lengths {
            blocks.push(DraftBlock {
                tokens: &tokens[d..d + length],
                accept: &accept[d..d + length],
                next: &next[t..=t + length],
            });
            (d, t) = (d + length, t + length + 1);
        }
        let draft_tensor = Tensor::from_slice(&draft, (count, vocab), &Device::Cpu).unwrap();
        let expected = verify_blocks(&tensor(&target, count + lengths.len()), &draft_tensor, &blocks).unwrap();
        let views = (Simt::view(&target, vocab), Simt::view(&draft, vocab));
        assert_eq!(device::verify::verify_blocks(&Simt, &views.0, &views.1, &blocks).unwrap(), expected);
    }
}

#[test]
fn first_maximum() {
    let mut random = Random::new(3);
    for cols in [1, 2, 255, 256, 1000] {
        let mut x: Vec<f32> = (0..6 * cols).map(|_| random.size(0, 40) as f32).collect();
        x[..cols].fill(-3.0);
        x[cols..2 * cols].fill(f32::NEG_INFINITY);
        x[2 * cols + random.size(0, cols - 1)] = f32::NAN;
        x[3 * cols + random.size(0, cols - 1)] = f32::INFINITY;
        let got = device::verify::argmax_first(&Simt, &Simt::view(&x, cols)).unwrap();
        for (row, got) in x.chunks(cols).zip(got) {
            let row = tensor(row, 1);
            assert_eq!(got, argmax_first(&row).ok().map(|places| places[0]));
        }
    }
}

#[test]
fn vocabulary_loss() {
    for case in 0..16 {
        let mut random = Random::new(case);
        let (vocab, width, rank) = (random.size(2, 700), random.size(1, 9), random.size(0, 4));
        let (count, positions) = (random.size(1, 9), random.size(1, 5));
        let [head, hidden] = [vocab, count].map(|rows| random.values(rows * width));
        let target: Vec<f32> = random.values(positions * width).iter().map(|v| v * 3.0).collect();
        let (latent, w2) = (random.values(count * rank), random.values(vocab * rank));
        let with_target = case % 4 != 0;
        let kl_temperature = [1.0, 2.0][case as usize % 2];
        let rows: Vec<Row> = (0..random.size(0, 12))
            .map(|_| Row {
                row: random.size(0, count - 1),
                target: random.size(0, positions - 1),
                label: Some(random.size(0, vocab - 1) as u32),
                ce: random.values(1)[0],
                tv: if with_target { random.values(1)[0] } else { 0.0 },
                kl: if with_target && case % 3 != 0 { random.values(1)[0] } else { 0.0 },
            })
            .collect();
        let head_tensor = tensor(&head, vocab);
        let packed = std::sync::Arc::new(Packed::new(&[&head], width, None, Precision::F32).unwrap());
        let loss = VocabLoss {
            target_head: packed.clone(),
            draft_head: packed,
            draft_head_weight: head_tensor.clone(),
            draft_tokens: None,
            rows: rows
                .iter()
                .map(|r| LossRow { row: r.row, target: r.target, label: r.label, ce: r.ce, tv: r.tv, kl: r.kl })
                .collect(),
            kl_temperature,
            with_target,
            soft_targets: false,
        };
        let at = |data: &[f32], rows: usize, cols: usize| {
            candle_core::Var::from_tensor(&Tensor::from_slice(data, (rows, cols), &Device::Cpu).unwrap()).unwrap()
        };
        let vars = [at(&hidden, count, width), at(&latent, count, rank), at(&w2, vocab, rank)];
        let expected = loss.forward(&vars[0], &vars[1], &vars[2], &tensor(&target, positions)).unwrap();
        let call = LossCall { rows: &rows, draft_tokens: None, kl_temperature, with_target, chunk_rows: Some(4) };
        let matrix = |data: &[f32], cols: usize| Matrix::new(data.as_ptr() as u64, vocab, cols);
        let heads = Heads { draft: matrix(&head, width), target: matrix(&head, width), w2: matrix(&w2, rank) };
        let latent_view = View { count, ..Simt::view(&latent, rank) };
        let views = (Simt::view(&hidden, width), latent_view, Simt::view(&target, width));
        let got = device::vocab_loss::forward(&Simt, &call, &views.0, &views.1, &views.2, &heads).unwrap();
        let terms: Vec<f32> = expected.terms.iter().flat_map(|t| [t.ce, t.tv, t.kl]).collect();
        assert_close("terms", &got.terms.concat(), &terms, 2e-5);
        let grads = expected.loss.sum_all().unwrap().backward().unwrap();
        for (var, got) in vars.iter().zip([&got.hidden, &got.latent, &got.w2]) {
            let expected = grads.get(var).map_or_else(|| vec![0.0; var.elem_count()], values);
            assert_close("gradient", &Simt.download(got).unwrap(), &expected, 2e-5);
        }
    }
}

/// A drafter with a part of the vocabulary, against plain f64 loops.
#[test]
fn vocabulary_loss_of_a_draft_vocabulary() {
    for case in 0..8 {
        let mut random = Random::new(case);
        let (target_vocab, width) = (random.size(2, 500), random.size(1, 6));
        let mut tokens: Vec<u32> = (0..target_vocab as u32).filter(|_| random.size(0, 2) == 0).collect();
        if tokens.is_empty() {
            tokens.push(target_vocab as u32 - 1);
        }
        let vocab = tokens.len();
        let temperature = [1.0f32, 2.0][case as usize % 2];
        let target_head = random.values(target_vocab * width);
        let head: Vec<f32> = tokens.iter().flat_map(|&t| target_head[t as usize * width..][..width].to_vec()).collect();
        let (hidden, target) = (random.values(2 * width), random.values(2 * width));
        let rows = [(0, 1, Some(vocab as u32 - 1)), (1, 0, None)].map(|(row, target, label)| Row {
            row,
            target,
            label,
            ce: 0.5,
            tv: 0.7,
            kl: 0.3,
        });
        let tokens_slice = Some(&tokens[..]);
        let call = LossCall {
            rows: &rows,
            draft_tokens: tokens_slice,
            kl_temperature: temperature,
            with_target: true,
            chunk_rows: None,
        };
        let matrix = |data: &[f32], rows: usize, cols: usize| Matrix::new(data.as_ptr() as u64, rows, cols);
        let heads = Heads {
            draft: matrix(&head, vocab, width),
            target: matrix(&target_head, target_vocab, width),
            w2: matrix(&[], vocab, 0),
        };
        let latent = View { count: 2, ..Simt::view(&[], 0) };
        let run = |hidden: &[f32]| {
            let (hidden, target) = (Simt::view(hidden, width), Simt::view(&target, width));
            device::vocab_loss::forward(&Simt, &call, &hidden, &latent, &target, &heads).unwrap()
        };
        let softmax = |logits: &[f64], t: f64| -> Vec<f64> {
            let total: f64 = logits.iter().map(|u| (u / t).exp()).sum();
            logits.iter().map(|u| (u / t).exp() / total).collect()
        };
        let logits = |x: &[f64], head: &[f32]| -> Vec<f64> {
            head.chunks(width).map(|row| row.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum()).collect()
        };
        let loss = |row: &Row, hidden: &[f64]| -> ([f64; 3], f64) {
            let x: Vec<f64> = target[row.target * width..][..width].iter().map(|v| f64::from(*v)).collect();
            let (u, t) = (logits(hidden, &head), logits(&x, &target_head));
            let (p, q) = (softmax(&u, 1.0), softmax(&t, 1.0));
            let outside: f64 = (0..target_vocab).filter(|v| !tokens.contains(&(*v as u32))).map(|v| q[v]).sum();
            let tv = p.iter().zip(&tokens).map(|(p, &t)| (p - q[t as usize]).abs()).sum::<f64>() + outside;
            let (pt, qt) = (softmax(&u, f64::from(temperature)), softmax(&t, f64::from(temperature)));
            let kl = pt.iter().zip(&tokens).map(|(p, &t)| qt[t as usize] * (qt[t as usize] / p).ln()).sum::<f64>();
            let ce = row.label.map_or(0.0, |label| -p[label as usize].ln());
            let total = f64::from(row.ce) * ce + f64::from(row.tv) * tv + f64::from(row.kl) * kl;
            ([ce, tv, kl], total)
        };
        let got = run(&hidden);
        let gradient = Simt.download(&got.hidden).unwrap();
        for (i, row) in rows.iter().enumerate() {
            let x: Vec<f64> = hidden[row.row * width..][..width].iter().map(|v| f64::from(*v)).collect();
            let expected = loss(row, &x).0.map(|v| v as f32);
            assert_close("terms", &got.terms[i], &expected, 2e-5);
            for d in 0..width {
                let shifted = |by: f64| {
                    let mut x = x.clone();
                    x[d] += by;
                    loss(row, &x).1
                };
                let expected = (shifted(1e-6) - shifted(-1e-6)) / 2e-6;
                assert!(
                    (f64::from(gradient[row.row * width + d]) - expected).abs() < 1e-4,
                    "case {case}, row {i}, {d}"
                );
            }
        }
    }
}
