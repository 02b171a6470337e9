//! Weights that are not numbers, or infinite: found when a tensor is read, before any of it is used.
//!
//! One such value makes every row that it meets meaningless, and a drafter with it drafts nothing that is accepted, in silence. A
//! value of either kind has all bits of its exponent set, whatever the type, so a tensor is checked by one pass over its bits.

use std::sync::atomic::Ordering;

use candle_core::{CpuStorage, Storage, Tensor};
use safetensors::Dtype;

use super::{Entry, Place, Weights};
use crate::error::{Error, Result};

/// Values looked at between two decisions; so few that they stay in the nearest cache.
const CHUNK: usize = 4096;

/// What is wrong with a tensor's values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Poison {
    nan: usize,
    infinite: usize,
    /// Place of the first of either kind, counted over all values.
    first: usize,
}

/// Bits of the exponent of each type; those below them are the fraction.
const SINGLE: u32 = 0x7f80_0000;
const BRAIN: u32 = 0x7f80;
const HALF: u32 = 0x7c00;

/// Looks at values by their bits, of which `EXPONENT` are the exponent's.
fn scan<const EXPONENT: u32, T: Copy>(values: &[T], bits: impl Fn(T) -> u32) -> Option<Poison> {
    let is_special = |value: T| bits(value) & EXPONENT == EXPONENT;
    let fraction = (EXPONENT & EXPONENT.wrapping_neg()) - 1;
    let mut found: Option<Poison> = None;
    for (chunk, values) in values.chunks(CHUNK).enumerate() {
        // Without a branch per value, so that the pass runs at the speed of the memory.
        if !values.iter().fold(false, |any, &value| any | is_special(value)) {
            continue;
        }
        for (i, &value) in values.iter().enumerate().filter(|(_, value)| is_special(**value)) {
            let found = found.get_or_insert(Poison { nan: 0, infinite: 0, first: chunk * CHUNK + i });
            if bits(value) & fraction == 0 {
                found.infinite += 1;
            } else {
                found.nan += 1;
            }
        }
    }
    found
}

fn scan_bytes(bytes: &[u8], dtype: Dtype) -> Option<Poison> {
    match dtype {
        Dtype::F32 => scan::<SINGLE, _>(bytes.as_chunks().0, u32::from_le_bytes),
        Dtype::F16 => scan::<HALF, _>(bytes.as_chunks().0, |value| u16::from_le_bytes(value).into()),
        Dtype::BF16 => scan::<BRAIN, _>(bytes.as_chunks().0, |value| u16::from_le_bytes(value).into()),
        // Whole numbers are always finite; other floats are refused by their type.
        _ => None,
    }
}

/// Values of a contiguous f32 tensor in host memory.
fn scan_tensor(tensor: &Tensor) -> Result<Option<Poison>> {
    let (storage, layout) = tensor.storage_and_layout();
    match (&*storage, layout.contiguous_offsets()) {
        (Storage::Cpu(CpuStorage::F32(values)), Some((from, to))) => {
            Ok(scan::<SINGLE, _>(&values[from..to], f32::to_bits))
        }
        _ => Ok(scan::<SINGLE, _>(&tensor.flatten_all()?.to_vec1::<f32>()?, f32::to_bits)),
    }
}

impl Weights {
    /// Reads all values of tensor `name` and refuses any that is not a number or infinite. [`get`](Self::get) does so by itself.
    ///
    /// # Errors
    /// [`Error::WeightsNotFinite`]; the tensor is missing or of a type that is not read.
    pub fn check_finite(&self, name: &str) -> Result<()> {
        let missing =
            || Error::TensorMissing { path: self.path.clone(), tensor: name.to_owned(), expected: Vec::new() };
        self.entries.get(name).ok_or_else(missing)?.check_finite()
    }

