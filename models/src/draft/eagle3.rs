//! The Eagle3 drafter: one decoder layer that drafts token after token from the target's features.
//!
//! Row i pairs the target's feature of position i, brought to the hidden size by `fc`, with the embedding of token i + 1, at
//! rotary position i; its output predicts token i + 2. What lies ahead of the features is drafted from the drafter's own
//! output rows. Training imitates that (*training-time test*): step s takes the output rows of step s − 1 in place of the
//! features and tokens one further to the left, and attends to the first step's rows causally and to its own row of each
//! later step.
//!
//! The same struct serves training (over variables, [`Eagle3::train_hidden`]) and inference (over packed weights, with keys
//! and values cached, see [`context`]).

pub mod context;
pub mod initialise;
mod layer;
mod rows;

use std::collections::BTreeMap;

use candle_core::Tensor;
use deepspec_kernels::attention::ttt::{StepKeys, TttAttention};
use deepspec_kernels::linear::Linear;
use deepspec_kernels::rms_norm;
use deepspec_kernels::rope::RopeFrequencies;

use self::layer::Eagle3Layer;
pub use self::rows::StepRows;
pub(crate) use self::rows::supervised_rows;
use super::parameters::{ParameterSource, layer_shapes};
use super::vocabulary::DraftVocabulary;
use crate::config::Eagle3Config;
use crate::error::{Error, Result};
use crate::target::{embed, head_layout, rope_frequencies, select_rows};

/// An Eagle3 drafter.
#[derive(Debug)]
pub struct Eagle3 {
    config: Eagle3Config,
    embed_tokens: Tensor,
    fc: Linear,
    layer: Eagle3Layer,
    norm: Tensor,
    rope: RopeFrequencies,
    /// The output head that drafting uses, in the drafter's own precision; `None` in training, where the loss has its own.
    pub(crate) lm_head: Option<Linear>,
    /// The tokens that drafting proposes, where they are not all of the target's; `None` in training, where the loss has it.
    vocabulary: Option<DraftVocabulary>,
}

/// Names and shapes of the trainable tensors, sorted by name; embedding and output head are the target's, frozen.
pub fn trainable_shapes(config: &Eagle3Config) -> BTreeMap<String, Vec<usize>> {
    let hidden_size = config.body.hidden_size;
    let layer = layer_shapes(&config.body, 2 * hidden_size, true);
    let mut shapes: BTreeMap<String, Vec<usize>> =
        layer.map(|(name, shape)| (format!("layers.0.{name}"), shape)).collect();
    shapes.insert("layers.0.hidden_norm.weight".into(), vec![hidden_size]);
    shapes.insert("fc.weight".into(), vec![hidden_size, hidden_size * config.target_layer_ids.len()]);
    shapes.insert("norm.weight".into(), vec![hidden_size]);
    shapes
}

impl Eagle3 {
    /// Builds the drafter over its tensors. `embed_tokens` is the target's, frozen.
    ///
    /// # Errors
    /// When a tensor is missing or misshapen, or the draft vocabulary is no map.
    pub fn new(config: Eagle3Config, embed_tokens: Tensor, source: ParameterSource<'_>) -> Result<Self> {
        let hidden = config.body.hidden_size;
        Ok(Self {
            fc: source.linear("fc", hidden, config.target_layer_ids.len() * hidden, false)?,
            layer: Eagle3Layer::new(&config, source)?,
            norm: source.tensor("norm.weight", &[hidden])?,
            rope: rope_frequencies(&config.body),
            lm_head: None,
            vocabulary: match source {
                ParameterSource::Frozen(weights, _) => {
                    DraftVocabulary::read_map(weights, config.draft_vocab(), config.body.vocab_size)?
                }
                ParameterSource::Trainable(_) => None,
            },
            embed_tokens,
            config,
        })
    }

    /// The drafter with an output head of its own, for drafting.
    pub fn with_lm_head(mut self, lm_head: Linear) -> Self {
        self.lm_head = Some(lm_head);
        self
    }

    /// The drafter's configuration.
    pub fn config(&self) -> &Eagle3Config {
        &self.config
    }

