//! Register tiles over panels of f32 and of bf16 weights.
//!
//! A tile of up to 12 rows × 32 outputs stays in registers while k is walked once, so each weight is loaded once per tile
//! and serves all its rows. Every output starts at what the tile holds and is one chain of fused multiply-adds over
//! k = 0, 1, 2, … (a multiply and an add on processors without FMA). Linear layers and attention both run on these.

use half::bf16;

use super::packed::PANEL;
use crate::simd::Level;

/// `tile[r] += a[r] · panel` for any number of rows; `panel` is `[k][32]`.
pub(crate) fn tile_f32(level: Level, panel: &[f32], a: &[&[f32]], tile: &mut [[f32; PANEL]]) {
    match level {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `level` says that the processor has these features; every row of `a` is as long as the panel is deep.
        Level::Avx512 => unsafe { x86::avx512_f32(panel, a, tile) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Level::Avx2 => unsafe { x86::avx2_f32(panel, a, tile) },
        _ => tile_portable(panel, |w| *w, a, tile),
    }
}

/// As [`tile_f32`], over weights in bf16.
pub(super) fn tile_bf16(level: Level, panel: &[bf16], a: &[&[f32]], tile: &mut [[f32; PANEL]]) {
    match level {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as in `tile_f32`.
        Level::Avx512 => unsafe { x86::avx512_bf16(panel, a, tile) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Level::Avx2 => unsafe { x86::avx2_bf16(panel, a, tile) },
        _ => tile_portable(panel, |w| w.to_f32(), a, tile),
    }
}

fn tile_portable<W>(panel: &[W], widen: impl Fn(&W) -> f32, a: &[&[f32]], tile: &mut [[f32; PANEL]]) {
    for (row, sums) in a.iter().zip(tile.iter_mut()) {
        for (&x, weights) in row.iter().zip(panel.chunks_exact(PANEL)) {
            for (sum, weight) in sums.iter_mut().zip(weights) {
                *sum += x * widen(weight);
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    //! Register tiles for AVX-512 (rows × 32) and AVX2 (rows × 16, twice a panel).

    use std::arch::x86_64::{
        _MM_HINT_T0, _mm_loadu_si128, _mm_prefetch, _mm256_castsi256_ps, _mm256_cvtepu16_epi32, _mm256_fmadd_ps,
        _mm256_loadu_ps, _mm256_loadu_si256, _mm256_set1_ps, _mm256_setzero_ps, _mm256_slli_epi32, _mm256_storeu_ps,
        _mm512_castsi512_ps, _mm512_cvtepu16_epi32, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_set1_ps,
        _mm512_setzero_ps, _mm512_slli_epi32, _mm512_storeu_ps,
    };

    use half::bf16;

    use super::PANEL;

    /// Steps of k that weights are fetched ahead.
    const AHEAD: usize = 32;

    /// Defines `$name(panel, a, tile)` for panels of `$weight`: `$kernel::<R>` on tiles of R = 1 … `$most` rows.
    macro_rules! tiles {
        ($name:ident, $kernel:ident, $weight:ty, $most:literal, [$($rows:literal),+]) => {
            /// # Safety
            /// The processor has the features; the panel is `a[i].len()` deep for every row.
            pub(super) unsafe fn $name(panel: &[$weight], a: &[&[f32]], tile: &mut [[f32; PANEL]]) {
                let mut done = 0;
                while done < a.len() {
                    let rows = (a.len() - done).min($most);
                    let (a, tile) = (&a[done..done + rows], &mut tile[done..done + rows]);
                    debug_assert!(a.iter().all(|row| row.len() * PANEL == panel.len()));
                    match rows {
                        // SAFETY: promised by the caller.
                        $($rows => unsafe { $kernel::<$rows>(panel, a, tile) },)+
                        _ => unreachable!("a tile has at most {} rows", $most),
                    }
                    done += rows;
                }
            }
        };
    }

    macro_rules! avx512_kernel {
        ($kernel:ident, $weight:ty, |$p:ident| $load:expr) => {
            #[target_feature(enable = "avx512f")]
            unsafe fn $kernel<const R: usize>(panel: &[$weight], a: &[&[f32]], tile: &mut [[f32; PANEL]]) {
                let depth = panel.len() / PANEL;
                let mut rows = [std::ptr::null(); R];
                for (pointer, row) in rows.iter_mut().zip(a) {
                    *pointer = row.as_ptr();
                }
                let mut sums = [[_mm512_setzero_ps(); 2]; R];
                for (out, sum) in tile.iter().zip(&mut sums) {
                    // SAFETY: a tile row holds 32 values.
                    unsafe { *sum = [_mm512_loadu_ps(out.as_ptr()), _mm512_loadu_ps(out.as_ptr().add(16))] };
                }
                let mut weights = panel.as_ptr();
                for k in 0..depth {
                    // SAFETY: k < depth, which is the length of each row and the number of 32-weight steps in the panel.
                    unsafe {
                        // The hardware prefetcher stops at page borders; a hint past the end of the panel is harmless.
                        _mm_prefetch::<_MM_HINT_T0>(weights.wrapping_add(AHEAD * PANEL).cast());
                        if size_of::<$weight>() == 4 {
                            _mm_prefetch::<_MM_HINT_T0>(weights.wrapping_add(AHEAD * PANEL + 16).cast());
                        }
                        let $p = weights;
                        let low = $load;
                        let $p = weights.add(16);
                        let high = $load;
                        for r in 0..R {
                            let x = _mm512_set1_ps(*rows[r].add(k));
                            sums[r][0] = _mm512_fmadd_ps(x, low, sums[r][0]);
                            sums[r][1] = _mm512_fmadd_ps(x, high, sums[r][1]);
                        }
                        weights = weights.add(PANEL);
                    }
                }
                for (out, sum) in tile.iter_mut().zip(&sums) {
                    // SAFETY: a tile row holds 32 values.
                    unsafe {
                        _mm512_storeu_ps(out.as_mut_ptr(), sum[0]);
                        _mm512_storeu_ps(out.as_mut_ptr().add(16), sum[1]);
                    }
                }
            }
        };
    }

    macro_rules! avx2_kernel {
        ($kernel:ident, $weight:ty, |$p:ident| $load:expr) => {
            #[target_feature(enable = "avx2,fma")]
            unsafe fn $kernel<const R: usize>(panel: &[$weight], a: &[&[f32]], tile: &mut [[f32; PANEL]]) {
                let depth = panel.len() / PANEL;
                for half in [0, PANEL / 2] {
                    let mut sums = [[_mm256_setzero_ps(); 2]; R];
                    for (out, sum) in tile.iter().zip(&mut sums) {
                        let out = out.as_ptr();
                        // SAFETY: a tile row holds 32 values, `half` is 0 or 16.
                        unsafe { *sum = [_mm256_loadu_ps(out.add(half)), _mm256_loadu_ps(out.add(half + 8))] };
                    }
                    for k in 0..depth {
                        // SAFETY: k < depth, which is the length of each row and the number of 32-weight steps in the panel.
                        unsafe {
                            let $p = panel.as_ptr().add(k * PANEL + half);
                            let low = $load;
                            let $p = panel.as_ptr().add(k * PANEL + half + 8);
                            let high = $load;
                            for r in 0..R {
                                let x = _mm256_set1_ps(*a.get_unchecked(r).get_unchecked(k));
                                sums[r][0] = _mm256_fmadd_ps(x, low, sums[r][0]);
                                sums[r][1] = _mm256_fmadd_ps(x, high, sums[r][1]);
                            }
                        }
                    }
                    for (out, sum) in tile.iter_mut().zip(&sums) {
                        // SAFETY: a tile row holds 32 values, `half` is 0 or 16.
                        unsafe {
                            _mm256_storeu_ps(out.as_mut_ptr().add(half), sum[0]);
                            _mm256_storeu_ps(out.as_mut_ptr().add(half + 8), sum[1]);
                        }
                    }
                }
            }
        };
    }

    avx512_kernel!(avx512_f32_rows, f32, |p| _mm512_loadu_ps(p));
    avx512_kernel!(avx512_bf16_rows, bf16, |p| _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(
        _mm256_loadu_si256(p.cast())
    ))));
    avx2_kernel!(avx2_f32_rows, f32, |p| _mm256_loadu_ps(p));
    avx2_kernel!(avx2_bf16_rows, bf16, |p| _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(
        _mm_loadu_si128(p.cast())
    ))));

    tiles!(avx512_f32, avx512_f32_rows, f32, 12, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]);
    tiles!(avx512_bf16, avx512_bf16_rows, bf16, 12, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]);
    tiles!(avx2_f32, avx2_f32_rows, f32, 6, [1, 2, 3, 4, 5, 6]);
    tiles!(avx2_bf16, avx2_bf16_rows, bf16, 6, [1, 2, 3, 4, 5, 6]);
}
