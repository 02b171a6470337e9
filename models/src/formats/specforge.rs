//! SpecForge's layouts: DSpark with everything in `dflash_config`, and EAGLE-3 as `LlamaForCausalLMEagle3`, whose one layer is called
//! `midlayer`. Its ids are the layers whose outputs are read; SGLang, which serves them, adds 1 itself.

use serde_json::{Value, json};

use super::json::Json;
use super::{Format, LayerIds, Source, block, layers, not_expressible};
use crate::error::{Error, Result};

/// Tokens per round where a layout has no key for them: the reference's.
pub(super) const DEFAULT_TTT_LENGTH: usize = 7;
/// Feature layers of EAGLE-3 as engines build it.
const EAGLE3_FEATURES: usize = 3;
/// Ids in our convention's neighbour, where vLLM looks for them.
const VLLM_IDS: &str = "eagle_aux_hidden_state_layer_ids";

pub(super) fn read(mut json: Json, source: &Source) -> Result<Value> {
    if json.get("architectures") == Some(&json!(["LlamaForCausalLMEagle3"])) {
        return read_eagle3(json, source);
    }
    let mut inner = json.take_object("dflash_config")?;
    // Set in training: labels are those of the next position, which is what anchor-first means.
    let shifted = inner.flag("shift_label")?;
    inner.drop(&["shift_label"]);
    json.put("dflash_config", inner.into_value());
    block::lift_dflash_config(&mut json)?;
    block::complete(json, source, shifted.unwrap_or(true))
}

pub(super) fn write(mut json: Json) -> Result<Value> {
    let format = Format::Specforge;
    if json.is_eagle3() {
        return write_eagle3(json, format);
    }
    block::refuse_common(format, &json)?;
    if !block::is_anchor_first(&json)? {
        return Err(not_expressible(format, "its blocks are 1+N, `DSparkDraftModel` is read as anchor-first"));
    }
    let mut inner = serde_json::Map::new();
    inner.insert("attention_mode".into(), json!("gqa"));
    inner.insert("projector_type".into(), json!("dspark"));
    for key in ["mask_token_id", "target_layer_ids"].iter().chain(&block::HEAD_KEYS).chain(&["confidence_head_alpha"]) {
        if let Some(value) = json.take(key) {
            inner.insert((*key).into(), value);
        }
    }
    json.put("architectures", json!(["DSparkDraftModel"]));
    json.put("auto_map", json!({ "AutoModel": "dspark.DSparkDraftModel" }));
    json.put("dflash_config", Value::Object(inner));
    Ok(json.into_value())
}

fn read_eagle3(mut json: Json, source: &Source) -> Result<Value> {
    json.drop(&["auto_map"]);
    let hidden = json.size("hidden_size")?;
    block::same_width(&mut json, hidden)?;
    refuse_variants(&mut json)?;
    block::target_layers(&mut json, source);
    let vllm = json.take_layers(VLLM_IDS, LayerIds::HiddenStates)?;
    let mut inner = json.take_object("eagle_config")?;
    inner.only("use_aux_hidden_state", &[json!(true)], "`true`")?;
    let nested = inner.take_layers(VLLM_IDS, LayerIds::Sglang)?;
    inner.finish()?;
    let flat = json.integers("target_layer_ids")?.is_some();
    let ids = match (nested, vllm) {
        (Some(nested), Some(vllm)) if nested != vllm => {
            return Err(Error::FieldsDisagree {
                path: json.path.into(),
                left: VLLM_IDS.into(),
                left_value: format!("{:?}", LayerIds::HiddenStates.write(&vllm)),
                right: format!("eagle_config.{VLLM_IDS}"),
                right_value: format!("{:?} counted from the embedding", LayerIds::HiddenStates.write(&nested)),
            });
        }
        (Some(ids), _) | (None, Some(ids)) => Some(ids),
        (None, None) if flat => None,
        (None, None) => Some(layers::eagle3_default(&json)?),
    };
    if let Some(ids) = ids {
        json.put_layers_once("target_layer_ids", LayerIds::Output, &ids, VLLM_IDS)?;
    }
    complete_eagle3(json, source)
}

/// Completes an Eagle3 config of another layout.
pub(super) fn complete_eagle3(mut json: Json, source: &Source) -> Result<Value> {
    block::qwen3_body(&mut json)?;
    json.put("architectures", json!(["Qwen3Eagle3Model"]));
    json.default("norm_before_residual", false);
    json.default("ttt_length", DEFAULT_TTT_LENGTH);
    if !source.weights.names().any(|name| name.ends_with(".q_norm.weight") || name.ends_with(".k_norm.weight")) {
        json.put("qk_norm", false);
    }
    block::draft_vocabulary(&mut json, source)?;
    json.put("tie_word_embeddings", false);
    Ok(json.into_value())
}

/// Variants of Eagle3 that are not implemented.
pub(super) fn refuse_variants(json: &mut Json) -> Result<()> {
    for key in ["norm_before_fc", "fc_norm", "norm_output"] {
        json.only(key, &[json!(false)], "`false`")?;
    }
    Ok(())
}

/// The EAGLE-3 layout.
pub(super) fn write_eagle3(mut json: Json, format: Format) -> Result<Value> {
    let refuse = |problem: String| Err(not_expressible(format, problem));
    if json.flag("qk_norm")? != Some(false) {
        return refuse("it has query and key norms, `LlamaForCausalLMEagle3` has none".into());
    }
    if json.flag("norm_before_residual")? == Some(true) {
        return refuse(
            "its residual starts after `hidden_norm` (`norm_before_residual`), here it starts before".into(),
        );
    }
    let ids = block::layer_ids(&mut json)?;
    if ids.len() != EAGLE3_FEATURES {
        return refuse(format!("it reads {} target layers, engines build an `fc` for {EAGLE3_FEATURES}", ids.len()));
    }
    let layers = json.size("num_hidden_layers")?;
    if layers != 1 {
        return refuse(format!("it has {layers} layers, the format one"));
    }
    json.drop(&["qk_norm", "norm_before_residual"]);
    json.put("architectures", json!(["LlamaForCausalLMEagle3"]));
    json.put("model_type", "llama");
    if json.get("draft_vocab_size").is_none() {
        json.put("draft_vocab_size", json.size("vocab_size")?);
    }
    json.put("eagle_config", json!({ VLLM_IDS: LayerIds::Sglang.write(&ids), "use_aux_hidden_state": true }));
    Ok(json.into_value())
}
