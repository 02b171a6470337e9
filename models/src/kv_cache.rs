//! Preallocated key/value caches with O(1) rollback.
//!
//! One tensor per layer and side, in the panels that the attention kernel reads. A slot belongs to one sequence at a
//! time; its length says how many positions are valid. Rolling back or freeing a slot only moves the length: rows past it are
//! overwritten before they are ever read.

use candle_core::{DType, Device, Tensor};
use deepspec_kernels::attention::HeadLayout;
use deepspec_kernels::attention::ragged::cache_shapes;

use crate::error::{Error, Result};

/// Keys and values of all layers for a number of sequences.
#[derive(Debug)]
pub struct KvCache {
    pub(crate) keys: Vec<Tensor>,
    pub(crate) values: Vec<Tensor>,
    lengths: Vec<usize>,
    capacity: usize,
}

impl KvCache {
    /// A cache of `slots` sequences of at most `capacity` positions.
    ///
    /// # Errors
    /// When the memory cannot be had.
    pub fn new(layers: usize, slots: usize, capacity: usize, heads: HeadLayout, device: &Device) -> Result<Self> {
        let [keys, values] = cache_shapes(slots, capacity, heads);
        let empty = |shape| (0..layers).map(|_| Tensor::zeros(shape, DType::F32, device)).collect::<Result<_, _>>();
        Ok(Self { keys: empty(keys)?, values: empty(values)?, lengths: vec![0; slots], capacity })
    }

    /// Bytes that such a cache takes.
    pub fn bytes(layers: usize, slots: usize, capacity: usize, heads: HeadLayout) -> usize {
        4 * layers * cache_shapes(slots, capacity, heads).iter().map(|(rows, cols)| rows * cols).sum::<usize>()
    }

    /// Number of slots.
    pub fn slots(&self) -> usize {
        self.lengths.len()
    }

    /// Most positions of one sequence.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Valid positions of a slot.
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
    /// When `len` is more than the slot holds.
    pub fn truncate(&mut self, slot: usize, len: usize) {
        assert!(len <= self.lengths[slot], "rollback to {len} of {} positions", self.lengths[slot]);
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
