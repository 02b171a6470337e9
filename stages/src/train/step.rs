//! One optimiser step: supervision of the whole batch, forward and backward per micro-batch, clipped update.

use deepspec_models::draft::dspark::TrainRows;
use deepspec_models::draft::moe::Routing;
use deepspec_models::draft::{DSpark, Parameters};
use deepspec_models::loss::dspark::{LossHead, LossWeights, MetricSums, Supervision, WeightSums, dspark_loss};
use deepspec_models::loss::router::RouterWeights;
use deepspec_models::optimizer::{Gradients, Optimizer};

use super::batches::MicroBatch;
use crate::error::Result;
use crate::recipe::{Phase, TrainRecipe};

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

/// Coefficients of the routers' losses.
pub fn router_weights(train: &TrainRecipe) -> RouterWeights {
    RouterWeights { load_balance: train.load_balance.unwrap_or(0.0), z: train.router_z.unwrap_or(0.0) }
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
    routers: RouterWeights,
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
    let blocks: usize = supervision.iter().map(|s| s.blocks).sum();
    let mut gradients = Gradients::default();
    let mut sums = MetricSums::default();
    for (micro, supervision) in batch.iter().zip(&supervision) {
        let TrainRows { hidden, routing } = drafter.train_rows(&micro.sequences, &micro.features)?;
        let target = &micro.target_hidden;
        let loss = dspark_loss(drafter, head, weights, supervision, &hidden, target, denominators, with_acceptance)?;
        let share = supervision.blocks as f64 / blocks.max(1) as f64;
        let loss = loss.with_routers(&routing, routers, share)?;
        let idle = routing.iter().flat_map(Routing::idle_parameters).collect();
        gradients.add_with_idle(parameters, &loss.loss.backward()?, &idle)?;
        sums.add(&loss.sums);
    }
    let grad_norm = optimizer.update(parameters, &gradients, lr)?;
    let tokens = batch.iter().flat_map(|micro| &micro.sequences).map(|s| s.tokens.len()).sum();
    Ok(StepDone { sums, grad_norm, tokens })
}
