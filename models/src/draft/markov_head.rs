//! DSpark's sequential head, vanilla form (Eq. 4–5): a bias B = W2 · W1[x_{j−1}] on the logits of slot j.
//!
//! The previous token of slot 0 is the anchor. W1 is an embedding `[vocab, rank]`, W2 a linear map `rank → draft vocab`.

use candle_core::Tensor;
use deepspec_kernels::linear::Linear;

use super::parameters::ParameterSource;
use crate::error::Result;
use crate::target::embed;

/// The vanilla Markov head.
#[derive(Debug)]
pub struct MarkovHead {
    markov_w1: Tensor,
    markov_w2: Linear,
}

impl MarkovHead {
    /// Reads `markov_head.markov_w1.weight` and `markov_head.markov_w2.weight`.
    ///
    /// # Errors
    /// When a tensor is missing or misshapen.
    pub fn new(vocab: usize, draft_vocab: usize, rank: usize, source: ParameterSource<'_>) -> Result<Self> {
        Ok(Self {
            markov_w1: source.tensor("markov_head.markov_w1.weight", &[vocab, rank])?,
            markov_w2: source.linear("markov_head.markov_w2", draft_vocab, rank, false)?,
        })
    }

    /// Latent rows `W1[x]` of previous tokens.
    ///
    /// # Shapes
    /// n tokens → `[n, rank]`
    ///
    /// # Errors
    /// When a token is outside the vocabulary.
    pub fn latent(&self, previous: &[u32]) -> Result<Tensor> {
        embed(&self.markov_w1, previous)
    }

    /// The bias of latent rows.
    ///
    /// # Shapes
    /// `[n, rank]` → `[n, draft vocab]`
    ///
    /// # Errors
    /// When shapes do not fit.
    pub fn bias(&self, latent: &Tensor) -> Result<Tensor> {
        Ok(self.markov_w2.forward(latent)?)
    }

    /// W2 as a plain tensor `[draft vocab, rank]`, when it is trainable.
    pub fn w2(&self) -> Option<&Tensor> {
        match &self.markov_w2 {
            Linear::Dense { weight, .. } => Some(weight),
            Linear::Frozen { .. } | Linear::Device { .. } => None,
        }
    }
}
