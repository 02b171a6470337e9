//! What an Eagle3 drafter starts from: random weights, or the target's last layer.

use candle_core::{Device, Tensor};

use super::trainable_shapes;
use crate::config::Eagle3Config;
use crate::draft::initialise::random_of;
use crate::draft::{ParameterSource, Parameters};
use crate::error::{Error, Result};
use crate::weights::Weights;

/// What random weights that read the embedding are scaled by in a start from the target: small, so that the layer computes
/// nearly what the target's does, but not 0, so that `input_layernorm` has a gradient from the first step.
const EMBEDDING_SCALE: f64 = 0.1;

/// Random weights, as for block drafters.
///
/// # Errors
/// When a tensor cannot be made.
pub fn random(config: &Eagle3Config, seed: u64) -> Result<Parameters> {
    random_of(trainable_shapes(config), seed)
}

/// Replaces the layer by the target's last one, `fc` by the selection of the last feature layer and `norm` by the target's.
///
/// The halves of q, k and v that read the hidden row are the target's and `hidden_norm` is its input norm; the halves that read
/// the embedding stay random, scaled down to a tenth, with `input_layernorm` from the target's first layer. Where the last
/// feature is the output of layer L − 2 and the target's family has the drafter's head norms, the drafter starts as nearly the
/// target's last layer.
///
/// # Errors
/// When the target lacks a tensor of the shape needed.
pub fn from_target_layers(parameters: &mut Parameters, config: &Eagle3Config, target: &Weights) -> Result<()> {
    let hidden = config.body.hidden_size;
    let Some(last) = config.num_target_layers.checked_sub(1) else {
        return Err(Error::Batch("a target without layers to start from".into()));
    };
    let mut replaced = Vec::new();
    for (name, shape) in trainable_shapes(config) {
        let Some(rest) = name.strip_prefix("layers.0.") else { continue };
        let source = format!("model.layers.{last}.{rest}");
        let value = match rest {
            "input_layernorm.weight" => target.get("model.layers.0.input_layernorm.weight", &shape)?,
            "hidden_norm.weight" => target.get(&format!("model.layers.{last}.input_layernorm.weight"), &shape)?,
            // Head norms that the target's family does not have stay at 1; nothing else may be missing.
            "self_attn.q_norm.weight" | "self_attn.k_norm.weight" if !target.contains(&source) => continue,
            "self_attn.q_proj.weight" | "self_attn.k_proj.weight" | "self_attn.v_proj.weight" => {
                let random = ParameterSource::Trainable(parameters).tensor(&name, &shape)?;
                let embedding = (random.narrow(1, 0, hidden)? * EMBEDDING_SCALE)?;
                Tensor::cat(&[embedding, target.get(&source, &[shape[0], hidden])?], 1)?
            }
            _ => target.get(&source, &shape)?,
        };
        replaced.push((name, value));
    }
    let width = config.target_layer_ids.len() * hidden;
    let select: Vec<f32> =
        (0..hidden * width).map(|at| if at % width == width - hidden + at / width { 1.0 } else { 0.0 }).collect();
    replaced.push(("fc.weight".into(), Tensor::from_vec(select, (hidden, width), &Device::Cpu)?));
    replaced.push(("norm.weight".into(), target.get("model.norm.weight", &[hidden])?));
    for (name, value) in replaced {
        parameters.insert(name, &value)?;
    }
    Ok(())
}
