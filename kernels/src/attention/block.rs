//! Attention of draft blocks in training, with gradients.
//!
//! Keys and values are `context rows` followed by `block rows`. Block b sees the context rows of its own sequence before
//! its anchor, and all rows of itself in both directions. Nothing of size [queries, keys] is kept: the backward pass
//! computes the scores of one row at a time again.

use std::ops::Range;
use std::sync::Arc;

#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::{CpuStorage, CustomOp3, Layout, Result, Shape, Tensor, bail};
use rayon::prelude::*;

use super::HeadLayout;
use super::head_gradients::{AllGradients, HeadGradients, split};
use super::row::attend;
use crate::rows::Rows;
#[cfg(feature = "cuda")]
use crate::{
    cuda::{Cuda, cuda_storage},
    device::attention as device,
};

/// What one block sees.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockSpan {
    /// Visible context rows.
    pub context: Range<usize>,
    /// The block's own rows among the block rows, all visible to each other; a block with no visible key at all
    /// (`sees_itself` false and an empty context) gives zeros.
    pub rows: Range<usize>,
    /// Whether the block's rows see each other.
    pub sees_itself: bool,
}

/// The attention pattern of a batch.
#[derive(Debug, Clone)]
pub struct BlockAttention {
    sequences: Arc<[Sequence]>,
    context_rows: usize,
    block_rows: usize,
    heads: HeadLayout,
}

/// Blocks over one sequence's context; no other sequence touches these rows.
#[derive(Debug)]
struct Sequence {
    context: Range<usize>,
    rows: Range<usize>,
    blocks: Vec<BlockSpan>,
}

impl BlockAttention {
    /// A pattern of blocks grouped by sequence: per sequence its context rows and its blocks. Sequences follow each other
    /// in both row dimensions.
    ///
    /// # Errors
    /// When ranges overlap between sequences or lie outside their sequence.
    pub fn new(sequences: Vec<(Range<usize>, Vec<BlockSpan>)>, heads: HeadLayout) -> Result<Self> {
        let (mut context_rows, mut block_rows) = (0, 0);
        let mut checked = Vec::with_capacity(sequences.len());
        for (context, blocks) in sequences {
            if context.start != context_rows || context.end < context.start {
                bail!("context rows {context:?} do not follow row {context_rows}");
            }
            context_rows = context.end;
            let first = block_rows;
            for block in &blocks {
                if block.rows.start != block_rows || block.rows.end < block.rows.start {
                    bail!("block rows {:?} do not follow row {block_rows}", block.rows);
                }
                if block.context.start < context.start || block.context.end > context.end {
                    bail!("block context {:?} lies outside its sequence {context:?}", block.context);
                }
                block_rows = block.rows.end;
            }
            checked.push(Sequence { context, rows: first..block_rows, blocks });
        }
        Ok(Self { sequences: checked.into(), context_rows, block_rows, heads })
    }

    /// Attends.
    ///
    /// # Shapes
    /// q `[block_rows, heads · head_dim]`; k, v `[context_rows + block_rows, kv_heads · head_dim]` →
    /// `[block_rows, heads · head_dim]`
    ///
    /// # Errors
    /// When the shapes do not fit the pattern.
    pub fn forward(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        q.apply_op3(k, v, self.clone())
    }

    fn check(&self, qkv: [&Rows<'_>; 3]) -> Result<()> {
        let shapes = qkv.map(|rows| [rows.count, rows.cols]);
        self.heads.check("block attention", (self.block_rows, self.context_rows + self.block_rows), shapes)
    }

    #[cfg(feature = "cuda")]
    fn device_call(&self) -> device::BlockCall<'_> {
        let sequences = self.sequences.iter();
        device::BlockCall {
            sequences: sequences
                .map(|Sequence { context, rows, blocks }| device::BlockSequence { context, rows, blocks })
                .collect(),
            context_rows: self.context_rows,
            block_rows: self.block_rows,
            heads: self.heads,
        }
    }

    /// The two stretches of key rows that a block sees.
    fn keys(&self, block: &BlockSpan) -> [Range<usize>; 2] {
        let own = if block.sees_itself { block.rows.clone() } else { 0..0 };
        [block.context.clone(), self.context_rows + own.start..self.context_rows + own.end]
    }
}

