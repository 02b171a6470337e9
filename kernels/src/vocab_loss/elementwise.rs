//! The loops over one row of the vocabulary that the loss is made of.

use crate::multiversion;
use crate::simd::{exp_shifted, max, sum};

/// Probabilities below this are taken for 0: what is computed from them would be subnormal numbers, on which processors take
/// a hundred times as long.
const NEGLIGIBLE: f32 = 1e-26;

multiversion! {
    /// Logits → probabilities in place; returns log Σ e^u.
    pub(super) fn softmax(row: &mut [f32]) -> f32 {
        let largest = max(row);
        let total = exp_shifted(row, largest);
        let inverse = 1.0 / total;
        for value in row.iter_mut() {
            let p = *value * inverse;
            *value = if p < NEGLIGIBLE { 0.0 } else { p };
        }
        largest + total.ln()
    }
}

multiversion! {
    /// Σ|p − q| and Σ p·sign(p − q), in sixteen partial sums.
    pub(super) fn distance(p: &[f32], q: &[f32]) -> (f32, f32) {
        let (mut total, mut signed) = ([0f32; 16], [0f32; 16]);
        let (mut tail_total, mut tail_signed) = (0f32, 0f32);
        let split = p.len() / 16 * 16;
        for (p, q) in p[..split].chunks_exact(16).zip(q[..split].chunks_exact(16)) {
            for lane in 0..16 {
                let difference = p[lane] - q[lane];
                let side = if difference > 0.0 { 1.0 } else if difference < 0.0 { -1.0 } else { 0.0 };
                total[lane] += difference.abs();
                signed[lane] += p[lane] * side;
            }
        }
        for (p, q) in p[split..].iter().zip(&q[split..]) {
            let difference = p - q;
            let side = if difference > 0.0 { 1.0 } else if difference < 0.0 { -1.0 } else { 0.0 };
            tail_total += difference.abs();
            tail_signed += p * side;
        }
        (total.iter().sum::<f32>() + tail_total, signed.iter().sum::<f32>() + tail_signed)
    }
}

multiversion! {
    /// p ← ce·p + tv·p·(sign(p − q) − signed) + kl·(kept·p − q), `kept` = Σ q: the gradient with respect to the logits, less
    /// the label's part.
    pub(super) fn gradient(p: &mut [f32], q: &[f32], ce: f32, tv: f32, kl: f32, signed: f32, kept: f32) {
        for (p, q) in p.iter_mut().zip(q) {
            let difference = *p - q;
            let side = if difference > 0.0 { 1.0 } else if difference < 0.0 { -1.0 } else { 0.0 };
            *p = *p * (ce + tv * (side - signed)) + kl * (kept * *p - q);
        }
    }
}

multiversion! {
    /// p ← factor·p
    pub(super) fn scale(p: &mut [f32], factor: f32) {
        for p in p.iter_mut() {
            *p *= factor;
        }
    }
}

multiversion! {
    /// Σ p in sixteen partial sums.
    pub(super) fn total(p: &[f32]) -> f32 {
        sum(p)
    }
}

/// KL(q ‖ p) = Σ q (log q − log p) from probabilities q and logits u with their log-sum-exp.
pub(super) fn kl_divergence(q: &[f32], logits: &[f32], log_sum: f32) -> f32 {
    let mut total = 0f64;
    for (&q, &u) in q.iter().zip(logits) {
        if q > 0.0 {
            total += f64::from(q) * f64::from(q.ln() - (u - log_sum));
        }
    }
    total as f32
}
