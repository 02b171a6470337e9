//! Four-bit weights on the tile unit: their half-bytes are spread to bytes in front of it, 32 inputs at a time.

use std::arch::asm;
use std::arch::x86_64::{
    __m512, __m512i, _MM_HINT_T0, _mm_prefetch, _mm256_loadu_si256, _mm512_add_epi32, _mm512_and_si512,
    _mm512_cvtepi32_ps, _mm512_cvtph_ps, _mm512_fmadd_ps, _mm512_load_si512, _mm512_loadu_si512, _mm512_set1_epi8,
    _mm512_set1_ps, _mm512_setzero_ps, _mm512_slli_epi32, _mm512_srli_epi16, _mm512_store_si512, _mm512_storeu_ps,
};
use std::mem::MaybeUninit;

use super::int4::{BLOCK, GROUP, HALF, LINE, LINES, TileRows};
use super::int8::AMX_ROWS;
use super::packed::PANEL;

/// Bytes that weights are fetched ahead.
const AHEAD: usize = 4096;

/// Weights of 16 outputs and 32 inputs as the unit reads them: `[k/4][16][4]`.
#[repr(C, align(64))]
struct Spread([u8; GROUP * HALF]);

/// Integer sums of 16 rows (or of 8 rows and two groups) × 16 outputs: of high bytes, then of low bytes, row by row.
#[repr(C, align(64))]
struct Sums([[[i32; HALF]; 2]; AMX_ROWS]);

/// 16 outputs for up to 16 rows, before the rows' scales.
///
/// # Safety
/// [`super::amx::usable`] has returned true and this thread holds [`super::amx::Tiles`] for [`GROUP`] inputs and the batch whose
/// rows from these on are `x.values`.
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn tile(blocks: &[u8], x: TileRows<'_>, half: usize, tile: &mut [[f32; PANEL]]) {
    let row = 2 * GROUP * x.groups;
    assert!((1..=AMX_ROWS).contains(&x.count) && tile.len() >= x.count && half < 2);
    // For a batch of at most 8 rows only these are configured; a larger one is padded.
    let is_whole_batch = x.count <= AMX_ROWS / 2 && x.values.len() == x.count * row;
    assert!(is_whole_batch || x.values.len() >= AMX_ROWS * row);
    assert!(x.groups.is_multiple_of(2) && blocks.len() == x.groups * BLOCK && x.sums.len() >= AMX_ROWS * x.groups);
    let tile = &mut tile[..x.count];
    // SAFETY: promised by the caller; the lengths are checked above.
    unsafe {
        match x.count {
            1..=4 => rows::<4>(blocks, x, half, tile),
            5..=8 => rows::<8>(blocks, x, half, tile),
            _ => rows::<AMX_ROWS>(blocks, x, half, tile),
        }
    }
}

/// Up to `R` rows; tile registers hold eight rows.
///
/// # Safety
/// See [`tile`]; the lengths are checked there.
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn rows<const R: usize>(blocks: &[u8], x: TileRows<'_>, half: usize, tile: &mut [[f32; PANEL]]) {
    let groups = const { groups_per_step(R) };
    // The unit's loads and stores wait for memory: what one step writes is read in the next one, from the other of two places.
    let mut spread = [const { MaybeUninit::<[Spread; 2]>::uninit() }; 2];
    let mut sums = [const { MaybeUninit::<Sums>::uninit() }; 2];
    for sums in &mut sums {
        // The unit stores the sums of the batch's rows; the others are read, but not used.
        let start = sums.as_mut_ptr().cast::<[[i32; HALF]; 2]>();
        for row in (0..groups).flat_map(|i| (tile.len()..R).map(move |row| i * AMX_ROWS / 2 + row)) {
            // SAFETY: there are 16 rows, 8 of each of two groups.
            unsafe { start.add(row).write([[0; HALF]; 2]) };
        }
    }
    let mut out = [_mm512_setzero_ps(); R];
    for step in 0..x.groups / groups + 3 {
        // The step whose groups are at a stage now.
        let at = |stage: usize| step.checked_sub(stage).filter(|&step| step < x.groups / groups);
        // SAFETY: promised by the caller: blocks and rows have all groups.
        unsafe {
            if let Some(step) = at(0) {
                for i in 0..groups {
                    let block = blocks.as_ptr().add((step * groups + i) * BLOCK);
                    spread_halves(block, spread[step % 2].as_mut_ptr().cast::<Spread>().add(i).cast());
                }
            }
            if let Some(step) = at(1) {
                multiply::<R>(x, step, spread[step % 2].as_ptr().cast());
            }
            if let Some(step) = at(2) {
                store(step, sums[step % 2].as_mut_ptr());
            }
            if let Some(step) = at(3) {
                let sums = sums[step % 2].as_ptr().cast::<[[i32; HALF]; 2]>();
                for i in 0..groups {
                    let g = step * groups + i;
                    scale(blocks.as_ptr().add(g * BLOCK), x, g, sums.add(i * AMX_ROWS / 2), &mut out);
                }
            }
        }
    }
    for (row, out) in tile.iter_mut().zip(out) {
        // SAFETY: a tile row holds two halves of 16 values.
        unsafe { _mm512_storeu_ps(row.as_mut_ptr().add(half * HALF), out) };
    }
}

