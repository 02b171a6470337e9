//! Gated activation of the MLP with gradients: y = silu(gate) · up, silu(x) = x / (1 + e^−x).

#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor, bail};
use rayon::prelude::*;

use crate::multiversion;
use crate::rows::Rows;
use crate::simd::exp;
use crate::threads;
#[cfg(feature = "cuda")]
use crate::{cuda::Cuda, device};

/// y = silu(gate) · up.
///
/// # Shapes
/// `[rows, n]`, `[rows, n]` → `[rows, n]`
///
/// # Errors
/// When the shapes differ or a tensor is not f32.
pub fn silu_mul(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    gate.apply_op2(up, SiluMul)
}

struct SiluMul;

multiversion! {
    fn forward_row(gate: &[f32], up: &[f32], y: &mut [f32]) {
        for ((y, g), u) in y.iter_mut().zip(gate).zip(up) {
            *y = g / (1.0 + exp(-g)) * u;
        }
    }
}

multiversion! {
    // With σ = 1/(1+e^−g): d gate = grad·u·σ·(1 + g·(1−σ)), d up = grad·g·σ
    fn backward_row(gate: &[f32], up: &[f32], grad: &[f32], dgate: &mut [f32], dup: &mut [f32]) {
        for (i, (dg, du)) in dgate.iter_mut().zip(dup).enumerate() {
            let (g, u, grad) = (gate[i], up[i], grad[i]);
            let sigma = 1.0 / (1.0 + exp(-g));
            *dg = grad * u * sigma * (1.0 + g * (1.0 - sigma));
            *du = grad * g * sigma;
        }
    }
}

impl CustomOp2 for SiluMul {
    fn name(&self) -> &'static str {
        "silu-mul"
    }

    fn cpu_fwd(&self, g: &CpuStorage, gl: &Layout, u: &CpuStorage, ul: &Layout) -> Result<(CpuStorage, Shape)> {
        let (gate, up) = (Rows::new(self.name(), g, gl)?, Rows::new(self.name(), u, ul)?);
        if gl.dims() != ul.dims() {
            bail!("silu-mul of shapes {:?} and {:?}", gl.dims(), ul.dims());
        }
        let parallel = gate.count * gate.cols >= threads::DEAR_WORTH_SHARING;
        let forward = |i: usize, y: &mut [f32]| forward_row(gate.row(i), up.row(i), y);
        let y = threads::new_rows(gate.count, gate.cols, parallel, forward);
        Ok((CpuStorage::F32(y), gl.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, g: &CudaStorage, gl: &Layout, u: &CudaStorage, ul: &Layout) -> Result<(CudaStorage, Shape)> {
        let cuda = Cuda::of(g);
        let (gate, up) = (cuda.rows(self.name(), g, gl)?, cuda.rows(self.name(), u, ul)?);
        let y = device::elementwise::silu_mul(&cuda, &gate, &up)?;
        Ok((cuda.storage(y), gl.shape().clone()))
    }

    fn bwd(
        &self,
        gate: &Tensor,
        up: &Tensor,
        _res: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let both = gate.apply_op3_no_bwd(up, &grad.contiguous()?, &SiluMulBackward)?;
        Ok((Some(both.get(0)?.reshape(gate.shape())?), Some(both.get(1)?.reshape(up.shape())?)))
    }
}

/// `[2, rows, n]`: gradients of gate and up.
struct SiluMulBackward;

impl candle_core::CustomOp3 for SiluMulBackward {
    fn name(&self) -> &'static str {
        "silu-mul-backward"
    }

    fn cpu_fwd(
        &self,
        g: &CpuStorage,
        gl: &Layout,
        u: &CpuStorage,
        ul: &Layout,
        d: &CpuStorage,
        dl: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let gate = Rows::new(self.name(), g, gl)?;
        let up = Rows::new(self.name(), u, ul)?;
        let grad = Rows::new(self.name(), d, dl)?;
        let mut out = vec![0f32; 2 * gate.count * gate.cols];
        let (dgate, dup) = out.split_at_mut(gate.count * gate.cols);
        dgate
            .par_chunks_exact_mut(gate.cols)
            .zip(dup.par_chunks_exact_mut(gate.cols))
            .enumerate()
            .for_each(|(i, (dgate, dup))| backward_row(gate.row(i), up.row(i), grad.row(i), dgate, dup));
        Ok((CpuStorage::F32(out), Shape::from((2, gate.count, gate.cols))))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        g: &CudaStorage,
        gl: &Layout,
        u: &CudaStorage,
        ul: &Layout,
        d: &CudaStorage,
        dl: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let cuda = Cuda::of(g);
        let (gate, up) = (cuda.rows(self.name(), g, gl)?, cuda.rows(self.name(), u, ul)?);
        let grad = cuda.rows(self.name(), d, dl)?;
        let out = device::elementwise::silu_mul_backward(&cuda, &gate, &up, &grad)?;
        Ok((cuda.storage(out), Shape::from((2, gate.count, gate.cols))))
    }
}
