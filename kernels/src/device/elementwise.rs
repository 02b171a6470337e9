//! Rotary embedding, gated activation and AdamW on a device; the kernels are in `rope.cu`, `silu_mul.cu`, `adamw.cu`.

use candle_core::{Result, bail};

use super::{Backend, Kernel, View, args};
use crate::adamw::{AdamWStep, Factors};

/// Elements per partial sum of [`square_sums`].
const CHUNK: usize = 1 << 14;

/// Rotated rows, contiguous. `cosines` and `sines` are `[rows, pairs]`.
///
/// # Errors
/// When the width is no whole number of heads or a launch fails.
pub fn rope<B: Backend>(
    backend: &B,
    x: &View,
    [cosines, sines]: [u64; 2],
    head_dim: usize,
    pairs: usize,
    inverse: bool,
) -> Result<B::Buffer<f32>> {
    if head_dim == 0 || !x.cols.is_multiple_of(head_dim) || 2 * pairs > head_dim {
        bail!("rope of {pairs} pairs in heads of {head_dim} got rows of {}", x.cols);
    }
    let y = backend.alloc::<f32>(x.count * x.cols)?;
    let sign = if inverse { -1f32 } else { 1f32 };
    let args = args![x.address, x.stride, cosines, sines, backend.address(&y), x.cols, head_dim, pairs, sign];
    backend.launch(Kernel { module: "rope", function: "rope" }, [x.count, 1, 1], 128, &args)?;
    Ok(y)
}

/// silu(gate) · up, contiguous.
///
/// # Errors
/// When the shapes differ or a launch fails.
pub fn silu_mul<B: Backend>(backend: &B, gate: &View, up: &View) -> Result<B::Buffer<f32>> {
    check_shapes(gate, &[up])?;
    let y = backend.alloc::<f32>(gate.count * gate.cols)?;
    let args = args![gate.address, gate.stride, up.address, up.stride, backend.address(&y), gate.cols];
    backend.launch(Kernel { module: "silu_mul", function: "silu_mul_forward" }, [gate.count, 1, 1], 256, &args)?;
    Ok(y)
}

/// `[2, rows, n]`: gradients of gate and up.
///
/// # Errors
/// When the shapes differ or a launch fails.
pub fn silu_mul_backward<B: Backend>(backend: &B, gate: &View, up: &View, grad: &View) -> Result<B::Buffer<f32>> {
    check_shapes(gate, &[up, grad])?;
    let count = gate.count * gate.cols;
    let out = backend.alloc::<f32>(2 * count)?;
    let dgate = backend.address(&out);
    let dup = dgate + (count * size_of::<f32>()) as u64;
    let args =
        args![gate.address, gate.stride, up.address, up.stride, grad.address, grad.stride, dgate, dup, gate.cols];
    backend.launch(Kernel { module: "silu_mul", function: "silu_mul_backward" }, [gate.count, 1, 1], 256, &args)?;
    Ok(out)
}

fn check_shapes(first: &View, others: &[&View]) -> Result<()> {
    for other in others {
        if (other.count, other.cols) != (first.count, first.cols) {
            bail!("silu-mul of [{}, {}] and [{}, {}]", first.count, first.cols, other.count, other.cols);
        }
    }
    Ok(())
}

/// Updates `count` contiguous elements of a parameter and its two moments in place.
///
/// # Errors
/// When the launch fails.
pub fn adamw<B: Backend>(
    backend: &B,
    parameter: u64,
    gradient: u64,
    [first, second]: [u64; 2],
    count: usize,
    step: &AdamWStep,
) -> Result<()> {
    let Factors { decay, rate, root_correction, beta1, beta2, eps, scale } = step.factors();
    let args = args![parameter, gradient, first, second, count, decay, rate, root_correction, beta1, beta2, eps, scale];
    backend.launch(Kernel { module: "adamw", function: "adamw" }, [count.div_ceil(1024), 1, 1], 256, &args)
}

/// Σ x² of `count` contiguous elements: partial sums in f64, added up on the host.
///
/// # Errors
/// When a launch or copy fails.
pub fn square_sum<B: Backend>(backend: &B, x: u64, count: usize) -> Result<f64> {
    let blocks = count.div_ceil(CHUNK);
    if blocks == 0 {
        return Ok(0.0);
    }
    let sums = backend.alloc::<f64>(blocks)?;
    let args = args![x, backend.address(&sums), count, CHUNK];
    backend.launch(Kernel { module: "adamw", function: "square_sums" }, [blocks, 1, 1], 256, &args)?;
    Ok(backend.download(&sums)?.iter().sum())
}
