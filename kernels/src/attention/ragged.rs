//! Attention of the new rows of many sequences over their caches, and the write into the caches.
//!
//! Caches are panels of 32, like packed weights, so that attention runs on the same register tiles as a linear layer:
//! keys of 32 positions side by side, `[slot][kv head][position/32][dimension][32]`, and values of 32 dimensions side by
//! side, `[slot][kv head][dimension/32][position][32]`. A slot is a ring: position p lies at p mod its capacity, so that with
//! a window a slot of limited capacity serves a sequence of any length, in the same bits as one that holds all. A task takes a few rows of one segment with all the query heads
//! that share a key/value head; its scores live in a buffer of the thread. Prefill, decode, verification and drafting are
//! the same call with other segments. Every row is computed in one order of operations that depends on nothing but its
//! own keys.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::{CpuStorage, CustomOp3, InplaceOp2, Layout, Result, Shape, Tensor, bail};

use super::HeadLayout;
use crate::linear::{PANEL, tile_f32};
use crate::multiversion;
use crate::rows::Rows;
use crate::simd::{exp, level, max, sum};
use crate::threads::{self, Shared};
#[cfg(feature = "cuda")]
use crate::{cuda::Cuda, device::attention as device};

/// Query vectors per task, unless one row has more (AVX-512: 12 × 2 accumulators of 16 lanes).
const TASK_VECTORS: usize = 12;

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
    /// Positions per slot in the caches. With a window, positions may go beyond it where it is a multiple of [`PANEL`]: newer ones
    /// then take the places of the oldest, and a segment and the keys in its sight must fit together.
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
    /// q `[rows, heads · head_dim]`, caches as in [`cache_shapes`] → `[rows, heads · head_dim]`
    ///
    /// # Errors
    /// When shapes, segments and capacity do not fit each other.
    pub fn forward(&self, q: &Tensor, k_cache: &Tensor, v_cache: &Tensor) -> Result<Tensor> {
        q.apply_op3_no_bwd(k_cache, v_cache, self)
    }

    /// Writes the keys and values of the segments' rows into the caches at their positions.
    ///
    /// # Shapes
    /// k, v `[rows, kv_heads · head_dim]`, caches as in [`cache_shapes`]
    ///
    /// # Errors
    /// When a segment does not fit into its slot; without a window, or with a capacity that is no multiple of [`PANEL`], also when
    /// it goes beyond the last position.
    pub fn store(&self, k: &Tensor, v: &Tensor, k_cache: &Tensor, v_cache: &Tensor) -> Result<()> {
        k_cache.inplace_op2(k, &Store { attention: self, side: CacheSide::Keys })?;
        v_cache.inplace_op2(v, &Store { attention: self, side: CacheSide::Values })
    }

    #[cfg(feature = "cuda")]
    fn device_call(&self) -> device::RaggedCall<'_> {
        let causal = self.visibility == Visibility::Causal;
        let (capacity, heads, window) = (self.capacity, self.heads, self.window);
        device::RaggedCall { segments: &self.segments, capacity, heads, causal, window }
    }

    fn keys_of_row(&self, segment: &Segment, row: usize) -> Range<usize> {
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

    /// Where the panels of a slot's key/value head begin in the key cache, and in the value cache.
    fn panels(&self, slot: usize, kv_head: usize) -> [usize; 2] {
        let HeadLayout { kv_heads, head_dim, .. } = self.heads;
        let head = slot * kv_heads + kv_head;
        let keys = head * self.capacity.div_ceil(PANEL) * head_dim * PANEL;
        [keys, head * head_dim.div_ceil(PANEL) * self.capacity * PANEL]
    }

    /// Fails when a segment lies outside the caches, or the slot cannot hold all positions from the `oldest` on that a call
    /// reads or writes.
    fn check_segments(&self, elements: usize, side: CacheSide, oldest: impl Fn(&Segment) -> usize) -> Result<()> {
        let [keys, values] = cache_shapes(1, self.capacity, self.heads);
        let per_slot = match side {
            CacheSide::Keys => keys.0 * keys.1,
            CacheSide::Values => values.0 * values.1,
        };
        for segment in self.segments.iter() {
            let end = segment.start + segment.len;
            let wraps = end > self.capacity;
            if end - oldest(segment) > self.capacity
                || (wraps && !self.capacity.is_multiple_of(PANEL))
                || (segment.slot + 1) * per_slot > elements
            {
                bail!("{segment:?} lies outside a cache of {elements} elements, capacity {}", self.capacity);
            }
        }
        Ok(())
    }

    fn check_store(&self, elements: usize, side: CacheSide) -> Result<()> {
        self.check_segments(elements, side, |segment| self.window.map_or(0, |_| segment.start))
    }

    fn check_read(&self, elements: usize, side: CacheSide) -> Result<()> {
        self.check_segments(elements, side, |segment| self.keys_of_row(segment, 0).start)
    }

    /// Positions cut where their places in a slot begin anew.
    fn stretches(&self, keys: Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
        let (capacity, mut next) = (self.capacity, keys.start);
        std::iter::from_fn(move || {
            let from = next;
            (from < keys.end).then(|| {
                next = keys.end.min(from - from % capacity + capacity);
                from..next
            })
        })
    }
}

