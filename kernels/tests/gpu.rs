//! Every operation on a CUDA device against the same call on the CPU (feature `cuda`); without a device they say so and pass.
#![cfg(feature = "cuda")]
#![expect(clippy::print_stdout, clippy::unwrap_used, reason = "tests say that they were skipped, and fail as tests do")]

use candle_core::{Device, Result, Tensor, Var};
use deepspec_kernels::adamw::{AdamWStep, Moments, adamw, square_sum};
use deepspec_kernels::attention::HeadLayout;
use deepspec_kernels::attention::block::{BlockAttention, BlockSpan};
use deepspec_kernels::attention::ragged::{RaggedAttention, Segment, Visibility, cache_shapes};
use deepspec_kernels::linear::{INVARIANT_ROWS, Linear, Packed, Precision};
use deepspec_kernels::rope::RopeFrequencies;
use deepspec_kernels::verify::{DraftBlock, argmax_first, verify_blocks};
use deepspec_kernels::vocab_loss::{LossRow, VocabLoss};
use deepspec_kernels::{rms_norm, silu_mul};

fn gpu() -> Option<Device> {
    match Device::new_cuda(0) {
        Ok(device) => Some(device),
        Err(error) => {
            println!("skipped: no CUDA device: {error}");
            None
        }
    }
}

/// Values in (−1, 1) from a seed.
fn random(seed: u64, rows: usize, cols: usize) -> Tensor {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let values: Vec<f32> = (0..rows * cols)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect();
    Tensor::from_vec(values, (rows, cols), &Device::Cpu).unwrap()
}

fn values(t: &Tensor) -> Vec<f32> {
    t.flatten_all().unwrap().to_vec1().unwrap()
}

fn assert_close(what: &str, got: &[f32], expected: &[f32], tolerance: f32) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        let error = (got - expected).abs();
        assert!(error <= tolerance * expected.abs().max(1.0), "{what}[{i}]: {got}, expected {expected}");
    }
}

/// Runs `f` on both devices, with the gradients of Σ y · c in every input.
fn compare(gpu: &Device, what: &str, inputs: &[Tensor], tolerance: f32, f: impl Fn(&[Tensor]) -> Result<Tensor>) {
    let run = |device: &Device| {
        let vars: Vec<Var> = inputs.iter().map(|t| Var::from_tensor(&t.to_device(device).unwrap()).unwrap()).collect();
        let tensors: Vec<Tensor> = vars.iter().map(|v| v.as_tensor().clone()).collect();
        let y = f(&tensors).unwrap();
        let c = random(99, 1, y.elem_count()).reshape(y.shape()).unwrap().to_device(device).unwrap();
        let grads = (&y * c).unwrap().sum_all().unwrap().backward().unwrap();
        let grads: Vec<Vec<f32>> = vars.iter().map(|v| grads.get(v).map_or_else(Vec::new, values)).collect();
        (values(&y), grads)
    };
    let (expected, expected_grads) = run(&Device::Cpu);
    let (got, grads) = run(gpu);
    assert_close(what, &got, &expected, tolerance);
    for (i, (got, expected)) in grads.iter().zip(&expected_grads).enumerate() {
        assert_close(&format!("{what}: gradient {i}"), got, expected, 10.0 * tolerance);
    }
}

#[test]
fn rows_operations() {
    let Some(gpu) = gpu() else { return };
    for (rows, cols) in [(1, 576), (7, 64), (300, 1536), (5, 33)] {
        let (x, y) = (random(1, rows, cols), random(2, rows, cols));
        let weight = random(3, 1, cols).reshape(cols).unwrap();
        compare(&gpu, "rms-norm", &[x.clone(), weight], 1e-5, |t| rms_norm(&t[0], &t[1], 1e-5));
        compare(&gpu, "silu-mul", &[(&x * 6.0).unwrap(), y], 1e-5, |t| silu_mul(&t[0], &t[1]));
    }
    let positions: Vec<usize> = (0..50).map(|i| i * 13).collect();
    let angles = RopeFrequencies::plain(1e4, 64, 72).at(&positions);
    compare(&gpu, "rope", &[random(4, 50, 3 * 72)], 1e-5, |t| angles.apply(&t[0]));
    // A slice of a wider row, as the parts of a fused projection are.
    compare(&gpu, "slice", &[random(5, 9, 100)], 1e-5, |t| silu_mul(&t[0].narrow(1, 4, 32)?, &t[0].narrow(1, 50, 32)?));
}

