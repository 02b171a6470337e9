//! The one linear layer, y = x Wᵀ + b, in two storages.
//!
//! * [`Linear::frozen`]: weights packed for this machine at load, used for everything that is not trained. On the CPU a
//!   row of the output is computed in one fixed order of operations whatever the number of rows, of threads or the batch
//!   around it, so verifying a block gives bit for bit what decoding token by token gives. On a CUDA device the weight stays
//!   `[out, in]` and the same holds for calls of up to [`INVARIANT_ROWS`] rows, which a kernel of our own computes; larger ones
//!   go to cuBLAS.
//! * [`Linear::trainable`]: the weight stays a candle tensor `[out, in]`, as in checkpoints, and takes part in autograd.

mod aligned;
#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod amx4;
mod dense;
mod float;
mod int4;
mod int8;
mod packed;

use std::sync::Arc;

#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::{CpuStorage, CustomOp1, CustomOp2, DType, Layout, Result, Shape, Tensor, bail};

pub(crate) use aligned::Aligned;
pub(crate) use float::tile_f32;
pub use packed::{PANEL, Packed, Precision};

use crate::rows::Rows;

/// Most rows for which a row's result on a CUDA device does not depend on the others in the call.
pub const INVARIANT_ROWS: usize = 64;

/// Name of the instruction set that layers of integers use on this machine.
pub(crate) fn int_level() -> &'static str {
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
    /// On a CUDA device, without gradient.
    Device {
        /// `[out, in]`, f32 or bf16.
        weight: Tensor,
        /// `[out]`, f32.
        bias: Option<Tensor>,
    },
    /// Plain tensors with gradients (also the path of devices without kernels of ours).
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
            if !first.device().is_cuda() {
                return Ok(Linear::Dense { weight, bias: bias.cloned() });
            }
            let stored = match precision {
                Precision::F32 => DType::F32,
                Precision::Bf16 => DType::BF16,
                Precision::Q8 | Precision::Q4 => {
                    bail!("{} weights have no CUDA kernel; choose bf16 or f32", precision.name())
                }
            };
            let bias = bias.map(|b| b.to_dtype(DType::F32)?.contiguous()).transpose()?;
            return Ok(Linear::Device { weight: weight.to_dtype(stored)?.contiguous()?, bias });
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
            Linear::Device { weight, .. } | Linear::Dense { weight, .. } => weight.dims()[0],
        }
    }

    /// Bytes of memory that the weights take.
    pub fn bytes(&self) -> usize {
        match self {
            Linear::Frozen { weight } => weight.bytes(),
            Linear::Device { weight, .. } | Linear::Dense { weight, .. } => {
                weight.elem_count() * weight.dtype().size_in_bytes()
            }
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
            Linear::Device { weight, bias } if x.dims2()?.0 <= INVARIANT_ROWS => {
                x.apply_op2_no_bwd(weight, &FewRows { bias: bias.clone() })
            }
            Linear::Device { weight, bias } => {
                with_bias(&x.contiguous()?, &weight.to_dtype(DType::F32)?, bias.as_ref())
            }
            Linear::Dense { weight, bias } => with_bias(x, weight, bias.as_ref()),
        }
    }
}

fn with_bias(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let y = if x.device().is_cpu() { dense::forward(x, weight)? } else { x.matmul(&weight.t()?)? };
    match bias {
        Some(bias) => y.broadcast_add(bias),
        None => Ok(y),
    }
}

/// The product with few rows on a CUDA device.
#[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "the bias is read on the device"))]
struct FewRows {
    bias: Option<Tensor>,
}

impl CustomOp2 for FewRows {
    fn name(&self) -> &'static str {
        "few-rows-linear"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        bail!("a linear layer made for a CUDA device got rows in host memory")
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, x: &CudaStorage, xl: &Layout, w: &CudaStorage, wl: &Layout) -> Result<(CudaStorage, Shape)> {
        use candle_core::backend::BackendStorage;

        use crate::cuda::{Cuda, cuda_storage};
        use crate::device::linear::{Stored, Weight, forward};

        let cuda = Cuda::of(x);
        let x = cuda.rows(self.name(), x, xl)?;
        let (outputs, inputs) = wl.shape().dims2()?;
        let (weight, stored) = match w.dtype() {
            DType::BF16 => (cuda.start::<half::bf16>(w, wl)?, Stored::Bf16),
            _ => (cuda.start::<f32>(w, wl)?, Stored::F32),
        };
        let bias = self.bias.as_ref().map(Tensor::storage_and_layout);
        let bias = match &bias {
            Some((storage, layout)) => Some(cuda.start::<f32>(cuda_storage(self.name(), storage)?, layout)?),
            None => None,
        };
        let weight = Weight { address: *weight, stored, bias: bias.as_deref().copied().unwrap_or(0), inputs, outputs };
        let y = forward(&cuda, &x, &weight)?;
        Ok((cuda.storage(y), Shape::from((x.count, outputs))))
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
        let y = self.weight.forward_rows(x);
        Ok((CpuStorage::F32(y), Shape::from((x.count, self.weight.outputs()))))
    }
}