impl CustomOp3 for BlockAttention {
    fn name(&self) -> &'static str {
        "block-attention"
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        ql: &Layout,
        k: &CpuStorage,
        kl: &Layout,
        v: &CpuStorage,
        vl: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let q = Rows::new(self.name(), q, ql)?;
        let (k, v) = (Rows::new(self.name(), k, kl)?, Rows::new(self.name(), v, vl)?);
        self.check([&q, &k, &v])?;
        let HeadLayout { heads, head_dim, .. } = self.heads;
        let mut spans = vec![None; self.block_rows];
        for block in self.sequences.iter().flat_map(|s| &s.blocks) {
            spans[block.rows.clone()].fill(Some(block));
        }
        let mut y = vec![0f32; self.block_rows * heads * head_dim];
        y.par_chunks_exact_mut(heads * head_dim).zip(&spans).enumerate().for_each_init(
            Vec::new,
            |scores: &mut Vec<f32>, (row, (y, block))| {
                if let Some(block) = block {
                    attend(self.heads, row, [q, k, v], &self.keys(block), scores, y);
                }
            },
        );
        Ok((CpuStorage::F32(y), Shape::from((self.block_rows, heads * head_dim))))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        q: &CudaStorage,
        ql: &Layout,
        k: &CudaStorage,
        kl: &Layout,
        v: &CudaStorage,
        vl: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let cuda = Cuda::of(q);
        let q = cuda.rows(self.name(), q, ql)?;
        let (k, v) = (cuda.rows(self.name(), k, kl)?, cuda.rows(self.name(), v, vl)?);
        let y = device::block(&cuda, &self.device_call(), &q, &k, &v)?;
        Ok((cuda.storage(y), Shape::from((q.count, q.cols))))
    }

    fn bwd(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        _res: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        // Gradients of q, k and v come out of one pass; the custom operation returns them side by side in one tensor.
        let op = BlockAttentionBackward { pattern: self.clone(), grad: grad.contiguous()? };
        split(&q.apply_op3_no_bwd(k, v, &op)?, [q, k, v])
    }
}

struct BlockAttentionBackward {
    pattern: BlockAttention,
    grad: Tensor,
}

impl CustomOp3 for BlockAttentionBackward {
    fn name(&self) -> &'static str {
        "block-attention-backward"
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        ql: &Layout,
        k: &CpuStorage,
        kl: &Layout,
        v: &CpuStorage,
        vl: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let pattern = &self.pattern;
        let (grad_storage, grad_layout) = self.grad.storage_and_layout();
        let candle_core::Storage::Cpu(grad_storage) = &*grad_storage else {
            bail!("expected a gradient in host memory")
        };
        let grad = Rows::new(self.name(), grad_storage, grad_layout)?;
        let q = Rows::new(self.name(), q, ql)?;
        let (k, v) = (Rows::new(self.name(), k, kl)?, Rows::new(self.name(), v, vl)?);
        pattern.check([&q, &k, &v])?;
        let heads = pattern.heads;
        let tasks: Vec<(&Sequence, usize)> =
            pattern.sequences.iter().flat_map(|s| (0..heads.kv_heads).map(move |h| (s, h))).collect();
        let part = |&(sequence, kv_head): &(&Sequence, usize)| {
            let (context, own) = (sequence.context.len(), sequence.rows.len());
            let mut part = HeadGradients::new(heads, kv_head, own, context + own);
            for block in &sequence.blocks {
                let keys = pattern.keys(block);
                let first =
                    [block.context.start - sequence.context.start, context + block.rows.start - sequence.rows.start];
                for row in block.rows.clone() {
                    part.add_row(row - sequence.rows.start, row, &keys, first, [q, k, v, grad]);
                }
            }
            part
        };
        let parts: Vec<HeadGradients> = tasks.par_iter().map(part).collect();
        let mut all = AllGradients::new(heads, pattern.block_rows, pattern.context_rows + pattern.block_rows);
        for ((sequence, _), part) in tasks.iter().zip(&parts) {
            let own = sequence.rows.clone().map(|row| pattern.context_rows + row);
            all.place(part, sequence.rows.clone(), sequence.context.clone().chain(own));
        }
        Ok(all.into_storage())
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        q: &CudaStorage,
        ql: &Layout,
        k: &CudaStorage,
        kl: &Layout,
        v: &CudaStorage,
        vl: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let cuda = Cuda::of(q);
        let (grad_storage, grad_layout) = self.grad.storage_and_layout();
        let grad = cuda.rows(self.name(), cuda_storage(self.name(), &grad_storage)?, grad_layout)?;
        let q = cuda.rows(self.name(), q, ql)?;
        let (k, v) = (cuda.rows(self.name(), k, kl)?, cuda.rows(self.name(), v, vl)?);
        let out = device::block_backward(&cuda, &self.pattern.device_call(), &q, &k, &v, &grad)?;
        Ok((cuda.storage(out), Shape::from(q.count * q.cols + 2 * k.count * k.cols)))
    }
}
