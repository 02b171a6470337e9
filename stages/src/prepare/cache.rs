//! Runs the target over the samples and writes what it computed to the target cache.
//!
//! Several samples share a forward pass, up to [`BATCH_TOKENS`]; a row's values do not depend on what else is in the pass, so
//! the cache has the same bytes however the samples are batched or the run was interrupted.

use std::path::Path;

use candle_core::{DType, Tensor};
use deepspec_datasets::target_cache::{
    CacheError, CacheMeta, Manifest, Plan, Sample as CacheSample, StorageMode, Writer, estimate_bytes,
};
use deepspec_models::target::{NewTokens, Target};
use half::bf16;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::Settings;
use super::answers::{hex, sha256_hex};
use super::samples::Sample;
use super::space::require;
use crate::error::{Error, Result};
use crate::recipe::{LossOn, Recipe};
use crate::target_model::packing;
use deepspec_engine::progress::{Context, Event};

/// Tokens of one forward pass; a longer sample has a pass of its own.
const BATCH_TOKENS: usize = 1024;
/// Samples of one forward pass.
const BATCH_SAMPLES: usize = 8;

/// Bytes of a shard besides its samples: schema with the description of the cache, twice, and the footer.
const SHARD_BYTES: u64 = 16 << 10;
/// Bytes by which the columns of a sample can be longer than they are on average, through their alignment.
const ALIGNMENT_BYTES: u64 = 256;

/// What decides the size of a cache.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Extent {
    pub(super) samples: u64,
    pub(super) tokens: u64,
    /// Bytes of all source ids and domains.
    pub(super) text_bytes: u64,
}

impl Extent {
    pub(super) fn add(&mut self, samples: u64, tokens: usize, text_bytes: usize) {
        self.samples += samples;
        self.tokens += samples * tokens as u64;
        self.text_bytes += samples * text_bytes as u64;
    }

    /// Size that the cache will have, within about 1 %.
    pub(super) fn bytes(&self, settings: &Settings<'_>) -> u64 {
        estimate_bytes(
            self.samples,
            self.tokens,
            settings.layer_ids.len(),
            settings.config.hidden_size,
            StorageMode::Bf16,
        )
    }

    /// Size that the cache will not exceed.
    pub(super) fn bytes_at_most(&self, settings: &Settings<'_>) -> u64 {
        let shards = self.samples.div_ceil(settings.recipe.prepare.samples_per_shard as u64);
        self.bytes(settings) + self.samples * ALIGNMENT_BYTES + self.text_bytes + shards * SHARD_BYTES
    }
}

impl<'a> FromIterator<&'a Sample> for Extent {
    fn from_iter<I: IntoIterator<Item = &'a Sample>>(samples: I) -> Self {
        let mut extent = Self::default();
        for sample in samples {
            extent.add(1, sample.ids.len(), sample.source_id.len() + sample.domain.len());
        }
        extent
    }
}

/// Builds the cache in `dir`, or goes on with it; a complete one that fits is left alone.
///
/// # Errors
/// No supervised token, not enough space, a cache of other data or settings in the folder, [`Error::Interrupted`], or the
/// target fails.
pub(super) fn build(
    samples: &[Sample],
    settings: &Settings<'_>,
    target: &Target,
    fingerprint: &str,
    dir: &Path,
    ctx: Context<'_>,
) -> Result<Manifest> {
    let extent: Extent = samples.iter().collect();
    let supervised: u64 = samples.iter().map(Sample::supervised_tokens).sum();
    if supervised == 0 {
        return Err(CacheError::NothingSupervised { dir: dir.to_owned(), samples: extent.samples }.into());
    }
    ctx.note(format!(
        "target cache: {} samples, {} tokens, {:.1} % supervised, about {} in `{}`",
        extent.samples,
        extent.tokens,
        100.0 * supervised as f64 / extent.tokens as f64,
        super::size(extent.bytes(settings)),
        dir.display()
    ));
    let plan = Plan { samples: extent.samples, samples_per_shard: settings.recipe.prepare.samples_per_shard as u64 };
    let mut writer = Writer::create_or_resume(dir, meta(samples, settings, fingerprint)?, plan)?;
    let done = writer.next_sample();
    ctx.reporter.event(Event::Started { task: "target cache", total: extent.samples, done, unit: "samples" });
    if done < extent.samples {
        write(&mut writer, samples, settings, target, dir, ctx)?;
    }
    let manifest = writer.finish()?;
    ctx.reporter.event(Event::Finished);
    Ok(manifest)
}

