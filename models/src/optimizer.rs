//! The optimiser of a training run: accumulated gradients, clipping by the global norm, AdamW, the learning-rate schedule.
//!
//! It holds trainable tensors only, in order of their names, with f32 master weights and moments.

use std::collections::{BTreeMap, BTreeSet};

use candle_core::backprop::GradStore;
use candle_core::{Device, Tensor};
use deepspec_kernels::adamw::{AdamWStep, Moments, adamw, square_sum};

use crate::draft::Parameters;
use crate::error::{Error, Result};

/// Fixed settings of AdamW.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWConfig {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay, on every tensor.
    pub weight_decay: f64,
    /// Largest global gradient norm; larger ones are scaled down to it.
    pub max_grad_norm: f64,
}

/// AdamW over a set of parameters.
#[derive(Debug)]
pub struct Optimizer {
    config: AdamWConfig,
    moments: BTreeMap<String, Moments>,
    step: u64,
}

/// Gradients summed over the micro-batches of a step.
#[derive(Debug, Default)]
pub struct Gradients {
    sums: BTreeMap<String, Tensor>,
}

impl Gradients {
    /// Adds the gradients of one micro-batch.
    ///
    /// # Errors
    /// [`Error::NoGradient`] when a parameter has none: it would silently never train.
    pub fn add(&mut self, parameters: &Parameters, store: &GradStore) -> Result<()> {
        self.add_with_idle(parameters, store, &BTreeSet::new())
    }

    /// As [`add`](Self::add), where the `idle` parameters took no part in the pass: those without a gradient have one of zeros.
    ///
    /// # Errors
    /// [`Error::NoGradient`] when another parameter has none.
    pub fn add_with_idle(&mut self, parameters: &Parameters, store: &GradStore, idle: &BTreeSet<String>) -> Result<()> {
        for (name, var) in parameters.iter() {
            let grad = match store.get(var) {
                Some(grad) => grad,
                None if !idle.contains(name) => return Err(Error::NoGradient { parameter: name.into() }),
                None if self.sums.contains_key(name) => continue,
                None => &var.zeros_like()?,
            };
            match self.sums.get_mut(name) {
                Some(sum) => *sum = (&*sum + grad)?,
                None => {
                    self.sums.insert(name.into(), grad.contiguous()?);
                }
            }
        }
        Ok(())
    }

    /// The gradient of a parameter.
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.sums.get(name)
    }

    /// Euclidean norm over all parameters.
    ///
    /// # Errors
    /// When a gradient is not f32 in host memory.
    pub fn norm(&self) -> Result<f64> {
        let mut total = 0.0;
        for grad in self.sums.values() {
            total += square_sum(grad)?;
        }
        Ok(total.sqrt())
    }
}

impl Optimizer {
    /// An optimiser with zero moments.
    pub fn new(config: AdamWConfig, parameters: &Parameters) -> Self {
        let moments =
            parameters.iter().map(|(name, var)| (name.to_owned(), Moments::zeros(var.elem_count()))).collect();
        Self { config, moments, step: 0 }
    }

    /// Updates done so far.
    pub fn step_count(&self) -> u64 {
        self.step
    }

    /// Clips, updates every parameter in place and returns the norm before clipping.
    ///
    /// # Errors
    /// [`Error::NotFinite`] when the norm is not finite (nothing is updated), [`Error::NoGradient`] for a parameter
    /// without a gradient.
    pub fn update(&mut self, parameters: &Parameters, gradients: &Gradients, lr: f64) -> Result<f64> {
        let norm = gradients.norm()?;
        if !norm.is_finite() {
            return Err(Error::NotFinite { what: "gradient norm".into(), step: self.step + 1 });
        }
        let AdamWConfig { beta1, beta2, eps, weight_decay, max_grad_norm } = self.config;
        let clip = max_grad_norm / (norm + 1e-6);
        self.step += 1;
        let step = AdamWStep { lr, beta1, beta2, eps, weight_decay, step: self.step, gradient_scale: clip.min(1.0) };
        for (name, var) in parameters.iter() {
            let grad = gradients.get(name).ok_or_else(|| Error::NoGradient { parameter: name.into() })?;
            let moments = self.moments.get_mut(name).ok_or_else(|| Error::NoGradient { parameter: name.into() })?;
            adamw(var.as_tensor(), grad, moments, &step)?;
        }
        Ok(norm)
    }

    /// State as named tensors, for a checkpoint.
    ///
    /// # Errors
    /// When a tensor cannot be made.
    pub fn state(&self) -> Result<Vec<(String, Tensor)>> {
        let mut out = Vec::new();
        for (name, moments) in &self.moments {
            for (kind, data) in ["exp_avg", "exp_avg_sq"].into_iter().zip(moments.values()?) {
                out.push((format!("{kind}.{name}"), Tensor::from_slice(&data, data.len(), &Device::Cpu)?));
            }
        }
        Ok(out)
    }

    /// Restores a state written by [`Optimizer::state`]; `read` gives a tensor by name and length.
    ///
    /// # Errors
    /// When a tensor is missing or misshapen.
    pub fn restore(&mut self, step: u64, read: impl Fn(&str, usize) -> Result<Tensor>) -> Result<()> {
        for (name, moments) in &mut self.moments {
            let len = moments.values()?[0].len();
            *moments = Moments::new(
                read(&format!("exp_avg.{name}"), len)?.to_vec1()?,
                read(&format!("exp_avg_sq.{name}"), len)?.to_vec1()?,
            )?;
        }
        self.step = step;
        Ok(())
    }
}

/// Linear warm-up, then a cosine to zero, in closed form.
///
/// Step i (from 0) of `warmup` gives lr·(i+1)/warmup; step warmup + k gives lr·½(1 + cos(πk/T)), T the steps after
/// warm-up. The reference evaluates the cosine recursively from its first value, which scales it by
/// 2/(1 + cos(π/T)); that is not copied.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Schedule {
    /// Highest learning rate.
    pub lr: f64,
    /// Steps of the run.
    pub total_steps: u64,
    /// Steps of warm-up.
    pub warmup_steps: u64,
}

impl Schedule {
    /// A schedule whose warm-up takes ⌊ratio · total⌋ steps.
    pub fn new(lr: f64, total_steps: u64, warmup_ratio: f64) -> Self {
        Self { lr, total_steps, warmup_steps: (warmup_ratio * total_steps as f64) as u64 }
    }

    /// Learning rate of step `step`, counted from 0.
    pub fn at(&self, step: u64) -> f64 {
        if step < self.warmup_steps {
            return self.lr * (step + 1) as f64 / self.warmup_steps as f64;
        }
        let span = (self.total_steps - self.warmup_steps).max(1) as f64;
        let done = (step - self.warmup_steps).min(self.total_steps - self.warmup_steps) as f64;
        self.lr * 0.5 * (1.0 + (std::f64::consts::PI * done / span).cos())
    }
}
