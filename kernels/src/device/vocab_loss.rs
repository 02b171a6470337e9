//! The fused vocabulary loss on a device: matrix products per chunk of rows, and the kernels of `vocab_loss.cu`.

use std::collections::BTreeMap;

use candle_core::{Result, bail};

use super::{Backend, Kernel, Matrix, View, args};

/// Bytes that the logits of a chunk may take.
const CHUNK_BYTES: usize = 128 << 20;

/// One draft row.
#[derive(Debug, Clone, Copy)]
pub struct Row {
    /// Row in the hidden tensor.
    pub row: usize,
    /// Row in the target's hidden tensor.
    pub target: usize,
    /// Draft token that follows, if the drafter has it.
    pub label: Option<u32>,
    /// Coefficient of the cross-entropy.
    pub ce: f32,
    /// Coefficient of the total variation.
    pub tv: f32,
    /// Coefficient of the divergence.
    pub kl: f32,
}

/// What one call computes.
#[derive(Debug, Clone, Copy)]
pub struct LossCall<'a> {
    /// Rows that count.
    pub rows: &'a [Row],
    /// The target's token of each draft token, ascending; `None` where both vocabularies are the same.
    pub draft_tokens: Option<&'a [u32]>,
    /// Temperature of the divergence.
    pub kl_temperature: f32,
    /// Whether target distributions are computed.
    pub with_target: bool,
    /// Most rows at a time; `None` for what [`CHUNK_BYTES`] allows.
    pub chunk_rows: Option<usize>,
}

/// Contiguous matrices with a row per token.
#[derive(Debug, Clone, Copy)]
pub struct Heads {
    /// The drafter's output head `[draft vocab, hidden]`.
    pub draft: Matrix,
    /// The target's `[vocab, hidden]`.
    pub target: Matrix,
    /// The Markov head's `[draft vocab, rank]`.
    pub w2: Matrix,
}

/// Terms and gradients.
pub struct LossOutput<B: Backend> {
    /// Cross-entropy, total variation and divergence of each row.
    pub terms: Vec<[f32; 3]>,
    /// Gradient of the hidden rows.
    pub hidden: B::Buffer<f32>,
    /// Gradient of the latent rows.
    pub latent: B::Buffer<f32>,
    /// Gradient of `w2`.
    pub w2: B::Buffer<f32>,
}

fn kernel(function: &'static str) -> Kernel {
    Kernel { module: "vocab_loss", function }
}

/// The rows that `index` names, side by side.
fn gather<B: Backend>(backend: &B, from: &View, index: &[u32]) -> Result<B::Buffer<f32>> {
    let table = backend.upload(index)?;
    let out = backend.alloc::<f32>(index.len() * from.cols)?;
    let args = args![from.address, from.stride, backend.address(&table), backend.address(&out), from.cols];
    backend.launch(kernel("gather_rows"), [index.len(), 1, 1], 128, &args)?;
    Ok(out)
}

impl LossCall<'_> {
    fn check(&self, hidden: &View, latent: &View, target_hidden: &View, heads: &Heads) -> Result<()> {
        let Heads { draft, target, w2 } = heads;
        let mapped = match self.draft_tokens {
            None => draft.rows == target.rows,
            Some(tokens) => {
                tokens.len() == draft.rows
                    && tokens.is_sorted_by(|a, b| a < b)
                    && tokens.last().is_none_or(|&last| (last as usize) < target.rows)
            }
        };
        let width = hidden.cols;
        if (draft.cols, target.cols, target_hidden.cols) != (width, width, width)
            || (w2.rows, w2.cols, latent.count) != (draft.rows, latent.cols, hidden.count)
            || draft.rows == 0
            || !mapped
        {
            bail!(
                "vocab-loss with heads [{}, {}] and [{}, {}]: hidden [{}, {width}], latent [{}, {}], w2 [{}, {}], target rows of {}",
                draft.rows,
                draft.cols,
                target.rows,
                target.cols,
                hidden.count,
                latent.count,
                latent.cols,
                w2.rows,
                w2.cols,
                target_hidden.cols
            );
        }
        for row in self.rows {
            let labelled = row.label.is_none_or(|label| (label as usize) < draft.rows);
            if row.row >= hidden.count || row.target >= target_hidden.count || !labelled {
                bail!("vocab-loss: {row:?} outside {} rows, {} targets", hidden.count, target_hidden.count);
            }
        }
        Ok(())
    }
}

