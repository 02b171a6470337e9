//! Verification of draft blocks and the first maximum on a device; the kernels are in `verify.cu`.

use candle_core::{Result, bail};

use super::{Backend, Kernel, View, args};
use crate::verify::{DraftBlock, Verdict};

/// Threads of a block, as compiled into the kernels.
const THREADS: usize = 256;
/// Largest vocabulary of the verification kernel.
const MAX_VOCAB: usize = 1 << 20;

/// Place of the first largest value of each row; `None` for a row with a NaN or an infinite maximum.
///
/// # Errors
/// When the launch or the copy fails.
pub fn argmax_first<B: Backend>(backend: &B, x: &View) -> Result<Vec<Option<u32>>> {
    if x.count == 0 {
        return Ok(Vec::new());
    }
    let out = backend.alloc::<u32>(x.count)?;
    let args = args![x.address, x.stride, backend.address(&out), x.cols];
    backend.launch(Kernel { module: "verify", function: "argmax_first" }, [x.count, 1, 1], THREADS, &args)?;
    Ok(backend.download(&out)?.into_iter().map(|place| (place != u32::MAX).then_some(place)).collect())
}

/// Verifies blocks; see [`crate::verify::verify_blocks`], which has checked that they fit the contiguous rows.
///
/// # Errors
/// When the vocabulary is too large, or a launch or copy fails.
pub fn verify_blocks<B: Backend>(
    backend: &B,
    target: &View,
    draft: &View,
    blocks: &[DraftBlock<'_>],
) -> Result<Vec<Verdict>> {
    if target.cols > MAX_VOCAB {
        bail!("verification kernels take vocabularies of up to {MAX_VOCAB}, found {}", target.cols);
    }
    if blocks.is_empty() {
        return Ok(Vec::new());
    }
    let (mut table, mut target_row, mut draft_row) = (Vec::with_capacity(3 * blocks.len()), 0, 0);
    for block in blocks {
        table.extend([target_row, draft_row, block.tokens.len() as u32]);
        target_row += block.tokens.len() as u32 + 1;
        draft_row += block.tokens.len() as u32;
    }
    let table = backend.upload(&table)?;
    let tokens = backend.upload(&blocks.iter().flat_map(|b| b.tokens).copied().collect::<Vec<u32>>())?;
    let accept = backend.upload(&blocks.iter().flat_map(|b| b.accept).copied().collect::<Vec<f64>>())?;
    let next = backend.upload(&blocks.iter().flat_map(|b| b.next).copied().collect::<Vec<f64>>())?;
    let out = backend.alloc::<u32>(2 * blocks.len())?;
    let args = args![
        target.address,
        draft.address,
        backend.address(&tokens),
        backend.address(&accept),
        backend.address(&next),
        backend.address(&table),
        backend.address(&out),
        target.cols
    ];
    backend.launch(Kernel { module: "verify", function: "verify_blocks" }, [blocks.len(), 1, 1], THREADS, &args)?;
    let pairs = backend.download(&out)?;
    Ok(pairs.chunks_exact(2).map(|p| Verdict { accepted: p[0] as usize, next_token: p[1] }).collect())
}
