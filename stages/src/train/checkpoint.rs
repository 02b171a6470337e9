//! Checkpoints of a run: `step-000120/` with the drafter in the reference's Hugging Face layout, and the training state
//! beside it. With `train.ema` the drafter is the average, and the training state has the weights too.
//!
//! A folder is written under another name, flushed and renamed, so that it is whole or not there. The last n are kept.

use std::path::PathBuf;

use candle_core::{DType, Device, Tensor};
use deepspec_models::checkpoint::{replace_folder, write_json, write_tensors};
use deepspec_models::config::DrafterConfig;
use deepspec_models::draft::{DraftVocabulary, Parameters};
use deepspec_models::loss::dspark::LossHead;
use deepspec_models::optimizer::Optimizer;
use deepspec_models::weights::Weights;
use serde::Deserialize;
use serde_json::json;

use super::log::Pending;
use crate::error::{Error, Result};

/// Folder of the optimiser's state inside a checkpoint.
const STATE: &str = "training_state";
/// What the names of the weights begin with in the training state, where the checkpoint's own are an average.
const TRAINED: &str = "weights.";

/// The checkpoints of a run.
#[derive(Debug)]
pub struct Checkpoints {
    folder: PathBuf,
    keep: usize,
}

/// A checkpoint on disk.
#[derive(Debug, Clone)]
pub struct Found {
    /// Optimiser steps done.
    pub step: u64,
    /// Its folder.
    pub folder: PathBuf,
}

impl Checkpoints {
    /// The checkpoints under a folder, which need not exist yet.
    pub fn new(folder: PathBuf, keep: usize) -> Self {
        Self { folder, keep: keep.max(1) }
    }

    /// All of them, oldest first.
    ///
    /// # Errors
    /// When the folder cannot be read.
    pub fn all(&self) -> Result<Vec<Found>> {
        if !self.folder.is_dir() {
            return Ok(Vec::new());
        }
        let mut found = Vec::new();
        for entry in fs_err::read_dir(&self.folder)? {
            let folder = entry?.path();
            let name = folder.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            if let Some(step) = name.strip_prefix("step-").and_then(|step| step.parse().ok()) {
                found.push(Found { step, folder });
            }
        }
        found.sort_by_key(|found| found.step);
        Ok(found)
    }

    /// Removes what a killed save or removal left behind.
    ///
    /// # Errors
    /// When the disk refuses.
    pub fn remove_leftovers(&self) -> Result<()> {
        if !self.folder.is_dir() {
            return Ok(());
        }
        for entry in fs_err::read_dir(&self.folder)? {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if name.starts_with(".step-") && name.ends_with(".partial") {
                fs_err::remove_dir_all(&path)?;
            }
        }
        Ok(())
    }

    /// The newest.
    ///
    /// # Errors
    /// When the folder cannot be read.
    pub fn latest(&self) -> Result<Option<Found>> {
        Ok(self.all()?.pop())
    }

    /// Writes a checkpoint and drops the ones that are too old; `frozen` as [`frozen`] gives it. Where `parameters` are an average,
    /// `trained` are the weights that training goes on with.
    ///
    /// # Errors
    /// When the disk refuses; earlier checkpoints stay as they are.
    pub fn save(
        &self,
        step: u64,
        config: &DrafterConfig,
        parameters: &Parameters,
        trained: Option<&Parameters>,
        frozen: &[(String, Tensor)],
        optimizer: &Optimizer,
        log: &Pending,
    ) -> Result<()> {
        let tensors = tensors(parameters, frozen);
        let mut state = optimizer.state()?;
        for (name, var) in trained.into_iter().flat_map(Parameters::iter) {
            state.push((format!("{TRAINED}{name}"), var.as_detached_tensor()));
        }
        replace_folder(self.folder.join(format!("step-{step:06}")), |fresh| {
            write_json(&fresh.join("config.json"), &config.to_json())?;
            write_tensors(&fresh.join("model.safetensors"), &tensors)?;
            let folder = fresh.join(STATE);
            fs_err::create_dir(&folder)?;
            write_tensors(&folder.join("model.safetensors"), &state)?;
            write_json(&folder.join("state.json"), &json!({ "step": step, "log": log }))
        })?;
        for old in self.all()?.iter().rev().skip(self.keep) {
            // Out of sight first: a half-removed folder must not be taken for a checkpoint.
            let hidden = self.folder.join(format!(".step-{:06}.partial", old.step));
            fs_err::rename(&old.folder, &hidden)?;
            fs_err::remove_dir_all(&hidden)?;
        }
        Ok(())
    }
}

