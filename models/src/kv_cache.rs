//! Preallocated key/value caches with O(1) rollback.
//!
//! One tensor per layer and side: values `[slots · capacity, kv_heads · head_dim]`, keys transposed
//! `[slots · kv_heads · head_dim, capacity]` (see the attention kernel). A slot belongs to one sequence at a time;
//! its length says how many positions are valid. Rolling back or freeing a slot only moves the length: rows past it are
//! overwritten before they are ever read.

use candle_core::{DType, Device, Tensor};
use deepspec_kernels::attention::HeadLayout;

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
        let width = heads.kv_heads * heads.head_dim;
        let keys = || Tensor::zeros((slots * width, capacity), DType::F32, device);
        let values = || Tensor::zeros((slots * capacity, width), DType::F32, device);
        Ok(Self {
            keys: (0..layers).map(|_| keys()).collect::<Result<_, _>>()?,
            values: (0..layers).map(|_| values()).collect::<Result<_, _>>()?,
            lengths: vec![0; slots],
            capacity,
        })
    }

    /// Bytes that such a cache takes.
    pub fn bytes(layers: usize, slots: usize, capacity: usize, heads: HeadLayout) -> usize {
        2 * 4 * layers * slots * capacity * heads.kv_heads * heads.head_dim
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