    /// The tokens that it proposes, where they are not all of the target's; `None` also over the variables of a training run.
    pub fn vocabulary(&self) -> Option<&DraftVocabulary> {
        self.vocabulary.as_ref()
    }

    /// Hidden rows of target features: `fc(features)`.
    ///
    /// # Shapes
    /// `[rows, layers · hidden]` → `[rows, hidden]`
    ///
    /// # Errors
    /// When the width is wrong.
    pub fn feature_rows(&self, features: &Tensor) -> Result<Tensor> {
        Ok(self.fc.forward(features)?)
    }

    /// What the output head takes: `norm(hidden)`. The rows themselves are what the next step goes on from.
    ///
    /// # Shapes
    /// `[rows, hidden]` → same
    ///
    /// # Errors
    /// When the width is wrong.
    pub fn head_rows(&self, hidden: &Tensor) -> Result<Tensor> {
        Ok(rms_norm(hidden, &self.norm, self.config.body.rms_norm_eps)?)
    }

    /// Output rows of the steps of training-time test, with gradients to every parameter but `norm`. Step s, row i of a sequence
    /// predicts token i + 2 + s. Rows whose tokens lie behind the end of their sequence are meaningless; no row that counts
    /// sees them.
    ///
    /// # Shapes
    /// features `[Σ tokens, layers · hidden]` in the order of the sequences → per step of `rows` `[its rows, hidden]`
    ///
    /// # Errors
    /// When shapes do not fit, there is no row to compute or a token is outside the vocabulary.
    pub fn train_hidden(&self, sequences: &[&[u32]], features: &Tensor, rows: &StepRows) -> Result<Vec<Tensor>> {
        let lengths: Vec<usize> = sequences.iter().map(|tokens| tokens.len()).collect();
        let count: usize = lengths.iter().sum();
        if features.dims()[0] != count || rows.steps().is_empty() {
            let steps = rows.steps().len();
            return Err(Error::Batch(format!("{} feature rows for {count} tokens, {steps} steps", features.dims()[0])));
        }
        let places: Vec<(&[u32], usize)> =
            sequences.iter().flat_map(|tokens| (0..tokens.len()).map(move |position| (*tokens, position))).collect();
        let attention = TttAttention::new(&lengths, head_layout(&self.config.body));
        let mut keys = StepKeys::default();
        let mut hidden = self.feature_rows(features)?;
        let mut held: Vec<usize> = (0..count).collect();
        let mut steps = Vec::with_capacity(rows.steps().len());
        for (step, rows) in rows.steps().iter().enumerate() {
            if step > 0
                && let Some(kept) = places_of(rows, &held)?
            {
                hidden = select_rows(&hidden, &kept)?;
                keys.narrow(&kept)?;
                held.clone_from(rows);
            }
            let here = held.iter().map(|&row| places[row]);
            let positions: Vec<usize> = here.clone().map(|(_, position)| position + step).collect();
            let token = |(tokens, position): (&[u32], usize)| tokens.get(position + step + 1).copied().unwrap_or(0);
            let tokens: Vec<u32> = here.map(token).collect();
            let embedding = embed(&self.embed_tokens, &tokens)?;
            let mut input = self.layer.project(&embedding, &hidden, &self.rope.at(&positions))?;
            keys.push(input.k, input.v);
            // The first step's keys are wanted of all rows, its outputs are not.
            if let Some(kept) = places_of(rows, &held)? {
                (input.q, input.residual) = (select_rows(&input.q, &kept)?, select_rows(&input.residual, &kept)?);
                held.clone_from(rows);
            }
            let mixed = attention.forward(&input.q, rows, &keys)?;
            hidden = self.layer.finish(&input.residual, &mixed)?;
            steps.push(hidden.clone());
        }
        Ok(steps)
    }
}

/// Where rows stand among those held, both ascending; `None` when they are the same.
fn places_of(rows: &[usize], held: &[usize]) -> Result<Option<Vec<usize>>> {
    if rows == held {
        return Ok(None);
    }
    let place = |row: &usize| {
        held.binary_search(row).map_err(|_| Error::Batch(format!("row {row} is not among those of the step before")))
    };
    rows.iter().map(place).collect::<Result<_>>().map(Some)
}
