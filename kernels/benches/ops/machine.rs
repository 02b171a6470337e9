//! What the machine can do at most, measured: f32 multiply-adds in registers and a streaming read.

use std::hint::black_box;
use std::time::Instant;

use deepspec_kernels::multiversion;
use deepspec_kernels::simd::{Level, level};
use rayon::prelude::*;

/// Rounds of which the best counts.
const ROUNDS: usize = 8;
/// Vectors of accumulators: enough to hide the latency of a multiply-add, few enough for the registers.
const ACCUMULATORS: usize = 12;
const STEPS: usize = 1 << 21;
/// Words read at a time, and words that are fetched ahead of them.
const CHUNK: usize = 32;
const AHEAD: usize = 512;
/// Size of a large page on x86-64.
#[cfg(target_os = "linux")]
const LARGE_PAGE: usize = 2 << 20;
/// Bytes of the streaming read.
pub(crate) const READ_BYTES: usize = 256 << 20;

/// Best rates with all threads.
#[derive(Clone, Copy)]
pub(crate) struct Peak {
    pub(crate) gflops: f64,
    pub(crate) gigabytes_per_s: f64,
}

impl Peak {
    pub(crate) fn measure() -> Self {
        let threads = rayon::current_num_threads();
        let flops = threads * STEPS * ACCUMULATORS * lanes() * 2;
        let gflops = best_rate(flops, || (0..threads).into_par_iter().map(|_| multiply_add(black_box(0.5))).sum());
        let data = buffer();
        let share = data.len() / threads;
        let gigabytes_per_s = best_rate(READ_BYTES, || data.par_chunks(share).map(|part| read(part) as f32).sum());
        Self { gflops, gigabytes_per_s }
    }
}

/// Words to read, on large pages where the system has them, as packed weights are.
fn buffer() -> Vec<u64> {
    let mut data: Vec<u64> = Vec::with_capacity(READ_BYTES / 8);
    #[cfg(target_os = "linux")]
    {
        let start: *mut u8 = data.as_mut_ptr().cast();
        let skipped = start.align_offset(LARGE_PAGE);
        // SAFETY: the range lies inside the allocation; the call changes how it is backed, not what it holds.
        unsafe { libc::madvise(start.add(skipped).cast(), READ_BYTES - LARGE_PAGE, libc::MADV_HUGEPAGE) };
    }
    data.resize(READ_BYTES / 8, 1);
    data
}

/// Billions of `amount` per second in the best round.
fn best_rate(amount: usize, run: impl Fn() -> f32) -> f64 {
    let time = |_| {
        let start = Instant::now();
        black_box(run());
        start.elapsed().as_secs_f64()
    };
    amount as f64 / (0..ROUNDS).map(time).fold(f64::INFINITY, f64::min) / 1e9
}

/// f32 lanes of a vector.
fn lanes() -> usize {
    match level() {
        Level::Avx512 => 16,
        Level::Avx2 => 8,
        Level::Portable => 4,
    }
}

fn multiply_add(x: f32) -> f32 {
    #[cfg(target_arch = "x86_64")]
    match level() {
        // SAFETY: `level` says that the processor has these features.
        Level::Avx512 => return unsafe { avx512(x) },
        // SAFETY: as above.
        Level::Avx2 => return unsafe { avx2(x) },
        Level::Portable => {}
    }
    chains::<4>(x, |a, b, c| a * b + c)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx2,fma")]
fn avx512(x: f32) -> f32 {
    use std::arch::x86_64::{_mm512_fmadd_ps, _mm512_reduce_add_ps, _mm512_set1_ps};
    let factor = _mm512_set1_ps(x);
    let mut sums = [factor; ACCUMULATORS];
    for _ in 0..STEPS {
        for sum in &mut sums {
            *sum = _mm512_fmadd_ps(*sum, factor, factor);
        }
    }
    sums.into_iter().map(|sum| _mm512_reduce_add_ps(sum)).sum()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn avx2(x: f32) -> f32 {
    chains::<8>(x, |a: f32, b, c| a.mul_add(b, c))
}

/// The accumulators' chains, `LANES` wide, for the compiler to make vectors of.
#[inline(always)]
#[expect(clippy::inline_always, reason = "takes on the features of its caller")]
fn chains<const LANES: usize>(x: f32, multiply_add: impl Fn(f32, f32, f32) -> f32) -> f32 {
    let mut sums = [[x; LANES]; ACCUMULATORS];
    for _ in 0..STEPS {
        for sum in sums.iter_mut().flatten() {
            *sum = multiply_add(*sum, x, x);
        }
    }
    sums.iter().flatten().sum()
}

multiversion! {
    /// Sum of all words, which takes one pass over memory.
    fn read(data: &[u64]) -> u64 {
        let mut sums = [0u64; CHUNK];
        for chunk in data.chunks_exact(CHUNK) {
            fetch(chunk.as_ptr().wrapping_add(AHEAD));
            for lane in 0..CHUNK {
                sums[lane] = sums[lane].wrapping_add(chunk[lane]);
            }
        }
        sums.iter().fold(0, |total, sum| total.wrapping_add(*sum))
    }
}

/// Asks for the cache lines of a chunk.
#[inline(always)]
#[expect(clippy::inline_always, reason = "called once per chunk")]
fn fetch(at: *const u64) {
    #[cfg(target_arch = "x86_64")]
    for line in 0..CHUNK / 8 {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch reads nothing, so any address will do.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(8 * line).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}
