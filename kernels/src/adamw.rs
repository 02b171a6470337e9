//! AdamW in place over one parameter, and the squared norm that clipping needs.
//!
//! p ← p·(1 − lr·wd) − lr·m̂/(√v̂ + ε), m̂ and v̂ the bias-corrected moments of the clipped gradient.

use std::sync::{Mutex, PoisonError};

use candle_core::{CpuStorage, InplaceOp2, Layout, Result, Storage, Tensor, bail};
use rayon::prelude::*;

use crate::multiversion;

/// Hyperparameters and the state of one step that all parameters share.
#[derive(Debug, Clone, Copy)]
pub struct AdamWStep {
    /// Learning rate of this step.
    pub lr: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Number of this step, from 1.
    pub step: u64,
    /// Factor on the gradient (1, or max norm / norm when clipping).
    pub gradient_scale: f64,
}

/// First and second moment of one parameter, in its element order.
#[derive(Debug, Clone, PartialEq)]
pub struct Moments {
    /// Running mean of the gradient.
    pub first: Vec<f32>,
    /// Running mean of the squared gradient.
    pub second: Vec<f32>,
}

impl Moments {
    /// Zero moments for a parameter of `len` elements.
    pub fn zeros(len: usize) -> Self {
        Self { first: vec![0.0; len], second: vec![0.0; len] }
    }
}

/// Updates `parameter` in place from `gradient` (contiguous f32 of one shape).
///
/// # Errors
/// When dtype, layout or lengths do not fit each other.
pub fn adamw(parameter: &Tensor, gradient: &Tensor, moments: &mut Moments, step: &AdamWStep) -> Result<()> {
    let taken = std::mem::replace(moments, Moments::zeros(0));
    let op = Update { moments: Mutex::new(taken), step: *step };
    let result = parameter.inplace_op2(&gradient.contiguous()?, &op);
    *moments = op.moments.into_inner().unwrap_or_else(PoisonError::into_inner);
    result
}

/// Σ x² of a contiguous f32 tensor, summed in f64 in a fixed order.
///
/// # Errors
/// When the tensor is not contiguous f32 in host memory.
pub fn square_sum(x: &Tensor) -> Result<f64> {
    let x = x.contiguous()?;
    let (storage, layout) = x.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else { bail!("expected a tensor in host memory") };
    let data = storage.as_slice::<f32>()?;
    let data = &data[layout.start_offset()..layout.start_offset() + layout.shape().elem_count()];
    let partials: Vec<f64> =
        data.par_chunks(1 << 14).map(|chunk| chunk.iter().map(|x| f64::from(*x) * f64::from(*x)).sum()).collect();
    Ok(partials.iter().sum())
}

struct Update {
    moments: Mutex<Moments>,
    step: AdamWStep,
}

#[derive(Clone, Copy)]
struct Factors {
    decay: f32,
    rate: f32,
    root_correction: f32,
    beta1: f32,
    beta2: f32,
    eps: f32,
    scale: f32,
}

multiversion! {
    fn update(p: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32], f: Factors) {
        for (((p, g), m), v) in p.iter_mut().zip(g).zip(m).zip(v) {
            let g = g * f.scale;
            *m = *m * f.beta1 + g * (1.0 - f.beta1);
            *v = *v * f.beta2 + g * g * (1.0 - f.beta2);
            *p = *p * f.decay - f.rate * *m / (v.sqrt() * f.root_correction + f.eps);
        }
    }
}

impl InplaceOp2 for Update {
    fn name(&self) -> &'static str {
        "adamw"
    }

    fn cpu_fwd(&self, p: &mut CpuStorage, pl: &Layout, g: &CpuStorage, gl: &Layout) -> Result<()> {
        let CpuStorage::F32(p) = p else { bail!("adamw keeps f32 master weights in host memory") };
        let g = g.as_slice::<f32>()?;
        let mut moments = self.moments.lock().unwrap_or_else(PoisonError::into_inner);
        let Moments { first, second } = &mut *moments;
        let count = pl.shape().elem_count();
        if !pl.is_contiguous() || !gl.is_contiguous() || gl.shape() != pl.shape() || first.len() != count {
            bail!("adamw of parameter {:?}, gradient {:?}, {} moments", pl.dims(), gl.dims(), first.len());
        }
        let step = &self.step;
        let correction1 = 1.0 - step.beta1.powi(step.step as i32);
        let correction2 = 1.0 - step.beta2.powi(step.step as i32);
        let factors = Factors {
            decay: (1.0 - step.lr * step.weight_decay) as f32,
            rate: (step.lr / correction1) as f32,
            root_correction: (1.0 / correction2.sqrt()) as f32,
            beta1: step.beta1 as f32,
            beta2: step.beta2 as f32,
            eps: step.eps as f32,
            scale: step.gradient_scale as f32,
        };
        const CHUNK: usize = 1 << 14;
        p[pl.start_offset()..pl.start_offset() + count]
            .par_chunks_mut(CHUNK)
            .zip(g[gl.start_offset()..gl.start_offset() + count].par_chunks(CHUNK))
            .zip(first.par_chunks_mut(CHUNK).zip(second.par_chunks_mut(CHUNK)))
            .for_each(|((p, g), (m, v))| update(p, g, m, v, factors));
        Ok(())
    }
}
