//! Gradients of attention in training, one sequence and key/value head at a time: what the backward passes of the patterns share.

use std::ops::Range;

use candle_core::{CpuStorage, Result, Shape, Tensor};

use super::HeadLayout;
use super::row::{backward_row, both};
use crate::rows::Rows;

/// Gradients of one sequence and one key/value head.
pub(super) struct HeadGradients {
    heads: HeadLayout,
    kv_head: usize,
    dq: Vec<f32>,
    dk: Vec<f32>,
    dv: Vec<f32>,
    scores: Vec<f32>,
    products: Vec<f32>,
}

impl HeadGradients {
    /// Zeros for so many rows and key rows of a sequence.
    pub(super) fn new(heads: HeadLayout, kv_head: usize, rows: usize, key_rows: usize) -> Self {
        let (dq, keys) = (vec![0f32; rows * heads.group() * heads.head_dim], key_rows * heads.head_dim);
        Self {
            heads,
            kv_head,
            dq,
            dk: vec![0f32; keys],
            dv: vec![0f32; keys],
            scores: Vec::new(),
            products: Vec::new(),
        }
    }

    /// Adds what row `row` gives, the sequence's `place`-th. It sees `keys`, whose two stretches begin at `first_key` among the
    /// sequence's key rows.
    pub(super) fn add_row(
        &mut self,
        place: usize,
        row: usize,
        keys: &[Range<usize>; 2],
        first_key: [usize; 2],
        [q, k, v, grad]: [Rows<'_>; 4],
    ) {
        let (group, head_dim) = (self.heads.group(), self.heads.head_dim);
        let visible = both(keys).count();
        if visible == 0 {
            return;
        }
        self.scores.resize(visible, 0.0);
        self.products.resize(visible, 0.0);
        for member in 0..group {
            let column = (self.kv_head * group + member) * head_dim;
            let at = (place * group + member) * head_dim;
            backward_row(
                q.part(row, column, head_dim),
                k,
                v,
                grad.part(row, column, head_dim),
                keys,
                self.kv_head * head_dim,
                self.heads.scale(),
                &mut self.scores,
                &mut self.products,
                &mut self.dq[at..at + head_dim],
                &mut self.dk,
                &mut self.dv,
                &first_key,
            );
        }
    }
}

/// Gradients of queries, keys and values of a whole batch, side by side in one array.
pub(super) struct AllGradients {
    values: Vec<f32>,
    heads: HeadLayout,
    query_elements: usize,
}

impl AllGradients {
    /// Zeros for so many rows and key rows.
    pub(super) fn new(heads: HeadLayout, rows: usize, key_rows: usize) -> Self {
        let query_elements = rows * heads.heads * heads.head_dim;
        let values = vec![0f32; query_elements + 2 * key_rows * heads.kv_heads * heads.head_dim];
        Self { values, heads, query_elements }
    }

    /// Puts a part in its place: the rows and the key rows of its sequence.
    pub(super) fn place(
        &mut self,
        part: &HeadGradients,
        rows: impl Iterator<Item = usize>,
        keys: impl Iterator<Item = usize>,
    ) {
        let HeadLayout { heads, kv_heads, head_dim } = self.heads;
        let width = self.heads.group() * head_dim;
        let (dq, rest) = self.values.split_at_mut(self.query_elements);
        let (dk, dv) = rest.split_at_mut(rest.len() / 2);
        for (row, values) in rows.zip(part.dq.chunks_exact(width)) {
            let at = row * heads * head_dim + part.kv_head * width;
            dq[at..at + width].copy_from_slice(values);
        }
        for (key, (of_key, of_value)) in keys.zip(part.dk.chunks_exact(head_dim).zip(part.dv.chunks_exact(head_dim))) {
            let at = (key * kv_heads + part.kv_head) * head_dim;
            dk[at..at + head_dim].copy_from_slice(of_key);
            dv[at..at + head_dim].copy_from_slice(of_value);
        }
    }

    /// The array, as an operation returns it.
    pub(super) fn into_storage(self) -> (CpuStorage, Shape) {
        let shape = Shape::from(self.values.len());
        (CpuStorage::F32(self.values), shape)
    }
}

/// Gradients of q, k and v, which a backward operation returns side by side in one tensor.
pub(super) fn split(all: &Tensor, inputs: [&Tensor; 3]) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
    let mut first = 0;
    let [q, k, v] = inputs.map(|input| {
        let part = all.narrow(0, first, input.elem_count()).and_then(|part| part.reshape(input.shape()));
        first += input.elem_count();
        part.map(Some)
    });
    Ok((q?, k?, v?))
}
