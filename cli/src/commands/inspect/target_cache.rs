//! Target caches: what they were made from, how much of them is supervised, one sample with its loss mask, and a check.

use std::path::Path;

use deepspec_datasets::target_cache::{self, Manifest, Reader, Sample, check};
use deepspec_datasets::tokenizer::Tokenizer;
use deepspec_engine::TextSide;
use deepspec_engine::progress::Context;
use serde_json::{Value, json};

use super::report::{Report, percent};
use super::{model, text_side};
use crate::args::InspectArguments;
use crate::failure::Refusal;

/// Reports on the cache at the path given.
pub(super) fn inspect(arguments: &InspectArguments, context: Context<'_>) -> anyhow::Result<Report> {
    let dir = &arguments.path;
    let mut report = Report::new("target_cache");
    if arguments.check {
        context.note("reading every sample and its checksum");
        add_check(&mut report, check(dir)?);
    }
    context.check_interrupt("nothing was changed")?;
    let reader = match Reader::open(dir) {
        Ok(reader) => reader,
        Err(_) if report.problem_count() > 0 => return Ok(report),
        Err(error) => return Err(error.into()),
    };
    add_manifest(&mut report, dir, reader.manifest());
    if let Some(index) = arguments.sample {
        let text_side = arguments.model.as_deref().map(text_side::load).transpose()?;
        let tokenizer = text_side.as_ref().map(TextSide::tokenizer);
        add_sample(&mut report, &reader.verify_sample(index)?, tokenizer, &reader.meta().tokenizer_hash);
    }
    Ok(report)
}

fn add_manifest(report: &mut Report, dir: &Path, manifest: &Manifest) {
    let meta = &manifest.meta;
    report.facts(
        "cache",
        json!({
            "path": dir.display().to_string(),
            "version": manifest.version,
            "target": meta.target,
            "target_fingerprint": meta.target_fingerprint,
            "target_dtype": meta.dtype,
            "hidden_size": meta.hidden_size,
            "vocab_size": meta.vocab_size,
            "mask_token_id": meta.mask_token_id,
            "samples": manifest.samples,
            "tokens": manifest.tokens,
            "supervised_tokens": manifest.supervised_tokens,
            "supervised_percent": percent(manifest.supervised_tokens, manifest.tokens),
            "mean_tokens_per_sample": (manifest.tokens as f64 / manifest.samples as f64).round(),
            "max_length": meta.max_length,
            "loss_on": meta.loss_on,
            "storage": meta.storage,
            "feature_rows": manifest.feature_rows,
            "last_hidden_rows": manifest.last_hidden_rows,
            "total_bytes": manifest.shards.iter().map(|shard| shard.bytes).sum::<u64>(),
            "tokenizer_hash": meta.tokenizer_hash,
            "template_hash": meta.template_hash,
            "data_hash": meta.data_hash,
        }),
    );
    model::add_layer_ids(report, &meta.layer_ids);
    if let Value::Object(recipe) = &meta.recipe {
        report.facts("recipe", Value::Object(recipe.clone()));
    }
    let rows = manifest.shards.iter().map(|shard| {
        let entry = [shard.samples, shard.tokens, shard.supervised_tokens, shard.bytes];
        [json!(shard.name)].into_iter().chain(entry.map(Value::from)).collect()
    });
    report.table("shards", &["name", "samples", "tokens", "supervised_tokens", "bytes"], rows.collect());
}

/// Adds what a check of every sample found, of whichever version of the cache.
pub(super) fn add_check(report: &mut Report, outcome: target_cache::Report) {
    report.facts(
        "check",
        json!({
            "sound": outcome.is_sound(),
            "samples_read": outcome.samples,
            "tokens_read": outcome.tokens,
            "supervised_tokens_read": outcome.supervised_tokens,
            "total_bytes": outcome.bytes,
        }),
    );
    for problem in outcome.problems {
        report.problem(problem);
    }
}

fn add_sample(report: &mut Report, sample: &Sample<'_>, tokenizer: Option<&Tokenizer>, expected_hash: &str) {
    let tokens = sample.input_ids.len() as u64;
    report.facts(
        "sample",
        json!({
            "sample_id": sample.sample_id,
            "source_id": sample.source_id,
            "domain": sample.domain,
            "tokens": tokens,
            "supervised_tokens": sample.supervised_tokens(),
            "supervised_percent": percent(sample.supervised_tokens(), tokens),
        }),
    );
    if let Some(found) = tokenizer.map(Tokenizer::hash).filter(|hash| *hash != expected_hash) {
        let problem = format!("tokenizer differs: the cache was made with `{expected_hash}`, `--model` has `{found}`");
        report.problem(Refusal { problem, hint: Some("give the model that the cache was made from".into()) });
    }
    let title = if tokenizer.is_some() { "text" } else { "token_ids" };
    report.spans(title, text_side::spans(sample.input_ids, sample.loss_mask, tokenizer));
}
