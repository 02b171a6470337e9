//! The feature columns of some layers of a cache, so that one cache serves drafters that read different layers. Training asks for
//! them; the rows stay where they are mapped.

use std::ops::Range;

use half::bf16;

use super::error::{CacheError, Mismatch};
use super::format::CacheMeta;
use super::reader::Reader;

/// Where the columns of chosen layers lie in a row of features.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerColumns {
    /// Values of a stored row.
    row: usize,
    /// Columns in the order of the chosen layers; neighbours are one range.
    ranges: Vec<Range<usize>>,
}

impl LayerColumns {
    /// The columns of `layer_ids`, in that order; `None` when the cache lacks one of them or a layer is asked for twice.
    fn of(meta: &CacheMeta, layer_ids: &[i32]) -> Option<Self> {
        let width = meta.hidden_size;
        let mut ranges: Vec<Range<usize>> = Vec::new();
        for (index, id) in layer_ids.iter().enumerate() {
            let place = meta.layer_ids.iter().position(|stored| stored == id)?;
            if layer_ids[..index].contains(id) {
                return None;
            }
            match ranges.last_mut() {
                Some(last) if last.end == place * width => last.end += width,
                _ => ranges.push(place * width..(place + 1) * width),
            }
        }
        (!ranges.is_empty()).then_some(Self { row: width * meta.layer_ids.len(), ranges })
    }

    /// The chosen columns of a sample's features `[T, L·d]`, row after row: slices that together are `[T, chosen·d]`.
    pub fn slices<'a>(&'a self, features: &'a [bf16]) -> impl Iterator<Item = &'a [bf16]> {
        features.chunks_exact(self.row).flat_map(|row| self.ranges.iter().map(|range| &row[range.clone()]))
    }
}

impl Reader {
    /// The feature columns of `layer_ids`, which must be among the cache's layers.
    ///
    /// # Errors
    /// [`CacheError::Unfit`] with both lists.
    pub fn columns(&self, layer_ids: &[i32]) -> Result<LayerColumns, CacheError> {
        LayerColumns::of(self.meta(), layer_ids).ok_or_else(|| CacheError::Unfit {
            dir: self.dir().to_owned(),
            mismatches: vec![Mismatch {
                field: "layer_ids".to_owned(),
                cache: format!("{:?}", self.meta().layer_ids),
                wanted: format!("{layer_ids:?}"),
            }],
        })
    }
}
