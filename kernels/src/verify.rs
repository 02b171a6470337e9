//! Verification of draft blocks where the probabilities lie: which tokens are accepted, and the token after them.
//!
//! Token k of a block is accepted with probability min(1, p_t / p_d). The first rejected one is replaced by a draw from
//! norm(max(0, p_t − p_d)), or from p_t where that has no mass; behind a block that is accepted whole follows a draw from the
//! target's last row. Only two numbers per block come back to the host.

use candle_core::{DType, Result, Storage, Tensor, bail};

use crate::rows::Rows;
#[cfg(feature = "cuda")]
use crate::{cuda::Cuda, device};

/// Smallest draft probability in the acceptance ratio, and the largest mass of a residual that is only rounding.
const FLOOR: f64 = 1e-8;

/// Tokens of one draft block and the uniform numbers in [0, 1) that its draws use.
#[derive(Debug, Clone, Copy)]
pub struct DraftBlock<'a> {
    /// The proposed tokens, each a draw from its draft row.
    pub tokens: &'a [u32],
    /// One number per token, for its acceptance.
    pub accept: &'a [f64],
    /// One number per token and one more: for the token drawn after that many accepted ones.
    pub next: &'a [f64],
}

/// What a verification commits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Verdict {
    /// Accepted tokens, a prefix of the block.
    pub accepted: usize,
    /// The token after them.
    pub next_token: u32,
}

/// Verifies blocks, one after the other in the rows.
///
/// # Shapes
/// target `[Σ (tokens + 1), vocab]`, draft `[Σ tokens, vocab]`: probabilities, f32.
///
/// # Errors
/// When the rows do not fit the blocks, or a token is outside the vocabulary.
pub fn verify_blocks(target: &Tensor, draft: &Tensor, blocks: &[DraftBlock<'_>]) -> Result<Vec<Verdict>> {
    let ((target_rows, vocab), (draft_rows, draft_vocab)) = (target.dims2()?, draft.dims2()?);
    let tokens: usize = blocks.iter().map(|b| b.tokens.len()).sum();
    let numbers = |b: &DraftBlock<'_>| b.accept.len() == b.tokens.len() && b.next.len() == b.tokens.len() + 1;
    if target_rows != tokens + blocks.len()
        || draft_rows != tokens
        || (draft_rows > 0 && draft_vocab != vocab)
        || vocab == 0
        || !blocks.iter().all(numbers)
    {
        bail!(
            "verification of {} blocks of {tokens} tokens got target [{target_rows}, {vocab}], draft [{draft_rows}, {draft_vocab}]",
            blocks.len()
        );
    }
    if let Some(token) = blocks.iter().flat_map(|b| b.tokens).find(|&&token| token as usize >= vocab) {
        bail!("token {token} is outside the vocabulary of {vocab}");
    }
    let (target, draft) = (target.contiguous()?, draft.contiguous()?);
    let ((target_storage, target_layout), (draft_storage, draft_layout)) =
        (target.storage_and_layout(), draft.storage_and_layout());
    match (&*target_storage, &*draft_storage) {
        (Storage::Cpu(target), Storage::Cpu(draft)) => {
            let target = Rows::new("verify", target, target_layout)?;
            let draft = Rows::new("verify", draft, draft_layout)?;
            let (mut t, mut d) = (0, 0);
            let verdict = |block: &DraftBlock<'_>| {
                let verdict = verify(&target, t, &draft, d, block);
                t += block.tokens.len() + 1;
                d += block.tokens.len();
                verdict
            };
            Ok(blocks.iter().map(verdict).collect())
        }
        #[cfg(feature = "cuda")]
        (Storage::Cuda(target), Storage::Cuda(draft)) => {
            let cuda = Cuda::of(target);
            let target = cuda.rows("verify", target, target_layout)?;
            let draft = cuda.rows("verify", draft, draft_layout)?;
            device::verify::verify_blocks(&cuda, &target, &draft, blocks)
        }
        _ => bail!("verification needs both distributions on one device that it has a kernel for"),
    }
}

/// Place of the largest value of each row, the first of equals.
///
/// # Shapes
/// `[rows, n]`, f32
///
/// # Errors
/// When a row is empty, has a NaN, or its maximum is infinite.
pub fn argmax_first(x: &Tensor) -> Result<Vec<u32>> {
    let x = x.to_dtype(DType::F32)?;
    let (storage, layout) = x.storage_and_layout();
    let places: Vec<Option<u32>> = match &*storage {
        Storage::Cpu(storage) => {
            let rows = Rows::new("argmax", storage, layout)?;
            (0..rows.count).map(|i| first_maximum(rows.row(i))).collect()
        }
        #[cfg(feature = "cuda")]
        Storage::Cuda(storage) => {
            let cuda = Cuda::of(storage);
            let rows = cuda.rows("argmax", storage, layout)?;
            device::verify::argmax_first(&cuda, &rows)?
        }
        _ => bail!("argmax has no kernel for this device"),
    };
    let usable = |(row, place): (usize, Option<u32>)| match place {
        Some(place) => Ok(place),
        None => bail!("row {row} is empty, has a NaN or an infinite maximum"),
    };
    places.into_iter().enumerate().map(usable).collect()
}

fn first_maximum(row: &[f32]) -> Option<u32> {
    let mut best = (f32::NEG_INFINITY, None);
    for (place, &value) in row.iter().enumerate() {
        if value.is_nan() {
            return None;
        }
        if value > best.0 {
            best = (value, Some(place as u32));
        }
    }
    best.1.filter(|_| best.0 < f32::INFINITY)
}

fn verify(target: &Rows<'_>, t: usize, draft: &Rows<'_>, d: usize, block: &DraftBlock<'_>) -> Verdict {
    let rejected = block.tokens.iter().zip(block.accept).enumerate().position(|(k, (&token, &u))| {
        let (p, q) = (target.row(t + k)[token as usize], draft.row(d + k)[token as usize]);
        u >= (f64::from(p) / f64::from(q).max(FLOOR)).min(1.0)
    });
    let accepted = rejected.unwrap_or(block.tokens.len());
    let p = target.row(t + accepted);
    let next_token = match rejected {
        Some(k) => sample(&residual(p, draft.row(d + k)), block.next[k]),
        None => sample(p, block.next[accepted]),
    };
    Verdict { accepted, next_token }
}

/// norm(max(0, p − q)), or norm(p) where that has no mass.
fn residual(p: &[f32], q: &[f32]) -> Vec<f32> {
    let mut weights: Vec<f32> = p.iter().zip(q).map(|(p, q)| (p - q).max(0.0)).collect();
    let mut mass = sum(&weights);
    if mass <= FLOOR {
        weights = p.to_vec();
        mass = sum(&weights);
    }
    for weight in &mut weights {
        *weight = (f64::from(*weight) / mass) as f32;
    }
    weights
}

/// The token at quantile `u`; rounding past the end gives the last token with mass.
fn sample(probabilities: &[f32], u: f64) -> u32 {
    let mut rest = u * sum(probabilities);
    let mut last = 0;
    for (token, &mass) in probabilities.iter().enumerate() {
        if mass > 0.0 {
            last = token;
            rest -= f64::from(mass);
            if rest < 0.0 {
                break;
            }
        }
    }
    last as u32
}

fn sum(values: &[f32]) -> f64 {
    values.iter().copied().map(f64::from).sum()
}
