//! One set of weights put together out of others without copying: tensors under new names, rows of fused tensors, tensors that are
//! borrowed from the target. Used by the checkpoint formats.

use std::borrow::Cow;
use std::ops::Range;
use std::path::Path;

use safetensors::{Dtype, View};

use super::{Entry, Place, Weights};
use crate::error::{Error, Result};

/// Where a tensor of an assembled set comes from.
#[derive(Debug, Clone)]
pub(crate) struct Part<'a> {
    pub(crate) weights: &'a Weights,
    /// Its name there.
    pub(crate) name: String,
    /// Rows of it; `None` = all.
    pub(crate) rows: Option<Range<usize>>,
}

impl Weights {
    /// The tensors of `parts` under new names, as they are stored. Type and device of the tensors handed out, and the path for
    /// messages, stay those of `self`.
    ///
    /// # Errors
    /// A part does not exist or has not the rows.
    pub(crate) fn assemble(&self, parts: Vec<(String, Part<'_>)>) -> Result<Self> {
        let mut entries = std::collections::BTreeMap::new();
        for (name, part) in parts {
            let missing = || Error::TensorMissing {
                path: part.weights.path.clone(),
                tensor: part.name.clone(),
                expected: vec![],
            };
            let entry = part.weights.entries.get(&part.name).ok_or_else(missing)?;
            let entry = match &part.rows {
                None => Entry::new(entry.shape.clone(), entry.place.clone()),
                Some(rows) => entry.rows(rows).ok_or_else(missing)?,
            };
            entries.insert(name, entry);
        }
        Ok(Self { path: self.path.clone(), dtype: self.dtype, device: self.device.clone(), entries })
    }

    /// Type of a tensor as stored, in safetensors' spelling, or that of its GGUF blocks; does not count as use.
    pub fn stored_type(&self, name: &str) -> Option<String> {
        self.entries.get(name).map(|entry| entry.stored().1)
    }

    /// Writes tensors as one safetensors file, flushed to the disk: pairs of the name in the file and the name here. Types are
    /// kept; blocks of GGUF files become f32.
    ///
    /// # Errors
    /// A tensor does not exist, cannot be read or holds values that are not finite, or the disk refuses.
    pub fn write(&self, path: &Path, names: &[(String, String)]) -> Result<()> {
        let mut views = Vec::with_capacity(names.len());
        for (written, name) in names {
            let missing = || Error::TensorMissing { path: self.path.clone(), tensor: name.clone(), expected: vec![] };
            let entry = self.entries.get(name).ok_or_else(missing)?;
            entry.check_finite()?;
            views.push((written.as_str(), entry.view()?));
        }
        crate::checkpoint::write_views(path, views)
    }
}

impl Entry {
    /// Some rows of a tensor of a shard.
    fn rows(&self, rows: &Range<usize>) -> Option<Self> {
        let Place::Shard { bytes, range, dtype, name, first_row } = &self.place else { return None };
        let all = *self.shape.first()?;
        if rows.start > rows.end || rows.end > all || !range.len().is_multiple_of(all.max(1)) {
            return None;
        }
        let row = range.len() / all.max(1);
        let range = range.start + rows.start * row..range.start + rows.end * row;
        let mut shape = self.shape.clone();
        shape[0] = rows.len();
        let (bytes, dtype, name) = (bytes.clone(), *dtype, name.clone());
        Some(Self::new(shape, Place::Shard { bytes, range, dtype, name, first_row: first_row + rows.start }))
    }

    fn view(&self) -> Result<Stored<'_>> {
        let shape = self.shape.as_slice();
        Ok(match &self.place {
            Place::Shard { bytes, range, dtype, .. } => {
                Stored { dtype: *dtype, shape, data: Cow::Borrowed(&bytes[range.clone()]) }
            }
            Place::Gguf { file, name, interleaved_heads } => {
                let tensor = file.tensor_f32(name)?;
                let tensor = match interleaved_heads {
                    Some(heads) => super::half_split_rows(&tensor, *heads)?,
                    None => tensor,
                };
                let values = tensor.flatten_all()?.to_vec1::<f32>()?;
                let data = Cow::Owned(values.iter().flat_map(|value| value.to_le_bytes()).collect());
                Stored { dtype: Dtype::F32, shape, data }
            }
        })
    }
}

/// A tensor's bytes as they go into a file.
struct Stored<'a> {
    dtype: Dtype,
    shape: &'a [usize],
    data: Cow<'a, [u8]>,
}

impl View for Stored<'_> {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.data)
    }

    fn data_len(&self) -> usize {
        self.data.len()
    }
}
