//! RMSNorm with gradients: y_i = w_i · x_i / √(mean(x²) + ε), per row.

#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor, bail};
use rayon::prelude::*;

use crate::multiversion;
use crate::rows::Rows;
use crate::simd::{dot, sum};
use crate::threads::{self, Shared};
#[cfg(feature = "cuda")]
use crate::{cuda::Cuda, device};

/// Normalises each row of `x` (last dimension) and scales it by `weight`.
///
/// # Shapes
/// `[.., d]`, `[d]` → `[.., d]`
///
/// # Errors
/// When the weight's length is not the row length or a tensor is not f32.
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    x.apply_op2(weight, RmsNorm { eps: eps as f32 })
}

/// x + y, and its [`rms_norm`], in one pass over the rows. Without gradients, for inference.
///
/// # Shapes
/// `[rows, d]`, `[rows, d]`, `[d]` → two of `[rows, d]`
///
/// # Errors
/// When shapes do not fit each other or a tensor is not f32.
pub fn add_rms_norm(x: &Tensor, y: &Tensor, weight: &Tensor, eps: f64) -> Result<(Tensor, Tensor)> {
    if !x.device().is_cpu() {
        let total = (x + y)?;
        let normalised = rms_norm(&total, weight, eps)?;
        return Ok((total, normalised));
    }
    let both = x.apply_op3_no_bwd(y, weight, &AddRmsNorm { eps: eps as f32 })?;
    let rows = both.dims()[0] / 2;
    Ok((both.narrow(0, 0, rows)?, both.narrow(0, rows, rows)?))
}

/// The first half of the result's rows are the sums, the second their norms.
struct AddRmsNorm {
    eps: f32,
}

multiversion! {
    fn add_row(x: &[f32], y: &[f32], out: &mut [f32]) {
        for ((out, x), y) in out.iter_mut().zip(x).zip(y) {
            *out = x + y;
        }
    }
}

impl candle_core::CustomOp3 for AddRmsNorm {
    fn name(&self) -> &'static str {
        "add-rms-norm"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        xl: &Layout,
        y: &CpuStorage,
        yl: &Layout,
        w: &CpuStorage,
        wl: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (x, y) = (Rows::new(self.name(), x, xl)?, Rows::new(self.name(), y, yl)?);
        let weight = Rows::new(self.name(), w, wl)?.row(0);
        if weight.len() != x.cols || (x.count, x.cols) != (y.count, y.cols) {
            bail!("add-rms-norm of {:?} and {:?} with {} weights", xl.dims(), yl.dims(), weight.len());
        }
        let (rows, cols) = (x.count, x.cols);
        let mut out = Vec::with_capacity(2 * rows * cols);
        let (sums, shares) =
            (Shared::new(out.as_mut_ptr()), if rows * cols >= threads::WORTH_SHARING { threads::count() } else { 1 });
        threads::run(shares, |share| {
            for i in rows * share / shares..rows * (share + 1) / shares {
                // SAFETY: both rows lie inside the memory and this share alone has them.
                let (sum, norm) = unsafe { (sums.zeros(i * cols, cols), sums.zeros((rows + i) * cols, cols)) };
                add_row(x.row(i), y.row(i), sum);
                forward_row(sum, weight, self.eps, norm);
            }
        });
        // SAFETY: every sum and every norm has been written.
        unsafe { out.set_len(2 * rows * cols) };
        Ok((CpuStorage::F32(out), Shape::from((2 * rows, cols))))
    }
}

struct RmsNorm {
    eps: f32,
}

multiversion! {
    fn forward_row(x: &[f32], weight: &[f32], eps: f32, y: &mut [f32]) {
        let scale = 1.0 / (dot(x, x) / x.len() as f32 + eps).sqrt();
        for ((y, x), w) in y.iter_mut().zip(x).zip(weight) {
            *y = x * scale * w;
        }
    }
}

multiversion! {
    // dx = s·(g∘w) − x·s³/d·⟨g∘w, x⟩ and dw += g∘x·s, with s = 1/√(mean(x²)+ε)
    fn backward_row(x: &[f32], weight: &[f32], eps: f32, grad: &[f32], dx: &mut [f32], dw: &mut [f32]) {
        let scale = 1.0 / (dot(x, x) / x.len() as f32 + eps).sqrt();
        for ((dx, g), w) in dx.iter_mut().zip(grad).zip(weight) {
            *dx = g * w;
        }
        let projection = dot(dx, x) * scale * scale * scale / x.len() as f32;
        for ((dx, x), (dw, g)) in dx.iter_mut().zip(x).zip(dw.iter_mut().zip(grad)) {
            *dx = *dx * scale - x * projection;
            *dw += g * x * scale;
        }
    }
}