/// Computes terms and gradients; see [`crate::vocab_loss::VocabLoss::forward`].
///
/// # Errors
/// When shapes do not fit, a row points outside its tensor or the vocabulary, or a launch or copy fails.
pub fn forward<B: Backend>(
    backend: &B,
    call: &LossCall<'_>,
    hidden: &View,
    latent: &View,
    target_hidden: &View,
    heads: &Heads,
) -> Result<LossOutput<B>> {
    call.check(hidden, latent, target_hidden, heads)?;
    let (vocab, width, rank) = (heads.draft.rows, hidden.cols, latent.cols);
    let out = LossOutput::<B> {
        terms: Vec::new(),
        hidden: backend.zeros::<f32>(hidden.count * width)?,
        latent: backend.zeros::<f32>(latent.count * rank)?,
        w2: backend.zeros::<f32>(vocab * rank)?,
    };
    let terms = backend.alloc::<f32>(3 * call.rows.len())?;
    let tokens = call.draft_tokens.map(|tokens| backend.upload(tokens)).transpose()?;
    let tokens = tokens.as_ref().map_or(0, |tokens| backend.address(tokens));
    let mut order: Vec<usize> = (0..call.rows.len()).collect();
    order.sort_by_key(|&i| call.rows[i].target);
    let allowed = (CHUNK_BYTES / (heads.target.rows.max(vocab) * size_of::<f32>())).clamp(16, 1024);
    for chunk in order.chunks(call.chunk_rows.unwrap_or(allowed)) {
        let count = chunk.len();
        // Rows of one position follow each other, so its logits are computed once per chunk.
        let (mut positions, mut table) = (Vec::<u32>::new(), Vec::with_capacity(6 * count));
        for &i in chunk {
            let row = &call.rows[i];
            if positions.last() != Some(&(row.target as u32)) {
                positions.push(row.target as u32);
            }
            let label = row.label.unwrap_or(u32::MAX);
            table.extend([positions.len() as u32 - 1, label, i as u32]);
            table.extend([row.ce, row.tv, row.kl].map(f32::to_bits));
        }
        let index: Vec<u32> = chunk.iter().map(|&i| call.rows[i].row as u32).collect();
        let h_rows = gather(backend, hidden, &index)?;
        let h = Matrix::new(backend.address(&h_rows), count, width);
        let logits = backend.alloc::<f32>(count * vocab)?;
        let logits_at = backend.address(&logits);
        backend.matmul(h, heads.draft.t(), logits_at, false)?;
        let m_rows = gather(backend, latent, &index)?;
        let m = Matrix::new(backend.address(&m_rows), count, rank);
        if rank > 0 {
            backend.matmul(m, heads.w2.t(), logits_at, true)?;
        }
        let targets = if call.with_target {
            let position_rows = gather(backend, target_hidden, &positions)?;
            let rows = Matrix::new(backend.address(&position_rows), positions.len(), width);
            let targets = backend.alloc::<f32>(positions.len() * heads.target.rows)?;
            backend.matmul(rows, heads.target.t(), backend.address(&targets), false)?;
            Some(targets)
        } else {
            None
        };
        let targets_at = targets.as_ref().map_or(0, |targets| backend.address(targets));
        let table = backend.upload(&table)?;
        let args = args![
            logits_at,
            targets_at,
            tokens,
            backend.address(&table),
            backend.address(&terms),
            vocab,
            heads.target.rows,
            call.kl_temperature
        ];
        backend.launch(kernel("vocab_loss_rows"), [count, 1, 1], 256, &args)?;

        let gradient = Matrix::new(logits_at, count, vocab);
        let groups = Groups::new(backend, &index)?;
        groups.add(backend, gradient, heads.draft, &out.hidden)?;
        if rank > 0 {
            groups.add(backend, gradient, heads.w2, &out.latent)?;
            backend.matmul(gradient.t(), m, backend.address(&out.w2), true)?;
        }
    }
    let terms = if call.rows.is_empty() { Vec::new() } else { backend.download(&terms)? };
    Ok(LossOutput { terms: terms.chunks_exact(3).map(|t| [t[0], t[1], t[2]]).collect(), ..out })
}

/// The rows of a chunk by the row they come from: two may share one.
struct Groups<B: Backend> {
    table: B::Buffer<u32>,
    members: B::Buffer<u32>,
    count: usize,
}

impl<B: Backend> Groups<B> {
    fn new(backend: &B, index: &[u32]) -> Result<Self> {
        let mut by_row = BTreeMap::<u32, Vec<u32>>::new();
        for (i, &row) in index.iter().enumerate() {
            by_row.entry(row).or_default().push(i as u32);
        }
        let (mut groups, mut members) = (Vec::new(), Vec::new());
        for (row, rows) in &by_row {
            groups.extend([*row, members.len() as u32, rows.len() as u32]);
            members.extend(rows);
        }
        Ok(Self { table: backend.upload(&groups)?, members: backend.upload(&members)?, count: by_row.len() })
    }

    /// Adds the rows of gradient · weight to those of `out` they belong to.
    fn add(&self, backend: &B, gradient: Matrix, weight: Matrix, out: &B::Buffer<f32>) -> Result<()> {
        let product = backend.alloc::<f32>(gradient.rows * weight.cols)?;
        backend.matmul(gradient, weight, backend.address(&product), false)?;
        let args = args![
            backend.address(&product),
            backend.address(&self.table),
            backend.address(&self.members),
            backend.address(out),
            weight.cols
        ];
        backend.launch(kernel("add_rows"), [self.count, 1, 1], 128, &args)
    }
}
