//! Target caches of the reference: what the manifest says, one sample with its loss mask, and a check of every sample.

use deepspec_datasets::target_cache::v2::{Reader, check};
use deepspec_engine::TextSide;
use deepspec_engine::progress::Context;
use serde_json::json;

use super::report::{Report, percent};
use super::{model, target_cache, text_side};
use crate::args::InspectArguments;

/// Reports on the cache at the path given.
pub(super) fn inspect(arguments: &InspectArguments, context: Context<'_>) -> anyhow::Result<Report> {
    let dir = &arguments.path;
    let mut report = Report::new("target_cache");
    let Some(reader) = report.ok(Reader::open(dir)) else { return Ok(report) };
    let manifest = reader.manifest();
    let tokens: u64 = reader.records().iter().map(|record| u64::from(record.seq_len)).sum();
    report.facts(
        "cache",
        json!({
            "path": dir.display().to_string(),
            "version": manifest.version,
            "target": manifest.target_model_name_or_path,
            "chat_template": manifest.chat_template,
            "hidden_size": manifest.hidden_size,
            "samples": reader.len(),
            "tokens": tokens,
            "mean_tokens_per_sample": (tokens as f64 / reader.len() as f64).round(),
            "max_length": manifest.max_length,
            "min_loss_tokens": manifest.min_loss_tokens,
            "total_bytes": manifest.shards.iter().filter_map(|shard| reader.shard_bytes(shard.shard_id)).sum::<u64>(),
            "source_jsonl_paths": manifest.source_jsonl_paths,
            "project_name": manifest.project_name,
            "exp_name": manifest.exp_name,
            "git_sha": manifest.git_sha,
        }),
    );
    model::add_layer_ids(&mut report, &manifest.target_layer_ids);
    let rows = manifest.shards.iter().map(|shard| {
        let samples = reader.records().iter().filter(|record| record.shard_id == shard.shard_id).count();
        vec![json!(shard.file_name), json!(samples), json!(reader.shard_bytes(shard.shard_id))]
    });
    report.table("shards", &["name", "samples", "bytes"], rows.collect());
    if let Some(row) = arguments.sample {
        let text_side = arguments.model.as_deref().map(text_side::load).transpose()?;
        let tokenizer = text_side.as_ref().map(TextSide::tokenizer);
        let (ids, mask) = reader.tokens(row)?;
        let supervised = mask.iter().map(|&mask| u64::from(mask)).sum();
        report.facts(
            "sample",
            json!({
                "sample_id": reader.records()[row as usize].sample_id,
                "tokens": ids.len(),
                "supervised_tokens": supervised,
                "supervised_percent": percent(supervised, ids.len() as u64),
            }),
        );
        let title = if tokenizer.is_some() { "text" } else { "token_ids" };
        report.spans(title, text_side::spans(&ids, mask, tokenizer));
    }
    if arguments.check {
        context.note("reading every sample");
        target_cache::add_check(&mut report, check(dir)?);
    }
    Ok(report)
}
