//! The tensors of a drafter in the reference's layout, which is the one used inside, and the strict mapping of stored ones to them.

use std::path::Path;

use serde_json::Value;

use super::{Format, Lender, is_eagle3};
use crate::config::DrafterConfig;
use crate::draft::DraftVocabulary;
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
    let config = DrafterConfig::from_json(path, config)?;
    let (vocab, hidden, draft_vocab) = (config.body().vocab_size, config.body().hidden_size, config.draft_vocab());
    let trained = config.trainable_shapes().into_iter();
    let mut slots: Vec<Slot> = trained.map(|(name, shape)| Slot::new(name, &shape, Need::Required)).collect();
    slots.push(Slot::new("embed_tokens.weight", &[vocab, hidden], Need::Borrowed));
    // A drafter with fewer tokens than the target cannot borrow its head.
    let has_map = draft_vocab != vocab;
    let head = if has_map { Need::Required } else { Need::Borrowed };
    slots.push(Slot::new("lm_head.weight", &[draft_vocab, hidden], head));
    slots.push(Slot::map("d2t", draft_vocab, if has_map { Need::Required } else { Need::Optional }));
    slots.push(Slot::map("t2d", vocab, Need::Optional));
    Ok(slots)
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
    let config = DrafterConfig::from_json(path, config)?;
    DraftVocabulary::read_map(weights, config.draft_vocab(), config.body().vocab_size)?;
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