#[test]
fn linear_layers() {
    let Some(gpu) = gpu() else { return };
    for precision in [Precision::F32, Precision::Bf16] {
        for (inputs, outputs) in [(576, 960), (1536, 576), (65, 33)] {
            let (weight, bias) = (random(1, outputs, inputs), random(2, 1, outputs).reshape(outputs).unwrap());
            let on_cpu = Linear::frozen(&[&weight], Some(&bias), precision).unwrap();
            let (weight, bias) = (weight.to_device(&gpu).unwrap(), bias.to_device(&gpu).unwrap());
            let on_gpu = Linear::frozen(&[&weight], Some(&bias), precision).unwrap();
            for rows in [1, 2, 3, 8, 16, 17, INVARIANT_ROWS, 200] {
                let x = random(3, rows, inputs);
                let y = on_gpu.forward(&x.to_device(&gpu).unwrap()).unwrap();
                assert_close("linear", &values(&y), &values(&on_cpu.forward(&x).unwrap()), 1e-4);
                if rows <= INVARIANT_ROWS {
                    let alone = on_gpu.forward(&x.narrow(0, rows - 1, 1).unwrap().to_device(&gpu).unwrap()).unwrap();
                    assert_eq!(
                        values(&alone),
                        values(&y.narrow(0, rows - 1, 1).unwrap()),
                        "a row depends on the others"
                    );
                }
            }
        }
    }
}

#[test]
fn attention_over_caches() {
    let Some(gpu) = gpu() else { return };
    for (head_dim, capacity, causal, window) in
        [(64, 1000, true, None), (64, 1024, false, Some(128)), (128, 700, true, Some(300)), (20, 101, false, None)]
    {
        let heads = HeadLayout { heads: 9, kv_heads: 3, head_dim };
        let width = 3 * head_dim;
        let segments = [
            Segment { slot: 2, start: capacity - 40, len: 40 },
            Segment { slot: 0, start: 3, len: 8 },
            Segment { slot: 1, start: capacity - 1, len: 1 },
        ];
        let visibility = if causal { Visibility::Causal } else { Visibility::WholeSegment };
        let run = |device: &Device, segments: &[Segment], first: usize| {
            let at = |t: Tensor| t.to_device(device).unwrap();
            let rows: usize = segments.iter().map(|s| s.len).sum();
            let [k_cache, v_cache] =
                cache_shapes(3, capacity, heads).map(|(rows, cols)| at(random(rows as u64, rows, cols)));
            let part = |seed, cols| at(random(seed, 49, cols).narrow(0, first, rows).unwrap());
            let op = RaggedAttention { segments: segments.into(), capacity, heads, visibility, window };
            op.store(&part(3, width), &part(4, width), &k_cache, &v_cache).unwrap();
            let q = (part(5, 9 * head_dim) * 4.0).unwrap();
            values(&op.forward(&q, &k_cache, &v_cache).unwrap())
        };
        let y = run(&gpu, &segments, 0);
        assert_close("attention", &y, &run(&Device::Cpu, &segments, 0), 1e-4);
        assert_eq!(run(&gpu, &segments[2..], 48), y[48 * 9 * head_dim..], "a row depends on other segments");
    }
}

#[test]
fn block_attention() {
    let Some(gpu) = gpu() else { return };
    for head_dim in [64, 128, 20, 200] {
        let heads = HeadLayout { heads: 6, kv_heads: 2, head_dim };
        let span =
            |context, first: usize| BlockSpan { context, rows: 7 * first..7 * (first + 1), sees_itself: first != 2 };
        let pattern = BlockAttention::new(
            vec![(0..300, vec![span(0..30, 0), span(100..300, 1), span(0..0, 2)]), (300..320, vec![span(300..311, 3)])],
            heads,
        )
        .unwrap();
        let keys = |seed| random(seed, 320 + 28, 2 * head_dim);
        let inputs = [(random(1, 28, 6 * head_dim) * 4.0).unwrap(), keys(2), keys(3)];
        compare(&gpu, "block attention", &inputs, 1e-5, |t| pattern.forward(&t[0], &t[1], &t[2]));
    }
}

