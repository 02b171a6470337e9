//! Takes over a target cache of the reference (version 2) as the cache of a run.
//!
//! Such a cache names its target and nothing more, so a sample is computed again before anything is copied: a cache of another target,
//! of other layers or of another order of them is refused.

use std::path::Path;

use deepspec_datasets::renderer::Renderer;
use deepspec_datasets::target_cache::v2::{Decoded, Reader};
use deepspec_datasets::target_cache::{CacheMeta, Manifest, Plan, StorageMode, Writer, estimate_bytes};
use deepspec_models::target::{NewTokens, Target};
use half::bf16;
use serde_json::json;
use sha2::{Digest, Sha256};

use super::Settings;
use super::answers::{hex, sha256_hex};
use super::cache::bf16_values;
use super::space::require;
use crate::error::{Error, Result};
use crate::recipe::Recipe;
use crate::run_dir::RunDir;
use deepspec_engine::progress::{Context, Event};

/// Relative distance of rows above which they are another target's. Rounding to bf16 makes 0.003, eight bits for the weights a few
/// hundredths; rows of different models are about 1.4 apart.
const MAX_DISTANCE: f64 = 0.3;
/// Tokens of the first sample that are computed again.
const PROBE_TOKENS: usize = 256;

/// Copies the version 2 cache in `from` into the run, or goes on with it. It must be of the recipe's target and layers.
///
/// # Errors
/// The cache is damaged, of another target or of other layers, or has tokens that the target lacks or the mask token; not enough disk
/// space; the run's cache is another; [`Error::Interrupted`] when the user asks to stop.
pub fn import(
    recipe: &Recipe,
    run: &RunDir,
    target: &Target,
    renderer: &Renderer,
    fingerprint: &str,
    from: &Path,
    ctx: Context<'_>,
) -> Result<Manifest> {
    ctx.reporter.event(Event::Stage("prepare"));
    let settings = Settings::new(recipe, target.config(), renderer)?;
    let reader = Reader::open(from)?;
    check_shape(&settings, &reader, from)?;
    let distance = distance(target, &settings.layer_ids, &reader.sample(0)?)?;
    if distance > MAX_DISTANCE {
        return Err(Error::Mismatch {
            what: "target".into(),
            left: format!("`{}`, whose cache `{}` is", reader.manifest().target_model_name_or_path, from.display()),
            right: format!("the recipe's, whose rows of the first sample are a relative {distance:.2} away"),
            hint: Some("name the target and the layers that the cache was made with".into()),
        });
    }
    let samples = reader.len();
    let tokens = reader.records().iter().map(|record| u64::from(record.seq_len)).sum();
    let (layers, hidden) = (settings.layer_ids.len(), target.config().hidden_size);
    let bytes = estimate_bytes(samples, tokens, layers, hidden, StorageMode::Bf16);
    let dir = run.cache();
    ctx.note(format!(
        "importing {samples} samples, {tokens} tokens, about {} into `{}`; first sample computed again: relative distance {distance:.4}",
        super::size(bytes),
        dir.display()
    ));
    let plan = Plan { samples, samples_per_shard: recipe.prepare.samples_per_shard as u64 };
    let mut writer = Writer::create_or_resume(&dir, meta(&settings, &reader, fingerprint)?, plan)?;
    let done = writer.next_sample();
    ctx.reporter.event(Event::Started { task: "target cache", total: samples, done, unit: "samples" });
    for row in done..samples {
        ctx.check_interrupt("all finished shards are saved")?;
        if row == done || row.is_multiple_of(plan.samples_per_shard) {
            require(&settings, &dir, bytes.saturating_sub(writer.bytes_written()))?;
        }
        let sample = reader.sample(row)?;
        writer.append(&sample.as_sample(row, &sample.sample_id.to_string()))?;
        ctx.reporter.event(Event::Advanced { done: row + 1, detail: "" });
    }
    ctx.reporter.event(Event::Finished);
    Ok(writer.finish()?)
}

