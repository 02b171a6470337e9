//! Models of the Hugging Face Hub: found in the cache that its libraries share, or downloaded there (feature `hub`).

use std::path::{Component, Path, PathBuf};

use super::fetched::check_snapshot;
use super::{ModelSourceConfig, ResolvedModel, fail};
use crate::error::Result;

/// Files that a target needs besides its weights.
const REQUIRED: &[&str] = &["config.json", "tokenizer.json"];
const SINGLE_FILE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Whether a text has the form `org/name`.
pub(super) fn is_repository_id(text: &str) -> bool {
    let allowed = |part: &str| {
        !part.is_empty()
            && !part.starts_with('.')
            && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
    };
    text.split_once('/').is_some_and(|(organisation, name)| allowed(organisation) && allowed(name))
}

/// A complete snapshot in the cache, else a download.
pub(super) fn resolve(model: &str, config: &ModelSourceConfig) -> Result<ResolvedModel> {
    let hub = config.hf_home.join("hub");
    let cached = snapshot(&hub, model);
    let problem = match &cached {
        Some(path) => match missing_file(path) {
            None => {
                check_snapshot(model, path, &config.cache_dir.join("hub"))?;
                return Ok(found(model, path.clone()));
            }
            Some(file) => format!("`{}` lacks `{file}`", path.display()),
        },
        None => format!("not in the cache `{}`", hub.display()),
    };
    if config.offline {
        let problem = format!("{problem}, and the network may not be used");
        return Err(fail(model, problem, "run once without offline mode, or give a folder or a .gguf file"));
    }
    download(model, &hub, &problem)
}

fn found(model: &str, path: PathBuf) -> ResolvedModel {
    let name = model.rsplit('/').next().unwrap_or(model).to_owned();
    ResolvedModel { path, name }
}

/// The snapshot that the branch `main` points to; where there is no such mark, the only snapshot there is.
fn snapshot(hub: &Path, model: &str) -> Option<PathBuf> {
    let repository = hub.join(format!("models--{}", model.replace('/', "--")));
    let snapshots = repository.join("snapshots");
    if let Ok(revision) = fs_err::read_to_string(repository.join("refs/main")) {
        let path = snapshots.join(revision.trim());
        if is_plain(revision.trim()) && path.is_dir() {
            return Some(path);
        }
    }
    let entries = fs_err::read_dir(snapshots).ok()?;
    let folders: Vec<PathBuf> =
        entries.filter_map(|entry| Some(entry.ok()?.path())).filter(|path| path.is_dir()).collect();
    <[PathBuf; 1]>::try_from(folders).ok().map(|[only]| only)
}

/// Whether a text is the name of one entry of a folder.
fn is_plain(name: &str) -> bool {
    let mut parts = Path::new(name).components();
    matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None))
}

/// The first file that a target needs and a snapshot lacks.
fn missing_file(folder: &Path) -> Option<String> {
    let lacks = |file: &&str| !folder.join(file).is_file();
    if let Some(file) = REQUIRED.iter().copied().find(lacks) {
        return Some(file.into());
    }
    if folder.join(SINGLE_FILE).is_file() {
        return None;
    }
    let Ok(index) = fs_err::read(folder.join(INDEX)) else { return Some(SINGLE_FILE.into()) };
    let index: serde_json::Value = serde_json::from_slice(&index).unwrap_or_default();
    let Some(map) = index["weight_map"].as_object() else { return Some(INDEX.into()) };
    let mut shards: Vec<&str> = map.values().filter_map(serde_json::Value::as_str).collect();
    shards.sort_unstable();
    shards.dedup();
    shards.into_iter().find(lacks).map(Into::into)
}

#[cfg(not(feature = "hub"))]
fn download(model: &str, _hub: &Path, problem: &str) -> Result<ResolvedModel> {
    Err(fail(
        model,
        format!("{problem}, and this program was built without downloads from the Hub"),
        "build it with `--features hub`, download the model with another tool, or give a folder or a .gguf file",
    ))
}

#[cfg(feature = "hub")]
fn download(model: &str, hub: &Path, _problem: &str) -> Result<ResolvedModel> {
    const FILES: &[&str] = &[
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "*.safetensors",
        INDEX,
    ];
    let failed = |error: &dyn std::fmt::Display| {
        fail(
            model,
            format!("download from the Hub failed: {error}"),
            "check the name, the network and, for a gated model, the token",
        )
    };
    let (organisation, name) = model.split_once('/').unwrap_or_default();
    let client = hf_hub::HFClient::builder().cache_dir(hub).build_sync().map_err(|error| failed(&error))?;
    let patterns = FILES.iter().map(|file| (*file).to_owned()).collect();
    let path = client
        .model(organisation, name)
        .snapshot_download()
        .allow_patterns(patterns)
        .send()
        .map_err(|error| failed(&error))?;
    match missing_file(&path) {
        None => Ok(found(model, path)),
        Some(file) => Err(fail(
            model,
            format!("the repository has no `{file}`"),
            "give a model with tokenizer.json and safetensors",
        )),
    }
}
