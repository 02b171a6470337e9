//! The vocabulary side of a block drafter's loss, fused: hidden rows in, loss and gradients out.
//!
//! Per row, with draft logits u = E·h + W2·m (E the frozen lm_head, m the Markov head's latent row) and the target's
//! logits t = E·h_target:
//!
//! * CE = −log p_d(label), TV = Σ|p_d − p_t|, KL = Σ p_t (log p_t − log p_d) at a temperature,
//!   acceptance a = 1 − ½ TV (SPEC §5; DSpark Eq. 8–11).
//!
//! The caller gives each row its coefficient per term (weight / denominator), so the gradient of the whole sum is known
//! in the forward pass: rows are worked through in chunks, and nothing of size [rows, vocabulary] outlives its chunk.
//! Target distributions are computed once per distinct position, however many blocks overlap there.

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{CpuStorage, CustomOp3, Layout, Result, Shape, Storage, Tensor, bail};
use rayon::prelude::*;

use crate::linear::Packed;
use crate::matmul::{Matrix, matmul};
use crate::multiversion;
use crate::rows::Rows;
use crate::simd::{exp_shifted, max};

/// Rows whose logits are held at a time.
const CHUNK_ROWS: usize = 256;

/// One draft row.
#[derive(Debug, Clone, Copy)]
pub struct LossRow {
    /// Row in the hidden tensor.
    pub row: usize,
    /// Row in the target's hidden tensor whose distribution this row should match.
    pub target: usize,
    /// Token that follows.
    pub label: u32,
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
    /// −log p_d(label)
    pub ce: f32,
    /// Σ|p_d − p_t|; 0 when target distributions were not asked for.
    pub tv: f32,
    /// KL(p_t ‖ p_d) at the loss's temperature; 0 likewise.
    pub kl: f32,
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
    /// The target's lm_head.
    pub lm_head: Arc<Packed>,
    /// The same weights as a plain tensor `[vocab, hidden]`, for the gradient.
    pub lm_head_weight: Tensor,
    /// Rows that count.
    pub rows: Vec<LossRow>,
    /// Temperature of the KL term, on both sides.
    pub kl_temperature: f32,
    /// Whether to compute target distributions (needed for TV, KL and acceptance).
    pub with_target: bool,
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
    /// hidden `[R, d]`, latent `[R, r]` and w2 `[vocab, r]` (r may be 0), target_hidden `[P, d]`
    ///
    /// # Errors
    /// When shapes do not fit or a row points outside its tensor or the vocabulary.
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
}

struct Op {
    settings: Arc<VocabLoss>,
    target_hidden: Tensor,
    state: Arc<Mutex<State>>,
}

multiversion! {
    /// Logits → probabilities in place; returns log Σ e^u.
    fn softmax(row: &mut [f32]) -> f32 {
        let largest = max(row);
        let total = exp_shifted(row, largest);
        let inverse = 1.0 / total;
        for value in row.iter_mut() {
            *value *= inverse;
        }
        largest + total.ln()
    }
}

multiversion! {
    /// Σ|p − q| and Σ p·sign(p − q), in sixteen partial sums.
    fn distance(p: &[f32], q: &[f32]) -> (f32, f32) {
        let (mut total, mut signed) = ([0f32; 16], [0f32; 16]);
        let (mut tail_total, mut tail_signed) = (0f32, 0f32);
        let split = p.len() / 16 * 16;
        for (p, q) in p[..split].chunks_exact(16).zip(q[..split].chunks_exact(16)) {
            for lane in 0..16 {
                let difference = p[lane] - q[lane];
                let side = if difference > 0.0 { 1.0 } else if difference < 0.0 { -1.0 } else { 0.0 };
                total[lane] += difference.abs();
                signed[lane] += p[lane] * side;
            }
        }
        for (p, q) in p[split..].iter().zip(&q[split..]) {
            let difference = p - q;
            let side = if difference > 0.0 { 1.0 } else if difference < 0.0 { -1.0 } else { 0.0 };
            tail_total += difference.abs();
            tail_signed += p * side;
        }
        (total.iter().sum::<f32>() + tail_total, signed.iter().sum::<f32>() + tail_signed)
    }
}

multiversion! {
    /// p ← ce·p + tv·p·(sign(p − q) − signed) + kl·(p − q): the gradient with respect to the logits, less the label's part.
    fn gradient(p: &mut [f32], q: &[f32], ce: f32, tv: f32, kl: f32, signed: f32) {
        for (p, q) in p.iter_mut().zip(q) {
            let difference = *p - q;
            let side = if difference > 0.0 { 1.0 } else if difference < 0.0 { -1.0 } else { 0.0 };
            *p = *p * (ce + tv * (side - signed)) + kl * difference;
        }
    }
}

