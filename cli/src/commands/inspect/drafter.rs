//! Drafters of any layout that is not the one checked tensor by tensor in `model.rs`: those of other programs, and Eagle3.

use std::path::Path;

use candle_core::{DType, Device};
use deepspec_models::config::{DrafterConfig, Eagle3Config};
use deepspec_models::formats::{Canonical, Lender};
use deepspec_stages::export::{block_rule, target_layer_ids};
use serde_json::{Value, json};

use super::model::{add_layer_ids, add_values_problems, drafter_facts};
use super::report::Report;
use crate::failure::Refusal;

/// Reports on the drafter in `folder`; with its target, whose embedding and head it may borrow.
pub(super) fn inspect(folder: &Path, target: Option<&Path>) -> anyhow::Result<Report> {
    let mut report = Report::new("drafter");
    let lender = target.map(Lender::open).transpose()?;
    let Some(drafter) = report.ok(Canonical::open(folder, lender.as_ref(), DType::F32, &Device::Cpu)) else {
        return Ok(report);
    };
    let mut facts = json!({ "layout": drafter.format.name(), "block_rule": block_rule(&drafter) });
    let config = report.ok(DrafterConfig::from_json(&folder.join("config.json"), &drafter.config));
    let more = match &config {
        Some(DrafterConfig::Block(config)) => drafter_facts(folder, config),
        Some(DrafterConfig::Eagle3(config)) => eagle3_facts(folder, config),
        None => json!({}),
    };
    for (key, value) in more.as_object().into_iter().flatten() {
        facts[key] = value.clone();
    }
    let left = ["embed_tokens.weight", "lm_head.weight"].into_iter().filter(|name| !drafter.weights.contains(name));
    facts["left_to_the_target"] = json!(left.collect::<Vec<_>>());
    report.facts("drafter", facts);
    add_layer_ids(&mut report, &target_layer_ids(&drafter));
    let weights = &drafter.weights;
    let rows =
        weights.names().map(|name| vec![json!(name), json!(weights.shape(name)), json!(weights.stored_type(name))]);
    report.table("tensors", &["name", "shape", "type"], rows.collect());
    add_values_problems(&mut report, weights, |_| true);
    if let Some(lender) = &lender {
        let (drafters, targets) = (drafter.config["num_target_layers"].as_u64(), lender.config().num_hidden_layers);
        if let Some(layers) = drafters.filter(|&layers| layers != targets as u64) {
            let problem = format!("the drafter is for a target of {layers} layers, `--model` has {targets}");
            report.problem(Refusal { problem, hint: Some("give the target that it was trained for".into()) });
        }
    }
    Ok(report)
}

fn eagle3_facts(folder: &Path, config: &Eagle3Config) -> Value {
    let body = &config.body;
    let draft_vocab = config.draft_vocab_size.unwrap_or(body.vocab_size);
    json!({
        "path": folder.display().to_string(),
        "algorithm": "Eagle3",
        "draft_vocabulary": format!("{draft_vocab} of {} tokens", body.vocab_size),
        "ttt_length": config.ttt_length,
        "norm_before_residual": config.norm_before_residual,
        "qk_norm": body.qk_norm,
        "draft_layers": body.num_hidden_layers,
        "num_target_layers": config.num_target_layers,
        "hidden_size": body.hidden_size,
        "intermediate_size": body.intermediate_size,
        "num_attention_heads": body.num_attention_heads,
        "num_key_value_heads": body.num_key_value_heads,
        "head_dim": body.head_dim,
        "rope_theta": body.rope.theta,
    })
}
