//! z-lab's DFlash: `DFlashDraftModel` with `dflash_config`, blocks of a known token and N masks, embedding and head the target's.

use serde_json::{Value, json};

use super::json::Json;
use super::{Format, LayerIds, Source, block, layers, not_expressible};
use crate::error::Result;

pub(super) fn read(mut json: Json, source: &Source) -> Result<Value> {
    block::lift_dflash_config(&mut json)?;
    block::target_layers(&mut json, source);
    let ids = json.take_layers("target_layer_ids", LayerIds::Output)?;
    let ids = ids.map_or_else(|| default_layers(&json), Ok)?;
    json.put_layers("target_layer_ids", LayerIds::Output, &ids);
    block::complete(json, source, false)
}

/// The layers of a checkpoint that does not list them.
fn default_layers(json: &Json) -> Result<Vec<i32>> {
    let ids = layers::zlab_default(json.size("num_hidden_layers")?, json.size("num_target_layers")?);
    LayerIds::Output.read(json.path, "num_target_layers", &ids)
}

pub(super) fn write(mut json: Json) -> Result<Value> {
    let format = Format::Zlab;
    block::refuse_common(format, &json)?;
    if json.is_eagle3() {
        return Err(not_expressible(format, "it is an Eagle3 drafter, the format holds DFlash alone"));
    }
    if block::markov_rank(&json) > 0 || json.flag("enable_confidence_head")? == Some(true) {
        return Err(not_expressible(format, "it has a Markov or confidence head, the format holds DFlash alone"));
    }
    if block::is_anchor_first(&json)? {
        let problem =
            "its blocks are anchor-first, engines read `DFlashDraftModel` as 1+N and would accept next to nothing";
        return Err(not_expressible(format, problem));
    }
    if json.get("draft_vocab_size").is_some() {
        return Err(not_expressible(format, "it has a draft vocabulary, the format borrows the target's whole head"));
    }
    let ids = block::layer_ids(&mut json)?;
    let mask = json.take("mask_token_id");
    json.drop(&block::HEAD_KEYS);
    json.put("architectures", json!(["DFlashDraftModel"]));
    json.put("auto_map", json!({ "AutoModel": "dflash.DFlashDraftModel" }));
    json.put("dflash_config", json!({ "mask_token_id": mask, "target_layer_ids": LayerIds::Output.write(&ids) }));
    Ok(json.into_value())
}
