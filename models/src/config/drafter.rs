//! Configuration of a drafter of any kind; the first entry of `architectures` says which.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;

use super::{DraftConfig, Eagle3Config, TargetConfig, read_json};
use crate::draft::{eagle3, trainable_shapes};
use crate::error::{Error, Result};

/// A drafter's configuration.
#[derive(Debug, Clone, PartialEq)]
pub enum DrafterConfig {
    /// DSpark and DFlash: blocks drafted in parallel.
    Block(DraftConfig),
    /// Eagle3: one token after the other.
    Eagle3(Eagle3Config),
}

impl DrafterConfig {
    /// Reads `config.json` of a checkpoint folder.
    ///
    /// # Errors
    /// As [`from_json`](Self::from_json), or the file cannot be read.
    pub fn from_folder(folder: impl AsRef<Path>) -> Result<Self> {
        let path = folder.as_ref().join("config.json");
        Self::from_json(&path, &read_json(&path)?)
    }

    /// Reads the content of a `config.json`; `path` is for messages.
    ///
    /// # Errors
    /// As [`DraftConfig::from_json`] and [`Eagle3Config::from_json`].
    pub fn from_json(path: &Path, json: &Value) -> Result<Self> {
        let is_eagle3 = json["architectures"][0].as_str().is_some_and(|name| name.contains("Eagle3"));
        if is_eagle3 {
            Eagle3Config::from_json(path, json).map(Self::Eagle3)
        } else {
            DraftConfig::from_json(path, json).map(Self::Block)
        }
    }

    /// The `config.json`.
    pub fn to_json(&self) -> Value {
        match self {
            Self::Block(config) => config.to_json(),
            Self::Eagle3(config) => config.to_json(),
        }
    }

    /// Shape of its decoder layers.
    pub fn body(&self) -> &TargetConfig {
        match self {
            Self::Block(config) => &config.body,
            Self::Eagle3(config) => &config.body,
        }
    }

    /// Number of layers of the target.
    pub fn num_target_layers(&self) -> usize {
        match self {
            Self::Block(config) => config.num_target_layers,
            Self::Eagle3(config) => config.num_target_layers,
        }
    }

    /// Target layers whose outputs it reads.
    pub fn target_layer_ids(&self) -> &[i32] {
        match self {
            Self::Block(config) => &config.target_layer_ids,
            Self::Eagle3(config) => &config.target_layer_ids,
        }
    }

    /// Most tokens of a proposal.
    pub fn proposals(&self) -> usize {
        match self {
            Self::Block(config) => config.proposals(),
            Self::Eagle3(config) => config.ttt_length,
        }
    }

    /// Number of tokens that it can propose, where that is not the target's whole vocabulary.
    pub fn draft_vocab_size(&self) -> Option<usize> {
        match self {
            Self::Block(config) => config.draft_vocab_size,
            Self::Eagle3(config) => config.draft_vocab_size,
        }
    }

    /// Number of tokens that it can propose.
    pub fn draft_vocab(&self) -> usize {
        self.draft_vocab_size().unwrap_or(self.body().vocab_size)
    }

    /// Names and shapes of its trainable tensors, sorted by name.
    pub fn trainable_shapes(&self) -> BTreeMap<String, Vec<usize>> {
        match self {
            Self::Block(config) => trainable_shapes(config),
            Self::Eagle3(config) => eagle3::trainable_shapes(config),
        }
    }
}

/// Checks the feature layers of a drafter for a target of `layers` layers; `path` is for messages.
pub(super) fn check_layer_ids(path: &Path, ids: &[i32], layers: usize) -> Result<()> {
    let last = i32::try_from(layers).map_or(i32::MAX, |layers| layers - 2);
    let bad = |expected: String| Err(Error::field(path, "target_layer_ids", format!("{ids:?}"), expected));
    if ids.is_empty() || ids.iter().any(|id| !(-1..=last).contains(id)) {
        return bad(format!(
            "at least one id, each from -1 to {last} (num_target_layers is {layers}, its last layer is not allowed)"
        ));
    }
    let mut unique = ids.to_vec();
    unique.sort_unstable();
    unique.dedup();
    if unique.len() != ids.len() {
        return bad("each id once".into());
    }
    Ok(())
}