impl CustomOp2 for RmsNorm {
    fn name(&self) -> &'static str {
        "rms-norm"
    }

    fn cpu_fwd(&self, x: &CpuStorage, xl: &Layout, w: &CpuStorage, wl: &Layout) -> Result<(CpuStorage, Shape)> {
        let x = Rows::new(self.name(), x, xl)?;
        let weight = Rows::new(self.name(), w, wl)?.row(0);
        if weight.len() != x.cols {
            bail!("rms-norm weight has {} elements for rows of {}", weight.len(), x.cols);
        }
        let parallel = x.count * x.cols >= threads::WORTH_SHARING;
        let y = threads::new_rows(x.count, x.cols, parallel, |i, y| forward_row(x.row(i), weight, self.eps, y));
        Ok((CpuStorage::F32(y), xl.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, x: &CudaStorage, xl: &Layout, w: &CudaStorage, wl: &Layout) -> Result<(CudaStorage, Shape)> {
        let cuda = Cuda::of(x);
        let (x, w) = (cuda.rows(self.name(), x, xl)?, cuda.rows(self.name(), w, wl)?);
        let y = device::rms_norm::forward(&cuda, &x, &w, self.eps)?;
        Ok((cuda.storage(y), xl.shape().clone()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        _res: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let cols = weight.elem_count();
        let packed = x.apply_op3_no_bwd(weight, &grad.contiguous()?, &RmsNormBackward { eps: self.eps })?;
        let rows = x.elem_count() / cols;
        let dx = packed.narrow(0, 0, rows)?.reshape(x.shape())?;
        let dw = packed.narrow(0, rows, 1)?.reshape(weight.shape())?;
        Ok((Some(dx), Some(dw)))
    }
}

/// Rows 0..n of the result are dx, row n is dw.
struct RmsNormBackward {
    eps: f32,
}

/// Rows per partial sum of dw: fixed, so that the result does not depend on the number of threads.
const ROWS_PER_PARTIAL: usize = 64;

impl candle_core::CustomOp3 for RmsNormBackward {
    fn name(&self) -> &'static str {
        "rms-norm-backward"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        xl: &Layout,
        w: &CpuStorage,
        wl: &Layout,
        g: &CpuStorage,
        gl: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let x = Rows::new(self.name(), x, xl)?;
        let weight = Rows::new(self.name(), w, wl)?.row(0);
        let grad = Rows::new(self.name(), g, gl)?;
        let mut out = vec![0f32; (x.count + 1) * x.cols];
        let (dx, dw) = out.split_at_mut(x.count * x.cols);
        let partials: Vec<Vec<f32>> = dx
            .par_chunks_mut(ROWS_PER_PARTIAL * x.cols)
            .enumerate()
            .map(|(chunk, dx)| {
                let mut partial = vec![0f32; x.cols];
                for (i, dx) in dx.chunks_exact_mut(x.cols).enumerate() {
                    let row = chunk * ROWS_PER_PARTIAL + i;
                    backward_row(x.row(row), weight, self.eps, grad.row(row), dx, &mut partial);
                }
                partial
            })
            .collect();
        for (column, dw) in dw.iter_mut().enumerate() {
            let column: Vec<f32> = partials.iter().map(|p| p[column]).collect();
            *dw = sum(&column);
        }
        Ok((CpuStorage::F32(out), Shape::from((x.count + 1, x.cols))))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        x: &CudaStorage,
        xl: &Layout,
        w: &CudaStorage,
        wl: &Layout,
        g: &CudaStorage,
        gl: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let cuda = Cuda::of(x);
        let (x, w) = (cuda.rows(self.name(), x, xl)?, cuda.rows(self.name(), w, wl)?);
        let grad = cuda.rows(self.name(), g, gl)?;
        let out = device::rms_norm::backward(&cuda, &x, &w, &grad, self.eps)?;
        Ok((cuda.storage(out), Shape::from((x.count + 1, x.cols))))
    }
}
