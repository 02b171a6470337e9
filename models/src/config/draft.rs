//! Configuration of a DSpark or DFlash drafter: read from and written as the `config.json` of its checkpoint.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::drafter::check_layer_ids;
use super::fields::Fields;
use super::moe::MoeConfig;
use super::{Family, TargetConfig, read_json};
use crate::error::{Error, Result};

/// Architecture that is written.
const ARCHITECTURE: &str = "Qwen3DSparkModel";
/// Anchors per sequence where a checkpoint does not state them; used in training only.
const DEFAULT_ANCHORS: usize = 512;
/// Keys that may stand in a nested `dflash_config` as well as at the top.
const NESTED: [&str; 10] = [
    "mask_token_id",
    "target_layer_ids",
    "block_size",
    "draft_vocab_size",
    "sample_from_anchor",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "confidence_head_alpha",
];
/// Keys of drafters that are not implemented.
pub(crate) const UNKNOWN: [&str; 6] = [
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
    "draft_adapter_rank",
    "pure_draft_prefix_len",
];
/// Longest block.
const MAX_BLOCK_SIZE: usize = 256;

/// Form of the Markov head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MarkovHeadType {
    /// Bias from the previous token alone.
    Vanilla,
    /// Bias scaled by a gate of the hidden row and the previous token.
    Gated,
    /// Bias from a recurrent state.
    Rnn,
}

impl MarkovHeadType {
    /// Spelling in `config.json`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Vanilla => "vanilla",
            Self::Gated => "gated",
            Self::Rnn => "rnn",
        }
    }

    /// The type of that spelling.
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Vanilla, Self::Gated, Self::Rnn].into_iter().find(|kind| kind.name() == name)
    }
}

/// Which rows of a block predict which tokens. Checkpoints name it by the flag `sample_from_anchor`.
///
/// Both layouts embed the anchor token in row 0 and the mask token in all others, at positions anchor, anchor + 1, ….
/// Proposal k stands at anchor + 1 + k and its previous token at anchor + k; the layouts differ in the row that it is read
/// from. A drafter that is read in the other layout than it was trained in still runs, and has as good as nothing accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockLayout {
    /// `sample_from_anchor: true`: row j predicts the token at anchor + 1 + j, so that all rows propose.
    AnchorFirst,
    /// `sample_from_anchor: false`, 1+N: row 0, the anchor's, predicts nothing, and row j predicts the token at its own position
    /// anchor + j.
    AnchorPlusMasks,
}

impl BlockLayout {
    /// Row of proposal 0.
    pub fn first_predicting_row(self) -> usize {
        match self {
            Self::AnchorFirst => 0,
            Self::AnchorPlusMasks => 1,
        }
    }

    /// Name in messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::AnchorFirst => "anchor-first",
            Self::AnchorPlusMasks => "1+N",
        }
    }

    /// The layout of a checkpoint without the flag: what its format has always meant, where there is such a thing.
    ///
    /// * `speculators_model_type` `dspark` → anchor-first, `dflash` → 1+N: the defaults of that format
    /// * an architecture `…DSparkModel` (`Qwen3DSparkModel`) → anchor-first; the released DFlash drafters of that name too
    /// * architecture `DFlashDraftModel` → 1+N
    fn of_unmarked(architecture: &str, speculators_model_type: Option<&str>) -> Option<Self> {
        match speculators_model_type {
            Some("dspark") => Some(Self::AnchorFirst),
            Some("dflash") => Some(Self::AnchorPlusMasks),
            None if architecture.ends_with("DSparkModel") => Some(Self::AnchorFirst),
            None if architecture == "DFlashDraftModel" => Some(Self::AnchorPlusMasks),
            Some(_) | None => None,
        }
    }
}

