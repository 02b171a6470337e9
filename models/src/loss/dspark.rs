//! DSpark's training objective (DSpark paper, Eq. 8–12): which slots count, the weighted terms, the metrics.
//!
//! Slot k of a block with anchor a is trained on the token at a+1+k, against the target's distribution at a+k, whatever row the
//! [block layout](crate::config::BlockLayout) reads it from. It counts
//! only while its label lies inside the sequence and is supervised, as an unbroken prefix of the block, with weight
//! w_k = exp(−k/`loss_decay_gamma`). Every term is Σ w·term / (Σ w + 1e−6) over the *whole* global batch, so the
//! denominator is known before the first forward pass and gradient accumulation changes nothing.
//!
//! The paper's sums have no such denominator; it is what the released training code does.
//!
//! A drafter with a draft vocabulary is compared with the target's distribution over the target's whole vocabulary. A slot
//! whose label it lacks has no cross-entropy and is not in that term's denominator; total variation, divergence and
//! confidence count it like any other.

use std::sync::Arc;

use candle_core::Tensor;
use deepspec_kernels::linear::{Packed, Precision};
use deepspec_kernels::vocab_loss::{LossRow, RowTerms, VocabLoss};
use serde::{Deserialize, Serialize};

use super::router::RouterSums;
use crate::draft::dspark::TrainSequence;
use crate::draft::{DSpark, DraftVocabulary};
use crate::error::{Error, Result};

/// Added to the denominators.
const DENOMINATOR_EPS: f64 = 1e-6;

/// Coefficients of the loss terms.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LossWeights {
    /// Cross-entropy on the label.
    pub ce: f64,
    /// Total variation Σ|p_d − p_t| (`l1_loss_alpha` of the reference).
    pub tv: f64,
    /// KL(p_t ‖ p_d).
    pub kl: f64,
    /// Temperature of the KL term on both sides.
    pub kl_temperature: f64,
    /// Binary cross-entropy of the confidence head.
    pub confidence: f64,
    /// γ of the weights w_k = exp(−k/γ); `None` weighs all slots alike.
    pub decay_gamma: Option<f64>,
}

/// One supervised slot.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Slot {
    /// Row among all predicting rows of the micro-batch ([`DSpark::predicting_rows`]).
    pub row: usize,
    /// Row of the target position a+k among all context rows of the micro-batch.
    pub target: usize,
    /// Token to be predicted, as the drafter numbers it; `None` when the drafter lacks it.
    pub label: Option<u32>,
    /// Token before it (the anchor for slot 0).
    pub previous: u32,
    /// Index k in its block.
    pub k: usize,
    /// Block among all of the micro-batch.
    pub block: usize,
    /// w_k
    pub weight: f64,
}

/// What is supervised in a micro-batch.
#[derive(Debug, Clone, Default)]
pub struct Supervision {
    /// Slots that count, in row order.
    pub slots: Vec<Slot>,
    /// Blocks that do not pad.
    pub blocks: usize,
    /// Σ w over the slots.
    pub weights: WeightSums,
    previous_of_row: Vec<u32>,
    anchor_stats: AnchorStats,
}

/// Σ w over slots: denominators of the loss terms. Those of the micro-batches of a global batch add up.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct WeightSums {
    /// Of all slots.
    pub all: f64,
    /// Of those whose label the drafter has: for the cross-entropy.
    pub labelled: f64,
}