multiversion! {
    fn scale(p: &mut [f32], factor: f32) {
        for p in p.iter_mut() {
            *p *= factor;
        }
    }
}

/// KL(q ‖ p) = Σ q (log q − log p) from probabilities q and logits u with their log-sum-exp.
fn kl_divergence(q: &[f32], logits: &[f32], log_sum: f32) -> f32 {
    let mut total = 0f64;
    for (&q, &u) in q.iter().zip(logits) {
        if q > 0.0 {
            total += f64::from(q) * f64::from(q.ln() - (u - log_sum));
        }
    }
    total as f32
}

/// Buffers of one chunk of rows, reused from chunk to chunk.
struct Buffers {
    hidden: Vec<f32>,
    latent: Vec<f32>,
    logits: Vec<f32>,
    dhidden: Vec<f32>,
    dlatent: Vec<f32>,
    targets: TargetDistributions,
}

/// Target distributions of the distinct positions of one chunk.
#[derive(Default)]
struct TargetDistributions {
    /// Index in `probabilities` of each row of the chunk.
    of_row: Vec<usize>,
    /// p_t, one row of the vocabulary per distinct position.
    probabilities: Vec<f32>,
    /// p_t at the KL temperature; empty when that is 1.
    tempered: Vec<f32>,
}

impl Op {
    fn check(&self, hidden: &Rows<'_>, latent: &Rows<'_>, w2: &Rows<'_>) -> Result<()> {
        let settings = &self.settings;
        let (targets, width) = self.target_hidden.dims2()?;
        let head = &settings.lm_head;
        let (inputs, vocab) = (head.inputs(), head.outputs());
        if hidden.cols != inputs
            || width != inputs
            || latent.count != hidden.count
            || latent.cols != w2.cols
            || w2.count != vocab
        {
            bail!(
                "vocab-loss with an lm_head of [{vocab}, {inputs}]: hidden [{}, {}], latent [{}, {}], w2 [{}, {}], target rows of {width}",
                hidden.count,
                hidden.cols,
                latent.count,
                latent.cols,
                w2.count,
                w2.cols
            );
        }
        if settings.lm_head_weight.dims() != [vocab, inputs] || !settings.lm_head_weight.is_contiguous() {
            bail!("vocab-loss: lm_head weight {:?} for a head of [{vocab}, {inputs}]", settings.lm_head_weight.dims());
        }
        for row in &settings.rows {
            if row.row >= hidden.count || row.target >= targets || row.label as usize >= vocab {
                bail!("vocab-loss: {row:?} outside {} rows, {targets} targets, {vocab} tokens", hidden.count);
            }
        }
        Ok(())
    }

    /// Computes p_t for the distinct target positions of a chunk (its rows are sorted by position).
    fn target_distributions(&self, rows: &[LossRow], target_hidden: Rows<'_>, out: &mut TargetDistributions) {
        out.of_row.clear();
        if !self.settings.with_target {
            return;
        }
        let head = &self.settings.lm_head;
        let mut gathered = Vec::new();
        let mut distinct = 0;
        for (i, row) in rows.iter().enumerate() {
            if i == 0 || rows[i - 1].target != row.target {
                gathered.extend_from_slice(target_hidden.row(row.target));
                distinct += 1;
            }
            out.of_row.push(distinct - 1);
        }
        out.probabilities.resize(distinct * head.outputs(), 0.0);
        head.forward(Rows::contiguous(&gathered, head.inputs()), &mut out.probabilities);
        let temperature = self.settings.kl_temperature;
        out.tempered.clear();
        if temperature != 1.0 {
            out.tempered.extend(out.probabilities.iter().map(|logit| logit / temperature));
            out.tempered.par_chunks_exact_mut(head.outputs()).for_each(|row| {
                softmax(row);
            });
        }
        out.probabilities.par_chunks_exact_mut(head.outputs()).for_each(|row| {
            softmax(row);
        });
    }

