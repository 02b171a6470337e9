//! A drafter at inference: keys and values of the committed context cached per slot, blocks drafted for many at once.
//!
//! With a sliding window W only the last W context rows before an anchor are ever in sight. A slot is then a ring of W rows
//! and one block, and of a longer commit only the last W rows are computed. Positions stay absolute.

use candle_core::Tensor;
use deepspec_kernels::attention::ragged::{RaggedAttention, Segment, Visibility};
use deepspec_kernels::rms_norm;

use super::DSpark;
use crate::error::{Error, Result};
use crate::kv_cache::KvCache;
use crate::target::head_layout;

impl DSpark {
    /// An empty context cache for sequences of at most `capacity` positions, one block counted in. With a sliding window its memory
    /// does not depend on `capacity`, once that is larger than window and block.
    ///
    /// # Errors
    /// When the memory cannot be had.
    pub fn new_context(&self, slots: usize, capacity: usize) -> Result<KvCache> {
        let (layers, device) = (self.layers.len(), self.embed_tokens.device());
        let heads = head_layout(&self.config.body);
        match self.config.sliding_window {
            Some(window) => KvCache::windowed(layers, slots, capacity, window, self.config.block_size, heads, device),
            None => KvCache::new(layers, slots, capacity, heads, device),
        }
    }

    fn attention(&self, cache: &KvCache, segments: Vec<Segment>) -> RaggedAttention {
        RaggedAttention {
            segments: segments.into(),
            capacity: cache.rows(),
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
        let (mut segments, mut first, mut kept) = (Vec::with_capacity(commits.len()), 0, Vec::new());
        for &(slot, len) in commits {
            cache.room(slot, len)?;
            // No later block sees more than the window.
            let seen = self.config.sliding_window.map_or(len, |window| len.min(window));
            segments.push(Segment { slot, start: cache.len(slot) + len - seen, len: seen });
            kept.push((first + len - seen, seen));
            first += len;
        }
        let rows = features.dims2()?.0;
        if rows != first {
            return Err(Error::Batch(format!("{rows} feature rows for commits of {first}")));
        }
        let positions: Vec<usize> = segments.iter().flat_map(|s| s.start..s.start + s.len).collect();
        let angles = self.rope.at(&positions);
        let context = if positions.len() == rows {
            self.context_rows(features)?
        } else {
            let kept = kept.iter().map(|&(from, len)| features.narrow(0, from, len));
            self.context_rows(&Tensor::cat(&kept.collect::<Result<Vec<_>, _>>()?, 0)?)?
        };
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

    /// Passes over committed positions of a slot that no later block sees: those of a whole window must follow before the next block.
    ///
    /// # Errors
    /// When the drafter has no window or the slot is full.
    pub fn skip_context(&self, cache: &mut KvCache, slot: usize, len: usize) -> Result<()> {
        if self.config.sliding_window.is_none() {
            return Err(Error::Batch(format!("a drafter without a window sees the {len} positions to be passed over")));
        }
        cache.room(slot, len)?;
        cache.advance(slot, len);
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