/// Shapes of a key cache and of a value cache.
pub fn cache_shapes(slots: usize, capacity: usize, heads: HeadLayout) -> [(usize, usize); 2] {
    let HeadLayout { kv_heads, head_dim, .. } = heads;
    [
        (slots * kv_heads * capacity.div_ceil(PANEL), head_dim * PANEL),
        (slots * kv_heads * head_dim.div_ceil(PANEL), capacity * PANEL),
    ]
}

/// Which of the caches rows are written to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CacheSide {
    /// Keys.
    Keys,
    /// Values.
    Values,
}

struct Store<'a> {
    attention: &'a RaggedAttention,
    side: CacheSide,
}

impl InplaceOp2 for Store<'_> {
    fn name(&self) -> &'static str {
        match self.side {
            CacheSide::Keys => "store-keys",
            CacheSide::Values => "store-values",
        }
    }

    fn cpu_fwd(&self, cache: &mut CpuStorage, cl: &Layout, rows: &CpuStorage, rl: &Layout) -> Result<()> {
        let RaggedAttention { segments, capacity, heads, .. } = self.attention;
        let HeadLayout { kv_heads, head_dim, .. } = *heads;
        let rows = Rows::new(self.name(), rows, rl)?;
        let CpuStorage::F32(cache) = cache else { bail!("{}: expected an f32 cache", self.name()) };
        let count: usize = segments.iter().map(|s| s.len).sum();
        if !cl.is_contiguous() || rows.cols != kv_heads * head_dim || rows.count != count {
            bail!("{}: rows {:?} for {count} positions of {heads:?}, cache {:?}", self.name(), rl.dims(), cl.dims());
        }
        self.attention.check_store(cl.shape().elem_count(), self.side)?;
        let cache = Shared::new(cache[cl.start_offset()..].as_mut_ptr());
        let places_of = |s: &Segment| {
            let slot = s.slot;
            (s.start..s.start + s.len).map(move |position| (slot, position % *capacity))
        };
        let places: Vec<(usize, usize)> = segments.iter().flat_map(places_of).collect();
        let store = |next: usize, (slot, position): (usize, usize)| {
            for kv_head in 0..kv_heads {
                let row = rows.part(next, kv_head * head_dim, head_dim);
                let [keys, values] = self.attention.panels(slot, kv_head);
                match self.side {
                    CacheSide::Keys => {
                        let first = keys + position / PANEL * head_dim * PANEL + position % PANEL;
                        for (i, key) in row.iter().enumerate() {
                            // SAFETY: the checked segments lie inside the cache, and only a single share writes a place twice.
                            unsafe { cache.write(first + i * PANEL, std::slice::from_ref(key)) };
                        }
                    }
                    CacheSide::Values => {
                        for (part, x) in row.chunks(PANEL).enumerate() {
                            // SAFETY: as above.
                            unsafe { cache.write(values + (part * capacity + position) * PANEL, x) };
                        }
                    }
                }
            }
        };
        let is_worth_sharing = count * rows.cols >= threads::WORTH_SHARING && !overlap(segments, *capacity);
        let shares = if is_worth_sharing { threads::count() } else { 1 };
        threads::run(shares, |share| {
            let (from, to) = (count * share / shares, count * (share + 1) / shares);
            for (next, &place) in places.iter().enumerate().take(to).skip(from) {
                store(next, place);
            }
        });
        Ok(())
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, cache: &mut CudaStorage, cl: &Layout, rows: &CudaStorage, rl: &Layout) -> Result<()> {
        self.attention.check_store(cl.shape().elem_count(), self.side)?;
        if !cl.is_contiguous() {
            bail!("{}: the cache must be contiguous", self.name());
        }
        let cuda = Cuda::of(rows);
        let rows = cuda.rows(self.name(), rows, rl)?;
        let cache = cuda.start_mut::<f32>(cache, cl)?;
        device::store(&cuda, &self.attention.device_call(), self.side, &rows, *cache)
    }
}

