//! Plans memory before anything is started: caches of target and drafter for all slots.

use deepspec_models::config::{DrafterConfig, TargetConfig};
use deepspec_models::kv_cache::KvCache;
use deepspec_models::target::head_layout;

use crate::error::{Error, Result};
use deepspec_engine::{MOST_UNSEEN, PREFILL_CHUNK};

/// Tokens of a sequence where nobody says how many.
const USUAL_CONTEXT: usize = 4096;

/// Slots and their length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capacity {
    /// Sequences at a time.
    pub slots: usize,
    /// Tokens of each, prompt included.
    pub context: usize,
    /// Bytes of all caches when every slot is full.
    pub bytes: usize,
}

impl Capacity {
    /// Plans for `slots` sequences of `context` tokens (by default what the target was made for, at most 4096) within
    /// `available` bytes.
    ///
    /// # Errors
    /// [`Error::Input`] for a context that the target was not made for, [`Error::Memory`] when the caches exceed the memory.
    pub fn plan(
        target: &TargetConfig,
        drafter: Option<&DrafterConfig>,
        slots: usize,
        context: Option<usize>,
        available: Option<u64>,
    ) -> Result<Self> {
        let longest = target.max_position_embeddings;
        let context = context.unwrap_or(USUAL_CONTEXT.min(longest));
        if context > longest || context < 2 {
            return Err(Error::Input(format!(
                "a context of {context} tokens is not possible: the target was made for 2 to {longest}"
            )));
        }
        let drafter_bytes = drafter.map_or(0, |drafter| {
            let capacity = context + drafter.proposals() + 1;
            let window = match drafter {
                DrafterConfig::Block(config) => config.sliding_window.map(|window| (window, config.block_size)),
                DrafterConfig::Eagle3(_) => None,
            };
            let rows = window.map_or(capacity, |(window, block)| KvCache::ring_rows(capacity, window, block));
            let cached = KvCache::bytes(drafter.body().num_hidden_layers, slots, rows, head_layout(drafter.body()));
            // While the drafter rests, features of committed tokens wait for it, in the end as rows of the hidden size in Eagle3.
            let most = window.map_or(MOST_UNSEEN, |(window, _)| window);
            let waiting = context.min(most.saturating_add(PREFILL_CHUNK)) * drafter.target_layer_ids().len();
            let rows = match drafter {
                DrafterConfig::Block(_) => waiting,
                DrafterConfig::Eagle3(_) => waiting + context,
            };
            cached + slots * rows * target.hidden_size * size_of::<f32>()
        });
        let bytes =
            KvCache::bytes(target.num_hidden_layers, slots, context, head_layout(target)).saturating_add(drafter_bytes);
        match available {
            Some(available) if bytes as u64 > available => Err(Error::Memory {
                what: format!("caches of {slots} sequences of {context} tokens"),
                needed: bytes as u64,
                available,
                hint: format!("give a smaller `--context` (such as {}) or fewer `--slots`", {
                    let fits = (context as u64 * available / bytes as u64) as usize;
                    (fits / 64 * 64).max(64)
                }),
            }),
            _ => Ok(Self { slots, context, bytes }),
        }
    }
}
