//! DSpark's confidence head (Eq. 7): the logit of the probability that token j survives, given that all before it did.

use candle_core::Tensor;
use deepspec_kernels::linear::Linear;

use super::parameters::ParameterSource;
use crate::error::Result;

/// c_j = σ(w · [h_j ; W1[x_{j−1}]] + b), or of h_j alone.
#[derive(Debug)]
pub struct ConfidenceHead {
    proj: Linear,
    with_markov: bool,
}

impl ConfidenceHead {
    /// Reads `confidence_head.proj.{weight,bias}`; `markov_rank` is the width of the Markov features, 0 without them.
    ///
    /// # Errors
    /// When a tensor is missing or misshapen.
    pub fn new(hidden: usize, markov_rank: usize, source: ParameterSource<'_>) -> Result<Self> {
        Ok(Self {
            proj: source.linear("confidence_head.proj", 1, hidden + markov_rank, true)?,
            with_markov: markov_rank > 0,
        })
    }

    /// Confidence logits.
    ///
    /// # Shapes
    /// hidden `[n, hidden]`, embedding `[n, rank]` of the previous tokens → `[n]`
    ///
    /// # Errors
    /// When shapes do not fit.
    pub fn logits(&self, hidden: &Tensor, embedding: Option<&Tensor>) -> Result<Tensor> {
        let input = match embedding {
            Some(embedding) if self.with_markov => Tensor::cat(&[hidden, embedding], 1)?,
            _ => hidden.clone(),
        };
        Ok(self.proj.forward(&input)?.flatten_all()?)
    }
}
