//! Attention of Eagle3's training-time test, with gradients.
//!
//! At step s, row i of a sequence sees the first step's keys 0..=i and its own key of each step 1..=s: what a drafter has that
//! drafted s tokens behind position i. Later steps may go on with fewer rows. Nothing of size [queries, keys] is kept: the
//! backward pass computes the scores of one row at a time again. There is no path for CUDA devices.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{CpuStorage, CustomOp3, Layout, Result, Shape, Storage, Tensor, bail};
use rayon::prelude::*;

use super::HeadLayout;
use super::head_gradients::{AllGradients, HeadGradients, split};
use super::row::attend;
use crate::rows::Rows;

/// Keys and values of the steps so far: the first step's of all rows, the later ones' of the rows that are still at work.
#[derive(Debug, Clone, Default)]
pub struct StepKeys {
    keys: Vec<Tensor>,
    values: Vec<Tensor>,
}

impl StepKeys {
    /// Adds those of the next step, `[rows at work, kv_heads · head_dim]` each.
    pub fn push(&mut self, keys: Tensor, values: Tensor) {
        self.keys.push(keys);
        self.values.push(values);
    }

    /// Goes on with a part of the rows: places among those at work.
    ///
    /// # Errors
    /// When a place does not exist.
    pub fn narrow(&mut self, kept: &[usize]) -> Result<()> {
        for side in [&mut self.keys, &mut self.values] {
            for step in side.iter_mut().skip(1) {
                let kept: Vec<u32> = kept.iter().map(|&row| row as u32).collect();
                *step = step.index_select(&Tensor::new(kept, step.device())?, 0)?;
            }
        }
        Ok(())
    }

    /// Steps so far.
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    /// Whether there is none yet.
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }
}

/// The first step's rows, then the later ones' row by row: what a row sees of later steps lies side by side.
fn by_row(steps: &[Tensor]) -> Result<Tensor> {
    let Some((first, later)) = steps.split_first() else { bail!("ttt-attention without keys") };
    let Some(last) = later.last() else { return Ok(first.clone()) };
    let (rows, width) = last.dims2()?;
    Tensor::cat(&[first, &Tensor::stack(later, 1)?.reshape((rows * later.len(), width))?], 0)
}

/// The attention pattern of a batch: which rows are one sequence.
#[derive(Debug, Clone)]
pub struct TttAttention {
    sequences: Arc<[Range<usize>]>,
    rows: usize,
    heads: HeadLayout,
}

impl TttAttention {
    /// A pattern over sequences of these lengths that follow each other in the row dimension.
    pub fn new(lengths: &[usize], heads: HeadLayout) -> Self {
        let mut rows = 0;
        let sequences = lengths.iter().map(|len| {
            rows += len;
            rows - len..rows
        });
        let sequences = sequences.collect();
        Self { sequences, rows, heads }
    }

    /// Attends at the last step of `steps`, from the rows at work: `rows`, ascending.
    ///
    /// # Shapes
    /// q `[rows at work, heads · head_dim]` → same
    ///
    /// # Errors
    /// When there is no step or the rows or shapes do not fit the pattern; on a CUDA device.
    pub fn forward(&self, q: &Tensor, rows: &[usize], steps: &StepKeys) -> Result<Tensor> {
        if !rows.is_sorted_by(|a, b| a < b) || rows.last().is_some_and(|&last| last >= self.rows) {
            bail!("ttt-attention from rows that do not ascend or are not among {}", self.rows);
        }
        let mut sequences = Vec::with_capacity(self.sequences.len());
        let mut next = 0;
        for sequence in self.sequences.iter() {
            let first = next;
            next += rows[first..].partition_point(|&row| row < sequence.end);
            sequences.push(Sequence { rows: sequence.clone(), at_work: first..next });
        }
        let later = steps.len().saturating_sub(1);
        let op = Op { pattern: self.clone(), at_work: rows.into(), sequences: sequences.into(), later };
        q.apply_op3(&by_row(&steps.keys)?, &by_row(&steps.values)?, op)
    }
}

/// One sequence of a batch.
#[derive(Debug, Clone)]
struct Sequence {
    /// Its rows.
    rows: Range<usize>,
    /// Which of those at work are its.
    at_work: Range<usize>,
}

