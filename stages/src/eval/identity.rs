//! What makes two evaluations the same, so that an interrupted one goes on and never mixes with another.
//!
//! Weights are told apart by what they compute: the bits of the hidden rows, biases and confidences that target and
//! drafter give on a fixed prompt. A drafter that was trained on has another fingerprint, however it is stored.

use std::collections::BTreeMap;

use candle_core::Tensor;
use deepspec_models::draft::{DSpark, Eagle3};
use deepspec_models::target::{NewTokens, Target};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::hex;
use super::outcome::Origin;
use crate::drafter::Drafter;
use crate::error::Result;
use crate::recipe::Recipe;

/// Tokens of the prompt that the fingerprints are taken on.
const PROBE_TOKENS: usize = 32;
/// Hex digits of a fingerprint or of an identity.
const DIGITS: usize = 16;

/// Hashes of what target and drafter compute on the start of a prompt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fingerprints {
    /// Of the target.
    pub target: String,
    /// Of the drafter, where there is one.
    pub drafter: Option<String>,
}

impl Fingerprints {
    /// Runs target and drafter over the first tokens of `prompt`.
    ///
    /// # Errors
    /// When a model fails.
    pub(super) fn take(target: &Target, drafter: Option<&Drafter>, prompt: &[u32]) -> Result<Self> {
        let tokens = &prompt[..prompt.len().min(PROBE_TOKENS)];
        let capture = drafter.map_or(&[][..], Drafter::target_layer_ids);
        let mut cache = target.new_cache(1, tokens.len())?;
        let rows = target.forward(&mut cache, &[NewTokens { slot: 0, tokens }], capture)?;
        let target_bits = digest(&[rows.hidden.clone(), target.logits(&rows.hidden, &[tokens.len() - 1])?])?;
        let drafter = match (drafter, &rows.features) {
            (Some(drafter), Some(features)) => Some(digest(&drafter_rows(drafter, features, tokens)?)?),
            _ => None,
        };
        Ok(Self { target: target_bits, drafter })
    }
}

/// What every part of a drafter gives behind the probe.
fn drafter_rows(drafter: &Drafter, features: &Tensor, tokens: &[u32]) -> Result<Vec<Tensor>> {
    match drafter {
        Drafter::Block(drafter) => block_rows(drafter, features, tokens),
        Drafter::Eagle3(drafter) => eagle3_rows(drafter, features, tokens),
    }
}

fn eagle3_rows(drafter: &Eagle3, features: &Tensor, tokens: &[u32]) -> Result<Vec<Tensor>> {
    let mut context = drafter.new_context(1, tokens.len())?;
    let hidden = drafter.feature_rows(features)?;
    // The token after the probe is not known: any will do, so that every position has its row.
    let next: Vec<u32> = tokens[1..].iter().chain(&tokens[tokens.len() - 1..]).copied().collect();
    let out = drafter.extend_context(&mut context, &hidden, &next, &[(0, tokens.len())])?;
    Ok(vec![drafter.head_rows(&out)?])
}

fn block_rows(drafter: &DSpark, features: &Tensor, tokens: &[u32]) -> Result<Vec<Tensor>> {
    let mut context = drafter.new_context(1, tokens.len() + drafter.config().block_size)?;
    drafter.extend_context(&mut context, features, &[(0, tokens.len())])?;
    let anchor = tokens[tokens.len() - 1];
    let hidden = drafter.predicting_rows(&drafter.block_hidden(&context, &[(0, anchor)])?)?;
    let slots = hidden.dims()[0];
    let embedding = drafter.markov_head().map(|markov| markov.embedding(&vec![anchor; slots])).transpose()?;
    let mut rows = Vec::new();
    if let (Some(markov), Some(embedding)) = (drafter.markov_head(), &embedding) {
        rows.push(markov.bias(&markov.block_latents(embedding, &hidden, slots)?)?);
    }
    if let Some(confidence) = drafter.confidence_head() {
        rows.push(confidence.logits(&hidden, embedding.as_ref())?);
    }
    rows.push(hidden);
    Ok(rows)
}

fn digest(tensors: &[Tensor]) -> Result<String> {
    let mut hash = Sha256::new();
    for tensor in tensors {
        hash.update(bytemuck::cast_slice::<f32, u8>(&tensor.flatten_all()?.to_vec1()?));
    }
    Ok(hex(&hash.finalize())[..DIGITS].to_owned())
}

/// Short hash of all that the answers and times of an evaluation depend on: the recipe's `eval` and `target` sections,
/// prompts, template, weights, program and machine.
pub(super) fn identity(recipe: &Recipe, origin: &Origin, inputs: &[&str]) -> Result<String> {
    let mut facts: BTreeMap<String, String> = recipe.entries()?;
    facts.retain(|key, _| key.starts_with("eval.") || key.starts_with("target."));
    let mut hash = Sha256::new();
    for (key, value) in &facts {
        hash.update(format!("{key}\0{value}\0"));
    }
    let machine = [&origin.version, &origin.machine, &origin.kernels, &origin.threads.to_string()];
    let program = origin.git_commit.as_deref().unwrap_or_default();
    for part in machine.into_iter().map(String::as_str).chain([program]).chain(inputs.iter().copied()) {
        hash.update(format!("{part}\0"));
    }
    Ok(hex(&hash.finalize())[..DIGITS].to_owned())
}
