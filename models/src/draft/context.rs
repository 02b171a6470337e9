//! A drafter at inference: keys and values of the committed context cached per slot, blocks drafted for many at once.

use candle_core::Tensor;
use deepspec_kernels::attention::ragged::{RaggedAttention, Segment, Visibility};
use deepspec_kernels::rms_norm;

use super::DSpark;
use crate::error::Result;
use crate::kv_cache::KvCache;
use crate::target::head_layout;

impl DSpark {
    /// An empty context cache. A slot needs room for the whole sequence and one block.
    ///
    /// # Errors
    /// When the memory cannot be had.
    pub fn new_context(&self, slots: usize, capacity: usize) -> Result<KvCache> {
        let heads = head_layout(&self.config.body);
        KvCache::new(self.layers.len(), slots, capacity, heads, self.embed_tokens.device())
    }

    fn attention(&self, cache: &KvCache, segments: Vec<Segment>) -> RaggedAttention {
        RaggedAttention {
            segments: segments.into(),
            capacity: cache.capacity(),
            heads: head_layout(&self.config.body),
            visibility: Visibility::WholeSegment,
            window: self.config.sliding_window,
        }
    }

    /// Appends features of committed positions to the context of their slots.
    ///
    /// # Shapes
    /// features `[Σ lengths, layers · hidden]`, `commits` (slot, length) in row order
    ///
    /// # Errors
    /// When a slot is full or the widths do not fit.
    pub fn extend_context(&self, cache: &mut KvCache, features: &Tensor, commits: &[(usize, usize)]) -> Result<()> {
        let mut segments = Vec::with_capacity(commits.len());
        for &(slot, len) in commits {
            cache.room(slot, len)?;
            segments.push(Segment { slot, start: cache.len(slot), len });
        }
        let positions: Vec<usize> = segments.iter().flat_map(|s| s.start..s.start + s.len).collect();
        let angles = self.rope.at(&positions);
        let context = self.context_rows(features)?;
        let attention = self.attention(cache, segments);
        for (i, layer) in self.layers.iter().enumerate() {
            let (k, v) = layer.context_keys_values(&context, &angles)?;
            attention.store(&k, &v, &cache.keys[i], &cache.values[i])?;
        }
        for &(slot, len) in commits {
            cache.advance(slot, len);
        }
        Ok(())
    }

    /// Final hidden rows of one block per slot; the anchor stands right after the slot's context.
    ///
    /// The block's keys and values go into the cache past its length and are overwritten by what is committed later.
    ///
    /// # Shapes
    /// `anchors` (slot, anchor token) → `[anchors · block_size, hidden]`
    ///
    /// # Errors
    /// When a slot has no room for a block.
    pub fn block_hidden(&self, cache: &KvCache, anchors: &[(usize, u32)]) -> Result<Tensor> {
        let size = self.config.block_size;
        let mut segments = Vec::with_capacity(anchors.len());
        for &(slot, _) in anchors {
            cache.room(slot, size)?;
            segments.push(Segment { slot, start: cache.len(slot), len: size });
        }
        let positions: Vec<usize> = segments.iter().flat_map(|s| s.start..s.start + s.len).collect();
        let angles = self.rope.at(&positions);
        let attention = self.attention(cache, segments);
        let mut x = self.block_inputs(anchors.iter().map(|&(_, token)| Some(token)), size)?;
        for (i, layer) in self.layers.iter().enumerate() {
            let block = layer.project(&x, &angles)?;
            attention.store(&block.k, &block.v, &cache.keys[i], &cache.values[i])?;
            x = layer.finish(&x, &attention.forward(&block.q, &cache.keys[i], &cache.values[i])?)?;
        }
        Ok(rms_norm(&x, &self.norm, self.config.body.rms_norm_eps)?)
    }
}
