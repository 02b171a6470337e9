//! DSpark's sequential heads (DSpark paper, Eq. 4–6): a bias B = W2 · m on the logits of slot j, from the tokens
//! before it. The previous token of slot 0 is the anchor.
//!
//! The forms differ in the latent row m alone. With e = W1[x_{j−1}] and h the slot's hidden row:
//!
//! * vanilla: m = e
//! * gated: m = σ(Wg [h ; e] + b) ⊙ e, see `gated_head.rs`
//! * rnn: m = tanh(out), with a state that is carried from slot to slot, see `rnn_head.rs`
//!
//! W1 is an embedding `[vocab, rank]`, W2 a linear map `rank → draft vocab`. The confidence head sees e, whatever the form.

use candle_core::Tensor;
use deepspec_kernels::linear::Linear;

use super::gated_head::GatedHead;
use super::parameters::ParameterSource;
use super::rnn_head::RnnHead;
use crate::config::{DraftConfig, MarkovHeadType};
use crate::error::{Error, Result};
use crate::target::embed;

/// A Markov head of any form.
#[derive(Debug)]
pub struct MarkovHead {
    markov_w1: Tensor,
    markov_w2: Linear,
    form: Form,
}

#[derive(Debug)]
enum Form {
    Vanilla,
    Gated(GatedHead),
    Rnn(RnnHead),
}

/// What a head carries from slot to slot of its blocks; [`MarkovState::default`] stands before the first slot.
#[derive(Debug, Clone, Default)]
pub struct MarkovState(Option<Tensor>);

impl MarkovHead {
    /// Reads `markov_head.markov_w1.weight`, `markov_head.markov_w2.weight` and what the form adds to them; `None` when the
    /// drafter has no such head.
    ///
    /// # Errors
    /// When a tensor is missing or misshapen.
    pub fn new(config: &DraftConfig, source: ParameterSource<'_>) -> Result<Option<Self>> {
        let Some(kind) = config.markov_head_type else { return Ok(None) };
        let (hidden, rank) = (config.body.hidden_size, config.markov_rank);
        Ok(Some(Self {
            markov_w1: source.tensor("markov_head.markov_w1.weight", &[config.body.vocab_size, rank])?,
            markov_w2: source.linear("markov_head.markov_w2", config.draft_vocab(), rank, false)?,
            form: match kind {
                MarkovHeadType::Vanilla => Form::Vanilla,
                MarkovHeadType::Gated => Form::Gated(GatedHead::new(hidden, rank, source)?),
                MarkovHeadType::Rnn => Form::Rnn(RnnHead::new(hidden, rank, source)?),
            },
        }))
    }

    /// Rows e = `W1[x]` of previous tokens.
    ///
    /// # Shapes
    /// n tokens → `[n, rank]`
    ///
    /// # Errors
    /// When a token is outside the vocabulary.
    pub fn embedding(&self, previous: &[u32]) -> Result<Tensor> {
        embed(&self.markov_w1, previous)
    }

    /// Latent rows m of one slot of n blocks; moves `state` on to the next slot.
    ///
    /// # Shapes
    /// embedding `[n, rank]`, hidden `[n, hidden]` → `[n, rank]`
    ///
    /// # Errors
    /// When shapes do not fit.
    pub fn latent(&self, embedding: &Tensor, hidden: &Tensor, state: &mut MarkovState) -> Result<Tensor> {
        match &self.form {
            Form::Vanilla => Ok(embedding.clone()),
            Form::Gated(head) => head.latent(embedding, hidden),
            Form::Rnn(head) => {
                let (latent, next) = head.step(state.0.as_ref(), embedding, hidden)?;
                state.0 = Some(next);
                Ok(latent)
            }
        }
    }

    /// Latent rows m of all slots of blocks whose tokens are known (teacher forcing).
    ///
    /// # Shapes
    /// embedding `[blocks · slots, rank]`, hidden `[blocks · slots, hidden]` → `[blocks · slots, rank]`
    ///
    /// # Errors
    /// When shapes do not fit.
    pub fn block_latents(&self, embedding: &Tensor, hidden: &Tensor, slots: usize) -> Result<Tensor> {
        if !matches!(self.form, Form::Rnn(_)) {
            return self.latent(embedding, hidden, &mut MarkovState::default());
        }
        let (rows, rank) = embedding.dims2()?;
        if slots == 0 || !rows.is_multiple_of(slots) {
            return Err(Error::Batch(format!("{rows} rows in blocks of {slots}")));
        }
        let blocks = |rows: &Tensor| rows.reshape(((), slots, rows.dims()[1]));
        let (embedding, hidden) = (blocks(embedding)?, blocks(hidden)?);
        let mut state = MarkovState::default();
        let mut latents = Vec::with_capacity(slots);
        for slot in 0..slots {
            let (embedding, hidden) = (slot_rows(&embedding, slot)?, slot_rows(&hidden, slot)?);
            latents.push(self.latent(&embedding, &hidden, &mut state)?);
        }
        Ok(Tensor::stack(&latents, 1)?.reshape((rows, rank))?)
    }

    /// The bias B = W2 · m of latent rows.
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

/// Rows of one slot of all blocks.
///
/// # Shapes
/// `[blocks, slots, width]` → `[blocks, width]`
pub(crate) fn slot_rows(rows: &Tensor, slot: usize) -> Result<Tensor> {
    Ok(rows.narrow(1, slot, 1)?.squeeze(1)?.contiguous()?)
}

/// σ(x), written with tanh: it neither overflows nor loses its gradient.
pub(super) fn sigmoid(x: &Tensor) -> Result<Tensor> {
    Ok((x * 0.5)?.tanh()?.affine(0.5, 0.5)?)
}
