//! What SGLang's DSPARK loads: the reference's layout, with the keys it looks for repeated in `dflash_config` and `dspark_config`.
//! Eagle3 it reads in SpecForge's layout.

use serde_json::Value;

use super::json::Json;
use super::{Format, LayerIds, Source, block, not_expressible, specforge};
use crate::error::{Error, Result};

/// SGLang's prefixed keys and the reference's.
const PREFIXED: [(&str, &str); 5] = [
    ("dspark_block_size", "block_size"),
    ("dspark_markov_rank", "markov_rank"),
    ("dspark_markov_head_type", "markov_head_type"),
    ("dspark_noise_token_id", "mask_token_id"),
    ("dspark_target_layer_ids", "target_layer_ids"),
];

pub(super) fn read(mut json: Json, source: &Source) -> Result<Value> {
    block::lift_dflash_config(&mut json)?;
    let mut inner = json.take_object("dspark_config")?;
    json.lift(&mut inner, &block::HEAD_KEYS)?;
    json.lift(&mut inner, &["mask_token_id", "block_size", "target_layer_ids"])?;
    inner.finish()?;
    for (prefixed, key) in PREFIXED {
        let Some(value) = json.take(prefixed) else { continue };
        if let Some(other) = json.get(key).filter(|other| **other != value) {
            return Err(Error::FieldsDisagree {
                path: json.path.into(),
                left: key.into(),
                left_value: other.to_string(),
                right: prefixed.into(),
                right_value: value.to_string(),
            });
        }
        json.put(key, value);
    }
    if let Some((key, found)) = json.starting_with("dspark_") {
        let supported = "the keys that its layout is known by";
        return Err(Error::Unsupported {
            path: json.path.into(),
            field: key.into(),
            found: found.to_string(),
            supported,
        });
    }
    if let Some(ids) = json.take_layers("target_layer_ids", LayerIds::Sglang)? {
        json.put_layers("target_layer_ids", LayerIds::Output, &ids);
    }
    block::complete(json, source, true)
}

pub(super) fn write(mut json: Json) -> Result<Value> {
    let format = Format::Sglang;
    if json.is_eagle3() {
        return specforge::write_eagle3(json, format);
    }
    block::refuse_common(format, &json)?;
    if block::markov_rank(&json) == 0 {
        let problem = if block::is_anchor_first(&json)? {
            "it has no Markov head: DSPARK refuses rank 0, and DFLASH would read its anchor-first blocks as 1+N"
        } else {
            "it has no Markov head, which DSPARK refuses; write `zlab`, which DFLASH reads"
        };
        return Err(not_expressible(format, problem));
    }
    if !block::is_anchor_first(&json)? {
        return Err(not_expressible(format, "its blocks are 1+N, DSPARK proposes from the anchor's row"));
    }
    if json.get("draft_vocab_size").is_some() {
        return Err(not_expressible(format, "it has a draft vocabulary, for which DSPARK's config has no key"));
    }
    let ids = block::layer_ids(&mut json)?;
    json.put_layers("target_layer_ids", LayerIds::Sglang, &ids);
    let of = |keys: &[&str]| -> Value {
        keys.iter().filter_map(|key| Some(((*key).to_owned(), json.get(key)?.clone()))).collect()
    };
    let dflash = of(&["block_size", "mask_token_id", "target_layer_ids"]);
    let dspark = of(&["markov_rank", "markov_head_type", "mask_token_id"]);
    json.put("dflash_config", dflash);
    json.put("dspark_config", dspark);
    Ok(json.into_value())
}
