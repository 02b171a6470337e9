//! The tile unit of recent Intel servers (AMX): 16 × 64 bytes of activations times 64 × 16 weights in one instruction.
//!
//! The compiler has no stable intrinsics for it, so the instructions are written out.

use std::arch::asm;
use std::arch::x86_64::{
    __cpuid_count, __m512, __m512i, _MM_HINT_T0, _mm_prefetch, _mm256_loadu_si256, _mm512_add_epi32,
    _mm512_cvtepi16_epi32, _mm512_cvtepi32_ps, _mm512_fmadd_ps, _mm512_load_si512, _mm512_loadu_ps, _mm512_mullo_epi32,
    _mm512_set1_epi32, _mm512_setzero_ps, _mm512_slli_epi32, _mm512_storeu_ps, _mm512_sub_epi32,
};
use std::mem::MaybeUninit;
use std::sync::OnceLock;

use super::int8::{AMX_ROWS, GROUP, Panel, SHIFT, STEP, STEP_BYTES, TileRows};
use super::packed::PANEL;

/// Steps that weights are fetched ahead.
const AHEAD: usize = 2;

/// Whether the processor has the unit and the system lets this process use it.
pub(super) fn usable() -> bool {
    static USABLE: OnceLock<bool> = OnceLock::new();
    *USABLE.get_or_init(|| {
        const TILE: u32 = 1 << 24;
        const INT8: u32 = 1 << 25;
        // `cpuid` exists on every x86-64 processor, leaf 7 where AVX-512 does.
        let found = __cpuid_count(7, 0).edx;
        found & (TILE | INT8) == TILE | INT8 && permitted()
    })
}

#[cfg(target_os = "linux")]
fn permitted() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    // SAFETY: the call asks the kernel to save the tile registers of this process; it changes no memory.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn permitted() -> bool {
    false
}

/// Tile registers as this thread's kernels use them.
pub(super) struct Tiles(());

#[repr(C, align(64))]
struct TileConfig {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    bytes_per_row: [u16; 16],
    rows: [u8; 16],
}

impl Tiles {
    /// Sets this thread's registers up for batches of `rows`, `inputs` at a time (32 or 64); released when dropped. Compiled code
    /// does not use them, so they keep what one piece of assembly leaves in them for the next.
    ///
    /// Tiles 0–3 hold sums, 4 and 5 activations (a high and a low half for each row), 6 and 7 weights.
    ///
    /// # Safety
    /// [`usable`] has returned true.
    pub(super) unsafe fn configure(rows: usize, inputs: usize) -> Self {
        let mut config =
            TileConfig { palette: 1, start_row: 0, reserved: [0; 14], bytes_per_row: [0; 16], rows: [0; 16] };
        config.bytes_per_row[..8].fill(64);
        config.rows[..6].fill((2 * rows).min(16) as u8);
        config.bytes_per_row[4..6].fill(inputs as u16);
        config.rows[6..8].fill((inputs / 4) as u8);
        // SAFETY: the unit is usable, and the configuration is one that palette 1 allows.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const config, options(nostack, readonly)) };
        Self(())
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: the registers were configured by this thread.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}

/// Integer sums of 16 rows × 32 outputs: of high bytes, then of low bytes, row by row.
#[repr(C, align(64))]
struct Sums([[[i32; PANEL]; 2]; AMX_ROWS]);

/// Outputs of one panel for up to 16 rows, before the rows' scales.
///
/// # Safety
/// [`usable`] has returned true and this thread holds [`Tiles`] for the batch whose rows from these on are `x.values`.
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn tile(panel: Panel<'_>, x: TileRows<'_>, tile: &mut [[f32; PANEL]]) {
    let (depth, count) = (x.depth, x.count);
    assert!((1..=AMX_ROWS).contains(&count) && tile.len() >= count);
    // For a batch of at most 8 rows only these are configured; a larger one is padded.
    let is_whole_batch = count <= AMX_ROWS / 2 && x.values.len() == count * 2 * depth;
    assert!(is_whole_batch || x.values.len() >= AMX_ROWS * 2 * depth);
    assert!(panel.weights.len() == depth * PANEL && panel.scales.len() == depth.div_ceil(GROUP) * PANEL);
    assert!(panel.sums.len() == panel.scales.len());
    let tile = &mut tile[..count];
    // SAFETY: promised by the caller; the lengths are checked above.
    unsafe {
        match count {
            1..=4 => few_rows::<4>(panel, x, tile),
            5..=8 => few_rows::<8>(panel, x, tile),
            _ => many_rows(panel, x, tile),
        }
    }
}

/// A group's integer sums of one row and 16 outputs, in f32.
///
/// # Safety
/// `half` is 0 or 16.
#[target_feature(enable = "avx512f")]
unsafe fn combine(sums: &[[i32; PANEL]; 2], half: usize, surplus: __m512i) -> __m512 {
    // SAFETY: both rows hold 32 sums, on a cache line.
    let [high, low] = sums.each_ref().map(|sums| unsafe { _mm512_load_si512(sums.as_ptr().add(half).cast()) });
    _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_add_epi32(_mm512_slli_epi32::<8>(high), low), surplus))
}

