//! The gated form of the Markov head (the reference's own, not in the paper): m = g ⊙ e with
//! g = σ(Wg [h ; e] + b), so that a hidden row can do without what the previous token says.

use candle_core::Tensor;
use deepspec_kernels::linear::Linear;

use super::markov_head::sigmoid;
use super::parameters::ParameterSource;
use crate::error::Result;

/// The gate.
#[derive(Debug)]
pub(super) struct GatedHead {
    gate_proj: Linear,
}

impl GatedHead {
    /// Reads `markov_head.gate_proj.{weight,bias}`, `[rank, hidden + rank]` and `[rank]`.
    pub(super) fn new(hidden: usize, rank: usize, source: ParameterSource<'_>) -> Result<Self> {
        Ok(Self { gate_proj: source.linear("markov_head.gate_proj", rank, hidden + rank, true)? })
    }

    /// Latent rows.
    ///
    /// # Shapes
    /// embedding e `[n, rank]`, hidden h `[n, hidden]` → `[n, rank]`
    pub(super) fn latent(&self, embedding: &Tensor, hidden: &Tensor) -> Result<Tensor> {
        let gate = sigmoid(&self.gate_proj.forward(&Tensor::cat(&[hidden, embedding], 1)?)?)?;
        Ok((gate * embedding)?)
    }
}
