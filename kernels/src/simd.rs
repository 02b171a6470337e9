//! Run-time choice of instruction set for loops that the compiler vectorises, and the few vector helpers they share.
//!
//! The binary is built for the baseline of its platform; `multiversion!` compiles the same loop again for AVX2+FMA and
//! AVX-512 and picks one when it is called. Loops use separate multiply and add, in an order written out in the source,
//! so every version gives the same bits.

/// Compiles a function body for several instruction sets and dispatches at run time.
///
/// The versions differ in speed only: bodies must not depend on the vector width.
#[macro_export]
#[doc(hidden)]
macro_rules! multiversion {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        $vis fn $name($($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            fn body($($arg: $ty),*) $(-> $ret)? $body

            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")]
                fn avx512($($arg: $ty),*) $(-> $ret)? { body($($arg),*) }
                #[target_feature(enable = "avx2,fma")]
                fn avx2($($arg: $ty),*) $(-> $ret)? { body($($arg),*) }

                match $crate::simd::level() {
                    // SAFETY: `level` has checked that this processor has the features the version is compiled for.
                    $crate::simd::Level::Avx512 => return unsafe { avx512($($arg),*) },
                    // SAFETY: as above.
                    $crate::simd::Level::Avx2 => return unsafe { avx2($($arg),*) },
                    $crate::simd::Level::Portable => {}
                }
            }
            body($($arg),*)
        }
    };
}

/// Instruction set that the kernels use on this machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Level {
    /// AVX-512 F/BW/VL/DQ.
    Avx512,
    /// AVX2 with FMA.
    Avx2,
    /// The platform's baseline.
    Portable,
}

impl Level {
    /// Name as printed in banners.
    pub fn name(self) -> &'static str {
        match self {
            Level::Avx512 => "avx512",
            Level::Avx2 => "avx2",
            Level::Portable => "portable",
        }
    }
}

/// Best instruction set of this processor.
pub fn level() -> Level {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("fma")
        {
            return Level::Avx512;
        }
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            return Level::Avx2;
        }
    }
    Level::Portable
}

const LANES: usize = 16;

/// Dot product with sixteen partial sums, added in a fixed order.
#[inline(always)]
#[expect(clippy::inline_always, reason = "called inside multiversioned loops")]
pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut partial = [0f32; LANES];
    let (a_chunks, b_chunks) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let mut tail = 0f32;
    for (x, y) in a_chunks.remainder().iter().zip(b_chunks.remainder()) {
        tail += x * y;
    }
    for (x, y) in a_chunks.zip(b_chunks) {
        let x: &[f32; LANES] = x.try_into().expect("chunks have this length");
        let y: &[f32; LANES] = y.try_into().expect("chunks have this length");
        for lane in 0..LANES {
            partial[lane] += x[lane] * y[lane];
        }
    }
    fold(partial) + tail
}

/// Sum with sixteen partial sums, added in a fixed order.
#[inline(always)]
#[expect(clippy::inline_always, reason = "called inside multiversioned loops")]
pub(crate) fn sum(a: &[f32]) -> f32 {
    let mut partial = [0f32; LANES];
    let chunks = a.chunks_exact(LANES);
    let tail: f32 = chunks.remainder().iter().sum();
    for x in chunks {
        for lane in 0..LANES {
            partial[lane] += x[lane];
        }
    }
    fold(partial) + tail
}

/// Largest element (negative infinity for an empty slice); NaN elements are ignored.
#[inline(always)]
#[expect(clippy::inline_always, reason = "called inside multiversioned loops")]
pub(crate) fn max(a: &[f32]) -> f32 {
    let mut partial = [f32::NEG_INFINITY; LANES];
    let chunks = a.chunks_exact(LANES);
    let mut largest = chunks.remainder().iter().copied().fold(f32::NEG_INFINITY, f32::max);
    for x in chunks {
        for lane in 0..LANES {
            partial[lane] = if x[lane] > partial[lane] { x[lane] } else { partial[lane] };
        }
    }
    for value in partial {
        largest = largest.max(value);
    }
    largest
}

/// `y += a · x`.
#[inline(always)]
#[expect(clippy::inline_always, reason = "called inside multiversioned loops")]
pub(crate) fn axpy(a: f32, x: &[f32], y: &mut [f32]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y += a * x;
    }
}

#[inline(always)]
#[expect(clippy::inline_always, reason = "called inside multiversioned loops")]
fn fold(partial: [f32; LANES]) -> f32 {
    // Kept opaque: otherwise the compiler carries the shape of this tree back into the loops and halves their vectors.
    let partial = std::hint::black_box(partial);
    let eight: [f32; 8] = std::array::from_fn(|i| partial[i] + partial[i + 8]);
    let four: [f32; 4] = std::array::from_fn(|i| eight[i] + eight[i + 4]);
    (four[0] + four[2]) + (four[1] + four[3])
}

/// e^x, relative error below 3e-7; 0 below −87.3, the largest finite power above 88.3.
///
/// Range reduction to 2^n · e^r with |r| ≤ ½ ln 2 and a degree-6 polynomial; no branch, so loops over it vectorise.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    const ROUND: f32 = 12_582_912.0; // 1.5 · 2^23: adding it rounds to an integer held in the low mantissa bits
    let clamped = if x < -87.3 { -87.3 } else { x };
    let clamped = if clamped > 88.3 { 88.3 } else { clamped };
    let shifted = clamped * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = clamped - n * 0.693_359_4;
    let r = r - n * -2.121_944_4e-4;
    let p = 1.388_888_9e-3_f32;
    let p = p * r + 8.333_334e-3;
    let p = p * r + 4.166_666_8e-2;
    let p = p * r + 0.166_666_67;
    let p = p * r + 0.5;
    let p = p * r + 1.0;
    let p = p * r + 1.0;
    let exponent = shifted.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(127) << 23;
    let value = p * f32::from_bits(exponent);
    if x < -87.3 { 0.0 } else { value }
}

/// Asks the memory for elements that will be needed soon.
#[inline]
pub(crate) fn prefetch(elements: &[f32]) {
    #[cfg(target_arch = "x86_64")]
    for line in elements.chunks(LANES) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a hint without any effect on what memory holds, about an element of the slice.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = elements;
}

/// Exponentiates `row − shift` in place and returns the sum of the results.
#[inline(always)]
#[expect(clippy::inline_always, reason = "called inside multiversioned loops")]
pub(crate) fn exp_shifted(row: &mut [f32], shift: f32) -> f32 {
    for value in row.iter_mut() {
        *value = exp(*value - shift);
    }
    sum(row)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_accurate_over_its_range() {
        for i in -8730..8830 {
            let x = i as f32 / 100.0;
            let expected = f64::from(x).exp();
            let error = (f64::from(exp(x)) - expected).abs() / expected;
            assert!(error < 3e-7, "exp({x}): relative error {error}");
        }
        assert_eq!(exp(-1000.0), 0.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(0.0), 1.0);
        assert!(exp(1000.0).is_finite());
    }

    #[test]
    fn reductions_match_a_plain_loop() {
        for n in [0, 1, 15, 16, 17, 64, 100] {
            let a: Vec<f32> = (0..n).map(|i| ((i * 7 % 13) as f32) - 6.0).collect();
            let b: Vec<f32> = (0..n).map(|i| ((i * 5 % 11) as f32) - 5.0).collect();
            assert_eq!(dot(&a, &b), a.iter().zip(&b).map(|(x, y)| x * y).sum::<f32>());
            assert_eq!(sum(&a), a.iter().sum::<f32>());
            assert_eq!(max(&a), a.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        }
    }
}