/// The pattern at one step.
#[derive(Debug, Clone)]
struct Op {
    pattern: TttAttention,
    /// Rows that attend, among all.
    at_work: Arc<[usize]>,
    sequences: Arc<[Sequence]>,
    /// Steps after the first.
    later: usize,
}

impl Op {
    fn key_rows(&self) -> usize {
        self.pattern.rows + self.at_work.len() * self.later
    }

    fn check(&self, qkv: [&Rows<'_>; 3]) -> Result<()> {
        let shapes = qkv.map(|rows| [rows.count, rows.cols]);
        self.pattern.heads.check("ttt-attention", (self.at_work.len(), self.key_rows()), shapes)
    }

    /// The two stretches of key rows that row `place` of those at work sees.
    fn keys(&self, sequence: &Range<usize>, place: usize) -> [Range<usize>; 2] {
        let own = self.pattern.rows + place * self.later;
        [sequence.start..self.at_work[place] + 1, own..own + self.later]
    }
}

impl CustomOp3 for Op {
    fn name(&self) -> &'static str {
        "ttt-attention"
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
        let heads = self.pattern.heads;
        let HeadLayout { heads: count, head_dim, .. } = heads;
        let sequence_of: Vec<&Range<usize>> =
            self.sequences.iter().flat_map(|part| std::iter::repeat_n(&part.rows, part.at_work.len())).collect();
        let mut y = vec![0f32; q.count * count * head_dim];
        y.par_chunks_exact_mut(count * head_dim).enumerate().for_each_init(
            Vec::new,
            |scores: &mut Vec<f32>, (row, y)| {
                attend(heads, row, [q, k, v], &self.keys(sequence_of[row], row), scores, y);
            },
        );
        Ok((CpuStorage::F32(y), Shape::from((q.count, count * head_dim))))
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
        let op = Backward { forward: self.clone(), grad: grad.contiguous()? };
        split(&q.apply_op3_no_bwd(k, v, &op)?, [q, k, v])
    }
}

struct Backward {
    forward: Op,
    grad: Tensor,
}

impl Backward {
    fn part(&self, Sequence { rows, at_work }: &Sequence, kv_head: usize, qkvg: [Rows<'_>; 4]) -> HeadGradients {
        let (len, later) = (rows.len(), self.forward.later);
        let key_rows = len + at_work.len() * later;
        let mut part = HeadGradients::new(self.forward.pattern.heads, kv_head, at_work.len(), key_rows);
        for (place, row) in at_work.clone().enumerate() {
            part.add_row(place, row, &self.forward.keys(rows, row), [0, len + place * later], qkvg);
        }
        part
    }
}

impl CustomOp3 for Backward {
    fn name(&self) -> &'static str {
        "ttt-attention-backward"
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
        let (grad_storage, grad_layout) = self.grad.storage_and_layout();
        let Storage::Cpu(grad_storage) = &*grad_storage else { bail!("expected a gradient in host memory") };
        let grad = Rows::new(self.name(), grad_storage, grad_layout)?;
        let q = Rows::new(self.name(), q, ql)?;
        let (k, v) = (Rows::new(self.name(), k, kl)?, Rows::new(self.name(), v, vl)?);
        self.forward.check([&q, &k, &v])?;
        let TttAttention { rows, heads, .. } = &self.forward.pattern;
        let tasks: Vec<(&Sequence, usize)> =
            self.forward.sequences.iter().flat_map(|part| (0..heads.kv_heads).map(move |head| (part, head))).collect();
        let part = |&(sequence, kv_head): &(&Sequence, usize)| self.part(sequence, kv_head, [q, k, v, grad]);
        let parts: Vec<HeadGradients> = tasks.par_iter().map(part).collect();
        let mut all = AllGradients::new(*heads, q.count, self.forward.key_rows());
        for ((Sequence { rows: sequence, at_work }, _), part) in tasks.iter().zip(&parts) {
            let later = self.forward.later;
            let own = rows + at_work.start * later..rows + at_work.end * later;
            all.place(part, at_work.clone(), sequence.clone().chain(own));
        }
        Ok(all.into_storage())
    }
}
