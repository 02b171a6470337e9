//! The target's distributions at the positions of one chunk of rows: exact over its whole vocabulary, kept for the draft
//! tokens.

use candle_core::Result;
use rayon::prelude::*;

use super::elementwise::{softmax, total};
use super::{LossRow, VocabLoss, chunk_rows, plain_panels};
use crate::logit_row::argmax;
use crate::matmul::{Matrix, matmul_panels};
use crate::rows::Rows;
use crate::threads;

/// Positions whose logits over the whole vocabulary are held at a time where only a part of them is kept: one pass of the
/// packed product over its weights.
const GROUP_ROWS: usize = 96;

/// Distributions of the distinct positions of a chunk; buffers are reused from chunk to chunk.
#[derive(Default)]
pub(super) struct TargetDistributions {
    /// Index in `plain` and `tempered` of each row of the chunk; empty when nothing was computed.
    of_row: Vec<usize>,
    /// p_t
    plain: Kept,
    /// p_t at the KL temperature; empty when that is 1.
    tempered: Kept,
    /// With soft targets, the most likely token of each distinct position, as the drafter numbers it, if it has it.
    tops: Vec<Option<u32>>,
    /// Hidden rows of the distinct positions.
    gathered: Vec<f32>,
    /// Logits over the whole vocabulary of some positions.
    logits: Vec<f32>,
    /// Draft tokens.
    vocab: usize,
}

/// Probabilities of the draft tokens, and the mass that the others have.
#[derive(Default)]
struct Kept {
    /// One row of the draft vocabulary per distinct position.
    probabilities: Vec<f32>,
    /// One value per distinct position; empty when nothing is missing.
    missing: Vec<f32>,
}

/// What a row of the loss compares itself with.
#[derive(Clone, Copy)]
pub(super) struct TargetRow<'a> {
    /// p_t of the draft tokens.
    pub(super) probabilities: &'a [f32],
    /// Mass of p_t outside them.
    pub(super) missing: f32,
    /// The same at the KL temperature; empty when that is 1.
    pub(super) tempered: &'a [f32],
    /// Its mass outside.
    pub(super) tempered_missing: f32,
    /// With soft targets, the draft token that is the most likely of all, if it is one.
    pub(super) top: Option<u32>,
}

impl TargetDistributions {
    /// Computes p_t for the distinct target positions of a chunk (its rows are sorted by position).
    ///
    /// # Errors
    /// When the head is not packed in f32.
    pub(super) fn compute(&mut self, settings: &VocabLoss, rows: &[LossRow], target_hidden: Rows<'_>) -> Result<()> {
        let head = &settings.target_head;
        self.of_row.clear();
        self.gathered.clear();
        let mut distinct = 0;
        for (i, row) in rows.iter().enumerate() {
            if i == 0 || rows[i - 1].target != row.target {
                self.gathered.extend_from_slice(target_hidden.row(row.target));
                distinct += 1;
            }
            self.of_row.push(distinct - 1);
        }
        self.vocab = settings.draft_head.outputs();
        let (inputs, vocab, temperature) = (head.inputs(), head.outputs(), settings.kl_temperature);
        self.plain.missing.clear();
        self.tempered.missing.clear();
        self.tops.clear();
        let panels = plain_panels(head)?;
        let logits_of = |hidden: &[f32], logits: &mut [f32]| {
            let rows = hidden.len() / inputs;
            let (nothing, of_nothing) = (Matrix::new(&[], rows, 0), Matrix::new(&[], 0, vocab));
            matmul_panels(Matrix::new(hidden, rows, inputs), panels, nothing, of_nothing, logits);
        };
        let Some(tokens) = &settings.draft_tokens else {
            let plain = at_least(&mut self.plain.probabilities, distinct * vocab);
            logits_of(&self.gathered, plain);
            if settings.soft_targets {
                self.tops.par_extend(plain.par_chunks_exact(vocab).map(top));
            }
            if temperature != 1.0 {
                let tempered = at_least(&mut self.tempered.probabilities, distinct * vocab);
                tempered.iter_mut().zip(&*plain).for_each(|(tempered, logit)| *tempered = logit / temperature);
                softmax_rows(tempered, vocab);
            }
            softmax_rows(plain, vocab);
            return Ok(());
        };
        for group in self.gathered.chunks(inputs * GROUP_ROWS.min(chunk_rows(vocab))) {
            let logits = at_least(&mut self.logits, group.len() / inputs * vocab);
            logits_of(group, logits);
            if settings.soft_targets {
                let draft_token = |token: u32| tokens.binary_search(&token).ok().map(|at| at as u32);
                self.tops.par_extend(logits.par_chunks_exact(vocab).map(|row| top(row).and_then(draft_token)));
            }
            if temperature != 1.0 {
                let mut scaled: Vec<f32> = logits.iter().map(|logit| logit / temperature).collect();
                self.tempered.extend(&mut scaled, vocab, tokens);
            }
            self.plain.extend(logits, vocab, tokens);
        }
        Ok(())
    }

    /// What row `index` of the chunk compares itself with; `None` when nothing was computed.
    pub(super) fn row(&self, index: usize) -> Option<TargetRow<'_>> {
        let &position = self.of_row.get(index)?;
        let (probabilities, missing) = self.plain.row(position, self.vocab);
        let (tempered, tempered_missing) = self.tempered.row(position, self.vocab);
        let top = self.tops.get(position).copied().flatten();
        Some(TargetRow { probabilities, missing, tempered, tempered_missing, top })
    }
}

impl Kept {
    /// Turns logits of the whole vocabulary into probabilities, and takes over those of `tokens`.
    fn extend(&mut self, logits: &mut [f32], vocab: usize, tokens: &[u32]) {
        let before = self.missing.len();
        let after = before + logits.len() / vocab;
        let probabilities = at_least(&mut self.probabilities, after * tokens.len());
        self.missing.resize(after, 0.0);
        logits
            .par_chunks_exact_mut(vocab)
            .zip(probabilities[before * tokens.len()..].par_chunks_exact_mut(tokens.len()))
            .zip(&mut self.missing[before..])
            .for_each(|((row, kept), missing)| {
                softmax(row);
                for (kept, &token) in kept.iter_mut().zip(tokens) {
                    *kept = std::mem::take(&mut row[token as usize]);
                }
                // Only what was not taken is left: this keeps a small mass exact, and none at exactly 0.
                *missing = total(row);
            });
    }

    fn row(&self, position: usize, vocab: usize) -> (&[f32], f32) {
        let probabilities = self.probabilities.get(position * vocab..(position + 1) * vocab).unwrap_or_default();
        (probabilities, self.missing.get(position).copied().unwrap_or(0.0))
    }
}

fn top(logits: &[f32]) -> Option<u32> {
    argmax(logits).map(|(token, _)| token as u32)
}

/// The first `len` elements of a buffer that is made longer where need be; whoever asks overwrites them.
fn at_least(buffer: &mut Vec<f32>, len: usize) -> &mut [f32] {
    if buffer.len() < len {
        buffer.resize(len, 0.0);
    }
    &mut buffer[..len]
}

fn softmax_rows(rows: &mut [f32], vocab: usize) {
    threads::for_each_chunk(rows, vocab, true, |_, row| {
        softmax(row);
    });
}
