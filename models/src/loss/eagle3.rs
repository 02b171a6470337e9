//! Eagle3's training objective: soft cross-entropy to the target's distributions at every step of training-time test.
//!
//! At step s, row i predicts token i + 2 + s, so it is compared with the target's distribution at position i + 1 + s. It counts
//! where the loss mask of position i + s is 1 and position i + 1 + s lies inside the sequence. A step's loss is
//! Σ −Σ_v p_t log p_d over the rows that count, divided by B·T: sequences × longest sequence of the *whole* global batch, padding
//! and masked positions included. The steps are summed with weights `step_loss_decay`^s.
//!
//! The mask is that of the position s in front of the drafted-from token, not that of the label, as in the released training
//! code: step 0 leaves out the last token of the prompt, later steps train it.
//!
//! A drafter with a draft vocabulary is compared with the target's distribution renormalised over its tokens; rows whose most
//! likely target token it lacks have no loss, but count as valid in the metrics, with their exact acceptance.

use candle_core::Tensor;
use deepspec_kernels::vocab_loss::{LossRow, VocabLoss};
use serde::{Deserialize, Serialize};

use super::dspark::LossHead;
use crate::draft::Eagle3;
use crate::draft::eagle3::{StepRows, supervised_rows};
use crate::error::{Error, Result};

/// Loss of a micro-batch.
pub struct Eagle3Loss {
    /// This micro-batch's share of the global loss, a scalar with gradients.
    pub loss: Tensor,
    /// Sums from which the metrics of the global batch are made.
    pub sums: Eagle3Sums,
}

/// Computes the loss of one micro-batch. `positions` is B·T of the whole global batch; `loss_masks` has one mask per sequence,
/// as long as its tokens.
///
/// # Shapes
/// steps: of [`Eagle3::train_hidden`] for the same `rows`; target_hidden `[Σ tokens, hidden]`
///
/// # Errors
/// When shapes do not fit.
pub fn eagle3_loss(
    drafter: &Eagle3,
    head: &LossHead,
    loss_masks: &[&[u8]],
    rows: &StepRows,
    steps: &[Tensor],
    target_hidden: &Tensor,
    positions: usize,
) -> Result<Eagle3Loss> {
    let count: usize = loss_masks.iter().map(|mask| mask.len()).sum();
    let computed: usize = rows.steps().iter().map(Vec::len).sum();
    let outputs: usize = steps.iter().map(|hidden| hidden.dims()[0]).sum();
    if outputs != computed || target_hidden.dims()[0] != count {
        let targets = target_hidden.dims()[0];
        let problem = format!("{outputs} output rows of {computed}, {targets} target rows for loss masks of {count}");
        return Err(Error::Batch(problem));
    }
    let decay = drafter.config().step_loss_decay;
    let counted = counted(loss_masks, rows)?;
    let scale = |step: usize| decay.powi(step as i32) / positions.max(1) as f64;
    let loss_row = |counted: &Counted| LossRow {
        row: counted.output,
        target: counted.row + 1 + counted.step,
        label: None,
        ce: 0.0,
        tv: 0.0,
        kl: scale(counted.step) as f32,
    };
    let op = VocabLoss {
        target_head: head.target.clone(),
        draft_head: head.draft.clone(),
        draft_head_weight: head.weight.clone(),
        draft_tokens: head.vocabulary.as_ref().map(|vocabulary| vocabulary.tokens().clone()),
        rows: counted.iter().map(loss_row).collect(),
        kl_temperature: 1.0,
        with_target: true,
        soft_targets: true,
    };
    let hidden = drafter.head_rows(&Tensor::cat(steps, 0)?)?;
    // No Markov head: latent rows of width 0.
    let empty = |count: usize| Tensor::zeros((count, 0), hidden.dtype(), hidden.device());
    let out = op.forward(&hidden, &empty(hidden.dims()[0])?, &empty(head.draft.outputs())?, target_hidden)?;
    let loss = out.loss.squeeze(0)?;
    let mut sums =
        Eagle3Sums { steps: vec![StepSums::default(); drafter.config().ttt_length], ..Eagle3Sums::default() };
    sums.loss = f64::from(loss.detach().to_scalar::<f32>()?);
    let mut chains = vec![Chain::default(); count];
    for (counted, terms) in counted.iter().zip(&out.terms) {
        let step = &mut sums.steps[counted.step];
        let (accepted, agrees) = (f64::from(terms.acceptance()), f64::from(u8::from(terms.agrees == Some(true))));
        step.loss += f64::from(terms.kl) / positions.max(1) as f64;
        step.valid += 1.0;
        step.covered += f64::from(u8::from(terms.agrees.is_some()));
        step.accepted += accepted;
        step.agreed += agrees;
        // Rows of a step come before those of the next, so the products go on as long as every step counts.
        let chain = &mut chains[counted.row];
        if chain.length == counted.step {
            chain.length += 1;
            chain.accepted *= accepted;
            chain.agreed *= agrees;
            sums.tau += chain.accepted;
            sums.tau_greedy += chain.agreed;
            sums.starts += f64::from(u8::from(counted.step == 0));
        }
    }
    Ok(Eagle3Loss { loss, sums })
}

