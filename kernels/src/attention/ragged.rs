//! Attention of the new rows of many sequences over their caches, and the write into the caches.
//!
//! Values are cached as `[slots · capacity, kv_heads · head_dim]`: position p of a sequence in slot s is row
//! s · capacity + p. Keys are cached transposed, `[slots · kv_heads · head_dim, capacity]`, so that the scores of many keys
//! are computed side by side without horizontal sums. Prefill, decode, verification and drafting are the same call with other segments. Every row is
//! computed in one order of operations that depends on nothing but its own keys.

use std::sync::Arc;

#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::{CpuStorage, CustomOp3, InplaceOp2, Layout, Result, Shape, Tensor, bail};

use super::HeadLayout;
use crate::multiversion;
use crate::rows::Rows;
use crate::simd::{axpy, axpy4, exp_shifted, max, weighted_sum};
use crate::threads;
#[cfg(feature = "cuda")]
use crate::{cuda::Cuda, device::attention as device};

/// New rows of one sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Cache slot of the sequence.
    pub slot: usize,
    /// Position of the first new row.
    pub start: usize,
    /// Number of new rows.
    pub len: usize,
}

/// Which keys a row sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Visibility {
    /// Positions up to and including its own.
    Causal,
    /// All positions before the segment and the whole segment.
    WholeSegment,
}

/// One attention call over caches.
#[derive(Debug, Clone)]
pub struct RaggedAttention {
    /// Segments in row order; their lengths add up to the number of query rows.
    pub segments: Arc<[Segment]>,
    /// Positions per slot in the caches.
    pub capacity: usize,
    /// Head sizes.
    pub heads: HeadLayout,
    /// Keys a row sees.
    pub visibility: Visibility,
    /// A row at position p sees only keys at positions > p − window (of the segment's start for
    /// [`Visibility::WholeSegment`]); `None` for all.
    pub window: Option<usize>,
}

impl RaggedAttention {
    /// Attends.
    ///
    /// # Shapes
    /// q `[rows, heads · head_dim]`, keys `[slots · kv_heads · head_dim, capacity]`, values
    /// `[slots · capacity, kv_heads · head_dim]` → `[rows, heads · head_dim]`
    ///
    /// # Errors
    /// When shapes, segments and capacity do not fit each other.
    pub fn forward(&self, q: &Tensor, k_cache: &Tensor, v_cache: &Tensor) -> Result<Tensor> {
        q.apply_op3_no_bwd(k_cache, v_cache, self)
    }

    fn keys_of_row(&self, segment: &Segment, row: usize) -> std::ops::Range<usize> {
        match self.visibility {
            Visibility::Causal => {
                let end = segment.start + row + 1;
                self.window.map_or(0, |w| end.saturating_sub(w))..end
            }
            Visibility::WholeSegment => {
                self.window.map_or(0, |w| segment.start.saturating_sub(w))..segment.start + segment.len
            }
        }
    }
}

/// Writes the rows of each segment into a value cache at their positions.
///
/// # Shapes
/// rows `[rows, kv_heads · head_dim]`, cache `[slots · capacity, kv_heads · head_dim]`
///
/// # Errors
/// When a segment does not fit into its slot.
pub fn store_values(cache: &Tensor, rows: &Tensor, segments: &[Segment], capacity: usize) -> Result<()> {
    let rows = rows.contiguous()?;
    let mut first = 0;
    for segment in segments {
        if segment.start + segment.len > capacity {
            bail!("positions {}..{} exceed the cache of {capacity}", segment.start, segment.start + segment.len);
        }
        cache.slice_set(&rows.narrow(0, first, segment.len)?, 0, segment.slot * capacity + segment.start)?;
        first += segment.len;
    }
    Ok(())
}

/// Writes the rows of each segment into a transposed key cache at their positions.
///
/// # Shapes
/// rows `[rows, kv_heads · head_dim]`, cache `[slots · kv_heads · head_dim, capacity]`
///
/// # Errors
/// When a segment does not fit into its slot.
pub fn store_keys(cache: &Tensor, rows: &Tensor, segments: &Arc<[Segment]>) -> Result<()> {
    cache.inplace_op2(rows, &StoreKeys { segments: segments.clone() })
}

struct StoreKeys {
    segments: Arc<[Segment]>,
}

impl InplaceOp2 for StoreKeys {
    fn name(&self) -> &'static str {
        "store-keys"
    }

    fn cpu_fwd(&self, cache: &mut CpuStorage, cl: &Layout, rows: &CpuStorage, rl: &Layout) -> Result<()> {
        let rows = Rows::new(self.name(), rows, rl)?;
        let CpuStorage::F32(cache) = cache else { bail!("store-keys: expected an f32 cache") };
        let (_, capacity) = cl.shape().dims2()?;
        let width = rows.cols;
        let mut next = 0;
        for segment in self.segments.iter() {
            let Segment { slot, start, len } = *segment;
            if start + len > capacity || !cl.is_contiguous() || (slot + 1) * width * capacity > cl.shape().elem_count()
            {
                bail!("store-keys: {segment:?} of width {width} does not fit a cache of {:?}", cl.dims());
            }
            let first = cl.start_offset() + slot * width * capacity + start;
            for i in 0..len {
                for (d, &value) in rows.row(next + i).iter().enumerate() {
                    cache[first + d * capacity + i] = value;
                }
            }
            next += len;
        }
        Ok(())
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, cache: &mut CudaStorage, cl: &Layout, rows: &CudaStorage, rl: &Layout) -> Result<()> {
        let cuda = Cuda::of(rows);
        let rows = cuda.rows(self.name(), rows, rl)?;
        let (count, capacity) = cl.shape().dims2()?;
        let fits = |s: &Segment| s.start + s.len <= capacity && (s.slot + 1) * rows.cols <= count;
        if !cl.is_contiguous() || !self.segments.iter().all(fits) {
            bail!("store-keys: {:?} of width {} do not fit a cache of {:?}", self.segments, rows.cols, cl.dims());
        }
        let cache = cuda.start_mut::<f32>(cache, cl)?;
        device::store_keys(&cuda, &rows, &self.segments, *cache, capacity)
    }
}