impl std::iter::Sum for WeightSums {
    fn sum<I: Iterator<Item = Self>>(parts: I) -> Self {
        parts.fold(Self::default(), |a, b| Self { all: a.all + b.all, labelled: a.labelled + b.labelled })
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct AnchorStats {
    sequences: f64,
    candidates: f64,
    candidate_share: f64,
    sampled: f64,
    sampled_share: f64,
    supervised: f64,
    supervised_share: f64,
}

/// Positions that may be anchors: supervised themselves and followed by a supervised token.
pub fn anchor_candidates(loss_mask: &[u8]) -> Vec<usize> {
    (0..loss_mask.len().saturating_sub(1)).filter(|&p| loss_mask[p] == 1 && loss_mask[p + 1] == 1).collect()
}

impl Supervision {
    /// Finds the supervised slots of a micro-batch whose blocks propose `slots` tokens each; `loss_masks` has one mask per
    /// sequence, as long as its tokens. Without a `vocabulary` the drafter has every token.
    ///
    /// # Errors
    /// [`Error::Batch`] when masks and sequences do not fit or an anchor lies outside its sequence.
    pub fn new(
        sequences: &[TrainSequence<'_>],
        loss_masks: &[&[u8]],
        slots: usize,
        mask_token_id: u32,
        decay_gamma: Option<f64>,
        vocabulary: Option<&DraftVocabulary>,
    ) -> Result<Self> {
        if sequences.len() != loss_masks.len() {
            return Err(Error::Batch(format!("{} sequences with {} loss masks", sequences.len(), loss_masks.len())));
        }
        let longest = sequences.iter().map(|s| s.tokens.len()).max().unwrap_or(0);
        let mut found = Self::default();
        let (mut first_context, mut first_row, mut first_block) = (0, 0, 0);
        for (sequence, mask) in sequences.iter().zip(loss_masks) {
            let tokens = sequence.tokens;
            if mask.len() != tokens.len() {
                return Err(Error::Batch(format!("a loss mask of {} for {} tokens", mask.len(), tokens.len())));
            }
            let before = found.slots.len();
            for (index, anchor) in sequence.anchors.iter().enumerate() {
                let rows = first_row + index * slots;
                let Some(anchor) = *anchor else {
                    found.previous_of_row.extend(std::iter::repeat_n(mask_token_id, slots));
                    continue;
                };
                if anchor >= tokens.len() {
                    return Err(Error::Batch(format!("anchor {anchor} in a sequence of {} tokens", tokens.len())));
                }
                let previous = |k: usize| tokens.get(anchor + k).copied().unwrap_or(mask_token_id);
                found.previous_of_row.extend((0..slots).map(previous));
                for k in 0..slots {
                    let label = anchor + 1 + k;
                    if label >= tokens.len() || mask[label] != 1 {
                        break;
                    }
                    let weight = decay_gamma.map_or(1.0, |gamma| (-(k as f64) / gamma).exp());
                    let label = vocabulary.map_or(Some(tokens[label]), |map| map.draft_token(tokens[label]));
                    found.weights.all += weight;
                    found.weights.labelled += if label.is_some() { weight } else { 0.0 };
                    found.slots.push(Slot {
                        row: rows + k,
                        target: first_context + anchor + k,
                        label,
                        previous: tokens[anchor + k],
                        k,
                        block: first_block + index,
                        weight,
                    });
                }
                found.blocks += 1;
            }
            let kept = sequence.anchors.iter().flatten().count() as f64;
            let supervised = (found.slots.len() - before) as f64 / kept.max(1.0);
            let candidates = anchor_candidates(mask).len() as f64;
            let stats = &mut found.anchor_stats;
            stats.sequences += 1.0;
            stats.candidates += candidates;
            stats.candidate_share += candidates / longest.max(1) as f64;
            stats.sampled += kept;
            stats.sampled_share += kept / sequence.anchors.len().max(1) as f64;
            stats.supervised += supervised;
            stats.supervised_share += supervised / slots as f64;
            first_context += tokens.len();
            first_row += sequence.anchors.len() * slots;
            first_block += sequence.anchors.len();
        }
        Ok(found)
    }
}

/// What the loss needs besides the drafter: the target's output head and the drafter's rows of it, packed for the forward
/// pass, the latter also plain for the gradient.
#[derive(Debug, Clone)]
pub struct LossHead {
    pub(super) target: Arc<Packed>,
    pub(super) draft: Arc<Packed>,
    pub(super) weight: Tensor,
    pub(super) vocabulary: Option<DraftVocabulary>,
}

impl LossHead {
    /// From the target's `lm_head` `[vocab, hidden]`, plain and packed in f32 without a bias; the drafter has the tokens of
    /// `vocabulary`, or all.
    ///
    /// # Errors
    /// When the two forms or the vocabulary do not fit each other.
    pub fn new(lm_head: &Tensor, packed: Arc<Packed>, vocabulary: Option<DraftVocabulary>) -> Result<Self> {
        let (vocab, width) = lm_head.dims2()?;
        let expected = vocabulary.as_ref().map_or(vocab, DraftVocabulary::target_vocab);
        if (packed.outputs(), packed.inputs()) != (expected, width) || vocab != expected {
            let found = format!("[{vocab}, {width}], packed [{}, {}]", packed.outputs(), packed.inputs());
            return Err(Error::Batch(format!("an lm_head of {found} for a vocabulary of {expected}")));
        }
        let (weight, draft) = match &vocabulary {
            None => (lm_head.contiguous()?, packed.clone()),
            Some(vocabulary) => {
                let rows = vocabulary.rows_of(lm_head)?;
                let data: Vec<f32> = rows.flatten_all()?.to_vec1()?;
                (rows, Arc::new(Packed::new(&[&data], width, None, Precision::F32)?))
            }
        };
        Ok(Self { target: packed, draft, weight, vocabulary })
    }

    /// The drafter's rows of the target's `lm_head`, `[draft vocab, hidden]`.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// The tokens that the drafter has, where they are not all.
    pub fn vocabulary(&self) -> Option<&DraftVocabulary> {
        self.vocabulary.as_ref()
    }
}

/// Loss of a micro-batch.
pub struct DSparkLoss {
    /// This micro-batch's share of the global loss, a scalar with gradients.
    pub loss: Tensor,
    /// Sums from which the metrics of the global batch are made.
    pub sums: MetricSums,
}

/// Computes the loss of one micro-batch; `denominators` are the Σ w over the whole global batch. The target's distributions are
/// computed where a term needs them, or for the metrics when `with_acceptance`; without them the sums hold no acceptance.
///
/// # Shapes
/// hidden `[block rows, hidden]` (of [`DSpark::train_hidden`]), target_hidden `[context rows, hidden]`
///
/// # Errors
/// When shapes do not fit.
pub fn dspark_loss(
    drafter: &DSpark,
    head: &LossHead,
    weights: &LossWeights,
    supervision: &Supervision,
    hidden: &Tensor,
    target_hidden: &Tensor,
    denominators: WeightSums,
    with_acceptance: bool,
) -> Result<DSparkLoss> {
    let with_target = with_acceptance || weights.tv != 0.0 || weights.kl != 0.0 || weights.confidence != 0.0;
    let denominator = denominators.all + DENOMINATOR_EPS;
    let ce_denominator = denominators.labelled + DENOMINATOR_EPS;
    let hidden = &drafter.predicting_rows(hidden)?;
    let rows = hidden.dims()[0];
    let previous = &supervision.previous_of_row;
    if previous.len() != rows {
        return Err(Error::Batch(format!("{rows} predicting rows, supervision of {}", previous.len())));
    }
    let device = hidden.device();
    let embedding = drafter.markov_head().map(|markov| markov.embedding(previous)).transpose()?;
    let (m, w2) = if let (Some(markov), Some(embedding)) = (drafter.markov_head(), &embedding) {
        let w2 = markov.w2().ok_or_else(|| Error::Batch("the loss needs a trainable Markov head".into()))?;
        (markov.block_latents(embedding, hidden, drafter.config().proposals())?, w2.clone())
    } else {
        let vocab = head.draft.outputs();
        (Tensor::zeros((rows, 0), hidden.dtype(), device)?, Tensor::zeros((vocab, 0), hidden.dtype(), device)?)
    };
    let op = VocabLoss {
        target_head: head.target.clone(),
        draft_head: head.draft.clone(),
        draft_head_weight: head.weight.clone(),
        draft_tokens: head.vocabulary.as_ref().map(|vocabulary| vocabulary.tokens().clone()),
        rows: supervision
            .slots
            .iter()
            .map(|slot| {
                let share = |alpha: f64, denominator: f64| (alpha * slot.weight / denominator) as f32;
                LossRow {
                    row: slot.row,
                    target: slot.target,
                    label: slot.label,
                    ce: share(weights.ce, ce_denominator),
                    tv: share(weights.tv, denominator),
                    kl: share(weights.kl, denominator),
                }
            })
            .collect(),
        kl_temperature: weights.kl_temperature as f32,
        with_target,
        soft_targets: false,
    };
    let vocabulary = op.forward(hidden, &m, &w2, target_hidden)?;
    let mut loss = vocabulary.loss.squeeze(0)?;
    let acceptance: Vec<f32> = vocabulary.terms.iter().map(RowTerms::acceptance).collect();
    let mut confidence_logits = Vec::new();
    let mut confidence_terms = Vec::new();
    if let Some(confidence_head) = drafter.confidence_head()
        && !supervision.slots.is_empty()
    {
        let ids: Vec<u32> = supervision.slots.iter().map(|slot| slot.row as u32).collect();
        let ids = Tensor::from_vec(ids, supervision.slots.len(), device)?;
        let embedding = embedding.as_ref().map(|rows| rows.index_select(&ids, 0)).transpose()?;
        let logits = confidence_head.logits(&hidden.index_select(&ids, 0)?, embedding.as_ref())?;
        let labels = Tensor::from_slice(&acceptance, acceptance.len(), device)?;
        let terms = binary_cross_entropy(&logits, &labels)?;
        // Part of the graph at weight 0 too, so that the head always has a gradient.
        let shares: Vec<f32> =
            supervision.slots.iter().map(|s| (weights.confidence * s.weight / denominator) as f32).collect();
        let shares = Tensor::from_vec(shares, terms.elem_count(), device)?;
        loss = (loss + (&terms * shares)?.sum_all()?)?;
        confidence_logits = logits.detach().to_vec1::<f32>()?;
        confidence_terms = terms.detach().to_vec1::<f32>()?;
    }
    let mut sums = MetricSums::new(drafter.config().proposals(), supervision);
    if !with_target {
        confidence_logits.clear();
        confidence_terms.clear();
    }
    sums.loss = f64::from(loss.detach().to_scalar::<f32>()?);
    for (i, slot) in supervision.slots.iter().enumerate() {
        let terms = vocabulary.terms[i];
        sums.ce += slot.weight * f64::from(terms.ce);
        sums.tv += slot.weight * f64::from(terms.tv);
        sums.kl += slot.weight * f64::from(terms.kl);
        if with_target {
            sums.accepted[slot.k] += f64::from(acceptance[i]);
            sums.slots[slot.k] += 1.0;
        }
    }
    if with_target {
        sums.add_block_products(supervision, &acceptance, &confidence_logits);
    }
    for (i, (slot, term)) in supervision.slots.iter().zip(&confidence_terms).enumerate() {
        let error = sigmoid(confidence_logits[i]) - f64::from(acceptance[i]);
        sums.confidence += slot.weight * f64::from(*term);
        sums.confidence_abs_error += slot.weight * error.abs();
        sums.confidence_bias += slot.weight * error;
    }
    Ok(DSparkLoss { loss, sums })
}

/// −a log σ(x) − (1−a) log(1−σ(x)) = max(x, 0) − a·x + log(1 + e^−|x|).
fn binary_cross_entropy(logits: &Tensor, labels: &Tensor) -> Result<Tensor> {
    let soft = (logits.abs()?.neg()?.exp()? + 1.0)?.log()?;
    Ok(((logits.relu()? - (logits * labels)?)? + soft)?)
}

fn sigmoid(x: f32) -> f64 {
    1.0 / (1.0 + (-f64::from(x)).exp())
}

/// Sums over slots and blocks; those of the micro-batches of a global batch add up.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct MetricSums {
    /// The loss.
    pub loss: f64,
    /// Supervised slots.
    pub rows: f64,
    /// Σ w over slots.
    pub weight: f64,
    /// Σ w over the slots whose label the drafter has.
    pub labelled_weight: f64,
    /// Σ w over the slots whose acceptance was measured.
    pub measured_weight: f64,
    /// Σ w·CE.
    pub ce: f64,
    /// Σ w·TV.
    pub tv: f64,
    /// Σ w·KL.
    pub kl: f64,
    /// Σ w·BCE of the confidence.
    pub confidence: f64,
    /// Σ w·|c − a|.
    pub confidence_abs_error: f64,
    /// Σ w·(c − a).
    pub confidence_bias: f64,
    /// Σ w·(Π c − Π a).
    pub confidence_cumprod_bias: f64,
    /// Σ acceptance per slot index.
    pub accepted: Vec<f64>,
    /// Slots per slot index whose acceptance was measured.
    pub slots: Vec<f64>,
    /// Σ over blocks of 1 + Σ_k Π_{i≤k} a_i.
    pub tau: f64,
    /// Blocks whose acceptance was measured.
    pub blocks: f64,
    /// Of the routers, where there are experts.
    #[serde(default)]
    pub router: RouterSums,
    anchors: [f64; 7],
}

impl MetricSums {
    fn new(slots: usize, supervision: &Supervision) -> Self {
        let a = supervision.anchor_stats;
        Self {
            weight: supervision.weights.all,
            labelled_weight: supervision.weights.labelled,
            rows: supervision.slots.len() as f64,
            accepted: vec![0.0; slots],
            slots: vec![0.0; slots],
            anchors: [
                a.sequences,
                a.candidates,
                a.candidate_share,
                a.sampled,
                a.sampled_share,
                a.supervised,
                a.supervised_share,
            ],
            ..Self::default()
        }
    }

    fn add_block_products(&mut self, supervision: &Supervision, acceptance: &[f32], confidence_logits: &[f32]) {
        self.blocks = supervision.blocks as f64;
        self.measured_weight = supervision.weights.all;
        self.tau += self.blocks;
        let (mut survival, mut predicted) = (1.0, 1.0);
        for (i, slot) in supervision.slots.iter().enumerate() {
            if slot.k == 0 {
                (survival, predicted) = (1.0, 1.0);
            }
            survival *= f64::from(acceptance[i]);
            self.tau += survival;
            if let Some(&logit) = confidence_logits.get(i) {
                predicted *= sigmoid(logit);
                self.confidence_cumprod_bias += slot.weight * (predicted - survival);
            }
        }
    }

    /// Adds the sums of another micro-batch.
    pub fn add(&mut self, other: &Self) {
        self.loss += other.loss;
        self.rows += other.rows;
        self.weight += other.weight;
        self.labelled_weight += other.labelled_weight;
        self.measured_weight += other.measured_weight;
        self.ce += other.ce;
        self.tv += other.tv;
        self.kl += other.kl;
        self.confidence += other.confidence;
        self.confidence_abs_error += other.confidence_abs_error;
        self.confidence_bias += other.confidence_bias;
        self.confidence_cumprod_bias += other.confidence_cumprod_bias;
        self.tau += other.tau;
        self.blocks += other.blocks;
        self.router.add(&other.router);
        let longest = self.accepted.len().max(other.accepted.len());
        self.accepted.resize(longest, 0.0);
        self.slots.resize(longest, 0.0);
        for (k, (accepted, slots)) in other.accepted.iter().zip(&other.slots).enumerate() {
            self.accepted[k] += accepted;
            self.slots[k] += slots;
        }
        for (mine, other) in self.anchors.iter_mut().zip(other.anchors) {
            *mine += other;
        }
    }

    /// τ_probabilistic = 1 + Σ_k Π_{i≤k} a_i, the mean over blocks: tokens a round would commit on training data.
    pub fn tau(&self) -> f64 {
        self.tau / self.blocks.max(1.0)
    }

    /// Named metrics for logs; `with_confidence` adds those of the confidence head.
    pub fn metrics(&self, weights: &LossWeights, with_confidence: bool) -> Vec<(String, f64)> {
        let labelled = self.labelled_weight + DENOMINATOR_EPS;
        let measured = self.measured_weight + DENOMINATOR_EPS;
        let [sequences, candidates, candidate_share, sampled, sampled_share, supervised, supervised_share] =
            self.anchors;
        let per_sequence = |sum: f64| sum / sequences.max(1.0);
        let mut out = vec![("loss".into(), self.loss), ("ce_loss".into(), self.ce / labelled)];
        if weights.tv != 0.0 {
            out.push(("l1_loss".into(), self.tv / measured));
        }
        if weights.kl != 0.0 {
            out.push(("kl_loss".into(), self.kl / measured));
        }
        if with_confidence {
            out.push(("confidence_loss".into(), self.confidence / measured));
            out.push(("confidence_abs_error".into(), self.confidence_abs_error / measured));
            out.push(("confidence_bias".into(), self.confidence_bias / measured));
            out.push(("confidence_cumprod_bias".into(), self.confidence_cumprod_bias / measured));
        }
        out.extend(self.router.metrics());
        for (k, (accepted, slots)) in self.accepted.iter().zip(&self.slots).enumerate() {
            out.push((format!("accept_rate@{k}"), accepted / slots.max(1.0)));
        }
        out.push(("tau_probabilistic".into(), self.tau()));
        out.push(("valid_anchors_abs".into(), per_sequence(candidates)));
        out.push(("valid_anchors_ratio".into(), per_sequence(candidate_share)));
        out.push(("sampled_anchors_abs".into(), per_sequence(sampled)));
        out.push(("sampled_anchors_ratio".into(), per_sequence(sampled_share)));
        out.push(("block_supervised_tokens_abs".into(), per_sequence(supervised)));
        out.push(("block_supervised_tokens_ratio".into(), per_sequence(supervised_share)));
        out
    }
}
