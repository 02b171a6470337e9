//! The layout of the speculators library, which vLLM reads: the body in `transformer_layer_config`, the drafter's keys above it, the
//! target as `verifier`. Layer ids count the embedding as 0.

use serde_json::{Value, json};

use super::json::Json;
use super::{Format, LayerIds, Source, Verifier, block, layers, not_expressible, specforge};
use crate::error::{Error, Result};

/// Version of the library whose layout is written.
const VERSION: &str = "0.5.0";
/// Keys of block drafters above the body.
const BLOCK_KEYS: [&str; 4] = ["block_size", "mask_token_id", "sample_from_anchor", "draft_vocab_size"];
/// Keys of the body that say something about its numbers; what stands above the body too must say the same.
const BODY_KEYS: [&str; 20] = [
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
    "hidden_act",
    "attention_bias",
    "mlp_bias",
    "layer_types",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "quantization_config",
];
const BLOCK_IDS: &str = "aux_hidden_state_layer_ids";
const EAGLE3_IDS: &str = "eagle_aux_hidden_state_layer_ids";

pub(super) fn read(mut json: Json, source: &Source) -> Result<Value> {
    let mut proposals = json.take_object("speculators_config")?;
    let kind = match json.text("speculators_model_type")? {
        Some(kind) => Some(kind),
        None => proposals.text("algorithm")?,
    };
    let mut body = json.take_object("transformer_layer_config")?;
    body = Json::new(json.path, &body.into_value())?;
    body.drop(&["architectures"]);
    body.lift(&mut json, &BODY_KEYS)?;
    let hidden = body.size("hidden_size")?;
    block::same_width(&mut json, hidden)?;
    block::target_layers(&mut body, source);
    match kind.as_deref() {
        Some("dspark" | "dflash") => {
            body.lift(&mut json, &BLOCK_KEYS)?;
            body.lift(&mut json, &block::HEAD_KEYS)?;
            let window = body.flag("use_sliding_window")? == Some(true)
                || body.get("layer_types").is_some_and(|types| types.to_string().contains("sliding_attention"));
            if window {
                // Without the flag a window also makes the block causal.
                json.default("sliding_window_non_causal", false);
                json.only("sliding_window_non_causal", &[json!(true)], "`true`: rows of a block see the whole block")?;
            }
            let ids = json.take_layers(BLOCK_IDS, LayerIds::HiddenStates)?;
            let missing = || Error::FieldMissing { path: json.path.into(), field: BLOCK_IDS.into() };
            body.put_layers_once("target_layer_ids", LayerIds::Output, &ids.ok_or_else(missing)?, BLOCK_IDS)?;
            block::complete(body, source, kind.as_deref() == Some("dspark"))
        }
        Some("eagle3") => {
            specforge::refuse_variants(&mut json)?;
            body.lift(&mut json, &["draft_vocab_size", "norm_before_residual"])?;
            if body.get("norm_before_residual").is_none() {
                // The library means false, vLLM true.
                return Err(Error::FieldMissing { path: json.path.into(), field: "norm_before_residual".into() });
            }
            let ids = json.take_layers(EAGLE3_IDS, LayerIds::HiddenStates)?;
            let ids = ids.map_or_else(|| layers::eagle3_default(&body), Ok)?;
            body.put_layers_once("target_layer_ids", LayerIds::Output, &ids, EAGLE3_IDS)?;
            if let Some(tokens) =
                proposals.get("proposal_methods").and_then(|methods| methods[0].get("speculative_tokens"))
            {
                body.default("ttt_length", tokens.clone());
            }
            if let Some(name) = proposals.take_object("verifier")?.take("name_or_path") {
                body.default("target_model_name_or_path", name);
            }
            specforge::complete_eagle3(body, source)
        }
        other => Err(Error::Unsupported {
            path: json.path.into(),
            field: "speculators_model_type".into(),
            found: other.unwrap_or("absent").into(),
            supported: "`dspark`, `dflash` and `eagle3`",
        }),
    }
}

pub(super) fn write(mut body: Json, verifier: &Verifier) -> Result<Value> {
    let format = Format::Speculators;
    let eagle = body.is_eagle3();
    body.drop(&["architectures"]);
    let ids = LayerIds::HiddenStates.write(&block::layer_ids(&mut body)?);
    let mut top = Json::new(body.path, &json!({}))?;
    body.default("draft_vocab_size", body.size("vocab_size")?);
    let name =
        verifier.name.clone().map_or_else(|| body.get("target_model_name_or_path").cloned(), |name| Some(json!(name)));
    let (kind, class, tokens) = if eagle {
        let ttt_length = body.optional_size("ttt_length")?.unwrap_or(specforge::DEFAULT_TTT_LENGTH);
        if body.size("num_hidden_layers")? != 1 {
            return Err(not_expressible(format, "it has more than one layer, vLLM builds one"));
        }
        // The class of the layer says whether queries and keys are normalised.
        let norms = body.flag("qk_norm")?.unwrap_or(true);
        body.put("model_type", if norms { "qwen3" } else { "llama" });
        body.drop(&["qk_norm"]);
        top.lift(&mut body, &["draft_vocab_size", "norm_before_residual"])?;
        top.default("norm_before_residual", false);
        top.put(EAGLE3_IDS, json!(ids));
        top.put("embed_requires_grad", false);
        ("eagle3", "Eagle3Speculator", ttt_length)
    } else {
        block::refuse_common(format, &body)?;
        let (size, anchor_first) = (body.size("block_size")?, block::is_anchor_first(&body)?);
        let is_dflash = block::markov_rank(&body) == 0 && body.flag("enable_confidence_head")? != Some(true);
        top.lift(&mut body, &BLOCK_KEYS)?;
        top.put(BLOCK_IDS, json!(ids));
        top.put("sliding_window_non_causal", body.flag("use_sliding_window")? == Some(true));
        let tokens = if anchor_first { size } else { size - 1 };
        if is_dflash {
            body.drop(&block::HEAD_KEYS);
            ("dflash", "DFlashSpeculator", tokens)
        } else {
            top.lift(&mut body, &block::HEAD_KEYS)?;
            top.default("confidence_head_with_markov", false);
            ("dspark", "DSparkSpeculator", tokens)
        }
    };
    top.put("architectures", json!([class]));
    let module = class.trim_end_matches("Speculator");
    top.put("auto_map", json!({ "": format!("config.{module}SpeculatorConfig") }));
    top.put("speculators_model_type", kind);
    top.put("speculators_version", VERSION);
    top.put("target_hidden_size", Value::Null);
    top.put("tie_word_embeddings", false);
    top.put(
        "speculators_config",
        json!({
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{
                "proposal_type": "greedy", "speculative_tokens": tokens, "verifier_accept_k": 1, "accept_tolerance": 0.0,
            }],
            "verifier": { "name_or_path": name, "architectures": verifier.architecture.iter().collect::<Vec<_>>() },
        }),
    );
    top.put("transformer_layer_config", body.into_value());
    Ok(top.into_value())
}
