//! A transposing copy, by squares that fit the registers.

use crate::simd::Level;

/// Side of a square.
const SIDE: usize = 8;

/// `to[j][i] = from[i][j]` for `rows × cols` elements of matrices whose rows are the strides apart.
pub(super) fn transpose(
    level: Level,
    from: &[f32],
    from_stride: usize,
    rows: usize,
    cols: usize,
    to: &mut [f32],
    to_stride: usize,
) {
    let whole = |length: usize| if level == Level::Portable { 0 } else { length / SIDE * SIDE };
    let (whole_rows, whole_cols) = (whole(rows), whole(cols));
    #[cfg(target_arch = "x86_64")]
    if whole_rows > 0 && whole_cols > 0 {
        assert!(from_stride >= cols && from.len() >= (rows - 1) * from_stride + cols, "the source holds all rows");
        assert!(to_stride >= rows && to.len() >= (cols - 1) * to_stride + rows, "the destination holds all columns");
        // SAFETY: the processor has AVX2 at every level but the portable one, and the squares lie inside both slices.
        unsafe { x86::squares(from.as_ptr(), from_stride, whole_rows, whole_cols, to.as_mut_ptr(), to_stride) };
    }
    for i in 0..rows {
        let first = if i < whole_rows { whole_cols } else { 0 };
        for j in first..cols {
            to[j * to_stride + i] = from[i * from_stride + j];
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        _mm256_loadu_ps, _mm256_permute2f128_ps, _mm256_shuffle_ps, _mm256_storeu_ps, _mm256_unpackhi_ps,
        _mm256_unpacklo_ps,
    };

    use super::SIDE;

    /// Transposes `rows × cols` elements, both multiples of [`SIDE`].
    ///
    /// # Safety
    /// The processor has AVX2; all elements lie inside their matrices.
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn squares(
        from: *const f32,
        from_stride: usize,
        rows: usize,
        cols: usize,
        to: *mut f32,
        to_stride: usize,
    ) {
        for j in (0..cols).step_by(SIDE) {
            for i in (0..rows).step_by(SIDE) {
                // SAFETY: promised by the caller.
                unsafe { square(from.add(i * from_stride + j), from_stride, to.add(j * to_stride + i), to_stride) };
            }
        }
    }

    /// # Safety
    /// As for [`squares`].
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn square(from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize) {
        // SAFETY: promised by the caller.
        let r: [_; SIDE] = std::array::from_fn(|i| unsafe { _mm256_loadu_ps(from.add(i * from_stride)) });
        // Pairs of rows interleaved, then fours, each within the two halves; then the halves are put together.
        let pair = |i: usize| [_mm256_unpacklo_ps(r[i], r[i + 1]), _mm256_unpackhi_ps(r[i], r[i + 1])];
        let four = |i: usize| {
            let ([a, b], [c, d]) = (pair(i), pair(i + 2));
            [
                _mm256_shuffle_ps::<0x44>(a, c),
                _mm256_shuffle_ps::<0xEE>(a, c),
                _mm256_shuffle_ps::<0x44>(b, d),
                _mm256_shuffle_ps::<0xEE>(b, d),
            ]
        };
        let (upper, lower) = (four(0), four(4));
        for j in 0..SIDE / 2 {
            let left = _mm256_permute2f128_ps::<0x20>(upper[j], lower[j]);
            let right = _mm256_permute2f128_ps::<0x31>(upper[j], lower[j]);
            // SAFETY: promised by the caller.
            unsafe {
                _mm256_storeu_ps(to.add(j * to_stride), left);
                _mm256_storeu_ps(to.add((j + SIDE / 2) * to_stride), right);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::level;

    #[test]
    fn every_element_changes_places() {
        for (rows, cols) in [(0, 5), (1, 1), (8, 8), (7, 9), (16, 24), (33, 70)] {
            let (from_stride, to_stride) = (cols + 3, rows + 2);
            let from: Vec<f32> = (0..rows * from_stride).map(|i| i as f32).collect();
            for level in [level(), Level::Portable] {
                let mut to = vec![-1.0; cols * to_stride];
                transpose(level, &from, from_stride, rows, cols, &mut to, to_stride);
                for j in 0..cols {
                    for i in 0..to_stride {
                        let expected = if i < rows { from[i * from_stride + j] } else { -1.0 };
                        assert_eq!(to[j * to_stride + i], expected, "{level:?}, {rows} x {cols} at ({i}, {j})");
                    }
                }
            }
        }
    }
}