/// A drafter's shape. The checkpoint's `config.json` is a copy of the target's with the fields below.
#[derive(Debug, Clone, PartialEq)]
pub struct DraftConfig {
    /// Shape of the backbone: the target's, with `num_hidden_layers` draft layers, an output head of its own, and `qk_norm` (true
    /// unless the file says otherwise).
    pub body: TargetConfig,
    /// Number of layers of the target.
    pub num_target_layers: usize,
    /// Input rows per block, γ when the block is anchor-first.
    pub block_size: usize,
    /// Number of tokens that the drafter can propose, where that is not the target's whole vocabulary. The map is in the weights, see
    /// [`DraftVocabulary`](crate::draft::DraftVocabulary).
    pub draft_vocab_size: Option<usize>,
    /// Token whose embedding stands at the slots to be predicted.
    pub mask_token_id: u32,
    /// Target layers whose outputs are the features, in the order of their concatenation: i = output of decoder layer i, −1 = output of
    /// the embedding. The target's last layer is not allowed.
    pub target_layer_ids: Vec<i32>,
    /// Anchors drawn per sequence in training.
    pub num_anchors: usize,
    /// Whether there is a confidence head.
    pub enable_confidence_head: bool,
    /// Whether the confidence head also sees the Markov embedding of the previous token.
    pub confidence_head_with_markov: bool,
    /// Rank of the Markov head; 0 = none (DFlash).
    pub markov_rank: usize,
    /// Form of the Markov head; `None` exactly when the rank is 0.
    pub markov_head_type: Option<MarkovHeadType>,
    /// Block layout: true for [`BlockLayout::AnchorFirst`], false for [`BlockLayout::AnchorPlusMasks`].
    pub sample_from_anchor: bool,
    /// Number of last context rows that are attended to; `None` = all.
    pub sliding_window: Option<usize>,
    /// The mixture of experts in the place of the draft layers' MLPs; `None` for MLPs like the target's.
    pub moe: Option<MoeConfig>,
}

impl DraftConfig {
    /// A drafter's backbone for a target: its shape with `draft_layers` layers, Qwen3-like, with untied embeddings.
    pub fn body_of(target: &TargetConfig, draft_layers: usize) -> TargetConfig {
        TargetConfig {
            family: Family::Qwen3,
            qk_norm: true,
            num_hidden_layers: draft_layers,
            tie_word_embeddings: false,
            stop_ids: super::sorted(target.eos_token_ids.clone()),
            ..target.clone()
        }
    }

    /// Number of tokens that the drafter can propose.
    pub fn draft_vocab(&self) -> usize {
        self.draft_vocab_size.unwrap_or(self.body.vocab_size)
    }

    /// Whether the MLPs have a shared expert as wide as the target's MLP.
    pub fn shared_expert_fits_target(&self) -> bool {
        self.moe.as_ref().is_some_and(|moe| moe.shared_expert_intermediate_size == self.body.intermediate_size)
    }

    /// Which rows of a block predict which tokens.
    pub fn layout(&self) -> BlockLayout {
        if self.sample_from_anchor { BlockLayout::AnchorFirst } else { BlockLayout::AnchorPlusMasks }
    }

    /// Tokens proposed per full block.
    pub fn proposals(&self) -> usize {
        self.block_size - self.layout().first_predicting_row()
    }

    /// Reads `config.json` of a checkpoint folder.
    ///
    /// # Errors
    /// As [`from_json`](Self::from_json), or the file cannot be read.
    pub fn from_folder(folder: impl AsRef<Path>) -> Result<Self> {
        let path = folder.as_ref().join("config.json");
        Self::from_json(&path, &read_json(&path)?)
    }

