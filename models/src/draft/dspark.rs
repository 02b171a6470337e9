//! The DSpark drafter: parallel backbone, sequential Markov head, confidence head (DSpark paper, Eq. 2–7).
//!
//! The same struct serves training (over variables, [`DSpark::train_hidden`]) and inference (over packed weights, with the
//! context's keys and values cached, see [`super::context`]). DFlash is this drafter with Markov rank 0 and no confidence.

use std::ops::Range;

use candle_core::Tensor;
use deepspec_kernels::attention::block::{BlockAttention, BlockSpan};
use deepspec_kernels::linear::Linear;
use deepspec_kernels::rms_norm;
use deepspec_kernels::rope::RopeFrequencies;

use super::backbone::DraftLayer;
use super::confidence_head::ConfidenceHead;
use super::markov_head::MarkovHead;
use super::moe::Routing;
use super::parameters::ParameterSource;
use super::vocabulary::DraftVocabulary;
use crate::config::DraftConfig;
use crate::error::Result;
use crate::speculate::Temperatures;
use crate::target::{embed, head_layout, rope_frequencies};

/// A drafter of the DSpark family.
#[derive(Debug)]
pub struct DSpark {
    pub(crate) config: DraftConfig,
    pub(crate) embed_tokens: Tensor,
    pub(crate) fc: Linear,
    pub(crate) hidden_norm: Tensor,
    pub(crate) layers: Vec<DraftLayer>,
    pub(crate) norm: Tensor,
    pub(crate) markov_head: Option<MarkovHead>,
    pub(crate) confidence_head: Option<ConfidenceHead>,
    pub(crate) rope: RopeFrequencies,
    /// The output head that drafting uses, in the drafter's own precision; `None` in training, where the loss has its own.
    pub(crate) lm_head: Option<Linear>,
    /// The tokens that drafting proposes, where they are not all of the target's; `None` in training, where the loss has it.
    pub(crate) vocabulary: Option<DraftVocabulary>,
    /// Temperatures that drafting divides the confidence logits by.
    pub(crate) calibration: Option<Temperatures>,
}

/// One sequence of a training batch.
#[derive(Debug, Clone)]
pub struct TrainSequence<'a> {
    /// Tokens of the sequence.
    pub tokens: &'a [u32],
    /// Anchor positions of its blocks; `None` for a block that only pads (it sees nothing and holds mask tokens alone).
    pub anchors: Vec<Option<usize>>,
}

/// What the training forward gives.
#[derive(Debug)]
pub struct TrainRows {
    /// Final hidden rows `[block rows, hidden]`.
    pub hidden: Tensor,
    /// Where each layer's router sent the rows of the blocks that have an anchor; empty without experts.
    pub routing: Vec<Routing>,
}

impl DSpark {
    /// Builds the drafter over its tensors. `embed_tokens` is the target's, frozen.
    ///
    /// # Errors
    /// When a tensor is missing or misshapen, or the draft vocabulary is no map.
    pub fn new(config: DraftConfig, embed_tokens: Tensor, source: ParameterSource<'_>) -> Result<Self> {
        let hidden = config.body.hidden_size;
        let features = config.target_layer_ids.len() * hidden;
        let markov_features = if config.confidence_head_with_markov { config.markov_rank } else { 0 };
        Ok(Self {
            fc: source.linear("fc", hidden, features, false)?,
            hidden_norm: source.tensor("hidden_norm.weight", &[hidden])?,
            layers: (0..config.body.num_hidden_layers)
                .map(|i| DraftLayer::new(&config, i, source))
                .collect::<Result<_>>()?,
            norm: source.tensor("norm.weight", &[hidden])?,
            markov_head: MarkovHead::new(&config, source)?,
            confidence_head: config
                .enable_confidence_head
                .then(|| ConfidenceHead::new(hidden, markov_features, source))
                .transpose()?,
            rope: rope_frequencies(&config.body),
            lm_head: None,
            vocabulary: match source {
                ParameterSource::Frozen(weights, _) => DraftVocabulary::read(weights, &config)?,
                ParameterSource::Trainable(_) => None,
            },
            calibration: None,
            embed_tokens,
            config,
        })
    }

    /// The drafter with temperatures that its confidence logits are divided by when it drafts.
    ///
    /// # Errors
    /// They are not one per confidence of a block; a drafter without a confidence head has none.
    pub fn with_calibration(mut self, temperatures: Temperatures) -> Result<Self> {
        let expected = self.confidence_head.as_ref().map_or(0, |_| self.config.proposals());
        self.calibration = Some(Temperatures::new(temperatures.values().to_vec(), expected)?);
        Ok(self)
    }

    /// The temperatures of its confidences, where it is calibrated.
    pub fn calibration(&self) -> Option<&Temperatures> {
        self.calibration.as_ref()
    }

    /// The drafter with an output head of its own, for drafting.
    pub fn with_lm_head(mut self, lm_head: Linear) -> Self {
        self.lm_head = Some(lm_head);
        self
    }

    /// The drafter's configuration.
    pub fn config(&self) -> &DraftConfig {
        &self.config
    }

    /// The tokens that it proposes, where they are not all of the target's; `None` also over the variables of a training run.
    pub fn vocabulary(&self) -> Option<&DraftVocabulary> {
        self.vocabulary.as_ref()
    }