/// Scale and surplus of 16 outputs in group `g`.
///
/// # Safety
/// The panel has the group; `half` is 0 or 16.
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn scale_and_surplus(panel: Panel<'_>, g: usize, half: usize) -> (__m512, __m512i) {
    let at = g * PANEL + half;
    // SAFETY: promised by the caller.
    unsafe {
        let sums = _mm512_cvtepi16_epi32(_mm256_loadu_si256(panel.sums.as_ptr().add(at).cast()));
        (_mm512_loadu_ps(panel.scales.as_ptr().add(at)), _mm512_mullo_epi32(sums, _mm512_set1_epi32(SHIFT)))
    }
}

/// Up to `R` ≤ 8 rows: one tile of activations, outputs in registers.
///
/// # Safety
/// See [`tile`]; the lengths are checked there.
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn few_rows<const R: usize>(panel: Panel<'_>, x: TileRows<'_>, tile: &mut [[f32; PANEL]]) {
    let mut sums = MaybeUninit::<Sums>::uninit();
    // The unit stores the sums of the batch's rows; the others are read, but not used.
    let start = sums.as_mut_ptr().cast::<[[i32; PANEL]; 2]>();
    for row in tile.len()..R {
        // SAFETY: R ≤ 16.
        unsafe { start.add(row).write([[0; PANEL]; 2]) };
    }
    let mut out = [[_mm512_setzero_ps(); R]; 2];
    for g in 0..x.depth.div_ceil(GROUP) {
        // SAFETY: promised by the caller; prefetches may point past the weights.
        unsafe {
            asm!("tilezero tmm0", "tilezero tmm1", options(nostack, nomem));
            for step in g * GROUP / STEP..((g + 1) * GROUP).min(x.depth) / STEP {
                let weights = panel.weights.as_ptr().add(step * STEP_BYTES);
                prefetch(weights, 0);
                asm!(
                    "tileloadd tmm4, [{x} + {depth}*1]",
                    "tileloadd tmm6, [{w} + {stride}*1]",
                    "tdpbusd tmm0, tmm4, tmm6",
                    w = in(reg) weights,
                    x = in(reg) x.values.as_ptr().add(step * STEP),
                    depth = in(reg) x.depth,
                    stride = in(reg) 4 * PANEL,
                    options(nostack, readonly),
                );
                prefetch(weights, 1);
                asm!(
                    "tileloadd tmm7, [{w} + {stride}*1 + 64]",
                    "tdpbusd tmm1, tmm4, tmm7",
                    w = in(reg) weights,
                    stride = in(reg) 4 * PANEL,
                    options(nostack, readonly),
                );
            }
            asm!(
                "tilestored [{sums} + {stride}*1], tmm0",
                "tilestored [{sums} + {stride}*1 + 64], tmm1",
                stride = in(reg) 4 * PANEL,
                sums = in(reg) start,
                options(nostack),
            );
            let sums = std::slice::from_raw_parts(start, R);
            for (half, out) in [0, 16].into_iter().zip(&mut out) {
                let (scale, surplus) = scale_and_surplus(panel, g, half);
                for (out, sums) in out.iter_mut().zip(sums) {
                    *out = _mm512_fmadd_ps(combine(sums, half, surplus), scale, *out);
                }
            }
        }
    }
    for (half, out) in [0, 16].into_iter().zip(out) {
        for (row, out) in tile.iter_mut().zip(out) {
            // SAFETY: a tile row holds 32 values.
            unsafe { _mm512_storeu_ps(row.as_mut_ptr().add(half), out) };
        }
    }
}

