//! Checkpoints of drafters in the layouts that others use, read into and written from the reference's layout, which is the one inside.
//!
//! [`Canonical::open`] takes a checkpoint of any known layout: [`detect()`] tells which, the layout's file turns its `config.json` into
//! the reference's keys, and the tensors get the reference's names, strictly and without a copy. [`Canonical::write`] is the way
//! back; what a format cannot say about a drafter is refused with the reason. Stored types (f32, f16, bf16) are kept.
//!
//! | format | block drafters | Eagle3 | target layers | block rule where `sample_from_anchor` is absent |
//! | --- | --- | --- | --- | --- |
//! | [`Deepspec`](Format::Deepspec), the reference | `Qwen3DSparkModel`, flat keys | `Qwen3Eagle3Model` | output of layer L | anchor-first, how these were trained |
//! | [`Zlab`](Format::Zlab) | `DFlashDraftModel`, `dflash_config`, no embedding, no head | – | output of layer L | 1+N |
//! | [`Speculators`](Format::Speculators), read by vLLM | `dspark`, `dflash`, body in `transformer_layer_config` | `eagle3` | L + 1 | dflash 1+N, dspark anchor-first |
//! | [`Sglang`](Format::Sglang) | the reference's with `dspark_config` or `dspark_*` keys | as SpecForge | output of layer L, the engine adds 1 | anchor-first, the only one it has |
//! | [`Specforge`](Format::Specforge) | `DSparkDraftModel`, all in `dflash_config` | `LlamaForCausalLMEagle3`, `midlayer.*` | output of layer L | `shift_label`, else anchor-first |
//!
//! What is written always states `sample_from_anchor`. Layer ids are explained in [`LayerIds`]. Called by `export`, `inspect` and
//! every stage that loads a drafter.

mod block;
mod deepspec;
mod detect;
mod json;
mod layers;
mod sglang;
mod specforge;
mod speculators;
mod tensors;
mod zlab;

use std::path::Path;

use candle_core::{DType, Device};
use serde_json::Value;

pub use self::detect::detect;
use self::json::Json;
pub use self::layers::LayerIds;
use self::tensors::{Need, Slot};
use crate::checkpoint::{self, replace_folder, write_json};
use crate::config::TargetConfig;
use crate::error::{Error, Result};
use crate::weights::{Part, SINGLE_FILE, Weights};

/// File beside an exported checkpoint that says how it does.
pub const PROFILE_FILE: &str = "speculation_profile.json";

/// Layout of a drafter's checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// The reference's: flat keys, tensors without a prefix.
    Deepspec,
    /// z-lab's DFlash.
    Zlab,
    /// That of the speculators library, which vLLM reads.
    Speculators,
    /// The reference's with the keys that SGLang looks for.
    Sglang,
    /// SpecForge's DSpark, and the EAGLE-3 layout with `midlayer.*`.
    Specforge,
}

impl Format {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Deepspec, Self::Zlab, Self::Speculators, Self::Sglang, Self::Specforge];

    /// Spelling on the command line and in messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Deepspec => "deepspec",
            Self::Zlab => "zlab",
            Self::Speculators => "speculators",
            Self::Sglang => "sglang",
            Self::Specforge => "specforge",
        }
    }

    /// The format of that spelling.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|format| format.name() == name)
    }

    /// How its checkpoints of block drafters or Eagle3 count target layers.
    pub fn layer_ids(self) -> LayerIds {
        match self {
            Self::Deepspec | Self::Zlab => LayerIds::Output,
            Self::Speculators => LayerIds::HiddenStates,
            Self::Sglang | Self::Specforge => LayerIds::Sglang,
        }
    }

    /// Name in a file of this format of a tensor named as in the reference's layout.
    fn tensor_name(self, is_eagle3: bool, name: &str) -> String {
        match (self, name.strip_prefix("layers.0.")) {
            (Self::Specforge | Self::Sglang, Some(rest)) if is_eagle3 => format!("midlayer.{rest}"),
            _ => name.into(),
        }
    }

    /// Whether a file of this format holds the tensor; what is left out is the target's.
    fn stores(self, is_eagle3: bool, slot: &Slot) -> bool {
        match self {
            Self::Deepspec | Self::Speculators => true,
            Self::Sglang => !is_eagle3 || slot.name != "embed_tokens.weight",
            Self::Zlab | Self::Specforge => slot.need != Need::Borrowed || is_eagle3 && slot.name == "lm_head.weight",
        }
    }

    /// Whether a tensor is one that a training checkpoint of this format repeats from the target.
    fn repeats_target(self, name: &str) -> bool {
        self == Self::Speculators && ["verifier_lm_head.weight", "verifier_norm.weight"].contains(&name)
    }
}

/// The target whose embedding and output head a drafter borrows.
#[derive(Debug)]
pub struct Lender {
    config: TargetConfig,
    weights: Weights,
}

impl Lender {
    /// Opens the target: a folder in Hugging Face layout or a GGUF file. No weight is read yet.
    ///
    /// # Errors
    /// It is no model that is known.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let config = TargetConfig::open(path)?;
        Ok(Self { config, weights: Weights::open(path, DType::F32, &Device::Cpu)? })
    }

    /// The target's configuration.
    pub fn config(&self) -> &TargetConfig {
        &self.config
    }

    /// The target's tensor for one of a drafter: its embedding, or its head, which is the embedding where the two are tied.
    fn part(&self, drafters: &str) -> Result<Part<'_>> {
        let name = match drafters {
            "lm_head.weight" if !self.config.tie_word_embeddings => "lm_head.weight",
            "lm_head.weight" | "embed_tokens.weight" => "model.embed_tokens.weight",
            other => return Err(Error::Batch(format!("tensor `{other}` is none that a target lends"))),
        };
        Ok(Part { weights: &self.weights, name: name.into(), rows: None })
    }
}

