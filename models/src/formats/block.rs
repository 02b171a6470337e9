//! What the layouts of block drafters (DSpark, DFlash) share: the nested `dflash_config`, defaults that follow from the tensors, and
//! what engines cannot do.

use serde_json::{Value, json};

use super::json::Json;
use super::{Format, LayerIds, Source, not_expressible};
use crate::config::draft::UNKNOWN;
use crate::error::{Error, Result};

/// The reference's class.
const ARCHITECTURE: &str = "Qwen3DSparkModel";
/// Keys of the sequential heads.
pub(super) const HEAD_KEYS: [&str; 4] =
    ["markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"];
/// Lifts the keys of `dflash_config` to the top; one that is not known is refused.
pub(super) fn lift_dflash_config(json: &mut Json) -> Result<()> {
    let mut inner = json.take_object("dflash_config")?;
    inner.only("causal", &[json!(false)], "`false`: rows of a block see the whole block")?;
    inner.only("attention_mode", &[json!("gqa")], "`gqa`")?;
    inner.only("projector_type", &[json!("dflash"), json!("dspark")], "`dflash` and `dspark`")?;
    json.lift(
        &mut inner,
        &["mask_token_id", "target_layer_ids", "block_size", "draft_vocab_size", "sample_from_anchor"],
    )?;
    json.lift(&mut inner, &HEAD_KEYS)?;
    json.lift(&mut inner, &["confidence_head_alpha"])?;
    inner.finish()
}

/// Completes the config of a block drafter of another layout: `anchor_first` is what the layout means without `sample_from_anchor`.
pub(super) fn complete(mut json: Json, source: &Source, anchor_first: bool) -> Result<Value> {
    let path = json.path;
    json.drop(&["auto_map"]);
    for key in UNKNOWN {
        json.only(key, &[], "DSpark and DFlash as the reference has them")?;
    }
    let hidden = json.size("hidden_size")?;
    same_width(&mut json, hidden)?;
    qwen3_body(&mut json)?;
    json.put("architectures", json!([ARCHITECTURE]));
    json.default("sample_from_anchor", anchor_first);
    complete_heads(&mut json, source, hidden)?;
    draft_vocabulary(&mut json, source)?;
    // The file may be a copy of a tied target's; a drafter always has both tensors, or borrows them.
    json.put("tie_word_embeddings", false);
    target_layers(&mut json, source);
    repeated_layer_ids(&mut json)?;
    if json.integers("target_layer_ids")?.is_none() {
        return Err(Error::FieldMissing { path: path.into(), field: "target_layer_ids".into() });
    }
    Ok(json.into_value())
}

/// Keys that other layouts have the target layers in, counted from the embedding: beside ours they must say the same.
pub(super) fn repeated_layer_ids(json: &mut Json) -> Result<()> {
    for key in ["aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids"] {
        let Some(theirs) = json.take_layers(key, LayerIds::HiddenStates)? else { continue };
        let (ours, theirs) = (json.integers("target_layer_ids")?, LayerIds::Output.write(&theirs));
        if let Some(ours) = ours.filter(|ours| *ours != theirs) {
            return Err(Error::FieldsDisagree {
                path: json.path.into(),
                left: json.full(key),
                left_value: format!("{theirs:?}, counted by the layers' outputs"),
                right: json.full("target_layer_ids"),
                right_value: format!("{ours:?}"),
            });
        }
        json.default("target_layer_ids", theirs);
    }
    Ok(())
}

/// The drafter's width must be the target's.
pub(super) fn same_width(json: &mut Json, hidden: usize) -> Result<()> {
    json.only("target_hidden_size", &[json!(hidden)], "the drafter's own `hidden_size`")?;
    json.only("logit_scale", &[json!(1), json!(1.0)], "1")
}

/// Makes the body Qwen3's in name, with nothing left to defaults that differ between classes.
pub(super) fn qwen3_body(json: &mut Json) -> Result<()> {
    if json.text("model_type")?.as_deref() == Some("llama") {
        let (hidden, heads) = (json.size("hidden_size")?, json.size("num_attention_heads")?);
        json.default("head_dim", hidden / heads);
        json.put("model_type", "qwen3");
    }
    Ok(())
}

/// Heads that the config does not tell follow from the tensors.
fn complete_heads(json: &mut Json, source: &Source, hidden: usize) -> Result<()> {
    let weights = source.weights;
    let columns = |name: &str| weights.shape(name).and_then(|shape| shape.get(1).copied());
    json.default("markov_rank", columns("markov_head.markov_w1.weight").unwrap_or(0));
    if json.get("markov_rank") == Some(&json!(0)) {
        json.drop(&["markov_head_type"]);
    } else {
        let kind =
            match (weights.contains("markov_head.gate_proj.weight"), weights.contains("markov_head.joint_proj.weight"))
            {
                (true, _) => "gated",
                (_, true) => "rnn",
                _ => "vanilla",
            };
        json.default("markov_head_type", kind);
    }
    let confidence = columns("confidence_head.proj.weight");
    json.default("enable_confidence_head", confidence.is_some());
    if json.flag("enable_confidence_head")? == Some(true) {
        json.default("confidence_head_with_markov", confidence.is_some_and(|columns| columns > hidden));
    } else {
        json.drop(&["confidence_head_with_markov"]);
    }
    Ok(())
}

/// `draft_vocab_size` stands only where it is not the whole vocabulary; without the key the map of the tokens tells it.
pub(super) fn draft_vocabulary(json: &mut Json, source: &Source) -> Result<()> {
    if let Some(size) = source.weights.shape("d2t").and_then(|shape| shape.first().copied()) {
        json.default("draft_vocab_size", size);
    }
    if json.optional_size("draft_vocab_size")? == json.optional_size("vocab_size")? {
        json.drop(&["draft_vocab_size"]);
    }
    Ok(())
}

/// The number of the target's layers, which some layouts do not store.
pub(super) fn target_layers(json: &mut Json, source: &Source) {
    if let Some(layers) = source.target_layers {
        json.default("num_target_layers", layers);
    }
}

/// Our layer ids of a config in the reference's layout.
pub(super) fn layer_ids(json: &mut Json) -> Result<Vec<i32>> {
    json.take_layers("target_layer_ids", LayerIds::Output)?
        .ok_or_else(|| Error::FieldMissing { path: json.path.into(), field: "target_layer_ids".into() })
}

/// Refuses what no engine but this one does.
pub(super) fn refuse_common(format: Format, json: &Json) -> Result<()> {
    if json.optional_size("num_experts").is_ok_and(|experts| experts.is_some()) {
        return Err(not_expressible(format, "its MLPs are mixtures of experts, engines build dense ones"));
    }
    if json.flag("qk_norm")? == Some(false) {
        let problem = "it has no query and key norms (`qk_norm` is false), engines build a Qwen3 body, which has them";
        return Err(not_expressible(format, problem));
    }
    Ok(())
}

/// Whether slot 0 proposes; a config in the reference's layout always says so.
pub(super) fn is_anchor_first(json: &Json) -> Result<bool> {
    json.flag("sample_from_anchor")?
        .ok_or_else(|| Error::FieldMissing { path: json.path.into(), field: "sample_from_anchor".into() })
}

/// Rank of the Markov head.
pub(super) fn markov_rank(json: &Json) -> u64 {
    json.get("markov_rank").and_then(Value::as_u64).unwrap_or(0)
}