/// Whether two segments, neither longer than a slot, share a place of the cache.
fn overlap(segments: &[Segment], capacity: usize) -> bool {
    let place = |segment: &Segment| segment.start % capacity.max(1);
    // Places from the start of one segment to that of another, in the direction of positions.
    let distance = |from: &Segment, to: &Segment| (place(to) + capacity - place(from)) % capacity.max(1);
    segments.iter().enumerate().any(|(i, a)| {
        let shares_with = |b: &Segment| a.slot == b.slot && (distance(a, b) < a.len || distance(b, a) < b.len);
        segments[..i].iter().any(shares_with)
    })
}

multiversion! {
    /// Scores → e^(scale·(score − maximum)) in place; returns their sum.
    fn exponentials(scores: &mut [f32], scale: f32) -> f32 {
        let largest = max(scores);
        for score in scores.iter_mut() {
            *score = exp((*score - largest) * scale);
        }
        sum(scores)
    }
}

/// Some rows of one segment, for the query heads that share one key/value head.
struct Task {
    slot: usize,
    kv_head: usize,
    /// Row in the batch of the first one.
    first: usize,
    /// Keys of each row.
    keys: Vec<Range<usize>>,
}

/// Buffers of a thread.
#[derive(Default)]
struct Scratch {
    /// A row of scores per query vector.
    scores: Vec<f32>,
    totals: Vec<f32>,
    tile: Vec<[f32; PANEL]>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

impl RaggedAttention {
    fn tasks(&self) -> Vec<Task> {
        let rows_per_task = (TASK_VECTORS / self.heads.group()).max(1);
        let mut tasks = Vec::new();
        let mut first = 0;
        for segment in self.segments.iter() {
            for from in (0..segment.len).step_by(rows_per_task) {
                let rows = from..(from + rows_per_task).min(segment.len);
                for kv_head in 0..self.heads.kv_heads {
                    let keys = rows.clone().map(|row| self.keys_of_row(segment, row)).collect();
                    tasks.push(Task { slot: segment.slot, kv_head, first: first + from, keys });
                }
            }
            first += segment.len;
        }
        tasks
    }

