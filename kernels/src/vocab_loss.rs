//! The vocabulary side of a block drafter's loss, fused: hidden rows in, loss and gradients out.
//!
//! Per row, with draft logits u = E_d·h + W2·m (E_d the drafter's frozen lm_head, m the Markov head's latent row) and the
//! target's logits t = E·h_target:
//!
//! * CE = −log p_d(label), TV = Σ|p_d − p_t|, KL = Σ p_t (log p_t − log p_d) at a temperature,
//!   acceptance a = 1 − ½ TV (DSpark paper, Eq. 8–11).
//!
//! The drafter may know only some of the target's tokens. p_t is still the softmax over all of them; p_d is 0 for the
//! tokens that the drafter lacks. So TV is the sum over the draft tokens plus the mass m that p_t has elsewhere, the exact
//! distance over the whole vocabulary; KL sums over the draft tokens (elsewhere it would be infinite); a row whose label the
//! drafter lacks has no CE.
//!
//! With soft targets, as EAGLE-3 trains, the KL term becomes the cross-entropy −Σ p_t log p_d, with p_t renormalised over the
//! draft tokens; a row whose most likely target token the drafter lacks then has no such term.
//!
//! The caller gives each row its coefficient per term (weight / denominator), so the gradient of the whole sum is known
//! in the forward pass: rows are worked through in chunks, and nothing of size [rows, vocabulary] outlives its chunk.
//! Target distributions are computed once per distinct position of a chunk, however many blocks overlap there.

#[cfg(feature = "cuda")]
mod cuda;
mod elementwise;
mod targets;

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use candle_core::{CpuStorage, CustomOp3, Layout, Result, Shape, Storage, Tensor, bail};

use crate::linear::{Aligned, Packed};
use crate::logit_row::argmax;
use crate::matmul::{Matrix, matmul, matmul_panels};
use crate::rows::Rows;
use crate::simd::dot;
use crate::threads;
use elementwise::{distance, gradient, kl_divergence, scale, softmax};
use targets::{TargetDistributions, TargetRow};

/// Most rows whose logits are held at a time, and the most bytes that those may take.
const CHUNK_ROWS: usize = 256;
const CHUNK_BYTES: usize = 48 << 20;
/// Fewest rows of a chunk, so that a matrix product stays one.
const MIN_CHUNK_ROWS: usize = 16;

/// One draft row.
#[derive(Debug, Clone, Copy)]
pub struct LossRow {
    /// Row in the hidden tensor.
    pub row: usize,
    /// Row in the target's hidden tensor whose distribution this row should match.
    pub target: usize,
    /// Draft token that follows; `None` when the drafter lacks it: the row then has no CE.
    pub label: Option<u32>,
    /// Coefficient of CE.
    pub ce: f32,
    /// Coefficient of TV.
    pub tv: f32,
    /// Coefficient of KL.
    pub kl: f32,
}

/// Terms of one row, in the order of the rows given.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct RowTerms {
    /// −log p_d(label); 0 without a label.
    pub ce: f32,
    /// Σ|p_d − p_t| over the target's vocabulary; 0 when target distributions were not asked for.
    pub tv: f32,
    /// KL(p_t ‖ p_d) over the draft tokens at the loss's temperature; 0 likewise. With soft targets, the cross-entropy.
    pub kl: f32,
    /// With soft targets, whether the most likely tokens of both sides are the same; `None` where the drafter lacks the target's.
    pub agrees: Option<bool>,
}

impl RowTerms {
    /// Probability that the row's draft is accepted, 1 − ½ TV.
    pub fn acceptance(&self) -> f32 {
        1.0 - 0.5 * self.tv
    }
}

/// Settings of one call.
#[derive(Debug, Clone)]
pub struct VocabLoss {
    /// The target's lm_head `[vocab, hidden]`, in f32.
    pub target_head: Arc<Packed>,
    /// The drafter's lm_head `[draft vocab, hidden]`, in f32.
    pub draft_head: Arc<Packed>,
    /// The drafter's lm_head as a plain tensor, for the gradient.
    pub draft_head_weight: Tensor,
    /// The target's token for each draft token, ascending; `None` where the drafter knows the target's whole vocabulary.
    pub draft_tokens: Option<Arc<[u32]>>,
    /// Rows that count.
    pub rows: Vec<LossRow>,
    /// Temperature of the KL term, on both sides.
    pub kl_temperature: f32,
    /// Whether to compute target distributions (needed for TV, KL and acceptance).
    pub with_target: bool,
    /// Whether the KL term is the soft cross-entropy of EAGLE-3. It wants target distributions, temperature 1 and no CE.
    pub soft_targets: bool,
}

