//! A checkpoint that training starts from: refused where its tensors would fit and mean something else.
//!
//! Which target layers the features come from and in what order, the mask token, the rotary embedding: none of it shows in the shape of a
//! tensor, and with another value the weights are worth little more than random ones. What differs is listed in full.

use std::path::Path;

use deepspec_models::config::{DraftConfig, DrafterConfig, Eagle3Config, MarkovHeadType, RopeConfig, TargetConfig};
use deepspec_models::draft::DraftVocabulary;
use deepspec_models::weights::Weights;

use crate::error::{Error, Result};

/// Name of a fact that gives tensors their meaning, and its value.
type Fact = (&'static str, String);

/// Refuses the checkpoint in `folder` with the drafter `saved` as a start for the drafter `config`, whose draft vocabulary is
/// `vocabulary`.
///
/// # Errors
/// [`Error::OtherStart`] with everything that differs; the checkpoint's map of a draft vocabulary cannot be read.
pub(super) fn check(
    folder: &Path,
    saved: &DrafterConfig,
    weights: &Weights,
    config: &DrafterConfig,
    vocabulary: Option<&DraftVocabulary>,
) -> Result<()> {
    let mut differences: Vec<String> = facts(saved)
        .into_iter()
        .zip(facts(config))
        .filter(|((name, there), (other, here))| name != other || there != here)
        .map(|((name, there), (_, here))| difference(name, &there, &here))
        .collect();
    if std::mem::discriminant(saved) != std::mem::discriminant(config) {
        // The two have few facts in common; the first says it all.
        differences.truncate(1);
    } else if saved.body().vocab_size == config.body().vocab_size {
        let map = DraftVocabulary::read_map(weights, saved.draft_vocab(), saved.body().vocab_size)?;
        differences.extend(other_vocabulary(map.as_ref(), vocabulary));
    }
    if differences.is_empty() {
        return Ok(());
    }
    Err(Error::OtherStart { folder: folder.into(), differences })
}

fn difference(name: &str, there: &str, here: &str) -> String {
    format!("{name} differs: {there} in the checkpoint, {here} in the recipe")
}

/// What gives a drafter's tensors their meaning, in an order that depends on its kind alone.
fn facts(config: &DrafterConfig) -> Vec<Fact> {
    let kind = match config {
        DrafterConfig::Block(_) => "a block drafter",
        DrafterConfig::Eagle3(_) => "Eagle3",
    };
    let mut facts = vec![("kind of drafter", kind.to_owned())];
    facts.extend(body(config.body()));
    facts.push(("number of target layers", config.num_target_layers().to_string()));
    facts.push(("target_layer_ids", format!("{:?}", config.target_layer_ids())));
    match config {
        DrafterConfig::Block(config) => facts.extend(block(config)),
        DrafterConfig::Eagle3(Eagle3Config { norm_before_residual, .. }) => {
            facts.push(("norm_before_residual", norm_before_residual.to_string()));
        }
    }
    facts
}

fn body(body: &TargetConfig) -> Vec<Fact> {
    let RopeConfig { theta, partial_rotary_factor, .. } = body.rope;
    let rotary: Vec<f32> = body.rope.inverse_frequencies(body.head_dim);
    let lowest = rotary.last().copied().unwrap_or_default();
    let rope = format!(
        "theta {theta}, share {partial_rotary_factor}, {} scaling, lowest frequency {lowest:.6e}, length {:.6}",
        body.rope.scaling.name(),
        body.rope.attention_factor(),
    );
    vec![
        ("hidden_size", body.hidden_size.to_string()),
        ("vocab_size", body.vocab_size.to_string()),
        ("number of draft layers", body.num_hidden_layers.to_string()),
        ("intermediate_size", body.intermediate_size.to_string()),
        ("num_attention_heads", body.num_attention_heads.to_string()),
        ("num_key_value_heads", body.num_key_value_heads.to_string()),
        ("head_dim", body.head_dim.to_string()),
        ("rms_norm_eps", body.rms_norm_eps.to_string()),
        ("rope", rope),
        ("qk_norm", body.qk_norm.to_string()),
        ("attention_bias", body.attention_bias.to_string()),
        ("mlp_bias", body.mlp_bias.to_string()),
    ]
}

fn block(config: &DraftConfig) -> Vec<Fact> {
    vec![
        ("block layout", config.layout().name().to_owned()),
        ("mask_token_id", config.mask_token_id.to_string()),
        ("sliding_window", config.sliding_window.map_or("none".into(), |window| window.to_string())),
        ("Markov head", config.markov_head_type.map_or("none", MarkovHeadType::name).to_owned()),
        ("markov_rank", config.markov_rank.to_string()),
        ("confidence head", config.enable_confidence_head.to_string()),
        ("confidence_head_with_markov", config.confidence_head_with_markov.to_string()),
        (
            "experts",
            config.moe.as_ref().map_or("none".into(), |moe| format!("{moe}, norm_topk_prob {}", moe.norm_topk_prob)),
        ),
    ]
}

/// What two draft vocabularies differ in.
fn other_vocabulary(there: Option<&DraftVocabulary>, here: Option<&DraftVocabulary>) -> Option<String> {
    if there == here {
        return None;
    }
    let text = |map: Option<&DraftVocabulary>| match map {
        None => "all tokens".to_owned(),
        Some(map) => format!("{} tokens", map.size()),
    };
    let mut here_text = text(here);
    if let (Some(there), Some(here)) = (there, here) {
        let missing = there.tokens().iter().filter(|token| here.tokens().binary_search(token).is_err()).count();
        here_text += &format!(" without {missing} of those, the most frequent of the cache,");
    }
    Some(difference("draft vocabulary", &text(there), &here_text))
}
