//! A run's target cache in the reference's format, version 2.

use std::path::{Path, PathBuf};

use deepspec_datasets::target_cache::v2::{Manifest, Writer};
use deepspec_datasets::target_cache::{Reader, StorageMode, check_space};

use crate::error::{Error, Result};
use deepspec_engine::progress::{Context, Event};

/// What to export, and where to.
#[derive(Debug, Clone)]
pub struct CacheExport {
    /// Folder of the cache.
    pub cache: PathBuf,
    /// Folder to write; it must not exist or be empty.
    pub out: PathBuf,
    /// Size that a shard may have.
    pub max_shard_bytes: u64,
}

/// Writes the cache sample by sample. Source ids and domains have no place in the format.
///
/// # Errors
/// The cache is damaged or stores no hidden states, the disk has no room, or [`Error::Interrupted`]; the folder then does not appear.
pub fn cache(export: &CacheExport, ctx: Context<'_>) -> Result<Manifest> {
    let reader = Reader::open(&export.cache)?;
    let meta = reader.meta();
    if meta.storage == StorageMode::None {
        let path = export.cache.display();
        return Err(Error::Input(format!("`{path}` stores no hidden states, which a version 2 cache always does")));
    }
    let mut manifest = Manifest::new(&meta.target, &meta.layer_ids, meta.hidden_size, meta.max_length);
    // The reference names one of its parsers here; this cache was rendered with the target's own template.
    manifest.chat_template = format!("sha256:{}", meta.template_hash);
    manifest.exp_name = name(&export.cache);
    manifest.min_loss_tokens = 0;
    if let Some(prompts) = meta.recipe["data"]["prompts"].as_str() {
        manifest.source_jsonl_paths = vec![prompts.into()];
    }
    let (samples, tokens) = (reader.len(), reader.manifest().tokens);
    let per_token = 6 + 2 * meta.hidden_size as u64 * (meta.layer_ids.len() as u64 + 1);
    check_space(&export.out, tokens.saturating_mul(per_token))?;
    let mut writer = Writer::create(&export.out, manifest, export.max_shard_bytes)?;
    ctx.reporter.event(Event::Started { task: "export", total: samples, done: 0, unit: "samples" });
    for index in 0..samples {
        ctx.check_interrupt("nothing was written")?;
        writer.append(&reader.verify_sample(index)?)?;
        ctx.reporter.event(Event::Advanced { done: index + 1, detail: "" });
    }
    ctx.reporter.event(Event::Finished);
    Ok(writer.finish()?)
}

/// Name of the folder that holds the cache: that of the run.
fn name(cache: &Path) -> String {
    let run = cache.parent().and_then(Path::file_name).or(cache.file_name());
    run.map_or_else(String::new, |name| name.to_string_lossy().into_owned())
}
