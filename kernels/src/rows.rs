//! Views of candle tensors as rows: `[.., cols]` with contiguous columns and any row stride.
//!
//! Slices of a fused projection (`narrow` on the last dimension) are such views, so kernels read them without a copy.

use candle_core::{CpuStorage, Layout, Result, bail};

/// How the rows of a tensor lie in its storage.
pub(crate) struct RowLayout {
    /// Elements from row to row.
    pub(crate) stride: usize,
    /// Number of rows: the product of all dimensions but the last.
    pub(crate) count: usize,
    /// Length of one row.
    pub(crate) cols: usize,
}

impl RowLayout {
    /// Reads a layout as rows.
    ///
    /// # Errors
    /// When it has no dimension, or its columns are not contiguous or its rows not evenly spaced.
    pub(crate) fn new(op: &'static str, layout: &Layout) -> Result<Self> {
        let dims = layout.dims();
        let Some((&cols, leading)) = dims.split_last() else {
            bail!("{op}: expected a tensor of rows, found a scalar")
        };
        let count: usize = leading.iter().product();
        let strides = layout.stride();
        if cols > 1 && strides[dims.len() - 1] != 1 {
            bail!("{op}: columns must be contiguous, found strides {strides:?} for shape {dims:?}");
        }
        let stride = match leading.len() {
            0 => cols,
            n => {
                let innermost = strides[n - 1];
                for i in 0..n - 1 {
                    if strides[i] != strides[i + 1] * dims[i + 1] {
                        bail!("{op}: rows must be evenly spaced, found strides {strides:?} for shape {dims:?}");
                    }
                }
                innermost
            }
        };
        Ok(Self { stride, count, cols })
    }
}

/// Rows of a float tensor.
#[derive(Clone, Copy)]
pub(crate) struct Rows<'a> {
    data: &'a [f32],
    stride: usize,
    /// Number of rows: the product of all dimensions but the last.
    pub(crate) count: usize,
    /// Length of one row.
    pub(crate) cols: usize,
}

impl<'a> Rows<'a> {
    /// Reads a tensor's storage as rows.
    ///
    /// # Errors
    /// When the tensor is not f32, has no dimension, or its columns are not contiguous or its rows not evenly spaced.
    pub(crate) fn new(op: &'static str, storage: &'a CpuStorage, layout: &Layout) -> Result<Self> {
        let data = storage.as_slice::<f32>()?;
        let RowLayout { stride, count, cols } = RowLayout::new(op, layout)?;
        Ok(Self { data: &data[layout.start_offset()..], stride, count, cols })
    }

    /// Row `i`.
    #[inline]
    pub(crate) fn row(&self, i: usize) -> &'a [f32] {
        &self.data[i * self.stride..i * self.stride + self.cols]
    }

    /// Columns `from..from + len` of row `i`.
    #[inline]
    pub(crate) fn part(&self, i: usize, from: usize, len: usize) -> &'a [f32] {
        &self.data[i * self.stride + from..i * self.stride + from + len]
    }
}
