//! A recipe's drafter: its configuration, and a trained checkpoint loaded for inference. [`Drafter`] holds one of any kind.

pub mod limits;

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use deepspec_models::config::{DraftConfig, DrafterConfig, Eagle3Config, MarkovHeadType, MoeConfig, TargetConfig};
use deepspec_models::draft::{DSpark, Eagle3, ParameterSource};
use deepspec_models::formats::{Canonical, Lender};
use deepspec_models::linear::Linear;
use deepspec_models::return_freed_memory;
use deepspec_models::speculate::{DSparkProposer, Eagle3Proposer, Proposer, Temperatures};
use deepspec_models::target::Target;
use deepspec_models::weights::Weights;

use crate::error::{Error, Result};
use crate::recipe::{Algorithm, DraftRecipe, MarkovHead, Precision, Recipe, SharedExpert};
use crate::target_model::{TargetModel, packing};

/// A drafter of any kind, in training or loaded for drafting.
#[derive(Debug)]
pub enum Drafter {
    /// DSpark or DFlash.
    Block(DSpark),
    /// Eagle3.
    Eagle3(Eagle3),
}

impl Drafter {
    /// Builds the drafter over its tensors; `embed_tokens` is the target's, frozen.
    ///
    /// # Errors
    /// When a tensor is missing or misshapen, or the drafter is of a form that is not implemented.
    pub fn new(config: DrafterConfig, embed_tokens: Tensor, source: ParameterSource<'_>) -> Result<Self> {
        Ok(match config {
            DrafterConfig::Block(config) => Self::Block(DSpark::new(config, embed_tokens, source)?),
            DrafterConfig::Eagle3(config) => Self::Eagle3(Eagle3::new(config, embed_tokens, source)?),
        })
    }

    /// The drafter with an output head of its own, for drafting.
    #[must_use]
    pub fn with_lm_head(self, lm_head: Linear) -> Self {
        match self {
            Self::Block(drafter) => Self::Block(drafter.with_lm_head(lm_head)),
            Self::Eagle3(drafter) => Self::Eagle3(drafter.with_lm_head(lm_head)),
        }
    }

    /// Its configuration.
    pub fn config(&self) -> DrafterConfig {
        match self {
            Self::Block(drafter) => DrafterConfig::Block(drafter.config().clone()),
            Self::Eagle3(drafter) => DrafterConfig::Eagle3(drafter.config().clone()),
        }
    }

    /// Name in tables and metrics.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Block(drafter) if drafter.markov_head().is_some() => "dspark",
            Self::Block(_) => "dflash",
            Self::Eagle3(_) => "eagle3",
        }
    }

    /// Most tokens of a proposal.
    pub fn block_size(&self) -> usize {
        match self {
            Self::Block(drafter) => drafter.config().proposals(),
            Self::Eagle3(drafter) => drafter.config().ttt_length,
        }
    }

    /// Target layers whose outputs it reads.
    pub fn target_layer_ids(&self) -> &[i32] {
        match self {
            Self::Block(drafter) => &drafter.config().target_layer_ids,
            Self::Eagle3(drafter) => &drafter.config().target_layer_ids,
        }
    }

    /// Whether it tells the confidence of its tokens.
    pub fn has_confidence(&self) -> bool {
        matches!(self, Self::Block(drafter) if drafter.confidence_head().is_some())
    }

    /// Number of tokens of a proposal that it tells the confidence of.
    pub fn confidences(&self) -> usize {
        if self.has_confidence() { self.block_size() } else { 0 }
    }

    /// The drafter with calibrated confidences.
    ///
    /// # Errors
    /// When it has none, or not as many.
    pub fn with_calibration(self, temperatures: Temperatures) -> Result<Self> {
        match self {
            Self::Block(drafter) => Ok(Self::Block(drafter.with_calibration(temperatures)?)),
            Self::Eagle3(_) => Err(Error::Input("Eagle3 has no confidences to calibrate".into())),
        }
    }

    /// The temperatures of its confidences, where they are calibrated.
    pub fn calibration(&self) -> Option<&Temperatures> {
        match self {
            Self::Block(drafter) => drafter.calibration(),
            Self::Eagle3(_) => None,
        }
    }

    /// What drafts with it for `slots` sequences of at most `capacity` committed tokens.
    ///
    /// # Errors
    /// When drafter and target do not fit, or the memory cannot be had.
    pub fn proposer<'a>(&'a self, target: &'a Target, slots: usize, capacity: usize) -> Result<Box<dyn Proposer + 'a>> {
        let head = target.lm_head();
        Ok(match self {
            Self::Block(drafter) => Box::new(DSparkProposer::new(drafter, head, slots, capacity)?),
            Self::Eagle3(drafter) => Box::new(Eagle3Proposer::new(drafter, head, slots, capacity)?),
        })
    }
}

