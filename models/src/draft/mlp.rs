//! The MLP of a draft layer: the target's gated form, or a mixture of such experts.

use candle_core::Tensor;
use deepspec_kernels::linear::Linear;
use deepspec_kernels::silu_mul;

use super::moe::{MixtureOfExperts, Routing};
use super::parallel_linear::ParallelLinear;
use super::parameters::ParameterSource;
use crate::config::DraftConfig;
use crate::error::Result;

/// y = W_down (silu(W_gate x) ⊙ W_up x).
#[derive(Debug)]
pub struct GatedMlp {
    gate_up_proj: ParallelLinear<2>,
    down_proj: Linear,
}

impl GatedMlp {
    /// Reads `{name}.{gate,up,down}_proj`, with `inner` rows between the projections.
    ///
    /// # Errors
    /// When a tensor is missing or misshapen.
    pub fn new(name: &str, hidden: usize, inner: usize, has_bias: bool, source: ParameterSource<'_>) -> Result<Self> {
        let [gate, up] = ["gate_proj", "up_proj"].map(|part| (format!("{name}.{part}"), inner));
        Ok(Self {
            gate_up_proj: ParallelLinear::new([gate, up], hidden, has_bias, source)?,
            down_proj: source.linear(&format!("{name}.down_proj"), hidden, inner, has_bias)?,
        })
    }

    /// The output of each row.
    ///
    /// # Shapes
    /// `[rows, hidden]` → `[rows, hidden]`
    ///
    /// # Errors
    /// When shapes do not fit.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let [gate, up] = self.gate_up_proj.forward(x)?;
        Ok(self.down_proj.forward(&silu_mul(&gate, &up)?)?)
    }
}

/// The MLP of a draft layer.
#[derive(Debug)]
pub enum Mlp {
    /// One for all rows.
    Dense(GatedMlp),
    /// Each row has some of many.
    Experts(MixtureOfExperts),
}

impl Mlp {
    /// The MLP of layer `index`.
    ///
    /// # Errors
    /// When a tensor is missing or misshapen.
    pub fn new(config: &DraftConfig, index: usize, source: ParameterSource<'_>) -> Result<Self> {
        let (name, body) = (format!("layers.{index}.mlp"), &config.body);
        match &config.moe {
            Some(moe) => Ok(Self::Experts(MixtureOfExperts::new(moe, body.hidden_size, index, source)?)),
            None => {
                Ok(Self::Dense(GatedMlp::new(&name, body.hidden_size, body.intermediate_size, body.mlp_bias, source)?))
            }
        }
    }

    /// The output of each row, and where the rows went in a mixture; only rows of `routed` (all without it) go to routed experts.
    ///
    /// # Shapes
    /// `[rows, hidden]` → `[rows, hidden]`
    ///
    /// # Errors
    /// When shapes do not fit.
    pub fn forward(&self, x: &Tensor, routed: Option<&[u32]>) -> Result<(Tensor, Option<Routing>)> {
        match self {
            Self::Dense(mlp) => Ok((mlp.forward(x)?, None)),
            Self::Experts(experts) => {
                let (y, routing) = experts.forward(x, routed)?;
                Ok((y, Some(routing)))
            }
        }
    }
}
