//! The linear layer on a device; the kernels for few rows are in `linear/few_rows.cu`.

use candle_core::{Result, bail};

use super::{Backend, Kernel, View, args};

/// Most rows of one tile.
const TILE_ROWS: usize = 16;

/// How the weights of a layer are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stored {
    /// 4 bytes a weight.
    F32,
    /// 2 bytes a weight.
    Bf16,
}

/// A contiguous weight `[outputs, inputs]` and its bias in device memory.
#[derive(Debug, Clone, Copy)]
pub struct Weight {
    /// Address of the weights.
    pub address: u64,
    /// Their type.
    pub stored: Stored,
    /// Address of the f32 bias, 0 for none.
    pub bias: u64,
    /// Width of the input rows.
    pub inputs: usize,
    /// Width of the output rows.
    pub outputs: usize,
}

/// y = x Wᵀ + b, each row computed in an order that does not depend on the others.
///
/// # Errors
/// When the input width differs from the layer's or a launch fails.
pub fn forward<B: Backend>(backend: &B, x: &View, weight: &Weight) -> Result<B::Buffer<f32>> {
    let Weight { inputs, outputs, .. } = *weight;
    if x.cols != inputs {
        bail!("linear layer of {inputs} inputs got rows of {}", x.cols);
    }
    let y = backend.alloc::<f32>(x.count * outputs)?;
    // Rows per tile, and outputs per block as compiled into the kernel.
    let (rows, outputs_per_block, function) = match (x.count, weight.stored) {
        (0..=1, Stored::F32) => (1, 16, "linear_f32_1"),
        (2, Stored::F32) => (2, 16, "linear_f32_2"),
        (3..=4, Stored::F32) => (4, 16, "linear_f32_4"),
        (5..=8, Stored::F32) => (8, 32, "linear_f32_8"),
        (_, Stored::F32) => (TILE_ROWS, 32, "linear_f32_16"),
        (0..=1, Stored::Bf16) => (1, 16, "linear_bf16_1"),
        (2, Stored::Bf16) => (2, 16, "linear_bf16_2"),
        (3..=4, Stored::Bf16) => (4, 16, "linear_bf16_4"),
        (5..=8, Stored::Bf16) => (8, 32, "linear_bf16_8"),
        (_, Stored::Bf16) => (TILE_ROWS, 32, "linear_bf16_16"),
    };
    let grid = [outputs.div_ceil(outputs_per_block), x.count.div_ceil(rows), 1];
    let args = args![x.address, x.stride, weight.address, weight.bias, backend.address(&y), x.count, inputs, outputs];
    backend.launch(Kernel { module: "few_rows", function }, grid, 128, &args)?;
    Ok(y)
}