#[test]
fn vocabulary_loss() {
    let Some(gpu) = gpu() else { return };
    let (vocab, width, rank, count) = (5003, 64, 16, 40);
    let head = random(1, vocab, width);
    let packed = std::sync::Arc::new(Packed::new(&[&values(&head)], width, None, Precision::F32).unwrap());
    let inputs = [random(2, count, width), random(3, count, rank), random(4, vocab, rank)];
    for kl_temperature in [1.0, 2.0] {
        compare(&gpu, "vocabulary loss", &inputs, 1e-4, |t| {
            let device = t[0].device();
            let target = (random(5, 30, width) * 2.0)?.to_device(device)?;
            let row = |i: usize| LossRow {
                row: i * 3 % count,
                target: i * 7 % 30,
                label: (!i.is_multiple_of(5)).then_some((i * 101 % vocab) as u32),
                ce: 0.3,
                tv: 0.7,
                kl: 0.2,
            };
            let loss = VocabLoss {
                target_head: packed.clone(),
                draft_head: packed.clone(),
                draft_head_weight: head.to_device(device)?,
                draft_tokens: None,
                rows: (0..60).map(row).collect(),
                kl_temperature,
                with_target: true,
                soft_targets: false,
            };
            Ok(loss.forward(&t[0], &t[1], &t[2], &target)?.loss)
        });
    }
}

#[test]
fn optimiser() {
    let Some(gpu) = gpu() else { return };
    let (p, g) = (random(1, 100, 777), random(2, 100, 777));
    let run = |device: &Device| {
        let p = p.to_device(device).unwrap().copy().unwrap();
        let g = g.to_device(device).unwrap();
        let mut moments = Moments::zeros(77_700);
        for step in 1..4 {
            let (lr, eps, weight_decay, gradient_scale) = (1e-2, 1e-8, 0.1, 0.5);
            let step = AdamWStep { lr, beta1: 0.9, beta2: 0.999, eps, weight_decay, step, gradient_scale };
            adamw(&p, &g, &mut moments, &step).unwrap();
        }
        let [first, second] = moments.values().unwrap().map(std::borrow::Cow::into_owned);
        (values(&p), first, second, square_sum(&g).unwrap())
    };
    let (expected, got) = (run(&Device::Cpu), run(&gpu));
    assert_close("parameter", &got.0, &expected.0, 1e-6);
    assert_close("first moment", &got.1, &expected.1, 1e-6);
    assert_close("second moment", &got.2, &expected.2, 1e-6);
    assert!((got.3 - expected.3).abs() < 1e-9 * expected.3, "{} for {}", got.3, expected.3);
}

#[test]
fn verification() {
    let Some(gpu) = gpu() else { return };
    let vocab = 49_152;
    let probabilities = |seed, rows| {
        let weights = (random(seed, rows, vocab) * 8.0).unwrap().exp().unwrap();
        weights.broadcast_div(&weights.sum_keepdim(1).unwrap()).unwrap()
    };
    let (target, draft) = (probabilities(1, 9), probabilities(2, 7));
    let tokens = [5, 49_151, 0, 17, 300, 4000, 20_000];
    let uniform: Vec<f64> = values(&random(3, 1, 16)).iter().map(|v| f64::from(v.abs())).collect();
    let blocks = [
        DraftBlock { tokens: &tokens[..3], accept: &[0.0, 0.0, 0.0], next: &uniform[..4] },
        DraftBlock { tokens: &tokens[3..], accept: &uniform[4..8], next: &uniform[8..13] },
    ];
    let expected = verify_blocks(&target, &draft, &blocks).unwrap();
    let (target, draft) = (target.to_device(&gpu).unwrap(), draft.to_device(&gpu).unwrap());
    assert_eq!(verify_blocks(&target, &draft, &blocks).unwrap(), expected);
    let logits = (random(4, 20, vocab) * 4.0).unwrap().round().unwrap();
    assert_eq!(argmax_first(&logits.to_device(&gpu).unwrap()).unwrap(), argmax_first(&logits).unwrap());
}
