//! Where a loss or gradient that is not finite began, looked for after the fact: the step is run again sample by sample and, where only
//! a gradient is at fault, term by term. A step that fails updates nothing, so it fails again.

use candle_core::{D, Tensor};
use deepspec_models::Error as ModelError;
use deepspec_models::loss::dspark::LossWeights;
use deepspec_models::loss::router::RouterWeights;
use deepspec_models::optimizer::Gradients;

use super::batches::Batches;
use super::step::{self, Coefficients, Sums, Trained};
use crate::error::{Error, Result};

/// What to do where the weights are at fault.
const LOWER_LR: &str =
    "the weights have run away: lower `train.lr` or `train.max_grad_norm`, and go on from an earlier checkpoint";

/// The error of a failed step with the place where it began; other errors, and those of a place that is not found, pass.
pub(super) fn explain(
    error: Error,
    trained: Trained<'_>,
    coefficients: &Coefficients,
    batches: &Batches<'_>,
    index: u64,
) -> Error {
    let Error::Model(ModelError::NotFinite { what, step }) = &error else { return error };
    match origin(trained, coefficients, batches, index) {
        Ok(Some((origin, hint))) => Error::NotFinite { what: what.clone(), step: *step, origin, hint },
        Ok(None) => error,
        Err(other) => other,
    }
}

/// The first of weights, loss terms and gradients that is not finite, and what to do about it.
fn origin(
    trained: Trained<'_>,
    coefficients: &Coefficients,
    batches: &Batches<'_>,
    index: u64,
) -> Result<Option<(String, String)>> {
    for (name, weight) in trained.parameters.iter() {
        if !is_finite(weight.as_tensor())? {
            return Ok(Some((format!("weight `{name}` has numbers that are not finite"), LOWER_LR.into())));
        }
    }
    for single in batches.one_by_one(index)? {
        let batch = std::slice::from_ref(&single);
        let (sums, gradients) = step::gradients(trained, coefficients, batch, false)?;
        let sample = single.samples.first().copied().unwrap_or_default();
        let source = batches.cache().sample(sample)?.source_id;
        let hint = || {
            format!(
                "look at the sample with `deepspec inspect {} --sample {sample}`; if it is like others, lower `train.lr` and go on from \
                 an earlier checkpoint",
                batches.cache().dir().display()
            )
        };
        if let Some(term) = term_of(&sums) {
            return Ok(Some((format!("loss term {term} of sample {sample} (row `{source}`) is the first"), hint())));
        }
        if let Some(name) = gradient_of(trained, &gradients)? {
            let term = term_of_gradient(trained, coefficients, batch)?;
            let from = term.map_or_else(String::new, |term| format!(", from loss term {term}"));
            let text = format!("the gradient of `{name}` at sample {sample} (row `{source}`){from} is the first");
            return Ok(Some((text, hint())));
        }
    }
    let text = "each sample of the batch alone is finite, their sum is not".to_owned();
    Ok(Some((text, LOWER_LR.into())))
}

/// The first term that is not finite, in the order in which they are computed.
fn term_of(sums: &Sums) -> Option<String> {
    match sums {
        Sums::Block(sums) => {
            let terms = [("ce", sums.ce), ("tv", sums.tv), ("kl", sums.kl), ("confidence", sums.confidence)];
            let named = terms.into_iter().find(|(_, sum)| !sum.is_finite()).map(|(name, _)| format!("`{name}`"));
            named.or_else(|| (!sums.loss.is_finite()).then(|| "of the routers".to_owned()))
        }
        Sums::Eagle3(sums) => {
            let step = sums.steps.iter().position(|step| !step.loss.is_finite());
            step.map(|step| format!("`kl` of step {step}"))
                .or_else(|| (!sums.loss.is_finite()).then(|| "`kl`".to_owned()))
        }
    }
}

/// The first parameter whose gradient is not finite.
fn gradient_of(trained: Trained<'_>, gradients: &Gradients) -> Result<Option<String>> {
    for (name, _) in trained.parameters.iter() {
        if let Some(gradient) = gradients.get(name)
            && !is_finite(gradient)?
        {
            return Ok(Some(name.to_owned()));
        }
    }
    Ok(None)
}

/// The term whose gradient alone is not finite.
fn term_of_gradient(
    trained: Trained<'_>,
    coefficients: &Coefficients,
    batch: &[super::batches::MicroBatch<'_>],
) -> Result<Option<String>> {
    let Coefficients { weights, .. } = *coefficients;
    let none = LossWeights { ce: 0.0, tv: 0.0, kl: 0.0, confidence: 0.0, ..weights };
    let alone = [
        ("ce", LossWeights { ce: weights.ce, ..none }, weights.ce),
        ("tv", LossWeights { tv: weights.tv, ..none }, weights.tv),
        ("kl", LossWeights { kl: weights.kl, ..none }, weights.kl),
        ("confidence", LossWeights { confidence: weights.confidence, ..none }, weights.confidence),
    ];
    let routers = RouterWeights { load_balance: 0.0, z: 0.0 };
    for (name, weights, weight) in alone {
        if weight == 0.0 {
            continue;
        }
        // A term that does not reach every parameter has no gradient for the others: that is no fault of it here.
        match step::gradients(trained, &Coefficients { weights, routers }, batch, false) {
            Ok((_, gradients)) if gradient_of(trained, &gradients)?.is_some() => return Ok(Some(format!("`{name}`"))),
            Ok(_) | Err(Error::Model(ModelError::NoGradient { .. })) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}

/// Whether all numbers of a tensor are finite: zero times each of them is then zero, and so is the sum.
fn is_finite(tensor: &Tensor) -> Result<bool> {
    let sum: f32 = (tensor * 0.0)?.flatten_all()?.sum(D::Minus1)?.to_scalar()?;
    Ok(sum == 0.0)
}