/// Runs the samples that are not written yet.
fn write(
    writer: &mut Writer,
    samples: &[Sample],
    settings: &Settings<'_>,
    target: &Target,
    dir: &Path,
    ctx: Context<'_>,
) -> Result<()> {
    let mut first = writer.next_sample() as usize;
    let longest = samples[first..].iter().map(|sample| sample.ids.len()).max().unwrap_or(0);
    let mut positions = target.new_cache(BATCH_SAMPLES.min(samples.len() - first), longest)?;
    let started = std::time::Instant::now();
    let mut tokens = 0;
    let mut next_shard = first;
    while first < samples.len() {
        ctx.check_interrupt("all finished shards are saved")?;
        if first >= next_shard {
            let rest: Extent = samples[first..].iter().collect();
            require(settings, dir, rest.bytes_at_most(settings))?;
            next_shard += settings.recipe.prepare.samples_per_shard;
        }
        let batch = &samples[first..first + batch_len(&samples[first..])];
        let new: Vec<NewTokens<'_>> =
            batch.iter().enumerate().map(|(slot, sample)| NewTokens { slot, tokens: &sample.ids }).collect();
        let rows = target.forward(&mut positions, &new, &settings.layer_ids)?;
        for slot in 0..batch.len() {
            positions.truncate(slot, 0);
        }
        let features = rows.features.ok_or_else(|| Error::Invariant("the target gave no features".into()))?;
        append(writer, batch, first, &bf16_values(&features)?, &bf16_values(&rows.hidden)?)?;
        first += batch.len();
        tokens += batch.iter().map(|sample| sample.ids.len()).sum::<usize>();
        let rate = tokens as f64 / started.elapsed().as_secs_f64().max(1e-9);
        ctx.reporter.event(Event::Advanced { done: first as u64, detail: &format!("{rate:.0} tok/s") });
    }
    Ok(())
}

/// Number of samples for the next forward pass.
fn batch_len(samples: &[Sample]) -> usize {
    let mut tokens = 0;
    let fits = |sample: &&Sample| {
        tokens += sample.ids.len();
        tokens <= BATCH_TOKENS
    };
    samples.iter().take(BATCH_SAMPLES).take_while(fits).count().max(1)
}

/// Cuts the rows of a pass into samples and appends them.
fn append(writer: &mut Writer, batch: &[Sample], first: usize, features: &[bf16], last_hidden: &[bf16]) -> Result<()> {
    let rows: usize = batch.iter().map(|sample| sample.ids.len()).sum();
    let (feature_width, hidden_size) = (features.len() / rows, last_hidden.len() / rows);
    let mut row = 0;
    for (offset, sample) in batch.iter().enumerate() {
        let end = row + sample.ids.len();
        writer.append(&CacheSample {
            sample_id: (first + offset) as u64,
            source_id: &sample.source_id,
            domain: &sample.domain,
            input_ids: &sample.ids,
            loss_mask: &sample.loss_mask,
            features: &features[row * feature_width..end * feature_width],
            last_hidden: &last_hidden[row * hidden_size..end * hidden_size],
        })?;
        row = end;
    }
    Ok(())
}

/// All numbers of a tensor, row by row, rounded to bf16.
pub(super) fn bf16_values(rows: &Tensor) -> Result<Vec<bf16>> {
    Ok(rows.to_dtype(DType::BF16)?.flatten_all()?.to_vec1()?)
}

fn meta(samples: &[Sample], settings: &Settings<'_>, fingerprint: &str) -> Result<CacheMeta> {
    let Settings { recipe, renderer, config, layer_ids, .. } = settings;
    Ok(CacheMeta {
        target: recipe.target.model.clone(),
        target_fingerprint: fingerprint.to_owned(),
        layer_ids: layer_ids.clone(),
        hidden_size: config.hidden_size,
        vocab_size: u32::try_from(config.vocab_size)
            .map_err(|_| Error::Input(format!("a vocabulary of {} tokens is too large", config.vocab_size)))?,
        dtype: packing(recipe.target.precision).name().to_owned(),
        tokenizer_hash: renderer.tokenizer().hash().to_owned(),
        template_hash: sha256_hex(renderer.template().source().as_bytes()),
        data_hash: data_hash(samples),
        mask_token_id: Some(recipe.draft.mask_token_id),
        recipe: settings_of(recipe)?,
        loss_on: match recipe.data.loss_on {
            LossOn::All => "all",
            LossOn::Last => "last",
        }
        .to_owned(),
        max_length: recipe.prepare.max_length,
        storage: StorageMode::Bf16,
    })
}

/// The sections of the recipe that decide what is in the cache, without what cannot change it.
fn settings_of(recipe: &Recipe) -> Result<Value> {
    let mut sections = json!({});
    for (name, section, free) in [
        ("data", serde_json::to_value(&recipe.data), "max_bad_ratio"),
        ("prepare", serde_json::to_value(&recipe.prepare), "batch_size"),
    ] {
        let mut section = section.map_err(std::io::Error::from)?;
        if let Value::Object(keys) = &mut section {
            keys.remove(free);
        }
        sections[name] = section;
    }
    Ok(sections)
}

/// SHA-256 over length, ids and mask of every sample, as 64 hex digits.
fn data_hash(samples: &[Sample]) -> String {
    let mut hash = Sha256::new();
    for sample in samples {
        hash.update((sample.ids.len() as u64).to_le_bytes());
        for id in &sample.ids {
            hash.update(id.to_le_bytes());
        }
        hash.update(&sample.loss_mask);
    }
    hex(&hash.finalize())
}
