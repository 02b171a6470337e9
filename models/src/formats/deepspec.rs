//! The reference's layout: a copy of the target's config with the drafter's fields beside it, tensors without a prefix. What is
//! written adds `sample_from_anchor`.

use serde_json::Value;

use super::json::Json;
use super::{Source, block};
use crate::error::Result;

/// Completes the config; its keys are those used inside.
pub(super) fn read(mut json: Json, source: &Source) -> Result<Value> {
    if !json.is_eagle3() {
        block::lift_dflash_config(&mut json)?;
    }
    block::draft_vocabulary(&mut json, source)?;
    block::repeated_layer_ids(&mut json)?;
    if json.is_eagle3() {
        json.default("norm_before_residual", false);
    } else {
        // These were trained anchor-first, DFlash among them, and carry no flag.
        json.default("sample_from_anchor", true);
        json.default("markov_rank", 0);
        json.default("enable_confidence_head", false);
        if block::markov_rank(&json) == 0 {
            json.drop(&["markov_head_type"]);
        }
        if json.flag("enable_confidence_head")? == Some(false) {
            json.drop(&["confidence_head_with_markov"]);
        }
    }
    Ok(json.into_value())
}