/// A row that counts at a step.
struct Counted {
    step: usize,
    /// Among all rows of the micro-batch.
    row: usize,
    /// Among the output rows of all steps.
    output: usize,
}

fn counted(loss_masks: &[&[u8]], rows: &StepRows) -> Result<Vec<Counted>> {
    let (mut counted, mut first) = (Vec::new(), 0);
    for (step, computed) in rows.steps().iter().enumerate() {
        for row in supervised_rows(loss_masks, step) {
            let Ok(place) = computed.binary_search(&row) else {
                return Err(Error::Batch(format!("row {row} counts at step {step}, which did not compute it")));
            };
            counted.push(Counted { step, row, output: first + place });
        }
        first += computed.len();
    }
    Ok(counted)
}

/// What a proposal from one row would come to.
#[derive(Clone)]
struct Chain {
    length: usize,
    accepted: f64,
    agreed: f64,
}

impl Default for Chain {
    fn default() -> Self {
        Self { length: 0, accepted: 1.0, agreed: 1.0 }
    }
}

/// Sums over the rows of one step.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct StepSums {
    /// The step's loss, without its weight.
    pub loss: f64,
    /// Rows that count.
    pub valid: f64,
    /// Those whose most likely target token the drafter has.
    pub covered: f64,
    /// Σ acceptance.
    pub accepted: f64,
    /// Rows at which both sides' most likely tokens are the same.
    pub agreed: f64,
}

/// Sums of a micro-batch; those of the micro-batches of a global batch add up.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Eagle3Sums {
    /// The loss.
    pub loss: f64,
    /// Per step of training-time test.
    pub steps: Vec<StepSums>,
    /// Σ over the rows that count at step 0 of Σ_s Π_{j≤s} a_j.
    pub tau: f64,
    /// The same with agreement of the most likely tokens in place of acceptance.
    pub tau_greedy: f64,
    /// Rows that count at step 0.
    pub starts: f64,
}

impl Eagle3Sums {
    /// Adds the sums of another micro-batch.
    pub fn add(&mut self, other: &Self) {
        self.loss += other.loss;
        self.tau += other.tau;
        self.tau_greedy += other.tau_greedy;
        self.starts += other.starts;
        let longest = self.steps.len().max(other.steps.len());
        self.steps.resize(longest, StepSums::default());
        for (mine, other) in self.steps.iter_mut().zip(&other.steps) {
            mine.loss += other.loss;
            mine.valid += other.valid;
            mine.covered += other.covered;
            mine.accepted += other.accepted;
            mine.agreed += other.agreed;
        }
    }

    /// Rows that count, of all steps.
    pub fn rows(&self) -> f64 {
        self.steps.iter().map(|step| step.valid).sum()
    }

    /// 1 + Σ_s Π_{j≤s} a_j, the mean over rows: tokens a round would commit on training data.
    pub fn tau(&self) -> f64 {
        1.0 + self.tau / self.starts.max(1.0)
    }

    /// Named metrics for logs, over a number of optimiser steps. `covered` is the share of rows that count whose most likely
    /// target token the drafter has.
    pub fn metrics(&self, optimizer_steps: u64) -> Vec<(String, f64)> {
        let per_step = |sum: f64| sum / optimizer_steps.max(1) as f64;
        let mut out = vec![("loss".into(), per_step(self.loss))];
        let mut all = |name: &str, value: &dyn Fn(&StepSums) -> f64| {
            out.extend(self.steps.iter().enumerate().map(|(s, step)| (format!("{name}{s}"), value(step))));
        };
        all("ploss_", &|step| per_step(step.loss));
        all("accuracy@", &|step| step.agreed / step.valid.max(1.0));
        all("accept_rate@", &|step| step.accepted / step.valid.max(1.0));
        all("valid_tokens@", &|step| per_step(step.valid));
        out.push(("tau_greedy".into(), 1.0 + self.tau_greedy / self.starts.max(1.0)));
        out.push(("tau_probabilistic".into(), self.tau()));
        let covered: f64 = self.steps.iter().map(|step| step.covered).sum();
        out.push(("covered".into(), covered / self.rows().max(1.0)));
        out
    }
}
