//! Times every operation on a CUDA device beside the ceilings measured on the same device: bytes per second of a copy, f32
//! operations per second of a large matrix product.
#![expect(clippy::print_stdout, reason = "a measuring tool")]

use std::time::Instant;

use candle_core::{DType, Device, Result, Tensor, Var};
use deepspec_kernels::adamw::{AdamWStep, Moments, adamw};
use deepspec_kernels::attention::HeadLayout;
use deepspec_kernels::attention::block::{BlockAttention, BlockSpan};
use deepspec_kernels::attention::ragged::{RaggedAttention, Segment, Visibility, cache_shapes};
use deepspec_kernels::linear::{Linear, Packed, Precision};
use deepspec_kernels::rope::RopeFrequencies;
use deepspec_kernels::verify::{DraftBlock, argmax_first, verify_blocks};
use deepspec_kernels::vocab_loss::{LossRow, VocabLoss};
use deepspec_kernels::{rms_norm, silu_mul};

/// What the device reaches at best.
struct Ceilings {
    bytes_per_s: f64,
    flops: f64,
}

/// Shortest of several timings of `f`, in seconds, each over enough calls to outlast the launch.
fn seconds(device: &Device, mut f: impl FnMut() -> Result<()>) -> Result<f64> {
    f()?;
    device.synchronize()?;
    let mut best = f64::INFINITY;
    for _ in 0..5 {
        let (start, calls) = (Instant::now(), 10);
        for _ in 0..calls {
            f()?;
        }
        device.synchronize()?;
        best = best.min(start.elapsed().as_secs_f64() / f64::from(calls));
    }
    Ok(best)
}

/// Prints one line: time, bytes and operations per second, and the share of the nearer ceiling.
fn report(ceilings: &Ceilings, name: &str, seconds: f64, bytes: f64, flops: f64) {
    let share = (bytes / ceilings.bytes_per_s).max(flops / ceilings.flops) / seconds;
    println!(
        "{name:<34} {:>9.1} us {:>8.1} GB/s {:>8.2} TFLOP/s {:>5.0} % of the ceiling",
        seconds * 1e6,
        bytes / seconds / 1e9,
        flops / seconds / 1e12,
        share * 100.0
    );
}