    fn run(&self, task: &Task, q: Rows<'_>, keys: &[f32], values: &[f32], scratch: &mut Scratch, out: &Shared<f32>) {
        let HeadLayout { heads, head_dim, .. } = self.heads;
        let group = self.heads.group();
        let level = level();
        let vectors = task.keys.len() * group;
        // Query vector i belongs to row i / group and, in its group, to head i % group.
        let place = |i: usize| (task.first + i / group, (task.kv_head * group + i % group) * head_dim);
        let first_key = task.keys.iter().map(|keys| keys.start).min().unwrap_or(0) / PANEL * PANEL;
        let last_key = task.keys.iter().map(|keys| keys.end).max().unwrap_or(0);
        let width = (last_key - first_key.min(last_key)).next_multiple_of(PANEL);
        let [key_panels, value_panels] = self.panels(task.slot, task.kv_head);

        let Scratch { scores, totals, tile } = scratch;
        scores.resize((vectors * width).max(scores.len()), 0.0);
        tile.resize(vectors.max(tile.len()), [0.0; PANEL]);
        let tile = &mut tile[..vectors];
        let queries: Vec<&[f32]> = (0..vectors).map(place).map(|(row, at)| q.part(row, at, head_dim)).collect();
        for block in 0..width / PANEL {
            let panel = (first_key / PANEL + block) % self.capacity.div_ceil(PANEL);
            let at = key_panels + panel * head_dim * PANEL;
            tile.fill([0.0; PANEL]);
            tile_f32(level, &keys[at..at + head_dim * PANEL], &queries, tile);
            for (i, tile) in tile.iter().enumerate() {
                scores[i * width + block * PANEL..][..PANEL].copy_from_slice(tile);
            }
        }
        totals.clear();
        for (i, scores) in scores.chunks_exact_mut(width.max(1)).enumerate().take(vectors) {
            let keys = &task.keys[i / group];
            totals.push(exponentials(&mut scores[keys.start - first_key..keys.end - first_key], self.heads.scale()));
        }
        let weights = |i: usize, keys: Range<usize>| {
            &scores[i * width + keys.start - first_key..i * width + keys.end - first_key]
        };
        let shared = shared_keys(&task.keys);
        for part in 0..head_dim.div_ceil(PANEL) {
            // The places of a stretch of positions; a tile goes on with its sums from stretch to stretch.
            let panel = |keys: &Range<usize>| {
                let at = value_panels + (part * self.capacity + keys.start % self.capacity) * PANEL;
                &values[at..at + keys.len() * PANEL]
            };
            tile.fill([0.0; PANEL]);
            for keys in self.stretches(shared.clone()) {
                let weights: Vec<&[f32]> = (0..vectors).map(|i| weights(i, keys.clone())).collect();
                tile_f32(level, panel(&keys), &weights, tile);
            }
            for (i, tile) in tile.iter_mut().enumerate() {
                let rest = shared.end.max(task.keys[i / group].start)..task.keys[i / group].end;
                for keys in self.stretches(rest) {
                    tile_f32(level, panel(&keys), &[weights(i, keys.clone())], std::slice::from_mut(tile));
                }
                // A row without a visible key stays zero.
                if totals[i] > 0.0 || totals[i].is_nan() {
                    for y in tile.iter_mut() {
                        *y /= totals[i];
                    }
                }
                let (row, column) = place(i);
                let at = row * heads * head_dim + column + part * PANEL;
                // SAFETY: the place is inside the row, and this task alone has this row and head.
                unsafe { out.write(at, &tile[..PANEL.min(head_dim - part * PANEL)]) };
            }
        }
    }
}

/// Keys that all rows begin with; empty when they begin at different ones.
fn shared_keys(keys: &[Range<usize>]) -> Range<usize> {
    let start = keys[0].start;
    let end = keys.iter().map(|keys| keys.end).min().unwrap_or(start);
    if keys.iter().all(|keys| keys.start == start) && end > start { start..end } else { 0..0 }
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
        let HeadLayout { heads, head_dim, .. } = self.heads;
        let q = Rows::new(self.name(), q, ql)?;
        let rows: usize = self.segments.iter().map(|s| s.len).sum();
        if q.count != rows || q.cols != heads * head_dim || !kl.is_contiguous() || !vl.is_contiguous() {
            bail!(
                "attention of {rows} rows, {:?} got q {:?}, k {:?}, v {:?}",
                self.heads,
                ql.dims(),
                kl.dims(),
                vl.dims()
            );
        }
        self.check_read(kl.shape().elem_count(), CacheSide::Keys)?;
        self.check_read(vl.shape().elem_count(), CacheSide::Values)?;
        let (k, v) = (&k.as_slice::<f32>()?[kl.start_offset()..], &v.as_slice::<f32>()?[vl.start_offset()..]);
        let mut y = Vec::with_capacity(rows * heads * head_dim);
        let out = Shared::new(y.as_mut_ptr());
        let tasks = self.tasks();
        let run = |task: &Task| SCRATCH.with_borrow_mut(|scratch| self.run(task, q, k, v, scratch, &out));
        let work: usize = tasks.iter().flat_map(|task| &task.keys).map(Range::len).sum::<usize>() * head_dim;
        if work * self.heads.group() < 1 << 15 {
            tasks.iter().for_each(run);
        } else {
            threads::run(tasks.len(), |i| run(&tasks[i]));
        }
        // SAFETY: the tasks have written all heads of all rows.
        unsafe { y.set_len(rows * heads * head_dim) };
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
        self.check_read(kl.shape().elem_count(), CacheSide::Keys)?;
        self.check_read(vl.shape().elem_count(), CacheSide::Values)?;
        if !kl.is_contiguous() || !vl.is_contiguous() {
            bail!("attention: caches must be contiguous");
        }
        let cuda = Cuda::of(q);
        let q = cuda.rows(self.name(), q, ql)?;
        let (k, v) = (cuda.start::<f32>(k, kl)?, cuda.start::<f32>(v, vl)?);
        let y = device::ragged(&cuda, &self.device_call(), &q, [*k, *v])?;
        Ok((cuda.storage(y), Shape::from((q.count, q.cols))))
    }
}