/// Groups that are on their way through the unit together: a tile of sums holds eight rows, and there are two for each step.
const fn groups_per_step(rows: usize) -> usize {
    if rows > AMX_ROWS / 2 { 1 } else { 2 }
}

/// Integer sums of a step's groups, in tiles 0 and 1 or 2 and 3: of one group and 16 rows, or of two groups and 8 rows.
///
/// # Safety
/// See [`tile`]; the groups' weights have been spread.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn multiply<const R: usize>(x: TileRows<'_>, step: usize, weights: *const Spread) {
    let depth = x.groups * GROUP;
    macro_rules! multiply {
        ($first:literal, $second:literal) => {
            // SAFETY: promised by the caller.
            unsafe {
                let values = x.values.as_ptr().add(step * groups_per_step(R) * GROUP);
                if R > AMX_ROWS / 2 {
                    asm!(
                        "tileloadd tmm6, [{w} + {line}*1]",
                        "tileloadd tmm4, [{x} + {depth}*1]",
                        "tileloadd tmm5, [{y} + {depth}*1]",
                        concat!("tilezero ", $first),
                        concat!("tilezero ", $second),
                        concat!("tdpbsud ", $first, ", tmm4, tmm6"),
                        concat!("tdpbsud ", $second, ", tmm5, tmm6"),
                        w = in(reg) weights,
                        x = in(reg) values,
                        y = in(reg) values.add(AMX_ROWS * depth),
                        depth = in(reg) depth,
                        line = in(reg) LINE,
                        options(nostack, readonly),
                    );
                } else {
                    asm!(
                        "tileloadd tmm6, [{w} + {line}*1]",
                        "tileloadd tmm4, [{x} + {depth}*1]",
                        "tileloadd tmm7, [{w} + {line}*1 + 512]",
                        "tileloadd tmm5, [{x} + {depth}*1 + 32]",
                        concat!("tilezero ", $first),
                        concat!("tilezero ", $second),
                        concat!("tdpbsud ", $first, ", tmm4, tmm6"),
                        concat!("tdpbsud ", $second, ", tmm5, tmm7"),
                        w = in(reg) weights,
                        x = in(reg) values,
                        depth = in(reg) depth,
                        line = in(reg) LINE,
                        options(nostack, readonly),
                    );
                }
            }
        };
    }
    if step.is_multiple_of(2) {
        multiply!("tmm0", "tmm1");
    } else {
        multiply!("tmm2", "tmm3");
    }
}

/// Writes the sums of a step to memory.
///
/// # Safety
/// They have been multiplied.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn store(step: usize, sums: *mut Sums) {
    macro_rules! store {
        ($first:literal, $second:literal) => {
            // SAFETY: promised by the caller.
            unsafe {
                asm!(
                    concat!("tilestored [{sums} + {line}*1], ", $first),
                    concat!("tilestored [{sums} + {line}*1 + 1024], ", $second),
                    sums = in(reg) sums,
                    line = in(reg) LINE,
                    options(nostack),
                )
            }
        };
    }
    if step.is_multiple_of(2) {
        store!("tmm0", "tmm1");
    } else {
        store!("tmm2", "tmm3");
    }
}

/// Adds what group `g` gives to the outputs.
///
/// # Safety
/// `block` is the group's, `sums` holds `R` rows.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn scale<const R: usize>(
    block: *const u8,
    x: TileRows<'_>,
    g: usize,
    sums: *const [[i32; HALF]; 2],
    out: &mut [__m512; R],
) {
    // SAFETY: promised by the caller.
    unsafe {
        let scales = block.add(LINES * LINE);
        let steps = _mm512_cvtph_ps(_mm256_loadu_si256(scales.cast()));
        let minima = _mm512_cvtph_ps(_mm256_loadu_si256(scales.add(2 * HALF).cast()));
        for (r, out) in out.iter_mut().enumerate() {
            let [high, low] = (*sums.add(r)).each_ref().map(|sums| _mm512_load_si512(sums.as_ptr().cast()));
            let sum = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32::<8>(high), low));
            let total = _mm512_set1_ps(*x.sums.as_ptr().add(r * x.groups + g));
            *out = _mm512_fmadd_ps(total, minima, _mm512_fmadd_ps(sum, steps, *out));
        }
    }
}

/// Writes the half-bytes of a block as bytes.
///
/// # Safety
/// A block lies at `block`, and at `spread` there is room for its 512 weights, on a cache line.
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn spread_halves(block: *const u8, spread: *mut __m512i) {
    let nibble = _mm512_set1_epi8(15);
    for line in 0..LINES {
        // SAFETY: promised by the caller.
        unsafe {
            _mm_prefetch::<_MM_HINT_T0>(block.wrapping_add(AHEAD + line * LINE).cast());
            let both = _mm512_loadu_si512(block.add(line * LINE).cast());
            _mm512_store_si512(spread.add(2 * line), _mm512_and_si512(both, nibble));
            _mm512_store_si512(spread.add(2 * line + 1), _mm512_and_si512(_mm512_srli_epi16::<4>(both), nibble));
        }
    }
    _mm_prefetch::<_MM_HINT_T0>(block.wrapping_add(AHEAD + LINES * LINE).cast());
}