fn main() -> Result<()> {
    let gpu = Device::new_cuda(0)?;
    let random = |rows: usize, cols: usize| Tensor::randn(0f32, 1.0, (rows, cols), &gpu);
    let big = random(1 << 14, 1 << 14)?;
    let copy = seconds(&gpu, || big.copy().map(drop))?;
    let square = random(8192, 8192)?;
    let product = seconds(&gpu, || square.matmul(&square).map(drop))?;
    let ceilings =
        Ceilings { bytes_per_s: 2.0 * 4.0 * big.elem_count() as f64 / copy, flops: 2.0 * 8192f64.powi(3) / product };
    println!("ceilings: {:.0} GB/s, {:.1} TFLOP/s f32", ceilings.bytes_per_s / 1e9, ceilings.flops / 1e12);

    // Rows of a training batch, width and intermediate width of a one-billion-parameter model.
    let (rows, width, wide) = (8192, 2048, 8192);
    let values = |n: usize| n as f64 * 4.0;
    let (x, weight) = (random(rows, width)?, Tensor::ones(width, DType::F32, &gpu)?);
    let time = seconds(&gpu, || rms_norm(&x, &weight, 1e-5).map(drop))?;
    report(&ceilings, "rms-norm", time, values(2 * rows * width), 0.0);
    let angles = RopeFrequencies::plain(1e4, 64, 64).at(&(0..rows).collect::<Vec<_>>());
    let time = seconds(&gpu, || angles.apply(&x).map(drop))?;
    report(&ceilings, "rope", time, values(2 * rows * width + rows * 64), 0.0);
    let (gate, up) = (random(rows, wide)?, random(rows, wide)?);
    let time = seconds(&gpu, || silu_mul(&gate, &up).map(drop))?;
    report(&ceilings, "silu-mul", time, values(3 * rows * wide), 0.0);
    let backward = |leaves: &[&Var], y: &dyn Fn() -> Result<Tensor>| {
        let forward = seconds(&gpu, || y().map(drop))?;
        let both = seconds(&gpu, || {
            let grads = y()?.sum_all()?.backward()?;
            if leaves.iter().any(|leaf| grads.get(leaf).is_none()) {
                candle_core::bail!("an input without a gradient");
            }
            Ok(())
        })?;
        Ok::<_, candle_core::Error>(both - forward)
    };
    let (vx, vw) = (Var::from_tensor(&x)?, Var::from_tensor(&weight)?);
    let time = backward(&[&vx, &vw], &|| rms_norm(&vx, &vw, 1e-5))?;
    report(&ceilings, "rms-norm backward (with a sum)", time, values(5 * rows * width), 0.0);

    let (parameter, gradient) = (random(rows, width)?, random(rows, width)?);
    let mut moments = Moments::zeros(rows * width);
    let (lr, eps) = (1e-4, 1e-8);
    let step = AdamWStep { lr, beta1: 0.9, beta2: 0.999, eps, weight_decay: 0.0, step: 1, gradient_scale: 1.0 };
    let time = seconds(&gpu, || adamw(&parameter, &gradient, &mut moments, &step))?;
    report(&ceilings, "adamw", time, values(7 * rows * width), 0.0);

    for precision in [Precision::F32, Precision::Bf16] {
        let layer = Linear::frozen(&[&random(wide, width)?], None, precision)?;
        for count in [1, 4, 8, 16, 64, 512] {
            let x = random(count, width)?;
            let time = seconds(&gpu, || layer.forward(&x).map(drop))?;
            let flops = 2.0 * (count * width * wide) as f64;
            let bytes = layer.bytes() as f64 + values(count * (width + wide));
            report(&ceilings, &format!("linear {precision:?}, {count} rows"), time, bytes, flops);
        }
    }

    let heads = HeadLayout { heads: 32, kv_heads: 8, head_dim: 64 };
    let (slots, capacity) = (16, 4096);
    let [keys, cached] = cache_shapes(slots, capacity, heads).map(|(rows, cols)| random(rows, cols));
    let (keys, cached) = (keys?, cached?);
    for (name, sequences, start, len) in [
        ("decode, 1 sequence", 1, 4000, 1),
        ("decode, 16 sequences", 16, 4000, 1),
        ("verify 8, 16 sequences", 16, 4000, 8),
        ("prefill 2048", 1, 0, 2048),
    ] {
        let segments: Vec<Segment> = (0..sequences).map(|slot| Segment { slot, start, len }).collect();
        let q = random(sequences * len, 2048)?;
        let visibility = Visibility::Causal;
        let op = RaggedAttention { segments: segments.into(), capacity, heads, visibility, window: None };
        let time = seconds(&gpu, || op.forward(&q, &keys, &cached).map(drop))?;
        let seen = (sequences * (len * start + len * (len + 1) / 2)) as f64;
        let bytes = values(2 * sequences * (start + len) * 512 + 2 * sequences * len * 2048);
        report(&ceilings, &format!("attention, {name}"), time, bytes, 4.0 * seen * 2048.0);
    }

    let (context, blocks, size) = (2048, 512, 7);
    let spans = (0..blocks)
        .map(|i| BlockSpan { context: 0..4 * i + 1, rows: i * size..(i + 1) * size, sees_itself: true })
        .collect();
    let pattern = BlockAttention::new(vec![(0..context, spans)], heads)?;
    let (q, k, v) = (
        Var::from_tensor(&random(blocks * size, 2048)?)?,
        Var::from_tensor(&random(context + blocks * size, 512)?)?,
        Var::from_tensor(&random(context + blocks * size, 512)?)?,
    );
    let seen: f64 = (0..blocks).map(|i| (size * (4 * i + 1 + size)) as f64).sum();
    let time = seconds(&gpu, || pattern.forward(&q, &k, &v).map(drop))?;
    report(&ceilings, "block attention", time, 0.0, 4.0 * seen * 2048.0);
    let time = backward(&[&q, &k, &v], &|| pattern.forward(&q, &k, &v))?;
    report(&ceilings, "block attention backward", time, 0.0, 10.0 * seen * 2048.0);

    let (vocab, hidden, rank, count) = (49_152, 576, 256, 1024);
    let head = random(vocab, hidden)?;
    let packed = std::sync::Arc::new(Packed::new(&[&head.flatten_all()?.to_vec1()?], hidden, None, Precision::F32)?);
    let (h, m, w2, t) = (random(count, hidden)?, random(count, rank)?, random(vocab, rank)?, random(count, hidden)?);
    let row = |i: usize| LossRow { row: i, target: i, label: Some(i as u32), ce: 0.1, tv: 0.9, kl: 0.0 };
    let loss = VocabLoss {
        target_head: packed.clone(),
        draft_head: packed,
        draft_head_weight: head.clone(),
        draft_tokens: None,
        rows: (0..count).map(row).collect(),
        kl_temperature: 1.0,
        with_target: true,
        soft_targets: false,
    };
    let time = seconds(&gpu, || loss.clone().forward(&h, &m, &w2, &t).map(drop))?;
    let flops = 2.0 * (count * vocab) as f64 * (3 * hidden + 3 * rank) as f64;
    report(&ceilings, "vocabulary loss with gradients", time, values(8 * count * vocab), flops);

    let logits = random(64, vocab)?;
    let time = seconds(&gpu, || argmax_first(&logits).map(drop))?;
    report(&ceilings, "argmax, 64 rows, to the host", time, values(64 * vocab), 0.0);
    let probabilities = (logits.exp()?.broadcast_div(&logits.exp()?.sum_keepdim(1)?))?;
    let draft = probabilities.narrow(0, 0, 56)?.contiguous()?;
    let (tokens, numbers) = ([1u32; 7], [0.5f64; 8]);
    let blocks = [DraftBlock { tokens: &tokens, accept: &numbers[..7], next: &numbers }; 8];
    let time = seconds(&gpu, || verify_blocks(&probabilities, &draft, &blocks).map(drop))?;
    report(&ceilings, "verify, 8 blocks of 7, to the host", time, values(8 * 3 * vocab), 0.0);
    Ok(())
}