    /// Reads the content of a `config.json`; `path` is for messages. Fields may also stand in a nested `dflash_config`.
    ///
    /// Where `sample_from_anchor` is absent, the layout is what the format has always meant: anchor-first for an architecture that
    /// ends in `DSparkModel` and for `speculators_model_type` `dspark`, 1+N for architecture `DFlashDraftModel` and for
    /// `speculators_model_type` `dflash`. Anything else is refused.
    ///
    /// # Errors
    /// A field is missing, out of range or contradicts another; the block layout is not told.
    pub fn from_json(path: &Path, json: &Value) -> Result<Self> {
        let fields = Fields::new(path, json)?;
        let architecture = match fields.strings("architectures")?.as_slice() {
            [one] => *one,
            _ => return Err(fields.bad("architectures", "a list of one name")),
        };
        if !(architecture.contains("DSpark") || architecture.contains("DFlash")) {
            return Err(fields.unsupported("architecture", architecture, "DSpark and DFlash drafters"));
        }
        let model_type = fields.optional_string("speculators_model_type")?;
        let unmarked = || Some(BlockLayout::of_unmarked(architecture, model_type)? == BlockLayout::AnchorFirst);
        let ambiguous = || Error::AmbiguousLayout { path: path.into(), architecture: architecture.into() };
        let nested = fields.object("dflash_config")?;
        if let Some(nested) = nested {
            check_nested(&nested)?;
        }
        if let Some(key) = UNKNOWN.iter().find(|key| fields.get(key).is_some()) {
            return Err(fields.unsupported(key, "present", "DSpark and DFlash as the reference has them"));
        }
        let at = |name: &str| fields.or_in(nested, name);
        let flagged = at("sample_from_anchor")?.optional_flag("sample_from_anchor")?;
        let sample_from_anchor = flagged.or_else(unmarked).ok_or_else(ambiguous)?;
        let family = Family::parse(path, "model_type", fields.string("model_type")?)?;
        let mut body = TargetConfig::from_fields(&fields, family)?;
        body.qk_norm = fields.flag("qk_norm", true)?;
        same_width(&fields, body.hidden_size)?;

        let count = |name: &str| at(name)?.optional_count(name);
        let flag = |name: &str| at(name)?.optional_flag(name);
        let mask = at("mask_token_id")?;
        let layers = at("target_layer_ids")?;
        let layer_ids = layers.required("target_layer_ids", layers.integers("target_layer_ids")?)?;
        let as_i32 = |id: i64| i32::try_from(id).map_err(|_| layers.bad("target_layer_ids", "numbers of layers"));
        let markov_rank = count("markov_rank")?.unwrap_or(0);
        let head = at("markov_head_type")?;
        let markov_head_type = match (markov_rank, head.optional_string("markov_head_type")?) {
            (0, _) => None,
            (_, Some(name)) => Some(
                MarkovHeadType::from_name(name)
                    .ok_or_else(|| head.unsupported("markov_head_type", name, "`vanilla`, `gated` and `rnn`"))?,
            ),
            (_, None) => return Err(head.missing("markov_head_type")),
        };
        let enable_confidence_head = flag("enable_confidence_head")?.unwrap_or(false);
        let confidence_head_with_markov = match flag("confidence_head_with_markov")? {
            Some(flag) => flag && enable_confidence_head,
            None if enable_confidence_head => return Err(fields.missing("confidence_head_with_markov")),
            None => false,
        };
        let config = Self {
            num_target_layers: fields.size("num_target_layers")?,
            block_size: at("block_size")?.size("block_size")?,
            draft_vocab_size: at("draft_vocab_size")?
                .optional_size("draft_vocab_size")?
                .filter(|&size| size != body.vocab_size),
            mask_token_id: mask.required("mask_token_id", mask.optional_id("mask_token_id")?)?,
            target_layer_ids: layer_ids.into_iter().map(as_i32).collect::<Result<_>>()?,
            num_anchors: fields.optional_size("num_anchors")?.unwrap_or(DEFAULT_ANCHORS),
            enable_confidence_head,
            confidence_head_with_markov,
            markov_rank,
            markov_head_type,
            sample_from_anchor,
            sliding_window: sliding_window(&fields, body.num_hidden_layers)?,
            moe: MoeConfig::from_fields(&fields)?,
            body,
        };
        config.validate(path)?;
        Ok(config)
    }

    /// Checks what the fields must satisfy together; `path` is for messages.
    ///
    /// # Errors
    /// Names the first field at fault.
    pub fn validate(&self, path: &Path) -> Result<()> {
        let bad = |field: &str, found: String, expected: String| Err(Error::field(path, field, found, expected));
        let smallest = if self.sample_from_anchor { 1 } else { 2 };
        if !(smallest..=MAX_BLOCK_SIZE).contains(&self.block_size) {
            return bad("block_size", self.block_size.to_string(), format!("{smallest} to {MAX_BLOCK_SIZE}"));
        }
        check_layer_ids(path, &self.target_layer_ids, self.num_target_layers)?;
        if let Some(size) = self.draft_vocab_size.filter(|size| !(1..self.body.vocab_size).contains(size)) {
            let expected = format!("1 to vocab_size {}", self.body.vocab_size);
            return bad("draft_vocab_size", size.to_string(), expected);
        }
        let mask = self.mask_token_id;
        if mask as usize >= self.body.vocab_size {
            return bad("mask_token_id", mask.to_string(), format!("below vocab_size {}", self.body.vocab_size));
        }
        let body = &self.body;
        let special = body.stop_ids.iter().copied().chain(body.bos_token_id).chain(body.pad_token_id);
        if special.into_iter().any(|id| id == mask) {
            return bad("mask_token_id", mask.to_string(), "a token other than bos, eos and pad".into());
        }
        if self.markov_head_type.is_some() != (self.markov_rank > 0) {
            let found = self.markov_head_type.map_or("not given", MarkovHeadType::name);
            return bad("markov_head_type", found.into(), format!("one that fits markov_rank {}", self.markov_rank));
        }
        if self.confidence_head_with_markov && (self.markov_rank == 0 || !self.enable_confidence_head) {
            let expected = "false without a Markov head and a confidence head";
            return bad("confidence_head_with_markov", "true".into(), expected.into());
        }
        if self.sliding_window == Some(0) {
            return bad("sliding_window", "0".into(), "at least 1".into());
        }
        self.moe.as_ref().map_or(Ok(()), |moe| moe.validate(path, body))
    }

