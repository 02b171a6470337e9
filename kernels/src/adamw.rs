//! AdamW in place over one parameter, and the squared norm that clipping needs.
//!
//! p ← p·(1 − lr·wd) − lr·m̂/(√v̂ + ε), m̂ and v̂ the bias-corrected moments of the clipped gradient.

use std::borrow::Cow;
use std::sync::{Mutex, PoisonError};

#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::{CpuStorage, InplaceOp2, Layout, Result, Storage, Tensor, bail};
use rayon::prelude::*;

use crate::multiversion;
#[cfg(feature = "cuda")]
use crate::{
    cuda::{Cuda, Slice},
    device::{self, Backend},
};

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

/// First and second moment of one parameter, in its element order: the running means of the gradient and of its square.
///
/// They live where the parameter does: the first update of a parameter on a device moves them there.
#[derive(Debug, Clone)]
pub struct Moments {
    first: Vec<f32>,
    second: Vec<f32>,
    /// Both, once they have moved; the vectors are then empty.
    #[cfg(feature = "cuda")]
    on_device: Option<(Cuda, [Slice; 2])>,
}

impl Moments {
    /// Zero moments for a parameter of `len` elements.
    pub fn zeros(len: usize) -> Self {
        Self::of(vec![0.0; len], vec![0.0; len])
    }

    /// Given moments.
    ///
    /// # Errors
    /// When the lengths differ.
    pub fn new(first: Vec<f32>, second: Vec<f32>) -> Result<Self> {
        if first.len() != second.len() {
            bail!("{} first and {} second moments", first.len(), second.len());
        }
        Ok(Self::of(first, second))
    }

    fn of(first: Vec<f32>, second: Vec<f32>) -> Self {
        Self {
            first,
            second,
            #[cfg(feature = "cuda")]
            on_device: None,
        }
    }

    /// First and second moment, copied from the device if they live there.
    ///
    /// # Errors
    /// When the copy fails.
    pub fn values(&self) -> Result<[Cow<'_, [f32]>; 2]> {
        #[cfg(feature = "cuda")]
        if let Some((cuda, [first, second])) = &self.on_device {
            return Ok([cuda.download(first)?.into(), cuda.download(second)?.into()]);
        }
        Ok([Cow::from(&self.first), Cow::from(&self.second)])
    }

    /// The moments in device memory, moved there if need be.
    #[cfg(feature = "cuda")]
    fn on(&mut self, cuda: Cuda, len: usize) -> Result<[u64; 2]> {
        let (cuda, moments) = match &mut self.on_device {
            Some(there) => there,
            empty => {
                if self.first.len() != len {
                    bail!("adamw of {len} elements with {} moments", self.first.len());
                }
                let moments = [cuda.upload(&self.first)?, cuda.upload(&self.second)?];
                (self.first, self.second) = (Vec::new(), Vec::new());
                empty.insert((cuda, moments))
            }
        };
        Ok([cuda.address(&moments[0]), cuda.address(&moments[1])])
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
/// When the tensor is not f32.
pub fn square_sum(x: &Tensor) -> Result<f64> {
    let x = x.contiguous()?;
    let (storage, layout) = x.storage_and_layout();
    #[cfg(feature = "cuda")]
    if let Storage::Cuda(storage) = &*storage {
        let cuda = Cuda::of(storage);
        let start = cuda.start::<f32>(storage, layout)?;
        return device::elementwise::square_sum(&cuda, *start, layout.shape().elem_count());
    }
    let Storage::Cpu(storage) = &*storage else { bail!("no squared norm on this device") };
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

/// What a step multiplies with, in f32.
#[derive(Clone, Copy)]
pub(crate) struct Factors {
    pub(crate) decay: f32,
    pub(crate) rate: f32,
    pub(crate) root_correction: f32,
    pub(crate) beta1: f32,
    pub(crate) beta2: f32,
    pub(crate) eps: f32,
    pub(crate) scale: f32,
}

impl AdamWStep {
    pub(crate) fn factors(&self) -> Factors {
        let correction1 = 1.0 - self.beta1.powi(self.step as i32);
        let correction2 = 1.0 - self.beta2.powi(self.step as i32);
        Factors {
            decay: (1.0 - self.lr * self.weight_decay) as f32,
            rate: (self.lr / correction1) as f32,
            root_correction: (1.0 / correction2.sqrt()) as f32,
            beta1: self.beta1 as f32,
            beta2: self.beta2 as f32,
            eps: self.eps as f32,
            scale: self.gradient_scale as f32,
        }
    }
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
        let Moments { first, second, .. } = &mut *moments;
        let count = pl.shape().elem_count();
        if !pl.is_contiguous() || !gl.is_contiguous() || gl.shape() != pl.shape() || first.len() != count {
            bail!("adamw of parameter {:?}, gradient {:?}, {} moments", pl.dims(), gl.dims(), first.len());
        }
        let factors = self.step.factors();
        const CHUNK: usize = 1 << 14;
        p[pl.start_offset()..pl.start_offset() + count]
            .par_chunks_mut(CHUNK)
            .zip(g[gl.start_offset()..gl.start_offset() + count].par_chunks(CHUNK))
            .zip(first.par_chunks_mut(CHUNK).zip(second.par_chunks_mut(CHUNK)))
            .for_each(|((p, g), (m, v))| update(p, g, m, v, factors));
        Ok(())
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, p: &mut CudaStorage, pl: &Layout, g: &CudaStorage, gl: &Layout) -> Result<()> {
        if !pl.is_contiguous() || !gl.is_contiguous() || gl.shape() != pl.shape() {
            bail!("adamw of parameter {:?}, gradient {:?}", pl.dims(), gl.dims());
        }
        let count = pl.shape().elem_count();
        let cuda = Cuda::of(p);
        let mut moments = self.moments.lock().unwrap_or_else(PoisonError::into_inner);
        let moments = moments.on(Cuda::of(p), count)?;
        let (p, g) = (cuda.start_mut::<f32>(p, pl)?, cuda.start::<f32>(g, gl)?);
        device::elementwise::adamw(&cuda, *p, *g, moments, count, &self.step)
    }
}