/// What the reading of a config may look at besides the config.
struct Source<'a> {
    weights: &'a Weights,
    /// Layers of the target, where it is known.
    target_layers: Option<usize>,
}

/// The target as an exported config names it.
#[derive(Debug, Clone, Default)]
pub struct Verifier {
    /// Name or path that an engine can load.
    pub name: Option<String>,
    /// Its class, such as `Qwen3ForCausalLM`.
    pub architecture: Option<String>,
}

/// A drafter's checkpoint in the reference's layout, whatever it is stored in.
#[derive(Debug)]
pub struct Canonical {
    /// Layout of the files.
    pub format: Format,
    /// `config.json` with the reference's keys. Block drafters always have `sample_from_anchor`.
    pub config: Value,
    /// Tensors under the reference's names. `embed_tokens.weight` and `lm_head.weight` are missing when the file leaves them to a target
    /// that is not known.
    pub weights: Weights,
    slots: Vec<Slot>,
}

impl Canonical {
    /// Opens a checkpoint of any known layout; tensors are handed out as `dtype` on `device`. With the target, what the checkpoint
    /// leaves to it is there as well.
    ///
    /// # Errors
    /// The layout is none or several that are known; a key is missing, contradicts another, or asks for what is not implemented; a
    /// tensor is missing, left over, misshapen or mistyped; the target's tensors have other shapes.
    pub fn open(dir: impl AsRef<Path>, lender: Option<&Lender>, dtype: DType, device: &Device) -> Result<Self> {
        let (json, stored) = checkpoint::load(&dir, dtype, device)?;
        let path = stored.path().join("config.json");
        let format = detect(stored.path(), &json, stored.names())?;
        let target_layers = lender.map(|lender| lender.config.num_hidden_layers);
        let source = Source { weights: &stored, target_layers };
        let json = Json::new(&path, &json)?;
        let config = match format {
            Format::Deepspec => deepspec::read(json, &source)?,
            Format::Zlab => zlab::read(json, &source)?,
            Format::Speculators => speculators::read(json, &source)?,
            Format::Sglang => sglang::read(json, &source)?,
            Format::Specforge => specforge::read(json, &source)?,
        };
        let slots = tensors::slots(&path, &config)?;
        let weights = tensors::canonical(format, &config, &slots, &stored, lender)?;
        tensors::check_vocabulary(&path, &config, &weights)?;
        Ok(Self { format, config, weights, slots })
    }

    /// Whether this is an Eagle3 drafter; else it is a block drafter (DSpark or DFlash).
    pub fn is_eagle3(&self) -> bool {
        is_eagle3(&self.config)
    }

    /// Writes the checkpoint in a format as the folder `dir`, replacing one of that name, with a `speculation_profile.json` where there
    /// is one.
    ///
    /// # Errors
    /// The format cannot hold the drafter, a tensor that it stores is left to an unknown target, or the disk refuses; `dir` is then as
    /// it was.
    pub fn write(
        &self,
        format: Format,
        dir: impl AsRef<Path>,
        verifier: &Verifier,
        profile: Option<&Value>,
    ) -> Result<()> {
        let config = self.config_in(format, verifier)?;
        let eagle = self.is_eagle3();
        let mut names = Vec::with_capacity(self.slots.len());
        for slot in self.slots.iter().filter(|slot| format.stores(eagle, slot)) {
            if self.weights.contains(&slot.name) {
                names.push((format.tensor_name(eagle, &slot.name), slot.name.clone()));
            } else if slot.need == Need::Borrowed && format == Format::Deepspec {
                let tensor = if slot.name == "lm_head.weight" { "lm_head.weight" } else { "embed_tokens.weight" };
                return Err(Error::NotStored { path: self.weights.path().into(), tensor });
            }
        }
        replace_folder(dir, |fresh| {
            write_json(&fresh.join("config.json"), &config)?;
            self.weights.write(&fresh.join(SINGLE_FILE), &names)?;
            profile.map_or(Ok(()), |profile| write_json(&fresh.join(PROFILE_FILE), profile))
        })
    }

    /// The `config.json` of a format.
    ///
    /// # Errors
    /// The format cannot hold the drafter.
    pub fn config_in(&self, format: Format, verifier: &Verifier) -> Result<Value> {
        let json = Json::new(self.weights.path(), &self.config)?;
        match format {
            Format::Deepspec => Ok(json.into_value()),
            Format::Zlab => zlab::write(json),
            Format::Speculators => speculators::write(json, verifier),
            Format::Sglang => sglang::write(json),
            Format::Specforge => specforge::write(json),
        }
    }
}

/// Whether a config in the reference's layout is that of an Eagle3 drafter.
fn is_eagle3(config: &Value) -> bool {
    Json::new(Path::new("config.json"), config).is_ok_and(|json| json.is_eagle3())
}

/// For refusals: the format cannot say this.
fn not_expressible(format: Format, problem: impl Into<String>) -> Error {
    Error::NotExpressible { format: format.name(), problem: problem.into() }
}
