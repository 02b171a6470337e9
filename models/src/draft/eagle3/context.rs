//! Eagle3 at inference: keys and values of committed rows cached per slot, further rows drafted past them.
//!
//! Drafted rows go into the cache past a slot's length, so they are gone as soon as the next committed rows are appended.

use candle_core::Tensor;
use deepspec_kernels::attention::ragged::{RaggedAttention, Segment, Visibility};

use super::Eagle3;
use crate::error::{Error, Result};
use crate::kv_cache::KvCache;
use crate::target::{embed, head_layout, select_rows};

impl Eagle3 {
    /// An empty cache. A slot needs room for the whole sequence and one proposal.
    ///
    /// # Errors
    /// When the memory cannot be had.
    pub fn new_context(&self, slots: usize, capacity: usize) -> Result<KvCache> {
        KvCache::new(1, slots, capacity, head_layout(&self.config.body), self.embed_tokens.device())
    }

    /// Appends rows of committed positions to their slots and returns the output row of the last of each, which predicts the
    /// token after the last one given.
    ///
    /// # Shapes
    /// hidden `[Σ lengths, hidden]` (of [`Eagle3::feature_rows`]), `tokens` the token after each of these positions, `commits`
    /// (slot, length of at least 1) in row order → `[commits, hidden]`
    ///
    /// # Errors
    /// When a slot is full, lengths do not fit or a token is outside the vocabulary.
    pub fn extend_context(
        &self,
        cache: &mut KvCache,
        hidden: &Tensor,
        tokens: &[u32],
        commits: &[(usize, usize)],
    ) -> Result<Tensor> {
        if commits.iter().any(|&(_, len)| len == 0) {
            return Err(Error::Batch("a commit of no rows".into()));
        }
        let segments: Vec<Segment> =
            commits.iter().map(|&(slot, len)| Segment { slot, start: cache.len(slot), len }).collect();
        let out = self.cached_rows(cache, hidden, tokens, segments)?;
        for &(slot, len) in commits {
            cache.advance(slot, len);
        }
        Ok(out)
    }

    /// Output rows of one more drafted token per slot, `ahead` positions behind the first one after the committed rows.
    ///
    /// # Shapes
    /// hidden `[slots, hidden]`, the output rows before; `tokens` what was drafted from them → `[slots, hidden]`
    ///
    /// # Errors
    /// As [`Eagle3::extend_context`].
    pub fn draft_rows(
        &self,
        cache: &KvCache,
        hidden: &Tensor,
        tokens: &[u32],
        slots: &[usize],
        ahead: usize,
    ) -> Result<Tensor> {
        let segments = slots.iter().map(|&slot| Segment { slot, start: cache.len(slot) + ahead, len: 1 }).collect();
        self.cached_rows(cache, hidden, tokens, segments)
    }

    /// Stores keys and values of the segments' rows; attends and goes on with the last row of each.
    fn cached_rows(&self, cache: &KvCache, hidden: &Tensor, tokens: &[u32], segments: Vec<Segment>) -> Result<Tensor> {
        let (rows, expected) = (hidden.dims()[0], segments.iter().map(|segment| segment.len).sum::<usize>());
        if rows != expected || tokens.len() != expected {
            return Err(Error::Batch(format!("{rows} hidden rows and {} tokens for {expected} rows", tokens.len())));
        }
        for segment in &segments {
            cache.room(segment.slot, segment.start + segment.len - cache.len(segment.slot))?;
        }
        let positions: Vec<usize> = segments.iter().flat_map(|s| s.start..s.start + s.len).collect();
        let input = self.layer.project(&embed(&self.embed_tokens, tokens)?, hidden, &self.rope.at(&positions))?;
        let mut last = Vec::with_capacity(segments.len());
        let mut end = 0;
        for segment in &segments {
            end += segment.len;
            last.push(end - 1);
        }
        let last_segments = segments.iter().map(|s| Segment { slot: s.slot, start: s.start + s.len - 1, len: 1 });
        let queries = self.cached_attention(cache, last_segments.collect());
        self.cached_attention(cache, segments).store(&input.k, &input.v, &cache.keys[0], &cache.values[0])?;
        let (q, residual) = if last.len() == rows {
            (input.q, input.residual)
        } else {
            (select_rows(&input.q, &last)?, select_rows(&input.residual, &last)?)
        };
        self.layer.finish(&residual, &queries.forward(&q, &cache.keys[0], &cache.values[0])?)
    }

    fn cached_attention(&self, cache: &KvCache, segments: Vec<Segment>) -> RaggedAttention {
        RaggedAttention {
            segments: segments.into(),
            capacity: cache.capacity(),
            heads: head_layout(&self.config.body),
            visibility: Visibility::Causal,
            window: None,
        }
    }
}