/// Result of [`VocabLoss::forward`].
pub struct VocabLossOutput {
    /// Σ over rows of coefficient · term, with gradients to the hidden rows, the latent rows and W2.
    pub loss: Tensor,
    /// Terms per row.
    pub terms: Vec<RowTerms>,
}

impl VocabLoss {
    /// Computes the loss.
    ///
    /// # Shapes
    /// hidden `[R, d]`, latent `[R, r]` and w2 `[draft vocab, r]` (r may be 0), target_hidden `[P, d]`
    ///
    /// # Errors
    /// When shapes do not fit, a head is not packed in f32 or has a bias, a row points outside its tensor or the vocabulary,
    /// or draft tokens do not ascend.
    pub fn forward(
        self,
        hidden: &Tensor,
        latent: &Tensor,
        w2: &Tensor,
        target_hidden: &Tensor,
    ) -> Result<VocabLossOutput> {
        let state = Arc::new(Mutex::new(State::default()));
        let op = Op { settings: Arc::new(self), target_hidden: target_hidden.contiguous()?, state: state.clone() };
        let loss = hidden.apply_op3(latent, w2, op)?;
        let terms = std::mem::take(&mut state.lock().unwrap_or_else(PoisonError::into_inner).terms);
        Ok(VocabLossOutput { loss, terms })
    }
}

#[derive(Default)]
struct State {
    terms: Vec<RowTerms>,
    hidden: Vec<f32>,
    latent: Vec<f32>,
    w2: Vec<f32>,
    /// The gradients where they were computed on a device.
    #[cfg(feature = "cuda")]
    on_device: Option<cuda::Gradients>,
}

struct Op {
    settings: Arc<VocabLoss>,
    target_hidden: Tensor,
    state: Arc<Mutex<State>>,
}

/// Buffers of one chunk of rows, reused from chunk to chunk.
struct Buffers {
    hidden: Vec<f32>,
    latent: Vec<f32>,
    logits: Aligned<f32>,
    dhidden: Vec<f32>,
    dlatent: Vec<f32>,
    targets: TargetDistributions,
}

impl Op {
    fn check(&self, hidden: &Rows<'_>, latent: &Rows<'_>, w2: &Rows<'_>) -> Result<()> {
        let settings = &self.settings;
        let (targets, width) = self.target_hidden.dims2()?;
        let (inputs, vocab) = (settings.draft_head.inputs(), settings.draft_head.outputs());
        let target_vocab = settings.target_head.outputs();
        if settings.target_head.inputs() != inputs
            || hidden.cols != inputs
            || width != inputs
            || latent.count != hidden.count
            || latent.cols != w2.cols
            || w2.count != vocab
        {
            bail!(
                "vocab-loss with a draft head of [{vocab}, {inputs}]: hidden [{}, {}], latent [{}, {}], w2 [{}, {}], target rows of {width}",
                hidden.count,
                hidden.cols,
                latent.count,
                latent.cols,
                w2.count,
                w2.cols
            );
        }
        let weight = &settings.draft_head_weight;
        if weight.dims() != [vocab, inputs] || !weight.is_contiguous() {
            bail!("vocab-loss: draft head weight {:?} for a head of [{vocab}, {inputs}]", weight.dims());
        }
        let maps = vocab > 0
            && match &settings.draft_tokens {
                None => vocab == target_vocab,
                Some(tokens) => {
                    tokens.len() == vocab
                        && tokens.is_sorted_by(|a, b| a < b)
                        && tokens.last().is_none_or(|&last| (last as usize) < target_vocab)
                }
            };
        if !maps {
            bail!("vocab-loss: {vocab} draft tokens do not map to ascending ones of the target's {target_vocab}");
        }
        let is_soft =
            settings.with_target && settings.kl_temperature == 1.0 && settings.rows.iter().all(|r| r.ce == 0.0);
        if settings.soft_targets && !is_soft {
            bail!("vocab-loss: soft targets want target distributions at temperature 1, and rows without CE");
        }
        for row in &settings.rows {
            if row.row >= hidden.count || row.target >= targets || row.label.is_some_and(|l| l as usize >= vocab) {
                bail!("vocab-loss: {row:?} outside {} rows, {targets} targets, {vocab} tokens", hidden.count);
            }
        }
        Ok(())
    }

