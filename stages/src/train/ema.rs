//! An exponential moving average of the weights in training (`train.ema`). A checkpoint's drafter is the average, its training state
//! holds the weights themselves, so whoever loads a checkpoint decodes with the average and a resumed run goes on exactly.

use deepspec_models::draft::Parameters;

use crate::error::{Error, Result};

/// The average and the weights are f32, as the weights of training are.
#[derive(Debug)]
pub struct MovingAverage {
    decay: f64,
    average: Parameters,
}

impl MovingAverage {
    /// An average that has come to `average`; at the start of a run, the initial weights.
    pub fn new(decay: f64, average: Parameters) -> Self {
        Self { decay, average }
    }

    /// An average that starts from the weights.
    ///
    /// # Errors
    /// When a tensor cannot be copied.
    pub fn of(decay: f64, weights: &Parameters) -> Result<Self> {
        let mut average = Parameters::default();
        for (name, var) in weights.iter() {
            average.insert(name, &var.as_detached_tensor())?;
        }
        Ok(Self::new(decay, average))
    }

    /// Takes in the weights after `steps` optimiser steps: average ← d · average + (1 − d) · weights, with d the decay, but at most
    /// (1 + steps) / (10 + steps), so that the initial weights do not outweigh the first ones that were trained.
    ///
    /// # Errors
    /// The weights have other names or shapes.
    pub fn update(&mut self, weights: &Parameters, steps: u64) -> Result<()> {
        let steps = steps as f64;
        let decay = self.decay.min((1.0 + steps) / (10.0 + steps));
        for (name, average) in self.average.iter() {
            let weight = weights.get(name).ok_or_else(|| Error::Invariant(format!("no weight `{name}` to average")))?;
            let kept = (average.as_detached_tensor() * decay)?;
            average.set(&(kept + (weight.as_detached_tensor() * (1.0 - decay))?)?)?;
        }
        Ok(())
    }

    /// The average, by the names of the weights.
    pub fn parameters(&self) -> &Parameters {
        &self.average
    }
}