/// The configuration of the drafter that a recipe describes for a target.
///
/// # Errors
/// When the recipe does not fit the target.
pub fn draft_config(recipe: &Recipe, target: &TargetConfig) -> Result<DrafterConfig> {
    let Algorithm::Eagle3 = recipe.draft.algorithm else {
        return block_config(recipe, target).map(DrafterConfig::Block);
    };
    let draft = &recipe.draft;
    let missing = |key: &str| Error::Recipe { origin: "for `eagle3`".into(), problem: format!("`{key}` is absent") };
    let mut body = Eagle3Config::body_of(target);
    body.qk_norm = draft.qk_norm;
    let config = Eagle3Config {
        body,
        num_target_layers: target.num_hidden_layers,
        target_layer_ids: draft.target_layer_ids.resolve(target.num_hidden_layers)?,
        ttt_length: draft.ttt_length.ok_or_else(|| missing("draft.ttt_length"))?,
        step_loss_decay: recipe.train.step_loss_decay.ok_or_else(|| missing("train.step_loss_decay"))?,
        draft_vocab_size: draft.vocab_size.filter(|&size| size != target.vocab_size),
        target_model_name_or_path: Some(recipe.target.model.clone()),
        norm_before_residual: false,
    };
    config.validate(Path::new("recipe"))?;
    Ok(DrafterConfig::Eagle3(config))
}

fn block_config(recipe: &Recipe, target: &TargetConfig) -> Result<DraftConfig> {
    let draft = &recipe.draft;
    let dspark = draft.algorithm == Algorithm::Dspark;
    let markov_rank = if dspark { draft.markov_rank } else { 0 };
    if markov_rank > target.vocab_size {
        let problem = format!(
            "`draft.markov_rank` is {markov_rank}, allowed: at most the target's vocabulary of {}",
            target.vocab_size
        );
        return Err(Error::Recipe { origin: "for this target".into(), problem });
    }
    let mut body = DraftConfig::body_of(target, draft.num_layers);
    body.qk_norm = draft.qk_norm;
    let config = DraftConfig {
        body,
        num_target_layers: target.num_hidden_layers,
        block_size: draft.block_size,
        draft_vocab_size: draft.vocab_size.filter(|&size| size != target.vocab_size),
        mask_token_id: draft.mask_token_id,
        target_layer_ids: draft.target_layer_ids.resolve(target.num_hidden_layers)?,
        num_anchors: recipe.train.num_anchors,
        enable_confidence_head: dspark && draft.confidence_head,
        confidence_head_with_markov: dspark
            && draft.confidence_head
            && draft.confidence_head_with_markov
            && markov_rank > 0,
        markov_rank,
        markov_head_type: (markov_rank > 0).then_some(match draft.markov_head {
            MarkovHead::Vanilla => MarkovHeadType::Vanilla,
            MarkovHead::Gated => MarkovHeadType::Gated,
            MarkovHead::Rnn => MarkovHeadType::Rnn,
        }),
        sample_from_anchor: draft.sample_from_anchor,
        sliding_window: draft.sliding_window,
        moe: experts(draft, target),
    };
    config.validate(Path::new("recipe"))?;
    Ok(config)
}

/// The mixture of experts that a recipe describes for a target.
fn experts(draft: &DraftRecipe, target: &TargetConfig) -> Option<MoeConfig> {
    let num_experts_per_tok = draft.experts_per_token?;
    Some(MoeConfig {
        num_experts: draft.num_experts?,
        num_experts_per_tok,
        moe_intermediate_size: draft.moe_intermediate_size?,
        // The only weight of a token's experts would be 1 whatever the router says.
        norm_topk_prob: num_experts_per_tok > 1,
        shared_expert_intermediate_size: match draft.shared_expert {
            None | Some(SharedExpert::AsTarget(false)) => 0,
            Some(SharedExpert::AsTarget(true)) => target.intermediate_size,
            Some(SharedExpert::Width(width)) => width,
        },
    })
}

