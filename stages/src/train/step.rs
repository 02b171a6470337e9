//! One optimiser step: supervision of the whole batch, forward and backward per micro-batch, clipped update.

use deepspec_models::draft::{DSpark, Parameters};
use deepspec_models::loss::dspark::{LossHead, LossWeights, MetricSums, Supervision, WeightSums, dspark_loss};
use deepspec_models::optimizer::{Gradients, Optimizer};

use super::batches::MicroBatch;
use crate::error::Result;
use crate::recipe::Phase;

/// What a step did.
#[derive(Debug)]
pub struct StepDone {
    /// Metric sums over the batch.
    pub sums: MetricSums,
    /// Gradient norm before clipping.
    pub grad_norm: f64,
    /// Tokens of the sequences.
    pub tokens: usize,
}

/// Coefficients of a phase.
pub fn loss_weights(phase: &Phase, decay_gamma: f64) -> LossWeights {
    LossWeights {
        ce: phase.ce,
        tv: phase.tv,
        kl: phase.kl,
        kl_temperature: phase.kl_temperature,
        confidence: phase.confidence,
        decay_gamma: (decay_gamma > 0.0).then_some(decay_gamma),
    }
}

/// Runs one step; `with_acceptance` measures acceptance even where no loss term needs the target's distributions.
///
/// # Errors
/// When a gradient is missing or not finite.
pub fn run(
    drafter: &DSpark,
    parameters: &Parameters,
    head: &LossHead,
    weights: &LossWeights,
    optimizer: &mut Optimizer,
    batch: &[MicroBatch<'_>],
    lr: f64,
    with_acceptance: bool,
) -> Result<StepDone> {
    let config = drafter.config();
    let supervised = |micro: &MicroBatch<'_>| {
        let (slots, mask) = (config.proposals(), config.mask_token_id);
        Supervision::new(&micro.sequences, &micro.loss_masks, slots, mask, weights.decay_gamma, head.vocabulary())
    };
    let supervision: Vec<Supervision> = batch.iter().map(supervised).collect::<Result<_, _>>()?;
    // Sums are over the global batch, so the denominators are known before the first micro-batch runs.
    let denominators: WeightSums = supervision.iter().map(|s| s.weights).sum();
    let mut gradients = Gradients::default();
    let mut sums = MetricSums::default();
    for (micro, supervision) in batch.iter().zip(&supervision) {
        let hidden = drafter.train_hidden(&micro.sequences, &micro.features)?;
        let target = &micro.target_hidden;
        let loss = dspark_loss(drafter, head, weights, supervision, &hidden, target, denominators, with_acceptance)?;
        gradients.add(parameters, &loss.loss.backward()?)?;
        sums.add(&loss.sums);
    }
    let grad_norm = optimizer.update(parameters, &gradients, lr)?;
    let tokens = batch.iter().flat_map(|micro| &micro.sequences).map(|s| s.tokens.len()).sum();
    Ok(StepDone { sums, grad_norm, tokens })
}