    /// Turns the logits of one row into the gradient with respect to them.
    fn row(&self, row: &LossRow, index: usize, logits: &mut [f32], targets: &TargetDistributions) -> RowTerms {
        let vocab = logits.len();
        let label = row.label as usize;
        let label_logit = logits[label];
        let temperature = self.settings.kl_temperature;
        let mut terms = RowTerms::default();
        if !self.settings.with_target {
            terms.ce = softmax(logits) - label_logit;
            scale(logits, row.ce);
            logits[label] -= row.ce;
            return terms;
        }
        let at = targets.of_row[index] * vocab;
        let q = &targets.probabilities[at..at + vocab];
        let mut tempered = Vec::new(); // kl · (p_d − p_t) / T when T is not 1
        let mut kl = 0.0; // coefficient of the part of the gradient that shares p_d with the other terms
        if row.kl != 0.0 && temperature != 1.0 {
            let q = &targets.tempered[at..at + vocab];
            let scaled: Vec<f32> = logits.iter().map(|logit| logit / temperature).collect();
            tempered.clone_from(&scaled);
            let log_sum = softmax(&mut tempered);
            terms.kl = kl_divergence(q, &scaled, log_sum);
            tempered.iter_mut().zip(q).for_each(|(p, q)| *p = row.kl * (*p - q) / temperature);
        }
        let before = if row.kl != 0.0 && temperature == 1.0 { logits.to_vec() } else { Vec::new() };
        let log_sum = softmax(logits);
        terms.ce = log_sum - label_logit;
        let (tv, signed) = distance(logits, q);
        terms.tv = tv;
        if !before.is_empty() {
            terms.kl = kl_divergence(q, &before, log_sum);
            kl = row.kl;
        }
        gradient(logits, q, row.ce, row.tv, kl, signed);
        logits.iter_mut().zip(&tempered).for_each(|(g, t)| *g += t);
        logits[label] -= row.ce;
        terms
    }
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
        let (head_storage, head_layout) = settings.lm_head_weight.storage_and_layout();
        let (target_storage, target_layout) = self.target_hidden.storage_and_layout();
        let (Storage::Cpu(head_storage), Storage::Cpu(target_storage)) = (&*head_storage, &*target_storage) else {
            bail!("vocab-loss: expected tensors in host memory");
        };
        let head_weight = &head_storage.as_slice::<f32>()?[head_layout.start_offset()..];
        let target_hidden = Rows::new(self.name(), target_storage, target_layout)?;
        let w2_data = &w.as_slice::<f32>()?[wl.start_offset()..];

        let (vocab, width, rank) = (settings.lm_head.outputs(), hidden.cols, latent.cols);
        let mut order: Vec<usize> = (0..settings.rows.len()).collect();
        order.sort_by_key(|&i| settings.rows[i].target);
        let mut state = State {
            terms: vec![RowTerms::default(); order.len()],
            hidden: vec![0.0; hidden.count * width],
            latent: vec![0.0; hidden.count * rank],
            w2: vec![0.0; vocab * rank],
        };
        let most = CHUNK_ROWS.min(order.len());
        let mut buffers = Buffers {
            hidden: Vec::with_capacity(most * width),
            latent: Vec::with_capacity(most * rank),
            logits: vec![0.0; most * vocab],
            dhidden: vec![0.0; most * width],
            dlatent: vec![0.0; most * rank],
            targets: TargetDistributions::default(),
        };
        let mut loss = 0f64;
        for chunk in order.chunks(CHUNK_ROWS) {
            let rows: Vec<LossRow> = chunk.iter().map(|&i| settings.rows[i]).collect();
            let count = rows.len();
            let Buffers { hidden: h, latent: m, logits, dhidden, dlatent, targets } = &mut buffers;
            h.clear();
            m.clear();
            for row in &rows {
                h.extend_from_slice(hidden.row(row.row));
                m.extend_from_slice(latent.row(row.row));
            }
            self.target_distributions(&rows, target_hidden, targets);
            let logits = &mut logits[..count * vocab];
            settings.lm_head.forward(Rows::contiguous(h, width), logits);
            if rank > 0 {
                matmul(Matrix::new(m, count, rank), Matrix::new(w2_data, vocab, rank).t(), logits, true);
            }
            let targets = &*targets;
            let terms: Vec<RowTerms> = logits
                .par_chunks_exact_mut(vocab)
                .zip(&rows)
                .enumerate()
                .map(|(i, (logits, row))| self.row(row, i, logits, targets))
                .collect();
            let gradient = Matrix::new(logits, count, vocab);
            matmul(gradient, Matrix::new(head_weight, vocab, width), dhidden, false);
            if rank > 0 {
                matmul(gradient, Matrix::new(w2_data, vocab, rank), dlatent, false);
                matmul(gradient.t(), Matrix::new(m, count, rank), &mut state.w2, true);
            }
            for (i, (row, &index)) in rows.iter().zip(chunk).enumerate() {
                let t = terms[i];
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

    fn bwd(
        &self,
        h: &Tensor,
        m: &Tensor,
        w: &Tensor,
        _res: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let give = |data: &mut Vec<f32>, like: &Tensor| -> Result<Option<Tensor>> {
            let data = std::mem::take(data);
            if data.len() != like.elem_count() {
                bail!("vocab-loss: the backward pass ran twice");
            }
            if data.is_empty() {
                return Ok(None);
            }
            Tensor::from_vec(data, like.shape(), like.device())?.broadcast_mul(grad).map(Some)
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