    /// As [`Op::row`], with soft targets.
    fn soft_row(row: &LossRow, logits: &mut [f32], target: TargetRow<'_>) -> RowTerms {
        let TargetRow { probabilities: q, missing, .. } = target;
        let kept = 1.0 - missing;
        let best = argmax(logits).map(|(best, _)| best as u32);
        let product = dot(q, logits);
        let log_sum = softmax(logits);
        let (tv, signed) = distance(logits, q);
        let (term, coefficient) =
            if target.top.is_some() { (log_sum - product / kept, row.kl / kept) } else { (0.0, 0.0) };
        gradient(logits, q, 0.0, row.tv, coefficient, signed, kept);
        RowTerms { ce: 0.0, tv: tv + missing, kl: term, agrees: target.top.map(|top| best == Some(top)) }
    }

    /// Turns the logits of one row into the gradient with respect to them. `target` is there when distributions are wanted.
    fn row(&self, row: &LossRow, logits: &mut [f32], target: Option<TargetRow<'_>>) -> RowTerms {
        let label = row.label.map(|label| label as usize);
        let label_logit = label.map(|label| logits[label]);
        let ce = if label.is_some() { row.ce } else { 0.0 };
        let temperature = self.settings.kl_temperature;
        let mut terms = RowTerms::default();
        let log_sum;
        if let Some(target) = target {
            let mut tempered = Vec::new(); // kl · (Σ p_t · p_d − p_t) / T when T is not 1
            let mut kl = 0.0; // coefficient of the part of the gradient that shares p_d with the other terms
            if row.kl != 0.0 && temperature != 1.0 {
                let (q, kept) = (target.tempered, 1.0 - target.tempered_missing);
                let scaled: Vec<f32> = logits.iter().map(|logit| logit / temperature).collect();
                tempered.clone_from(&scaled);
                let log_sum = softmax(&mut tempered);
                terms.kl = kl_divergence(q, &scaled, log_sum);
                tempered.iter_mut().zip(q).for_each(|(p, q)| *p = row.kl * (kept * *p - q) / temperature);
            }
            let q = target.probabilities;
            let before = if row.kl != 0.0 && temperature == 1.0 { logits.to_vec() } else { Vec::new() };
            log_sum = softmax(logits);
            let (tv, signed) = distance(logits, q);
            terms.tv = tv + target.missing;
            if !before.is_empty() {
                terms.kl = kl_divergence(q, &before, log_sum);
                kl = row.kl;
            }
            gradient(logits, q, ce, row.tv, kl, signed, 1.0 - target.missing);
            logits.iter_mut().zip(&tempered).for_each(|(g, t)| *g += t);
        } else {
            log_sum = softmax(logits);
            scale(logits, ce);
        }
        if let (Some(label), Some(logit)) = (label, label_logit) {
            terms.ce = log_sum - logit;
            logits[label] -= ce;
        }
        terms
    }
}

fn plain_panels(head: &Packed) -> Result<&[f32]> {
    match head.plain_panels() {
        Some(panels) => Ok(panels),
        None => bail!("vocab-loss: expected heads in f32 without a bias"),
    }
}

/// Rows of a chunk whose logits over a vocabulary are held at a time.
fn chunk_rows(vocab: usize) -> usize {
    (CHUNK_BYTES / (vocab * size_of::<f32>())).clamp(MIN_CHUNK_ROWS, CHUNK_ROWS)
}

