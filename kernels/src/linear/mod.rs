//! The one linear layer, y = x Wᵀ + b, in two storages.
//!
//! * [`Linear::frozen`]: weights packed for this machine at load, used for everything that is not trained. On the CPU a
//!   row of the output is computed in one fixed order of operations whatever the number of rows, of threads or the batch
//!   around it, so verifying a block gives bit for bit what decoding token by token gives.
//! * [`Linear::trainable`]: the weight stays a candle tensor `[out, in]`, as in checkpoints, and takes part in autograd.

mod aligned;
#[cfg(target_arch = "x86_64")]
mod amx;
mod dense;
mod float;
mod int8;
mod packed;

use std::sync::Arc;

use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor, bail};

pub(crate) use aligned::Aligned;
pub(crate) use float::tile_f32;
pub(crate) use packed::PANEL;
pub use packed::{Packed, Precision};

use crate::rows::Rows;

/// Name of the instruction set that eight-bit layers use on this machine.
pub(crate) fn int8_level() -> &'static str {
    int8::IntLevel::detect().name()
}

/// A linear layer; see the module documentation.
#[derive(Debug, Clone)]
pub enum Linear {
    /// Packed, without gradient.
    Frozen {
        /// Weights in the layout of the CPU kernel.
        weight: Arc<Packed>,
    },
    /// Plain tensors with gradients (also the path of devices without packed kernels).
    Dense {
        /// `[out, in]`
        weight: Tensor,
        /// `[out]`
        bias: Option<Tensor>,
    },
}

impl Linear {
    /// Packs weights `[out, in]` for inference; several weights of one input are fused along the output dimension.
    ///
    /// # Errors
    /// When the shapes do not fit each other.
    pub fn frozen(weights: &[&Tensor], bias: Option<&Tensor>, precision: Precision) -> Result<Self> {
        let first = weights[0];
        if !first.device().is_cpu() {
            let weight = Tensor::cat(weights, 0)?;
            return Ok(Linear::Dense { weight, bias: bias.cloned() });
        }
        let (_, inputs) = first.dims2()?;
        let mut rows = Vec::new();
        for weight in weights {
            let (_, width) = weight.dims2()?;
            if width != inputs {
                bail!("fused linear layers need one input width, found {inputs} and {width}");
            }
            rows.push(weight.to_dtype(candle_core::DType::F32)?.contiguous()?);
        }
        let bias = bias.map(|b| b.to_dtype(candle_core::DType::F32)?.to_vec1::<f32>()).transpose()?;
        let mut slices = Vec::new();
        let guards: Vec<_> = rows.iter().map(Tensor::storage_and_layout).collect();
        for (storage, layout) in &guards {
            let candle_core::Storage::Cpu(storage) = &**storage else { bail!("expected weights in host memory") };
            let data = storage.as_slice::<f32>()?;
            slices.push(&data[layout.start_offset()..layout.start_offset() + layout.shape().elem_count()]);
        }
        let packed = Packed::new(&slices, inputs, bias, precision)?;
        Ok(Linear::Frozen { weight: Arc::new(packed) })
    }

    /// A layer whose weight `[out, in]` (and bias) take part in autograd.
    pub fn trainable(weight: Tensor, bias: Option<Tensor>) -> Self {
        Linear::Dense { weight, bias }
    }

    /// Number of outputs.
    pub fn outputs(&self) -> usize {
        match self {
            Linear::Frozen { weight } => weight.outputs(),
            Linear::Dense { weight, .. } => weight.dims()[0],
        }
    }

    /// Bytes of memory that the weights take.
    pub fn bytes(&self) -> usize {
        match self {
            Linear::Frozen { weight } => weight.bytes(),
            Linear::Dense { weight, .. } => weight.elem_count() * weight.dtype().size_in_bytes(),
        }
    }

    /// y = x Wᵀ + b.
    ///
    /// # Shapes
    /// `[rows, in]` → `[rows, out]`
    ///
    /// # Errors
    /// When the input width differs from the layer's.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Linear::Frozen { weight } => x.apply_op1_no_bwd(&PackedForward { weight: weight.clone() }),
            Linear::Dense { weight, bias } => {
                let y = if x.device().is_cpu() { dense::forward(x, weight)? } else { x.matmul(&weight.t()?)? };
                match bias {
                    Some(bias) => y.broadcast_add(bias),
                    None => Ok(y),
                }
            }
        }
    }
}

struct PackedForward {
    weight: Arc<Packed>,
}

impl CustomOp1 for PackedForward {
    fn name(&self) -> &'static str {
        "packed-linear"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let x = Rows::new(self.name(), storage, layout)?;
        if x.cols != self.weight.inputs() {
            bail!("linear layer of {} inputs got rows of {}", self.weight.inputs(), x.cols);
        }
        let mut y = vec![0f32; x.count * self.weight.outputs()];
        self.weight.forward(x, &mut y);
        Ok((CpuStorage::F32(y), Shape::from((x.count, self.weight.outputs()))))
    }
}
