//! The tensors of a drafter in the reference's layout, which is the one used inside, and the strict mapping of stored ones to them.

use std::path::Path;

use serde_json::{Value, json};

use super::json::Json;
use super::{Format, Lender, is_eagle3};
use crate::config::{DraftConfig, TargetConfig};
use crate::draft::{DraftVocabulary, trainable_shapes};
use crate::error::{Error, Result};
use crate::weights::{Part, Weights, is_derived};

const FLOATS: &[&str] = &["F32", "F16", "BF16"];
const INTEGERS: &[&str] = &["I64", "I32", "U8", "BOOL"];

/// Whether a checkpoint has to hold a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Need {
    Required,
    Optional,
    /// A copy of the target's, which a checkpoint may leave to the target.
    Borrowed,
}

/// One tensor of a drafter.
#[derive(Debug, Clone)]
pub(super) struct Slot {
    /// Name in the reference's layout.
    pub(super) name: String,
    shape: Vec<usize>,
    pub(super) need: Need,
    is_map: bool,
}

impl Slot {
    fn new(name: impl Into<String>, shape: &[usize], need: Need) -> Self {
        Self { name: name.into(), shape: shape.into(), need, is_map: false }
    }

    fn map(name: &str, length: usize, need: Need) -> Self {
        Self { is_map: true, ..Self::new(name, &[length], need) }
    }
}

/// The tensors of the drafter that a config in the reference's layout describes.
pub(super) fn slots(path: &Path, config: &Value) -> Result<Vec<Slot>> {
    let (mut slots, vocab, hidden, draft_vocab) = if is_eagle3(config) {
        eagle3(path, config)?
    } else {
        let config = DraftConfig::from_json(path, config)?;
        let trained = trainable_shapes(&config).into_iter();
        let slots = trained.map(|(name, shape)| Slot::new(name, &shape, Need::Required)).collect();
        (slots, config.body.vocab_size, config.body.hidden_size, config.draft_vocab())
    };
    slots.push(Slot::new("embed_tokens.weight", &[vocab, hidden], Need::Borrowed));
    // A drafter with fewer tokens than the target cannot borrow its head.
    let has_map = draft_vocab != vocab;
    let head = if has_map { Need::Required } else { Need::Borrowed };
    slots.push(Slot::new("lm_head.weight", &[draft_vocab, hidden], head));
    slots.push(Slot::map("d2t", draft_vocab, if has_map { Need::Required } else { Need::Optional }));
    slots.push(Slot::map("t2d", vocab, Need::Optional));
    Ok(slots)
}

/// Trained tensors, vocabulary, width and draft vocabulary of an Eagle3 drafter.
fn eagle3(path: &Path, config: &Value) -> Result<(Vec<Slot>, usize, usize, usize)> {
    let json = Json::new(path, config)?;
    let layers = json.integers("target_layer_ids")?.map_or(0, |ids| ids.len());
    let draft_vocab = json.optional_size("draft_vocab_size")?;
    let qk_norm = json.flag("qk_norm")?.unwrap_or(true);
    let mut body = Json::new(path, config)?;
    body.put("architectures", json!(["Qwen3ForCausalLM"]));
    let body = TargetConfig::from_json(path, &body.into_value())?;
    let TargetConfig { hidden_size, intermediate_size, head_dim, vocab_size, .. } = body;
    let (q, kv) = (body.num_attention_heads * head_dim, body.num_key_value_heads * head_dim);
    let mut slots = Vec::new();
    let mut add = |name: String, shape: &[usize]| slots.push(Slot::new(name, shape, Need::Required));
    add("fc.weight".into(), &[hidden_size, layers * hidden_size]);
    add("norm.weight".into(), &[hidden_size]);
    for layer in 0..body.num_hidden_layers {
        for name in ["input_layernorm", "hidden_norm", "post_attention_layernorm"] {
            add(format!("layers.{layer}.{name}.weight"), &[hidden_size]);
        }
        for (name, outputs, inputs, has_bias) in [
            ("self_attn.q_proj", q, 2 * hidden_size, body.attention_bias),
            ("self_attn.k_proj", kv, 2 * hidden_size, body.attention_bias),
            ("self_attn.v_proj", kv, 2 * hidden_size, body.attention_bias),
            ("self_attn.o_proj", hidden_size, q, body.attention_bias),
            ("mlp.gate_proj", intermediate_size, hidden_size, body.mlp_bias),
            ("mlp.up_proj", intermediate_size, hidden_size, body.mlp_bias),
            ("mlp.down_proj", hidden_size, intermediate_size, body.mlp_bias),
        ] {
            add(format!("layers.{layer}.{name}.weight"), &[outputs, inputs]);
            if has_bias {
                add(format!("layers.{layer}.{name}.bias"), &[outputs]);
            }
        }
        if qk_norm {
            add(format!("layers.{layer}.self_attn.q_norm.weight"), &[head_dim]);
            add(format!("layers.{layer}.self_attn.k_norm.weight"), &[head_dim]);
        }
    }
    Ok((slots, vocab_size, hidden_size, draft_vocab.unwrap_or(vocab_size)))
}

