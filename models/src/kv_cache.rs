//! Preallocated key/value caches with O(1) rollback.
//!
//! One tensor per layer and side, in the panels that the attention kernel reads. A slot belongs to one sequence at a
//! time; its length says how many positions are valid. Rolling back or freeing a slot only moves the length: rows past it are
//! overwritten before they are ever read.
//!
//! A cache for attention within a window is a *ring*: a slot holds as many rows as are ever in sight, position p at p mod that
//! number, so its memory does not depend on how long sequences get.

use candle_core::{DType, Device, Tensor};
use deepspec_kernels::attention::HeadLayout;
use deepspec_kernels::attention::ragged::cache_shapes;
use deepspec_kernels::linear::PANEL;
use deepspec_kernels::memory::on_fresh_pages;

use crate::error::{Error, Result};

/// Keys and values of all layers for a number of sequences.
#[derive(Debug)]
pub struct KvCache {
    pub(crate) keys: Vec<Tensor>,
    pub(crate) values: Vec<Tensor>,
    lengths: Vec<usize>,
    capacity: usize,
    /// Positions that a slot holds at a time; fewer than the capacity in a ring.
    rows: usize,
}

impl KvCache {
    /// A cache of `slots` sequences of at most `capacity` positions.
    ///
    /// # Errors
    /// When the memory cannot be had.
    pub fn new(layers: usize, slots: usize, capacity: usize, heads: HeadLayout, device: &Device) -> Result<Self> {
        Self::with_rows(layers, slots, capacity, capacity, heads, device)
    }

    /// A cache for attention that sees the last `window` positions and a segment of at most `segment` new ones. It holds no more
    /// than these (in whole panels) of a sequence, and no more than `capacity`.
    ///
    /// # Errors
    /// When the memory cannot be had.
    pub fn windowed(
        layers: usize,
        slots: usize,
        capacity: usize,
        window: usize,
        segment: usize,
        heads: HeadLayout,
        device: &Device,
    ) -> Result<Self> {
        Self::with_rows(layers, slots, capacity, Self::ring_rows(capacity, window, segment), heads, device)
    }

    /// Positions that a slot of a [`windowed`](Self::windowed) cache holds at a time.
    pub fn ring_rows(capacity: usize, window: usize, segment: usize) -> usize {
        let ring = window.saturating_add(segment).checked_next_multiple_of(PANEL);
        ring.map_or(capacity, |ring| ring.min(capacity))
    }

    fn with_rows(
        layers: usize,
        slots: usize,
        capacity: usize,
        rows: usize,
        heads: HeadLayout,
        device: &Device,
    ) -> Result<Self> {
        let [keys, values] = cache_shapes(slots, rows, heads);
        let empty = |shape| (0..layers).map(|_| Tensor::zeros(shape, DType::F32, device)).collect::<Result<_, _>>();
        let (keys, values) = on_fresh_pages(|| -> Result<_> { Ok((empty(keys)?, empty(values)?)) })?;
        Ok(Self { keys, values, lengths: vec![0; slots], capacity, rows })
    }

    /// Bytes that a cache from [`new`](Self::new) takes.
    pub fn bytes(layers: usize, slots: usize, capacity: usize, heads: HeadLayout) -> usize {
        4 * layers * cache_shapes(slots, capacity, heads).iter().map(|(rows, cols)| rows * cols).sum::<usize>()
    }

    /// Bytes that this cache takes.
    pub fn allocated_bytes(&self) -> usize {
        self.keys.iter().chain(&self.values).map(|side| side.elem_count() * side.dtype().size_in_bytes()).sum()
    }

    /// Number of slots.
    pub fn slots(&self) -> usize {
        self.lengths.len()
    }

    /// Most positions of one sequence.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Positions that a slot holds at a time, the newest: what attention takes as the capacity.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Valid positions of a slot, counting those that a ring no longer holds.
    pub fn len(&self, slot: usize) -> usize {
        self.lengths[slot]
    }

    /// Whether no slot holds anything.
    pub fn is_empty(&self) -> bool {
        self.lengths.iter().all(|&len| len == 0)
    }

    /// Rolls a slot back to `len` positions; 0 frees it for another sequence.
    ///
    /// # Panics
    /// When `len` is more than the slot holds, or neither that nor 0 in a ring, whose older rows may be overwritten.
    pub fn truncate(&mut self, slot: usize, len: usize) {
        let valid = self.lengths[slot];
        assert!(len <= valid, "rollback to {len} of {valid} positions");
        let is_ring = self.rows < self.capacity;
        assert!(!is_ring || len == 0 || len == valid, "rollback to {len} of {valid} positions in a ring");
        self.lengths[slot] = len;
    }

    /// Checks that `len` more positions fit into a slot.
    ///
    /// # Errors
    /// [`Error::CacheFull`] when they do not.
    pub(crate) fn room(&self, slot: usize, len: usize) -> Result<()> {
        let needed = self.lengths[slot] + len;
        if needed > self.capacity {
            return Err(Error::CacheFull { slot, needed, capacity: self.capacity });
        }
        Ok(())
    }

    pub(crate) fn advance(&mut self, slot: usize, len: usize) {
        self.lengths[slot] += len;
    }
}
