//! The tile unit of recent Intel servers (AMX): 16 × 64 bytes of activations times 64 × 16 weights in one instruction.
//!
//! The compiler has no stable intrinsics for it, so the instructions are written out.

use std::arch::asm;
use std::arch::x86_64::{
    __cpuid_count, _MM_HINT_T0, _mm_prefetch, _mm256_loadu_si256, _mm512_add_epi32, _mm512_cvtepi16_epi32,
    _mm512_cvtepi32_ps, _mm512_fmadd_ps, _mm512_load_si512, _mm512_loadu_ps, _mm512_mullo_epi32, _mm512_set1_epi32,
    _mm512_setzero_ps, _mm512_slli_epi32, _mm512_storeu_ps, _mm512_sub_epi32,
};
use std::sync::OnceLock;

use super::int8::{AMX_ROWS, GROUP, GROUP_BYTES, Panel, SHIFT, TileRows};
use super::packed::PANEL;

/// Groups that weights are fetched ahead.
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

/// Tile registers as this thread's kernels use them: eight tiles of 16 rows × 64 bytes.
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
    /// Sets the registers up for this thread; released when dropped.
    ///
    /// # Safety
    /// [`usable`] has returned true.
    pub(super) unsafe fn configure() -> Self {
        let mut config =
            TileConfig { palette: 1, start_row: 0, reserved: [0; 14], bytes_per_row: [0; 16], rows: [0; 16] };
        config.bytes_per_row[..8].fill(64);
        config.rows[..8].fill(16);
        // SAFETY: the unit is usable, and the configuration is one that every palette 1 allows.
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

/// Integer sums of 16 rows × 32 outputs, of high and of low bytes.
#[repr(C, align(64))]
struct Sums {
    high: [[i32; PANEL]; AMX_ROWS],
    low: [[i32; PANEL]; AMX_ROWS],
}

/// Outputs of one panel for up to 16 rows.
///
/// # Safety
/// [`usable`] has returned true and this thread holds [`Tiles`].
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn tile(panel: Panel<'_>, x: TileRows<'_>, tile: &mut [[f32; PANEL]]) {
    let (depth, count) = (x.depth, x.scales.len());
    assert!(count <= AMX_ROWS && tile.len() >= count && x.values.len() >= AMX_ROWS * 2 * depth);
    assert!(panel.weights.len() == depth * PANEL && panel.scales.len() * GROUP == panel.weights.len());
    assert!(panel.sums.len() == panel.scales.len());
    let mut sums = Sums { high: [[0; PANEL]; AMX_ROWS], low: [[0; PANEL]; AMX_ROWS] };
    let tile = &mut tile[..count];
    for g in 0..depth / GROUP {
        // SAFETY: the assertions above keep every address inside its slice; prefetches may point past them.
        unsafe {
            let weights = panel.weights.as_ptr().add(g * GROUP_BYTES);
            for line in 0..GROUP_BYTES / 64 {
                _mm_prefetch::<_MM_HINT_T0>(weights.wrapping_add(AHEAD * GROUP_BYTES + line * 64));
            }
            multiply(weights, x.values.as_ptr().add(g * GROUP), depth, &mut sums);
            for half in [0, 16] {
                let at = g * PANEL + half;
                let scale = _mm512_loadu_ps(panel.scales.as_ptr().add(at));
                let surplus = _mm512_cvtepi16_epi32(_mm256_loadu_si256(panel.sums.as_ptr().add(at).cast()));
                let surplus = _mm512_mullo_epi32(surplus, _mm512_set1_epi32(SHIFT));
                for (r, out) in tile.iter_mut().enumerate() {
                    let high = _mm512_load_si512(sums.high.get_unchecked(r).as_ptr().add(half).cast());
                    let low = _mm512_load_si512(sums.low.get_unchecked(r).as_ptr().add(half).cast());
                    let sum = _mm512_sub_epi32(_mm512_add_epi32(_mm512_slli_epi32::<8>(high), low), surplus);
                    let out = out.as_mut_ptr().add(half);
                    let before = if g == 0 { _mm512_setzero_ps() } else { _mm512_loadu_ps(out) };
                    _mm512_storeu_ps(out, _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scale, before));
                }
            }
        }
    }
    for (out, &scale) in tile.iter_mut().zip(x.scales) {
        for out in out {
            *out *= scale;
        }
    }
}

/// One group: 16 rows of high and of low bytes, `2·depth` bytes from row to row, times 64 × 32 weights.
///
/// # Safety
/// The rows and the weights can be read, and this thread holds [`Tiles`].
unsafe fn multiply(weights: *const i8, x: *const u8, depth: usize, sums: &mut Sums) {
    // SAFETY: promised by the caller; each half of the sums holds 16 rows of 128 bytes.
    unsafe {
        asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "tileloadd tmm6, [{w} + {stride}*1]",
            "tileloadd tmm4, [{x} + {row}*2]",
            "tdpbusd tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{w} + {stride}*1 + 64]",
            "tdpbusd tmm1, tmm4, tmm7",
            "tileloadd tmm5, [{y} + {row}*2]",
            "tdpbusd tmm2, tmm5, tmm6",
            "tdpbusd tmm3, tmm5, tmm7",
            "tilestored [{high} + {stride}*1], tmm0",
            "tilestored [{high} + {stride}*1 + 64], tmm1",
            "tilestored [{low} + {stride}*1], tmm2",
            "tilestored [{low} + {stride}*1 + 64], tmm3",
            w = in(reg) weights,
            x = in(reg) x,
            y = in(reg) x.add(depth),
            row = in(reg) depth,
            stride = in(reg) 4 * PANEL,
            high = in(reg) sums.high.as_mut_ptr(),
            low = in(reg) sums.low.as_mut_ptr(),
            options(nostack),
        );
    }
}