/// Stored tensors under the reference's names. Every stored tensor is used, none is missing, shapes and types are those of the
/// config, or the error names the tensor as the file spells it.
pub(super) fn canonical(
    format: Format,
    config: &Value,
    slots: &[Slot],
    stored: &Weights,
    lender: Option<&Lender>,
) -> Result<Weights> {
    let eagle = is_eagle3(config);
    let mut parts: Vec<(String, Part<'_>)> = Vec::with_capacity(slots.len());
    let mut used: Vec<String> = Vec::new();
    for slot in slots {
        let name = format.tensor_name(eagle, &slot.name);
        if stored.contains(&name) {
            check(stored, &name, &slot.shape, if slot.is_map { INTEGERS } else { FLOATS })?;
            parts.push((slot.name.clone(), Part { weights: stored, name: name.clone(), rows: None }));
            used.push(name);
        } else if let Some((fused, rows)) = fused(slots, &slot.name, &name, stored)? {
            parts.push((slot.name.clone(), Part { weights: stored, name: fused.clone(), rows: Some(rows) }));
            used.push(fused);
        } else {
            match (slot.need, lender) {
                (Need::Required, _) => {
                    let (path, expected) = (stored.path().into(), slot.shape.clone());
                    return Err(Error::TensorMissing { path, tensor: name, expected });
                }
                (Need::Borrowed, Some(lender)) => {
                    let part = lender.part(&slot.name)?;
                    check(part.weights, &part.name, &slot.shape, &[])?;
                    parts.push((slot.name.clone(), part));
                }
                (Need::Borrowed, None) | (Need::Optional, _) => {}
            }
        }
    }
    let is_known = |name: &str| used.iter().any(|used| used == name) || format.repeats_target(name) || is_derived(name);
    let left: Vec<String> = stored.names().filter(|name| !is_known(name)).map(Into::into).collect();
    if !left.is_empty() {
        return Err(Error::TensorsUnused { path: stored.path().into(), tensors: left });
    }
    stored.assemble(parts)
}

/// The map of a draft vocabulary must be one.
pub(super) fn check_vocabulary(path: &Path, config: &Value, weights: &Weights) -> Result<()> {
    if !is_eagle3(config) {
        DraftVocabulary::read(weights, &DraftConfig::from_json(path, config)?)?;
    }
    Ok(())
}

/// The rows of a fused `qkv_proj` that are the q, k or v projection `name` (`slot` in the reference's spelling).
fn fused(slots: &[Slot], slot: &str, name: &str, stored: &Weights) -> Result<Option<(String, std::ops::Range<usize>)>> {
    let parts = ["q_proj", "k_proj", "v_proj"];
    let Some(which) = parts.iter().position(|part| slot.contains(&format!(".self_attn.{part}."))) else {
        return Ok(None);
    };
    let fused = name.replace(parts[which], "qkv_proj");
    if !stored.contains(&fused) {
        return Ok(None);
    }
    let shape = |part: &str| {
        let wanted = slot.replace(parts[which], part);
        slots.iter().find(|slot| slot.name == wanted).map(|slot| slot.shape.as_slice()).unwrap_or_default()
    };
    let rows: Vec<usize> = parts.iter().map(|part| shape(part).first().copied().unwrap_or(0)).collect();
    let mut whole = shape(parts[0]).to_vec();
    if let Some(first) = whole.first_mut() {
        *first = rows.iter().sum();
    }
    check(stored, &fused, &whole, FLOATS)?;
    let start: usize = rows[..which].iter().sum();
    Ok(Some((fused, start..start + rows[which])))
}

/// Checks shape and type of a tensor that is there; an empty list of types allows all.
fn check(weights: &Weights, name: &str, shape: &[usize], types: &[&str]) -> Result<()> {
    let (path, tensor) = (weights.path().to_path_buf(), name.to_owned());
    let found = weights.shape(name).unwrap_or_default();
    if found != shape {
        return Err(Error::TensorShape { path, tensor, expected: shape.into(), found: found.into() });
    }
    let found = weights.stored_type(name).unwrap_or_default();
    if !types.is_empty() && !types.contains(&found.as_str()) {
        let expected = if types == FLOATS { "F32, F16 or BF16" } else { "I64, I32, U8 or BOOL" };
        return Err(Error::TensorDtype { path, tensor, found, expected });
    }
    Ok(())
}
