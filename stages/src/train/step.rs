//! One optimiser step: forward and backward per micro-batch by the drafter's algorithm, clipped update.

use deepspec_models::draft::dspark::TrainRows;
use deepspec_models::draft::eagle3::StepRows;
use deepspec_models::draft::moe::Routing;
use deepspec_models::draft::{DSpark, Eagle3, Parameters};
use deepspec_models::loss::dspark::{LossHead, LossWeights, MetricSums, Supervision, WeightSums, dspark_loss};
use deepspec_models::loss::eagle3::{Eagle3Sums, eagle3_loss};
use deepspec_models::loss::router::RouterWeights;
use deepspec_models::optimizer::{Gradients, Optimizer};
use serde::{Deserialize, Serialize};

use super::batches::MicroBatch;
use crate::drafter::Drafter;
use crate::error::Result;
use crate::recipe::{Phase, TrainRecipe};

/// Metric sums of a drafter's algorithm.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Sums {
    /// Of DSpark and DFlash.
    Block(Box<MetricSums>),
    /// Of Eagle3.
    Eagle3(Eagle3Sums),
}

impl Sums {
    /// The loss, summed over steps.
    pub fn loss(&self) -> f64 {
        match self {
            Self::Block(sums) => sums.loss,
            Self::Eagle3(sums) => sums.loss,
        }
    }

    /// Supervised rows.
    pub fn rows(&self) -> f64 {
        match self {
            Self::Block(sums) => sums.rows,
            Self::Eagle3(sums) => sums.rows(),
        }
    }

    /// Tokens a round would commit on training data.
    pub fn tau(&self) -> f64 {
        match self {
            Self::Block(sums) => sums.tau(),
            Self::Eagle3(sums) => sums.tau(),
        }
    }

    /// Named metrics over a number of steps, the mean loss of a step first.
    pub(super) fn metrics(&self, weights: &LossWeights, with_confidence: bool, steps: u64) -> Vec<(String, f64)> {
        match self {
            Self::Block(sums) => {
                let mut metrics = sums.metrics(weights, with_confidence);
                // The loss of a step is a ratio of sums over its batch; over several steps it is their mean.
                if let Some((_, loss)) = metrics.first_mut() {
                    *loss /= steps.max(1) as f64;
                }
                metrics
            }
            Self::Eagle3(sums) => sums.metrics(steps),
        }
    }
}

/// What a step did.
#[derive(Debug)]
pub struct StepDone {
    /// Metric sums over the batch.
    pub sums: Sums,
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

/// What a step trains.
#[derive(Clone, Copy)]
pub struct Trained<'a> {
    /// The drafter.
    pub drafter: &'a Drafter,
    /// Its weights.
    pub parameters: &'a Parameters,
    /// The output head that the loss reads.
    pub head: &'a LossHead,
}

/// Coefficients of the terms of a loss.
#[derive(Debug, Clone, Copy)]
pub struct Coefficients {
    /// Of the drafter's terms.
    pub weights: LossWeights,
    /// Of the routers' terms.
    pub routers: RouterWeights,
}

/// Runs one step; `with_acceptance` measures acceptance even where no loss term needs the target's distributions.
///
/// # Errors
/// When a gradient is missing, or the loss or a gradient is not finite (nothing is updated then).
pub fn run(
    trained: Trained<'_>,
    coefficients: &Coefficients,
    optimizer: &mut Optimizer,
    batch: &[MicroBatch<'_>],
    lr: f64,
    with_acceptance: bool,
) -> Result<StepDone> {
    let (sums, gradients) = gradients(trained, coefficients, batch, with_acceptance)?;
    if !sums.loss().is_finite() {
        let step = optimizer.step_count() + 1;
        return Err(deepspec_models::Error::NotFinite { what: "loss".into(), step }.into());
    }
    let grad_norm = optimizer.update(trained.parameters, &gradients, lr)?;
    let tokens = batch.iter().flat_map(|micro| &micro.sequences).map(|s| s.tokens.len()).sum();
    Ok(StepDone { sums, grad_norm, tokens })
}

/// Forward and backward over a batch.
///
/// # Errors
/// When a gradient is missing.
pub(super) fn gradients(
    trained: Trained<'_>,
    coefficients: &Coefficients,
    batch: &[MicroBatch<'_>],
    with_acceptance: bool,
) -> Result<(Sums, Gradients)> {
    let Trained { drafter, parameters, head } = trained;
    let Coefficients { weights, routers } = coefficients;
    let mut gradients = Gradients::default();
    let sums = match drafter {
        Drafter::Block(drafter) => Sums::Block(Box::new(block(
            drafter,
            parameters,
            head,
            weights,
            *routers,
            batch,
            with_acceptance,
            &mut gradients,
        )?)),
        Drafter::Eagle3(drafter) => Sums::Eagle3(eagle3(drafter, parameters, head, batch, &mut gradients)?),
    };
    Ok((sums, gradients))
}

fn block(
    drafter: &DSpark,
    parameters: &Parameters,
    head: &LossHead,
    weights: &LossWeights,
    routers: RouterWeights,
    batch: &[MicroBatch<'_>],
    with_acceptance: bool,
    gradients: &mut Gradients,
) -> Result<MetricSums> {
    let config = drafter.config();
    let supervised = |micro: &MicroBatch<'_>| {
        let (slots, mask) = (config.proposals(), config.mask_token_id);
        Supervision::new(&micro.sequences, &micro.loss_masks, slots, mask, weights.decay_gamma, head.vocabulary())
    };
    let supervision: Vec<Supervision> = batch.iter().map(supervised).collect::<Result<_, _>>()?;
    // Sums are over the global batch, so the denominators are known before the first micro-batch runs.
    let denominators: WeightSums = supervision.iter().map(|s| s.weights).sum();
    let blocks: usize = supervision.iter().map(|s| s.blocks).sum();
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
    Ok(sums)
}

fn eagle3(
    drafter: &Eagle3,
    parameters: &Parameters,
    head: &LossHead,
    batch: &[MicroBatch<'_>],
    gradients: &mut Gradients,
) -> Result<Eagle3Sums> {
    // The loss is divided by the size of the global batch as if it were padded to its longest sequence.
    let lengths = batch.iter().flat_map(|micro| &micro.sequences).map(|sequence| sequence.tokens.len());
    let positions = lengths.clone().count() * lengths.max().unwrap_or(0);
    let mut sums = Eagle3Sums::default();
    for micro in batch {
        let tokens: Vec<&[u32]> = micro.sequences.iter().map(|sequence| sequence.tokens).collect();
        let rows = StepRows::supervised(&micro.loss_masks, drafter.config().ttt_length);
        let steps = drafter.train_hidden(&tokens, &micro.features, &rows)?;
        let loss = eagle3_loss(drafter, head, &micro.loss_masks, &rows, &steps, &micro.target_hidden, positions)?;
        gradients.add(parameters, &loss.loss.backward()?)?;
        sums.add(&loss.sums);
    }
    Ok(sums)
}
