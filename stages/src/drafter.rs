//! A recipe's drafter: its configuration, and a trained checkpoint loaded for inference.

use std::path::Path;

use candle_core::{DType, Device};
use deepspec_models::config::{DraftConfig, MarkovHeadType, MoeConfig, TargetConfig};
use deepspec_models::draft::{DSpark, ParameterSource};
use deepspec_models::formats::{Canonical, Lender};
use deepspec_models::linear::Linear;
use deepspec_models::weights::Weights;

use crate::error::{Error, Result};
use crate::recipe::{Algorithm, DraftRecipe, MarkovHead, Precision, Recipe, SharedExpert};
use crate::target_model::{TargetModel, packing};

/// The configuration of the drafter that a recipe describes for a target.
///
/// # Errors
/// When the recipe does not fit the target.
pub fn draft_config(recipe: &Recipe, target: &TargetConfig) -> Result<DraftConfig> {
    let draft = &recipe.draft;
    let dspark = draft.algorithm == Algorithm::Dspark;
    let markov_rank = if dspark { draft.markov_rank } else { 0 };
    let mut body = DraftConfig::body_of(target, draft.num_layers);
    body.qk_norm = draft.qk_norm;
    let config = DraftConfig {
        body,
        num_target_layers: target.num_hidden_layers,
        block_size: draft.block_size,
        draft_vocab_size: draft.vocab_size.filter(|&size| size != target.vocab_size),
        mask_token_id: draft.mask_token_id,
        target_layer_ids: draft.target_layer_ids.resolve(target.num_hidden_layers)?,
        num_anchors: recipe.train.num_anchors,
        enable_confidence_head: dspark && draft.confidence_head,
        confidence_head_with_markov: dspark
            && draft.confidence_head
            && draft.confidence_head_with_markov
            && markov_rank > 0,
        markov_rank,
        markov_head_type: (markov_rank > 0).then_some(match draft.markov_head {
            MarkovHead::Vanilla => MarkovHeadType::Vanilla,
            MarkovHead::Gated => MarkovHeadType::Gated,
            MarkovHead::Rnn => MarkovHeadType::Rnn,
        }),
        sample_from_anchor: draft.sample_from_anchor,
        sliding_window: draft.sliding_window,
        moe: experts(draft, target),
    };
    config.validate(Path::new("recipe"))?;
    Ok(config)
}

/// The mixture of experts that a recipe describes for a target.
fn experts(draft: &DraftRecipe, target: &TargetConfig) -> Option<MoeConfig> {
    let num_experts_per_tok = draft.experts_per_token?;
    Some(MoeConfig {
        num_experts: draft.num_experts?,
        num_experts_per_tok,
        moe_intermediate_size: draft.moe_intermediate_size?,
        // The only weight of a token's experts would be 1 whatever the router says.
        norm_topk_prob: num_experts_per_tok > 1,
        shared_expert_intermediate_size: match draft.shared_expert {
            None | Some(SharedExpert::AsTarget(false)) => 0,
            Some(SharedExpert::AsTarget(true)) => target.intermediate_size,
            Some(SharedExpert::Width(width)) => width,
        },
    })
}

/// Loads a checkpoint of any layout for inference beside its target, whose embedding and head it may borrow; every tensor of it must
/// be used.
///
/// # Errors
/// When the checkpoint is damaged or belongs to another target.
pub fn load_drafter_for(folder: &Path, model: &TargetModel, precision: Precision) -> Result<DSpark> {
    load(folder, open(folder, model)?, model.target.config(), precision)
}

/// As [`load_drafter_for`] for a checkpoint that borrows nothing.
///
/// # Errors
/// As [`load_drafter_for`].
pub fn load_drafter(folder: &Path, target: &TargetConfig, precision: Precision) -> Result<DSpark> {
    load(folder, Canonical::open(folder, None, DType::F32, &Device::Cpu)?, target, precision)
}

fn load(folder: &Path, checkpoint: Canonical, target: &TargetConfig, precision: Precision) -> Result<DSpark> {
    let Canonical { config, weights, .. } = checkpoint;
    let config = DraftConfig::from_json(&folder.join("config.json"), &config)?;
    for (what, drafter, target) in [
        ("hidden_size", config.body.hidden_size, target.hidden_size),
        ("vocab_size", config.body.vocab_size, target.vocab_size),
        ("number of target layers", config.num_target_layers, target.num_hidden_layers),
    ] {
        if drafter != target {
            return Err(Error::Mismatch {
                what: what.into(),
                left: format!("{drafter} in drafter `{}`", folder.display()),
                right: format!("{target} in the target"),
                hint: Some("use the drafter with the target it was trained for".into()),
            });
        }
    }
    drafter_of(config, &weights, precision)
}

/// A drafter for inference from the tensors of its checkpoint, every one of which must be used.
///
/// # Errors
/// When a tensor is missing, misshapen or left over.
pub fn drafter_of(config: DraftConfig, weights: &Weights, precision: Precision) -> Result<DSpark> {
    let (vocab, draft_vocab, hidden) = (config.body.vocab_size, config.draft_vocab(), config.body.hidden_size);
    let packing = packing(precision);
    let embed_tokens = weights.get("embed_tokens.weight", &[vocab, hidden])?;
    let lm_head = Linear::frozen(&[&weights.get("lm_head.weight", &[draft_vocab, hidden])?], None, packing)?;
    let drafter = DSpark::new(config, embed_tokens, ParameterSource::Frozen(weights, packing))?;
    weights.finish()?;
    Ok(drafter.with_lm_head(lm_head))
}

/// A checkpoint of any layout, with what it leaves to its target.
///
/// # Errors
/// As [`Canonical::open`].
pub fn open(folder: &Path, model: &TargetModel) -> Result<Canonical> {
    let lender = Lender::open(&model.path)?;
    Ok(Canonical::open(folder, Some(&lender), DType::F32, &Device::Cpu)?)
}

/// One line that says what a drafter is.
pub fn describe(config: &DraftConfig) -> String {
    let head = match config.markov_head_type {
        Some(kind) => format!("{} Markov head of rank {}", kind.name(), config.markov_rank),
        None => "no Markov head".into(),
    };
    let vocabulary = match config.draft_vocab_size {
        Some(size) => format!("{size} of {}", config.body.vocab_size),
        None => config.body.vocab_size.to_string(),
    };
    format!(
        "drafter: {} draft layers, {} blocks of {} rows with {} proposals, target layers {:?}, vocabulary {vocabulary}, \
         {head}, confidence {}, window {}, MLP {}",
        config.body.num_hidden_layers,
        config.layout().name(),
        config.block_size,
        config.proposals(),
        config.target_layer_ids,
        if config.enable_confidence_head { "on" } else { "off" },
        config.sliding_window.map_or("none".into(), |w| w.to_string()),
        config.moe.as_ref().map_or("like the target's".into(), |moe| format!("of {moe}")),
    )
}
