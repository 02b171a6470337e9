//! The recurrent form of the Markov head (DSpark paper, Eq. 6): a state s that remembers all tokens of the block.
//!
//! (gate, candidate, out) = one linear map with bias of [s ; e ; h]; s' = σ(gate) ⊙ s + (1 − σ(gate)) ⊙ tanh(candidate);
//! m = tanh(out). Before the first slot that predicts, s = 0. Note that `out` is made of the state *before* the slot.

use candle_core::Tensor;
use deepspec_kernels::linear::Linear;

use super::markov_head::sigmoid;
use super::parameters::ParameterSource;
use crate::error::Result;

/// The recurrent cell.
#[derive(Debug)]
pub(super) struct RnnHead {
    joint_proj: Linear,
}

impl RnnHead {
    /// Reads `markov_head.joint_proj.{weight,bias}`, `[3 · rank, 2 · rank + hidden]` and `[3 · rank]`; the rows are those of
    /// gate, candidate and out.
    pub(super) fn new(hidden: usize, rank: usize, source: ParameterSource<'_>) -> Result<Self> {
        Ok(Self { joint_proj: source.linear("markov_head.joint_proj", 3 * rank, 2 * rank + hidden, true)? })
    }

    /// Latent rows of a slot and the state after it; `None` is the state before the first.
    ///
    /// # Shapes
    /// state s and embedding e `[n, rank]`, hidden h `[n, hidden]` → two of `[n, rank]`
    pub(super) fn step(&self, state: Option<&Tensor>, embedding: &Tensor, hidden: &Tensor) -> Result<(Tensor, Tensor)> {
        let rank = embedding.dims()[1];
        let state = state.cloned().map_or_else(|| embedding.zeros_like(), Ok)?;
        let joint = self.joint_proj.forward(&Tensor::cat(&[&state, embedding, hidden], 1)?)?;
        let part = |index: usize| joint.narrow(1, index * rank, rank);
        let (gate, candidate) = (sigmoid(&part(0)?)?, part(1)?.tanh()?);
        // s' = candidate + gate · (s − candidate)
        let next = (&candidate + (gate * (state - &candidate)?)?)?;
        Ok((part(2)?.tanh()?.contiguous()?, next))
    }
}