    /// Whether tensor `name` is there, and of a type of blocks that is read where it is one of a GGUF file.
    pub fn has_readable_type(&self, name: &str) -> bool {
        match self.entries.get(name).map(|entry| &entry.place) {
            Some(Place::Gguf { file, name, .. }) => file.tensor_info(name).is_some_and(|info| info.dtype.is_some()),
            Some(Place::Shard { .. }) => true,
            None => false,
        }
    }
}

impl Entry {
    /// Refuses values that are not finite, naming file, tensor and index as the file has them.
    pub(super) fn check_finite(&self) -> Result<()> {
        match &self.place {
            Place::Shard { bytes, range, dtype, .. } => self.refuse(scan_bytes(&bytes[range.clone()], *dtype)),
            Place::Gguf { file, name, .. } => self.check_finite_values(&file.tensor_f32(name)?),
        }
    }

    /// As [`check_finite`](Self::check_finite) for the values of a GGUF tensor, which are dequantised already.
    pub(super) fn check_finite_values(&self, values: &Tensor) -> Result<()> {
        self.refuse(scan_tensor(values)?)
    }

    fn refuse(&self, found: Option<Poison>) -> Result<()> {
        self.is_checked.store(true, Ordering::Relaxed);
        let Some(Poison { nan, infinite, first }) = found else { return Ok(()) };
        let (path, tensor, first_row) = match &self.place {
            Place::Shard { bytes, name, first_row, .. } => (bytes.path.clone(), name.clone(), *first_row),
            Place::Gguf { file, name, .. } => (file.path().to_owned(), name.clone(), 0),
        };
        let mut index = index(first, &self.shape);
        if let Some(row) = index.first_mut() {
            *row += first_row;
        }
        Err(Error::WeightsNotFinite { path, tensor, nan, infinite, first: index })
    }
}

/// Row, column and so on of a place counted over all values.
fn index(mut place: usize, shape: &[usize]) -> Vec<usize> {
    let mut index: Vec<usize> = Vec::with_capacity(shape.len());
    for &size in shape.iter().rev() {
        index.push(place % size.max(1));
        place /= size.max(1);
    }
    index.reverse();
    index
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_count_and_first_place_are_found_in_every_type() {
        let mut values = vec![0.5f32; 3 * CHUNK];
        assert_eq!(scan::<SINGLE, _>(&values, f32::to_bits), None);
        (values[CHUNK + 7], values[CHUNK + 9], values[2 * CHUNK]) = (f32::NEG_INFINITY, f32::NAN, -f32::NAN);
        let expected = Some(Poison { nan: 2, infinite: 1, first: CHUNK + 7 });
        let single: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        assert_eq!(scan_bytes(&single, Dtype::F32), expected);
        let brain: Vec<u8> =
            values.iter().flat_map(|value| (value.to_bits() >> 16).to_le_bytes()[..2].to_vec()).collect();
        assert_eq!(scan_bytes(&brain, Dtype::BF16), expected);
        let half = |value: f32| match value.to_bits() & 0x7fff_ffff {
            0x7f80_0000 => 0xfc00_u16,
            bits if bits > 0x7f80_0000 => 0x7e00,
            _ => 0x3800,
        };
        let half: Vec<u8> = values.iter().flat_map(|&value| half(value).to_le_bytes()).collect();
        assert_eq!(scan_bytes(&half, Dtype::F16), expected);
    }

    #[test]
    fn the_largest_values_of_each_type_are_finite() {
        assert_eq!(scan_bytes(&f32::MAX.to_le_bytes(), Dtype::F32), None);
        assert_eq!(scan_bytes(&0x7f7f_u16.to_le_bytes(), Dtype::BF16), None);
        assert_eq!(scan_bytes(&0x7bff_u16.to_le_bytes(), Dtype::F16), None);
    }

    #[test]
    fn places_become_rows_and_columns() {
        assert_eq!(index(7, &[2, 5]), [1, 2]);
        assert_eq!(index(3, &[5]), [3]);
        assert_eq!(index(0, &[]), Vec::<usize>::new());
    }
}