/// Up to 16 rows: two tiles of activations, outputs in memory.
///
/// # Safety
/// See [`tile`]; the lengths are checked there.
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn many_rows(panel: Panel<'_>, x: TileRows<'_>, tile: &mut [[f32; PANEL]]) {
    let mut sums = MaybeUninit::<Sums>::uninit();
    let start = sums.as_mut_ptr().cast::<[[i32; PANEL]; 2]>();
    for g in 0..x.depth.div_ceil(GROUP) {
        // SAFETY: promised by the caller; prefetches may point past the weights.
        unsafe {
            asm!("tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3", options(nostack, nomem));
            for step in g * GROUP / STEP..((g + 1) * GROUP).min(x.depth) / STEP {
                let weights = panel.weights.as_ptr().add(step * STEP_BYTES);
                let values = x.values.as_ptr().add(step * STEP);
                prefetch(weights, 0);
                asm!(
                    "tileloadd tmm6, [{w} + {stride}*1]",
                    "tileloadd tmm4, [{x} + {depth}*1]",
                    "tdpbusd tmm0, tmm4, tmm6",
                    w = in(reg) weights,
                    x = in(reg) values,
                    depth = in(reg) x.depth,
                    stride = in(reg) 4 * PANEL,
                    options(nostack, readonly),
                );
                prefetch(weights, 1);
                asm!(
                    "tileloadd tmm7, [{w} + {stride}*1 + 64]",
                    "tdpbusd tmm1, tmm4, tmm7",
                    "tileloadd tmm5, [{y} + {depth}*1]",
                    "tdpbusd tmm2, tmm5, tmm6",
                    "tdpbusd tmm3, tmm5, tmm7",
                    w = in(reg) weights,
                    y = in(reg) values.add(AMX_ROWS * x.depth),
                    depth = in(reg) x.depth,
                    stride = in(reg) 4 * PANEL,
                    options(nostack, readonly),
                );
            }
            asm!(
                "tilestored [{sums} + {stride}*1], tmm0",
                "tilestored [{sums} + {stride}*1 + 64], tmm1",
                "tilestored [{more} + {stride}*1], tmm2",
                "tilestored [{more} + {stride}*1 + 64], tmm3",
                stride = in(reg) 4 * PANEL,
                sums = in(reg) start,
                more = in(reg) start.add(AMX_ROWS / 2),
                options(nostack),
            );
            let sums = std::slice::from_raw_parts(start, AMX_ROWS);
            for half in [0, 16] {
                let (scale, surplus) = scale_and_surplus(panel, g, half);
                for (out, sums) in tile.iter_mut().zip(sums) {
                    let out = out.as_mut_ptr().add(half);
                    let before = if g == 0 { _mm512_setzero_ps() } else { _mm512_loadu_ps(out) };
                    _mm512_storeu_ps(out, _mm512_fmadd_ps(combine(sums, half, surplus), scale, before));
                }
            }
        }
    }
}

/// Fetches one half of the weights of a step a few steps ahead; all at once they would be in the way of the loads.
#[inline]
fn prefetch(weights: *const i8, half: usize) {
    for line in half * STEP_BYTES / 128..(half + 1) * STEP_BYTES / 128 {
        // SAFETY: a prefetch does not fault.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(weights.wrapping_add(AHEAD * STEP_BYTES + line * 64)) };
    }
}
