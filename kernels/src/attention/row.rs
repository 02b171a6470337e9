//! One query row of one head over two stretches of keys, forward and backward: what the training patterns are made of.

use std::ops::Range;

use super::HeadLayout;
use crate::multiversion;
use crate::rows::Rows;
use crate::simd::{axpy, dot, exp_shifted, max};

/// The rows of both stretches.
pub(super) fn both(keys: &[Range<usize>; 2]) -> impl Iterator<Item = usize> + use<'_> {
    keys[0].clone().chain(keys[1].clone())
}

multiversion! {
    /// Softmax numerators of one row; returns their sum.
    fn weights_of_row(q: &[f32], k: Rows<'_>, keys: &[Range<usize>; 2], column: usize, scale: f32, scores: &mut [f32]) -> f32 {
        let mut next = 0;
        for range in keys {
            for key in range.clone() {
                scores[next] = dot(q, k.part(key, column, q.len())) * scale;
                next += 1;
            }
        }
        exp_shifted(scores, max(scores))
    }
}

multiversion! {
    /// One row of one head: y = Σ p_j v_j.
    fn forward_row(q: &[f32], k: Rows<'_>, v: Rows<'_>, keys: &[Range<usize>; 2], column: usize, scale: f32, scores: &mut [f32], y: &mut [f32]) {
        let total = weights_of_row(q, k, keys, column, scale, scores);
        let mut next = 0;
        for range in keys {
            for key in range.clone() {
                axpy(scores[next] / total, v.part(key, column, q.len()), y);
                next += 1;
            }
        }
    }
}

/// All heads of row `row`: `y` starts as zeros, which is what a row without a visible key gives.
pub(super) fn attend(
    heads: HeadLayout,
    row: usize,
    [q, k, v]: [Rows<'_>; 3],
    keys: &[Range<usize>; 2],
    scores: &mut Vec<f32>,
    y: &mut [f32],
) {
    let head_dim = heads.head_dim;
    scores.resize(both(keys).count(), 0.0);
    if scores.is_empty() {
        return;
    }
    for (head, y) in y.chunks_exact_mut(head_dim).enumerate() {
        let column = head / heads.group() * head_dim;
        let q = q.part(row, head * head_dim, head_dim);
        forward_row(q, k, v, keys, column, heads.scale(), scores, y);
    }
}

multiversion! {
    /// Adds one row's gradients: dv_j += p_j g, dk_j += s_j q, dq += s_j k_j with s_j = p_j (g·v_j − Σ p g·v) · scale.
    pub(super) fn backward_row(q: &[f32], k: Rows<'_>, v: Rows<'_>, grad: &[f32], keys: &[Range<usize>; 2], column: usize, scale: f32,
        scores: &mut [f32], products: &mut [f32], dq: &mut [f32], dk: &mut [f32], dv: &mut [f32], first_key: &[usize; 2]) {
        let dim = q.len();
        let total = weights_of_row(q, k, keys, column, scale, scores);
        let mut delta = 0f32;
        let mut next = 0;
        for range in keys {
            for key in range.clone() {
                scores[next] /= total;
                products[next] = dot(grad, v.part(key, column, dim));
                delta += scores[next] * products[next];
                next += 1;
            }
        }
        next = 0;
        for (range, local) in keys.iter().zip(first_key) {
            for (i, key) in range.clone().enumerate() {
                let at = (local + i) * dim;
                let slope = scores[next] * (products[next] - delta) * scale;
                axpy(scores[next], grad, &mut dv[at..at + dim]);
                axpy(slope, q, &mut dk[at..at + dim]);
                axpy(slope, k.part(key, column, dim), dq);
                next += 1;
            }
        }
    }
}