    /// The `config.json`, in a fixed order: the body's fields, then the drafter's. [`from_json`](Self::from_json) gives the same
    /// config back.
    pub fn to_json(&self) -> Value {
        let mut json: Map<String, Value> = self.body.to_json();
        let mut put = |key: &str, value: Value| json.insert(key.into(), value);
        let layer_type = if self.sliding_window.is_some() { "sliding_attention" } else { "full_attention" };
        put("architectures", json!([ARCHITECTURE]));
        put("layer_types", json!(vec![layer_type; self.body.num_hidden_layers]));
        put("use_sliding_window", json!(self.sliding_window.is_some()));
        put("sliding_window", json!(self.sliding_window));
        put("max_window_layers", json!(if self.sliding_window.is_some() { 0 } else { self.body.num_hidden_layers }));
        put("num_target_layers", json!(self.num_target_layers));
        put("block_size", json!(self.block_size));
        put("sample_from_anchor", json!(self.sample_from_anchor));
        put("mask_token_id", json!(self.mask_token_id));
        if let Some(size) = self.draft_vocab_size {
            put("draft_vocab_size", json!(size));
        }
        put("target_layer_ids", json!(self.target_layer_ids));
        put("num_anchors", json!(self.num_anchors));
        put("markov_rank", json!(self.markov_rank));
        if let Some(kind) = self.markov_head_type {
            put("markov_head_type", json!(kind.name()));
        }
        put("enable_confidence_head", json!(self.enable_confidence_head));
        if self.enable_confidence_head {
            put("confidence_head_with_markov", json!(self.confidence_head_with_markov));
        }
        if !self.body.qk_norm {
            put("qk_norm", json!(false));
        }
        if let Some(moe) = &self.moe {
            moe.write(&mut json);
        }
        Value::Object(json)
    }
}

/// Refuses what a nested `dflash_config` says and nobody would read.
fn check_nested(nested: &Fields) -> Result<()> {
    if nested.flag("causal", false)? {
        return Err(nested.unsupported("causal", "true", "`false`: rows of a block see the whole block"));
    }
    for (key, known) in [("attention_mode", &["gqa"][..]), ("projector_type", &["dflash", "dspark"])] {
        if let Some(found) = nested.optional_string(key)?.filter(|found| !known.contains(found)) {
            return Err(nested.unsupported(key, found, "`gqa` with `dflash` and `dspark`"));
        }
    }
    let is_known = |key: &&str| NESTED.contains(key) || ["causal", "attention_mode", "projector_type"].contains(key);
    match nested.keys().find(|key| !is_known(key)) {
        Some(key) => Err(nested.unsupported(key, "present", "the keys that its layout is known by")),
        None => Ok(()),
    }
}

/// The drafter's width must be the target's.
pub(super) fn same_width(fields: &Fields, hidden: usize) -> Result<()> {
    match fields.optional_size("target_hidden_size")? {
        Some(width) if width != hidden => Err(fields.disagrees("target_hidden_size", fields, "hidden_size")),
        _ => Ok(()),
    }
}

fn sliding_window(fields: &Fields, layers: usize) -> Result<Option<usize>> {
    let types = fields.strings("layer_types")?;
    let sliding = types.iter().filter(|kind| **kind == "sliding_attention").count();
    if let Some(other) = types.iter().find(|kind| !["full_attention", "sliding_attention"].contains(kind)) {
        return Err(fields.unsupported("layer_types", *other, "`full_attention` and `sliding_attention`"));
    }
    if sliding != 0 && sliding != types.len() {
        return Err(fields.unsupported("layer_types", "a mixture", "one type for all draft layers"));
    }
    super::check_layer_types(fields, layers)?;
    let flag = fields.optional_flag("use_sliding_window")?;
    if flag == Some(false) && sliding > 0 {
        return Err(fields.disagrees("use_sliding_window", fields, "layer_types"));
    }
    // Layers from this one on have the window; it says nothing where the types of the layers do.
    let first = fields.optional_count("max_window_layers")?.unwrap_or(0);
    let in_use = match (types.is_empty(), flag.unwrap_or(false)) {
        (false, _) => sliding > 0,
        (true, true) if first > 0 && first < layers => {
            return Err(fields.unsupported(
                "max_window_layers",
                first.to_string(),
                "a window in all draft layers or none",
            ));
        }
        (true, flag) => flag && first == 0,
    };
    if !in_use {
        return Ok(None);
    }
    fields.size("sliding_window").map(Some)
}