multiversion! {
    /// One row and one group of query heads. `k` has a row per dimension of a key, starting at `k_row`.
    fn attend(q: &[f32], k: Rows<'_>, k_row: usize, v: Rows<'_>, v_row: usize, keys: std::ops::Range<usize>, column: usize, heads: HeadLayout,
        scores: &mut [f32], y: &mut [f32]) {
        let (dim, count, scale) = (heads.head_dim, keys.len(), heads.scale());
        for (q, scores) in q.chunks_exact(dim).zip(scores.chunks_exact_mut(count)) {
            let k = |d: usize| k.part(k_row + d, keys.start, count);
            let quads = q.chunks_exact(4);
            let tail = quads.remainder();
            for (i, q) in quads.enumerate() {
                axpy4([q[0], q[1], q[2], q[3]], [k(4 * i), k(4 * i + 1), k(4 * i + 2), k(4 * i + 3)], scores);
            }
            for (i, &q) in tail.iter().enumerate() {
                axpy(q, k(dim - tail.len() + i), scores);
            }
            for score in scores.iter_mut() {
                *score *= scale;
            }
        }
        for (head, scores) in scores.chunks_exact_mut(count).enumerate().take(heads.group()) {
            let total = exp_shifted(scores, max(scores));
            let y = &mut y[head * dim..(head + 1) * dim];
            weighted_sum(scores, |j| v.part(v_row + keys.start + j, column, dim), y);
            for value in y.iter_mut() {
                *value /= total;
            }
        }
    }
}

impl CustomOp3 for RaggedAttention {
    fn name(&self) -> &'static str {
        "ragged-attention"
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        ql: &Layout,
        k: &CpuStorage,
        kl: &Layout,
        v: &CpuStorage,
        vl: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let HeadLayout { heads, kv_heads, head_dim } = self.heads;
        let q = Rows::new(self.name(), q, ql)?;
        let (k, v) = (Rows::new(self.name(), k, kl)?, Rows::new(self.name(), v, vl)?);
        let rows: usize = self.segments.iter().map(|s| s.len).sum();
        if q.count != rows || q.cols != heads * head_dim || v.cols != kv_heads * head_dim || k.cols != self.capacity {
            bail!(
                "attention of {rows} rows, {heads} heads, {kv_heads} key/value heads of {head_dim} got q {:?}, k {:?}, v {:?}",
                ql.dims(),
                kl.dims(),
                vl.dims()
            );
        }
        let mut places = Vec::with_capacity(rows);
        let mut work = 0;
        for segment in self.segments.iter() {
            if segment.start + segment.len > self.capacity
                || (segment.slot + 1) * self.capacity > v.count
                || (segment.slot + 1) * v.cols > k.count
            {
                bail!("segment {segment:?} lies outside caches of {} rows, capacity {}", v.count, self.capacity);
            }
            for row in 0..segment.len {
                let keys = self.keys_of_row(segment, row);
                work += keys.len() * heads * head_dim;
                places.push((segment.slot, keys));
            }
        }
        let width = self.heads.group() * head_dim;
        let mut y = vec![0f32; rows * heads * head_dim];
        threads::for_each_chunk(&mut y, width, work >= 1 << 15, |task, y| {
            let (row, kv_head) = (task / kv_heads, task % kv_heads);
            let (slot, keys) = places[row].clone();
            if keys.is_empty() {
                return;
            }
            let mut scores = vec![0f32; keys.len() * self.heads.group()];
            let column = kv_head * head_dim;
            let (k_row, v_row) = (slot * v.cols + column, slot * self.capacity);
            attend(q.part(row, kv_head * width, width), k, k_row, v, v_row, keys, column, self.heads, &mut scores, y);
        });
        Ok((CpuStorage::F32(y), Shape::from((rows, heads * head_dim))))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        q: &CudaStorage,
        ql: &Layout,
        k: &CudaStorage,
        kl: &Layout,
        v: &CudaStorage,
        vl: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let cuda = Cuda::of(q);
        let q = cuda.rows(self.name(), q, ql)?;
        let (k, v) = (cuda.rows(self.name(), k, kl)?, cuda.rows(self.name(), v, vl)?);
        let causal = self.visibility == Visibility::Causal;
        let (capacity, heads, window) = (self.capacity, self.heads, self.window);
        let call = device::RaggedCall { segments: &self.segments, capacity, heads, causal, window };
        let y = device::ragged(&cuda, &call, &q, &k, &v)?;
        Ok((cuda.storage(y), Shape::from((q.count, q.cols))))
    }
}
