//! Plain f32 matrix products over slices with bounds checked, for the parts of fused operations that are gemms.

use gemm::Parallelism;

/// A row-major or transposed matrix inside a slice.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a> {
    data: &'a [f32],
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a> Matrix<'a> {
    /// Row-major `[rows, cols]`.
    pub(crate) fn new(data: &'a [f32], rows: usize, cols: usize) -> Self {
        assert!(data.len() >= rows * cols, "matrix of {rows} x {cols} in {} elements", data.len());
        Self { data, rows, cols, row_stride: cols, col_stride: 1 }
    }

    /// The transposed view.
    pub(crate) fn t(self) -> Self {
        Self { rows: self.cols, cols: self.rows, row_stride: self.col_stride, col_stride: self.row_stride, ..self }
    }
}

/// out = a · b, or out += a · b; `out` is row-major `[a.rows, b.cols]`.
pub(crate) fn matmul(a: Matrix<'_>, b: Matrix<'_>, out: &mut [f32], add: bool) {
    assert_eq!(a.cols, b.rows, "inner dimensions");
    assert!(out.len() >= a.rows * b.cols, "output of {} x {} in {} elements", a.rows, b.cols, out.len());
    if a.rows == 0 || b.cols == 0 {
        return;
    }
    // SAFETY: `Matrix::new` checked that every element lies inside its slice, transposing keeps the set of elements, and
    // the output was checked above; the slices cannot overlap because `out` is borrowed mutably.
    unsafe {
        gemm::gemm(
            a.rows,
            b.cols,
            a.cols,
            out.as_mut_ptr(),
            1,
            b.cols as isize,
            add,
            a.data.as_ptr(),
            a.col_stride as isize,
            a.row_stride as isize,
            b.data.as_ptr(),
            b.col_stride as isize,
            b.row_stride as isize,
            1.0,
            1.0,
            false,
            false,
            false,
            Parallelism::Rayon(rayon::current_num_threads()),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transposes_and_adds() {
        let a = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        let b = [1.0, 0.0, 0.0, 1.0, 1.0, 1.0];
        let mut out = [0.0; 4];
        matmul(Matrix::new(&a, 2, 3), Matrix::new(&b, 3, 2), &mut out, false);
        assert_eq!(out, [4.0, 5.0, 10.0, 11.0]);
        matmul(Matrix::new(&a, 3, 2).t(), Matrix::new(&b, 3, 2), &mut out, true);
        assert_eq!(out, [4.0 + 1.0 + 5.0, 5.0 + 3.0 + 5.0, 10.0 + 2.0 + 6.0, 11.0 + 4.0 + 6.0]);
    }
}