/// Layers and width must be the recipe's.
fn check_shape(settings: &Settings<'_>, reader: &Reader, from: &Path) -> Result<()> {
    let manifest = reader.manifest();
    let pairs = [
        ("target_layer_ids", format!("{:?}", manifest.target_layer_ids), format!("{:?}", settings.layer_ids)),
        ("hidden_size", manifest.hidden_size.to_string(), settings.config.hidden_size.to_string()),
    ];
    for (what, cache, recipe) in pairs {
        if cache != recipe {
            return Err(Error::Mismatch {
                what: what.into(),
                left: format!("{cache} in `{}`", from.display()),
                right: format!("{recipe} of the recipe and its target"),
                hint: Some("set `target.model` and `draft.target_layer_ids` to those of the cache".into()),
            });
        }
    }
    Ok(())
}

/// How far the rows of a sample are from those that the target computes, relative to their size.
fn distance(target: &Target, layer_ids: &[i32], sample: &Decoded) -> Result<f64> {
    let length = sample.input_ids.len().min(PROBE_TOKENS);
    let tokens = &sample.input_ids[..length];
    let vocab = target.config().vocab_size;
    if let Some(&token) = tokens.iter().find(|&&token| token as usize >= vocab) {
        return Err(deepspec_models::Error::TokenRange { token, vocab }.into());
    }
    let mut cache = target.new_cache(1, length)?;
    let rows = target.forward(&mut cache, &[NewTokens { slot: 0, tokens }], layer_ids)?;
    let features = rows.features.ok_or_else(|| Error::Invariant("the target gave no features".into()))?;
    let stored = [&sample.features, &sample.last_hidden];
    let computed = [bf16_values(&features)?, bf16_values(&rows.hidden)?];
    let mut worst = 0.0_f64;
    for (stored, computed) in stored.into_iter().zip(&computed) {
        let square = |value: f64| value * value;
        let pairs = stored.iter().zip(computed).map(|(a, b): (&bf16, &bf16)| (a.to_f64(), b.to_f64()));
        let (apart, size) = pairs.fold((0.0, 0.0), |(apart, size), (a, b)| (apart + square(a - b), size + square(b)));
        let relative = (apart / size.max(f64::MIN_POSITIVE)).sqrt();
        worst = if relative.is_nan() { f64::INFINITY } else { worst.max(relative) };
    }
    Ok(worst)
}

fn meta(settings: &Settings<'_>, reader: &Reader, fingerprint: &str) -> Result<CacheMeta> {
    let Settings { recipe, renderer, config, layer_ids, .. } = settings;
    let manifest = reader.manifest();
    Ok(CacheMeta {
        target: recipe.target.model.clone(),
        target_fingerprint: fingerprint.to_owned(),
        layer_ids: layer_ids.clone(),
        hidden_size: config.hidden_size,
        vocab_size: u32::try_from(config.vocab_size)
            .map_err(|_| Error::Input(format!("a vocabulary of {} tokens is too large", config.vocab_size)))?,
        dtype: "unknown, imported".into(),
        tokenizer_hash: renderer.tokenizer().hash().to_owned(),
        template_hash: sha256_hex(manifest.chat_template.as_bytes()),
        data_hash: data_hash(reader)?,
        mask_token_id: Some(recipe.draft.mask_token_id),
        recipe: json!({ "imported": {
            "target_model_name_or_path": manifest.target_model_name_or_path, "chat_template": manifest.chat_template,
            "source_jsonl_paths": manifest.source_jsonl_paths, "min_loss_tokens": manifest.min_loss_tokens,
            "git_sha": manifest.git_sha, "exp_name": manifest.exp_name, "project_name": manifest.project_name,
        } }),
        loss_on: "all".into(),
        max_length: manifest.max_length,
        storage: StorageMode::Bf16,
    })
}

/// As that of a cache that is built here: over length, ids and mask of every sample.
fn data_hash(reader: &Reader) -> Result<String> {
    let mut hash = Sha256::new();
    for row in 0..reader.len() {
        let (ids, mask) = reader.tokens(row)?;
        hash.update((ids.len() as u64).to_le_bytes());
        for id in &ids {
            hash.update(id.to_le_bytes());
        }
        hash.update(mask);
    }
    Ok(hex(&hash.finalize()))
}
