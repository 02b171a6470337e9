//! Where a drafter's tensors come from: frozen weights of a checkpoint, or the variables of a training run.
//!
//! Model code asks by the checkpoint's names, so a key can be found by search, and does not know which of the two it gets.

use std::collections::BTreeMap;

use candle_core::{DType, Tensor, Var};
use deepspec_kernels::linear::{Linear, Precision};

use crate::error::{Error, Result};
use crate::weights::Weights;

/// Trainable tensors by checkpoint name. The order of names is the order of every loop over them.
#[derive(Debug, Default)]
pub struct Parameters {
    vars: BTreeMap<String, Var>,
}

impl Parameters {
    /// Adds or replaces a parameter (kept as f32).
    ///
    /// # Errors
    /// When the tensor cannot be copied.
    pub fn insert(&mut self, name: impl Into<String>, value: &Tensor) -> Result<()> {
        let value = value.to_dtype(DType::F32)?.contiguous()?.copy()?;
        self.vars.insert(name.into(), Var::from_tensor(&value)?);
        Ok(())
    }

    /// The variable of that name.
    pub fn get(&self, name: &str) -> Option<&Var> {
        self.vars.get(name)
    }

    /// All parameters in order of names.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Var)> {
        self.vars.iter().map(|(name, var)| (name.as_str(), var))
    }

    /// Number of parameters' elements.
    pub fn elements(&self) -> usize {
        self.vars.values().map(|var| var.elem_count()).sum()
    }
}

/// Source of a drafter's tensors.
#[derive(Clone, Copy)]
pub enum ParameterSource<'a> {
    /// Inference: weights are packed in the given precision.
    Frozen(&'a Weights, Precision),
    /// Training: tensors are the variables themselves.
    Trainable(&'a Parameters),
}

impl ParameterSource<'_> {
    /// A plain tensor.
    ///
    /// # Errors
    /// When it is missing or misshapen.
    pub fn tensor(&self, name: &str, shape: &[usize]) -> Result<Tensor> {
        match self {
            Self::Frozen(weights, _) => weights.get(name, shape),
            Self::Trainable(parameters) => {
                let missing = || Error::TensorMissing { path: "parameters".into(), tensor: name.into(), expected: shape.into() };
                let var = parameters.get(name).ok_or_else(missing)?;
                if var.dims() != shape {
                    return Err(Error::TensorShape {
                        path: "parameters".into(),
                        tensor: name.into(),
                        expected: shape.into(),
                        found: var.dims().into(),
                    });
                }
                Ok(var.as_tensor().clone())
            }
        }
    }

    /// A linear layer `name.weight` (and `name.bias`) of `[outputs, inputs]`.
    ///
    /// # Errors
    /// When a tensor is missing or misshapen.
    pub fn linear(&self, name: &str, outputs: usize, inputs: usize, has_bias: bool) -> Result<Linear> {
        let weight = self.tensor(&format!("{name}.weight"), &[outputs, inputs])?;
        let bias = has_bias.then(|| self.tensor(&format!("{name}.bias"), &[outputs])).transpose()?;
        match self {
            Self::Frozen(_, precision) => Ok(Linear::frozen(&[&weight], bias.as_ref(), *precision)?),
            Self::Trainable(_) => Ok(Linear::trainable(weight, bias)),
        }
    }
}