impl CustomOp3 for Op {
    fn name(&self) -> &'static str {
        "vocab-loss"
    }

    fn cpu_fwd(
        &self,
        h: &CpuStorage,
        hl: &Layout,
        m: &CpuStorage,
        ml: &Layout,
        w: &CpuStorage,
        wl: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let settings = &self.settings;
        let hidden = Rows::new(self.name(), h, hl)?;
        let latent = Rows::new(self.name(), m, ml)?;
        let w2 = Rows::new(self.name(), w, wl)?;
        self.check(&hidden, &latent, &w2)?;
        if !wl.is_contiguous() {
            bail!("vocab-loss: w2 must be contiguous");
        }
        let (head_storage, head_layout) = settings.draft_head_weight.storage_and_layout();
        let (target_storage, target_layout) = self.target_hidden.storage_and_layout();
        let (Storage::Cpu(head_storage), Storage::Cpu(target_storage)) = (&*head_storage, &*target_storage) else {
            bail!("vocab-loss: expected tensors in host memory");
        };
        let head_weight = &head_storage.as_slice::<f32>()?[head_layout.start_offset()..];
        let target_hidden = Rows::new(self.name(), target_storage, target_layout)?;
        let w2_data = &w.as_slice::<f32>()?[wl.start_offset()..];

        let panels = plain_panels(&settings.draft_head)?;
        let (vocab, width, rank) = (settings.draft_head.outputs(), hidden.cols, latent.cols);
        let mut order: Vec<usize> = (0..settings.rows.len()).collect();
        order.sort_by_key(|&i| settings.rows[i].target);
        let mut state = State {
            terms: vec![RowTerms::default(); order.len()],
            hidden: vec![0.0; hidden.count * width],
            latent: vec![0.0; hidden.count * rank],
            w2: vec![0.0; vocab * rank],
            #[cfg(feature = "cuda")]
            on_device: None,
        };
        // Chunks of even size.
        let chunk_rows = order.len().div_ceil(order.len().div_ceil(chunk_rows(vocab)).max(1)).max(1);
        let most = chunk_rows.min(order.len());
        let mut buffers = Buffers {
            hidden: Vec::with_capacity(most * width),
            latent: Vec::with_capacity(most * rank),
            logits: Aligned::zeros(most * vocab),
            dhidden: vec![0.0; most * width],
            dlatent: vec![0.0; most * rank],
            targets: TargetDistributions::default(),
        };
        let mut loss = 0f64;
        for chunk in order.chunks(chunk_rows) {
            let rows: Vec<LossRow> = chunk.iter().map(|&i| settings.rows[i]).collect();
            let count = rows.len();
            let Buffers { hidden: h, latent: m, logits, dhidden, dlatent, targets } = &mut buffers;
            h.clear();
            m.clear();
            for row in &rows {
                h.extend_from_slice(hidden.row(row.row));
                m.extend_from_slice(latent.row(row.row));
            }
            if settings.with_target {
                targets.compute(settings, &rows, target_hidden)?;
            }
            let logits = &mut logits[..count * vocab];
            let (latent_rows, w2_columns) = (Matrix::new(m, count, rank), Matrix::new(w2_data, vocab, rank).t());
            matmul_panels(Matrix::new(h, count, width), panels, latent_rows, w2_columns, logits);
            let targets = &*targets;
            let terms: Vec<OnceLock<RowTerms>> = vec![OnceLock::new(); count];
            threads::for_each_chunk(logits, vocab, true, |i, logits| {
                terms[i].get_or_init(|| match targets.row(i) {
                    Some(target) if settings.soft_targets => Self::soft_row(&rows[i], logits, target),
                    target => self.row(&rows[i], logits, target),
                });
            });
            let gradient = Matrix::new(logits, count, vocab);
            matmul(gradient, Matrix::new(head_weight, vocab, width), dhidden, false);
            if rank > 0 {
                matmul(gradient, Matrix::new(w2_data, vocab, rank), dlatent, false);
                matmul(gradient.t(), Matrix::new(m, count, rank), &mut state.w2, true);
            }
            for (i, (row, &index)) in rows.iter().zip(chunk).enumerate() {
                let t = *terms[i].get().expect("every row was worked through");
                loss += f64::from(row.ce) * f64::from(t.ce)
                    + f64::from(row.tv) * f64::from(t.tv)
                    + f64::from(row.kl) * f64::from(t.kl);
                state.terms[index] = t;
                add(&mut state.hidden[row.row * width..(row.row + 1) * width], &dhidden[i * width..(i + 1) * width]);
                add(&mut state.latent[row.row * rank..(row.row + 1) * rank], &dlatent[i * rank..(i + 1) * rank]);
            }
        }
        *self.state.lock().unwrap_or_else(PoisonError::into_inner) = state;
        Ok((CpuStorage::F32(vec![loss as f32]), Shape::from(1)))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        h: &candle_core::CudaStorage,
        hl: &Layout,
        m: &candle_core::CudaStorage,
        ml: &Layout,
        w: &candle_core::CudaStorage,
        wl: &Layout,
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        self.on_device([h, m, w], [hl, ml, wl])
    }

    fn bwd(
        &self,
        h: &Tensor,
        m: &Tensor,
        w: &Tensor,
        _res: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        #[cfg(feature = "cuda")]
        if h.device().is_cuda() {
            return self.device_gradients([h, m, w], grad).map(Into::into);
        }
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let factor = grad.squeeze(0)?.to_scalar::<f32>()?;
        let give = |data: &mut Vec<f32>, like: &Tensor| -> Result<Option<Tensor>> {
            let data = std::mem::take(data);
            if data.len() != like.elem_count() {
                bail!("vocab-loss: the backward pass ran twice");
            }
            if data.is_empty() {
                return Ok(None);
            }
            let data = Tensor::from_vec(data, like.shape(), like.device())?;
            if factor == 1.0 { Ok(Some(data)) } else { data.affine(f64::from(factor), 0.0).map(Some) }
        };
        let State { hidden, latent, w2, .. } = &mut *state;
        Ok((give(hidden, h)?, give(latent, m)?, give(w2, w)?))
    }
}

fn add(to: &mut [f32], from: &[f32]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to += from;
    }
}