    /// The Markov head, if it has one.
    pub fn markov_head(&self) -> Option<&MarkovHead> {
        self.markov_head.as_ref()
    }

    /// The confidence head, if it has one.
    pub fn confidence_head(&self) -> Option<&ConfidenceHead> {
        self.confidence_head.as_ref()
    }

    /// Context rows of target features: `hidden_norm(fc(features))`.
    ///
    /// # Shapes
    /// `[rows, layers · hidden]` → `[rows, hidden]`
    ///
    /// # Errors
    /// When the width is wrong.
    pub fn context_rows(&self, features: &Tensor) -> Result<Tensor> {
        Ok(rms_norm(&self.fc.forward(features)?, &self.hidden_norm, self.config.body.rms_norm_eps)?)
    }

    /// Input rows of blocks: the anchor token's embedding, then the mask token's.
    ///
    /// # Errors
    /// When a token is outside the vocabulary.
    pub(crate) fn block_inputs(&self, anchors: impl Iterator<Item = Option<u32>>, size: usize) -> Result<Tensor> {
        let mask = self.config.mask_token_id;
        let tokens: Vec<u32> = anchors
            .flat_map(|anchor| std::iter::once(anchor.unwrap_or(mask)).chain(std::iter::repeat_n(mask, size - 1)))
            .collect();
        embed(&self.embed_tokens, &tokens)
    }

    /// The rows of whole blocks that predict a token, in the order of their slots: see
    /// [`BlockLayout`](crate::config::BlockLayout).
    ///
    /// # Shapes
    /// `[blocks · block_size, width]` → `[blocks · proposals, width]`
    ///
    /// # Errors
    /// When the rows are not whole blocks.
    pub fn predicting_rows(&self, rows: &Tensor) -> Result<Tensor> {
        let first = self.config.layout().first_predicting_row();
        if first == 0 {
            return Ok(rows.clone());
        }
        let width = rows.dims()[1];
        let blocks = rows.reshape(((), self.config.block_size, width))?;
        Ok(blocks.narrow(1, first, self.config.proposals())?.contiguous()?.reshape(((), width))?)
    }

    /// Final hidden rows of all blocks of a training batch, with gradients to every parameter of the backbone.
    ///
    /// # Shapes
    /// features `[Σ tokens, layers · hidden]` in the order of the sequences → `[Σ blocks · block_size, hidden]`
    ///
    /// # Errors
    /// When shapes do not fit or an anchor lies outside its sequence.
    pub fn train_hidden(&self, sequences: &[TrainSequence<'_>], features: &Tensor) -> Result<Tensor> {
        Ok(self.train_rows(sequences, features)?.hidden)
    }

    /// As [`train_hidden`](Self::train_hidden), with what the routers did. Blocks that pad go to no routed expert.
    ///
    /// # Errors
    /// When shapes do not fit or an anchor lies outside its sequence.
    pub fn train_rows(&self, sequences: &[TrainSequence<'_>], features: &Tensor) -> Result<TrainRows> {
        let size = self.config.block_size;
        let mut spans: Vec<(Range<usize>, Vec<BlockSpan>)> = Vec::new();
        let (mut context_positions, mut block_positions, mut anchor_tokens) = (Vec::new(), Vec::new(), Vec::new());
        let mut routed = Vec::new();
        for sequence in sequences {
            let first = context_positions.len();
            context_positions.extend(0..sequence.tokens.len());
            let mut blocks = Vec::new();
            for &anchor in &sequence.anchors {
                let rows = block_positions.len()..block_positions.len() + size;
                let position = anchor.unwrap_or(0);
                routed.extend(rows.clone().filter(|_| anchor.is_some()).map(|row| row as u32));
                let visible = anchor.map_or(0, |anchor| anchor.min(sequence.tokens.len()));
                let oldest = self.config.sliding_window.map_or(0, |window| visible.saturating_sub(window));
                block_positions.extend(position..position + size);
                anchor_tokens.push(anchor.and_then(|anchor| sequence.tokens.get(anchor).copied()));
                blocks.push(BlockSpan {
                    context: first + oldest..first + visible,
                    rows,
                    sees_itself: anchor.is_some(),
                });
            }
            spans.push((first..context_positions.len(), blocks));
        }
        let attention = BlockAttention::new(spans, head_layout(&self.config.body))?;
        let context = self.context_rows(features)?;
        let (context_angles, block_angles) = (self.rope.at(&context_positions), self.rope.at(&block_positions));
        let mut x = self.block_inputs(anchor_tokens.into_iter(), size)?;
        let mut routing = Vec::new();
        for layer in &self.layers {
            let (context_k, context_v) = layer.context_keys_values(&context, &context_angles)?;
            let block = layer.project(&x, &block_angles)?;
            let k = Tensor::cat(&[&context_k, &block.k], 0)?;
            let v = Tensor::cat(&[&context_v, &block.v], 0)?;
            let (y, routing_of_layer) =
                layer.finish_routed(&x, &attention.forward(&block.q, &k, &v)?, Some(&routed))?;
            x = y;
            routing.extend(routing_of_layer);
        }
        let hidden = rms_norm(&x, &self.norm, self.config.body.rms_norm_eps)?;
        Ok(TrainRows { hidden, routing })
    }
}