/// All tensors of a drafter in training, named as in a checkpoint; `frozen` as [`frozen`] gives it.
pub fn tensors(parameters: &Parameters, frozen: &[(String, Tensor)]) -> Vec<(String, Tensor)> {
    let trained = parameters.iter().map(|(name, var)| (name.to_owned(), var.as_detached_tensor()));
    trained.chain(frozen.iter().cloned()).collect()
}

/// The tensors of a drafter that are not trained: copies of the target's embedding and of its head, of which a drafter with a
/// draft vocabulary has some rows, and the map of that vocabulary.
///
/// # Errors
/// When a tensor cannot be made.
pub fn frozen(embed_tokens: &Tensor, head: &LossHead) -> Result<Vec<(String, Tensor)>> {
    let mut tensors = vec![
        ("embed_tokens.weight".to_owned(), embed_tokens.clone()),
        ("lm_head.weight".to_owned(), head.weight().clone()),
    ];
    if let Some(vocabulary) = head.vocabulary() {
        tensors.extend(vocabulary.tensors()?);
    }
    Ok(tensors)
}

/// Reads the trainable tensors of a configuration from a checkpoint's weights, whose draft vocabulary must be `vocabulary`; every
/// other tensor but the copies of the target's embedding and head is an error.
///
/// # Errors
/// When a tensor is missing, misshapen or left over, or the draft vocabulary is another.
pub fn read_parameters(
    weights: &Weights,
    config: &DrafterConfig,
    vocabulary: Option<&DraftVocabulary>,
) -> Result<Parameters> {
    let saved = DraftVocabulary::read_map(weights, config.draft_vocab(), config.body().vocab_size)?;
    if saved.as_ref() != vocabulary {
        return Err(Error::Mismatch {
            what: "draft vocabulary".into(),
            left: format!("the tokens in `{}`", weights.path().display()),
            right: "the most frequent ones of the cache".into(),
            hint: Some("use the cache that it was trained on, or train in another run folder from the start".into()),
        });
    }
    let mut parameters = Parameters::default();
    for (name, shape) in config.trainable_shapes() {
        parameters.insert(&name, &weights.get(&name, &shape)?)?;
    }
    weights.skip("embed_tokens.weight");
    weights.skip("lm_head.weight");
    weights.skip("d2t");
    weights.skip("t2d");
    weights.finish()?;
    Ok(parameters)
}

/// The trainable tensors of a run's own checkpoint.
///
/// # Errors
/// As [`read_parameters`], or when the checkpoint is of another drafter than the recipe's.
pub fn parameters(found: &Found, config: &DrafterConfig, vocabulary: Option<&DraftVocabulary>) -> Result<Parameters> {
    let saved = DrafterConfig::from_folder(&found.folder)?;
    if saved.to_json() != config.to_json() {
        return Err(Error::Mismatch {
            what: "drafter".into(),
            left: format!("the one in `{}`", found.folder.display()),
            right: "the recipe's".into(),
            hint: Some("train it in another run folder".into()),
        });
    }
    read_parameters(&Weights::from_folder(&found.folder, DType::F32, &Device::Cpu)?, config, vocabulary)
}

/// Restores the optimiser from a checkpoint and returns what the log had pending. Where the checkpoint's drafter is an average,
/// `average`, it also returns the weights that training goes on with.
///
/// # Errors
/// When the state is missing or does not fit the parameters.
pub fn restore(
    found: &Found,
    optimizer: &mut Optimizer,
    average: Option<&Parameters>,
) -> Result<(Pending, Option<Parameters>)> {
    let folder = found.folder.join(STATE);
    let path = folder.join("state.json");
    let text = fs_err::read_to_string(&path)?;
    let state: State = serde_json::from_str(&text)
        .map_err(|error| Error::Input(format!("`{}` is not the state of a training run: {error}", path.display())))?;
    let weights = Weights::from_folder(&folder, DType::F32, &Device::Cpu)?;
    optimizer.restore(state.step, |name, len| weights.get(name, &[len]))?;
    let trained = |average: &Parameters| -> Result<Parameters> {
        let mut trained = Parameters::default();
        for (name, var) in average.iter() {
            trained.insert(name, &weights.get(&format!("{TRAINED}{name}"), var.dims())?)?;
        }
        Ok(trained)
    };
    let trained = average.map(trained).transpose()?;
    weights.finish()?;
    Ok((state.log, trained))
}

#[derive(Deserialize)]
struct State {
    step: u64,
    log: Pending,
}