/// Loads a checkpoint of any layout for inference beside its target, whose embedding and head it may borrow; every tensor of it must
/// be used.
///
/// # Errors
/// When the checkpoint is damaged or belongs to another target.
pub fn load_drafter_for(folder: &Path, model: &TargetModel, precision: Precision) -> Result<Drafter> {
    load(folder, open(folder, model)?, model.target.config(), precision)
}

/// As [`load_drafter_for`] for a checkpoint that borrows nothing.
///
/// # Errors
/// As [`load_drafter_for`].
pub fn load_drafter(folder: &Path, target: &TargetConfig, precision: Precision) -> Result<Drafter> {
    load(folder, Canonical::open(folder, None, DType::F32, &Device::Cpu)?, target, precision)
}

fn load(folder: &Path, checkpoint: Canonical, target: &TargetConfig, precision: Precision) -> Result<Drafter> {
    let Canonical { config, weights, .. } = checkpoint;
    let config = DrafterConfig::from_json(&folder.join("config.json"), &config)?;
    let body = config.body();
    for (what, drafter, target) in [
        ("hidden_size", body.hidden_size, target.hidden_size),
        ("vocab_size", body.vocab_size, target.vocab_size),
        ("number of target layers", config.num_target_layers(), target.num_hidden_layers),
    ] {
        if drafter != target {
            return Err(Error::Mismatch {
                what: what.into(),
                left: format!("{drafter} in drafter `{}`", folder.display()),
                right: format!("{target} in the target"),
                hint: Some("use the drafter with the target it was trained for".into()),
            });
        }
    }
    let drafter = drafter_of(config, &weights, precision)?;
    return_freed_memory();
    Ok(drafter)
}

/// A drafter for inference from the tensors of its checkpoint, every one of which must be used.
///
/// # Errors
/// When a tensor is missing, misshapen or left over.
pub fn drafter_of(config: DrafterConfig, weights: &Weights, precision: Precision) -> Result<Drafter> {
    let (vocab, draft_vocab, hidden) = (config.body().vocab_size, config.draft_vocab(), config.body().hidden_size);
    let packing = packing(precision);
    let embed_tokens = weights.get("embed_tokens.weight", &[vocab, hidden])?;
    let lm_head = Linear::frozen(&[&weights.get("lm_head.weight", &[draft_vocab, hidden])?], None, packing)?;
    let drafter = Drafter::new(config, embed_tokens, ParameterSource::Frozen(weights, packing))?;
    weights.finish()?;
    Ok(drafter.with_lm_head(lm_head))
}

/// A checkpoint of any layout, with what it leaves to its target.
///
/// # Errors
/// As [`Canonical::open`].
pub fn open(folder: &Path, model: &TargetModel) -> Result<Canonical> {
    let lender = Lender::open(&model.path)?;
    Ok(Canonical::open(folder, Some(&lender), DType::F32, &Device::Cpu)?)
}

/// One line that says what a drafter is.
pub fn describe(config: &DrafterConfig) -> String {
    match config {
        DrafterConfig::Block(config) => describe_block(config),
        DrafterConfig::Eagle3(config) => format!(
            "drafter: Eagle3, {} steps of training-time test, target layers {:?}, vocabulary {}, q/k norm {}",
            config.ttt_length,
            config.target_layer_ids,
            vocabulary(config.draft_vocab_size, &config.body),
            if config.body.qk_norm { "on" } else { "off" },
        ),
    }
}

fn vocabulary(draft_vocab_size: Option<usize>, body: &TargetConfig) -> String {
    match draft_vocab_size {
        Some(size) => format!("{size} of {}", body.vocab_size),
        None => body.vocab_size.to_string(),
    }
}

fn describe_block(config: &DraftConfig) -> String {
    let head = match config.markov_head_type {
        Some(kind) => format!("{} Markov head of rank {}", kind.name(), config.markov_rank),
        None => "no Markov head".into(),
    };
    let vocabulary = vocabulary(config.draft_vocab_size, &config.body);
    format!(
        "drafter: {} draft layers, {} blocks of {} rows with {} proposals, target layers {:?}, vocabulary {vocabulary}, \
         {head}, confidence {}, window {}, MLP {}",
        config.body.num_hidden_layers,
        config.layout().name(),
        config.block_size,
        config.proposals(),
        config.target_layer_ids,
        if config.enable_confidence_head { "on" } else { "off" },
        config.sliding_window.map_or("none".into(), |w| w.to_string()),
        config.moe.as_ref().map_or("like the target's".into(), |moe| format!("of {moe}")),
    )
}
