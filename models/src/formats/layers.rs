//! Target layer ids as the formats count them.
//!
//! Inside there is one meaning: id L is the output of decoder layer L, −1 the output of the embedding. For a target of n layers:
//!
//! | convention | key | embedding | output of layer L | last layer |
//! | --- | --- | --- | --- | --- |
//! | [`LayerIds::Output`] | `target_layer_ids` (DeepSpec, z-lab, SpecForge, this program) | −1 | L | n − 1 |
//! | [`LayerIds::HiddenStates`] | `aux_hidden_state_layer_ids`, `eagle_aux_hidden_state_layer_ids` (speculators, vLLM) | 0 | L + 1 | n |
//! | [`LayerIds::GgufInput`] | `dflash.target_layers` (GGUF), the layer whose input it is | 0 | L + 1 | n |
//! | [`LayerIds::Sglang`] | `target_layer_ids`, `eagle_config` (SGLang, which adds 1 itself) | −1 | L | n − 1 |
//!
//! The entry n of a list of hidden states is normalised in Hugging Face's models and raw in most engines; that is why no drafter
//! reads the last layer. Ids are converted, never clamped: one that has no meaning is an error.

use std::path::Path;

use super::json::Json;
use crate::error::{Error, Result};

/// How a format counts target layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerIds {
    /// The decoder layer whose output is read.
    Output,
    /// The index in the list of hidden states that starts with the embedding.
    HiddenStates,
    /// The decoder layer whose input is read.
    GgufInput,
    /// The decoder layer whose output is read; the engine adds 1 to get the layer whose input it captures.
    Sglang,
}

impl LayerIds {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Output, Self::HiddenStates, Self::GgufInput, Self::Sglang];

    /// What a format's id is more than ours.
    fn offset(self) -> i64 {
        match self {
            Self::Output | Self::Sglang => 0,
            Self::HiddenStates | Self::GgufInput => 1,
        }
    }

    /// Our ids in the format's convention.
    pub fn write(self, ids: &[i32]) -> Vec<i64> {
        ids.iter().map(|&id| i64::from(id) + self.offset()).collect()
    }

    /// A format's ids in ours; `path` and `field` are for the message.
    ///
    /// # Errors
    /// An id lies before the embedding or is beyond any model.
    pub fn read(self, path: &Path, field: &str, ids: &[i64]) -> Result<Vec<i32>> {
        let first = self.offset() - 1;
        let ours = |id: i64| id.checked_sub(self.offset()).filter(|_| id >= first).and_then(|id| id.try_into().ok());
        let ours: Option<Vec<i32>> = ids.iter().map(|&id| ours(id)).collect();
        ours.ok_or_else(|| {
            Error::field(path, field, format!("{ids:?}"), format!("layers from {first} (the embedding)"))
        })
    }
}

/// The ids that a z-lab checkpoint without `target_layer_ids` means: as many as it has draft layers, evenly from layer 1 to the third
/// from the end, halves rounded to even; one alone lies in the middle.
pub(super) fn zlab_default(draft_layers: usize, target_layers: usize) -> Vec<i64> {
    if draft_layers == 1 {
        return vec![target_layers as i64 / 2];
    }
    let (first, last) = (1.0, target_layers as f64 - 3.0);
    let share = |index: usize| index as f64 / (draft_layers - 1) as f64;
    (0..draft_layers).map(|index| (first + share(index) * (last - first)).round_ties_even() as i64).collect()
}

/// The layers that an EAGLE-3 checkpoint without ids means, three entries of the list of hidden states: 2, n / 2 and n − 3.
pub(super) fn eagle3_default(json: &Json) -> Result<Vec<i32>> {
    let layers = json.size("num_target_layers")? as i64;
    LayerIds::HiddenStates.read(json.path, "num_target_layers", &[2, layers / 2, layers - 3])
}
