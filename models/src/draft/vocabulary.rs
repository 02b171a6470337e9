//! A draft vocabulary: the part of the target's tokens that a drafter can propose.
//!
//! With a small target the output head and the Markov projection are most of what drafting costs, and a few thousand
//! tokens make up nearly all text. A drafter with D of the target's V tokens has an `lm_head` and a `markov_w2` of D rows;
//! embedding and `markov_w1` stay indexed by the target's tokens. Drafting with fewer tokens changes no output, it can only
//! be accepted less often. In checkpoints the map is `d2t` (I64 `[D]`, offsets: target token = draft token + `d2t[draft token]`)
//! and `t2d` (BOOL `[V]`, whether the drafter has the token), as speculators and vLLM have it.

use std::sync::Arc;

use candle_core::{Device, Tensor};

use crate::config::DraftConfig;
use crate::error::{Error, Result};
use crate::target::select_rows;
use crate::weights::Weights;

/// Tensor of the offsets.
const D2T: &str = "d2t";
/// Tensor of the flags.
const T2D: &str = "t2d";

/// Which of the target's tokens a drafter has; draft tokens are numbered in the order of the target's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DraftVocabulary {
    tokens: Arc<[u32]>,
    target_vocab: usize,
}

impl DraftVocabulary {
    /// The `size` most frequent tokens of `counts` (one per target token), of equals the lower ones; those of `always` are
    /// in whatever their count.
    ///
    /// # Errors
    /// [`Error::Batch`] when `size` is not from the number of `always` tokens to that of all, or one of `always` does not exist.
    pub fn most_frequent(counts: &[u64], always: &[u32], size: usize) -> Result<Self> {
        let mut order: Vec<u32> = (0..counts.len() as u32).collect();
        let mut required = vec![false; counts.len()];
        for &token in always {
            let vocab = counts.len();
            *required.get_mut(token as usize).ok_or(Error::TokenRange { token, vocab })? = true;
        }
        let least = required.iter().filter(|is_required| **is_required).count().max(1);
        if !(least..=counts.len()).contains(&size) {
            let most = counts.len();
            return Err(Error::Batch(format!("a draft vocabulary of {size} tokens, expected {least} to {most}")));
        }
        order.sort_by_key(|&token| {
            let at = token as usize;
            (!required[at], std::cmp::Reverse(counts[at]))
        });
        order.truncate(size);
        order.sort_unstable();
        Ok(Self { tokens: order.into(), target_vocab: counts.len() })
    }

    /// Reads the map of a checkpoint; `None` when the configuration gives the drafter the target's whole vocabulary.
    ///
    /// # Errors
    /// `d2t` is missing, or it or `t2d` has another length than the configuration says, or they hold what is no map: tokens that do
    /// not ascend or do not exist, flags that disagree. The error names tensor and entry.
    pub fn read(weights: &Weights, config: &DraftConfig) -> Result<Option<Self>> {
        Self::read_map(weights, config.draft_vocab(), config.body.vocab_size)
    }

    /// Reads the map of a drafter with `size` of the target's `target_vocab` tokens.
    ///
    /// # Errors
    /// As [`DraftVocabulary::read`].
    pub fn read_map(weights: &Weights, size: usize, target_vocab: usize) -> Result<Option<Self>> {
        if size == target_vocab && !weights.contains(D2T) {
            return Ok(None);
        }
        let bad = |tensor: &str, entry: usize, found: String, expected: String| Error::TensorEntry {
            path: weights.path().into(),
            tensor: tensor.into(),
            entry,
            found,
            expected,
        };
        let offsets = weights.integers(D2T, &[size])?;
        let mut tokens: Vec<u32> = Vec::with_capacity(size);
        for (draft, &offset) in offsets.iter().enumerate() {
            let found =
                || format!("{offset}, which maps draft token {draft} to {}", i128::from(offset) + draft as i128);
            let token = u32::try_from(i128::from(offset) + draft as i128).ok();
            match token.filter(|&token| (token as usize) < target_vocab) {
                None => return Err(bad(D2T, draft, found(), format!("a token from 0 to {}", target_vocab - 1))),
                Some(token) if tokens.last().is_some_and(|&last| last >= token) => {
                    return Err(bad(D2T, draft, found(), "a token above the one before".into()));
                }
                Some(token) => tokens.push(token),
            }
        }
        let map = Self { tokens: tokens.into(), target_vocab };
        // Engines do not read the flags, so a checkpoint may lack them.
        if weights.contains(T2D) {
            let flags = weights.integers(T2D, &[target_vocab])?;
            let expected = map.flags();
            if let Some(token) = (0..target_vocab).find(|&token| flags[token] != i64::from(expected[token])) {
                let (found, expected) = (flags[token].to_string(), format!("{} as `d2t` has it", expected[token]));
                return Err(bad(T2D, token, found, expected));
            }
        }
        Ok((size < target_vocab).then_some(map))
    }

    /// Number of draft tokens.
    pub fn size(&self) -> usize {
        self.tokens.len()
    }

    /// Number of the target's tokens.
    pub fn target_vocab(&self) -> usize {
        self.target_vocab
    }

    /// The target's tokens in order of the draft tokens: ascending.
    pub fn tokens(&self) -> &Arc<[u32]> {
        &self.tokens
    }

    /// The draft token of a target token, if the drafter has it.
    pub fn draft_token(&self, token: u32) -> Option<u32> {
        self.tokens.binary_search(&token).ok().map(|index| index as u32)
    }

    /// The draft tokens' rows of a table.
    ///
    /// # Shapes
    /// `[vocab, n]` → `[draft vocab, n]`
    ///
    /// # Errors
    /// When the table has fewer rows than the target has tokens.
    pub fn rows_of(&self, table: &Tensor) -> Result<Tensor> {
        let rows: Vec<usize> = self.tokens.iter().map(|&token| token as usize).collect();
        select_rows(table, &rows)
    }

    /// `d2t` and `t2d` as a checkpoint holds them.
    ///
    /// # Errors
    /// When a tensor cannot be made.
    pub fn tensors(&self) -> Result<[(String, Tensor); 2]> {
        let offsets: Vec<i64> = (0..).zip(self.tokens.iter()).map(|(draft, &token)| i64::from(token) - draft).collect();
        let d2t = Tensor::from_vec(offsets, self.size(), &Device::Cpu)?;
        let t2d = Tensor::from_vec(self.flags(), self.target_vocab, &Device::Cpu)?;
        Ok([(D2T.into(), d2t), (T2D.into(), t2d)])
    }

    fn flags(&self) -> Vec<u8> {
        let mut flags = vec![0; self.target_vocab];
        for &token in self.tokens.iter() {
            flags[token as usize] = 1;
        }
        flags
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(counts: &[u64], always: &[u32], size: usize) -> Vec<u32> {
        DraftVocabulary::most_frequent(counts, always, size).unwrap().tokens().to_vec()
    }

    #[test]
    fn the_most_frequent_tokens_are_taken_the_lower_of_equals() {
        let counts = [0, 5, 2, 9, 2, 0, 2];
        assert_eq!(tokens(&counts, &[], 1), [3]);
        assert_eq!(tokens(&counts, &[], 3), [1, 2, 3]);
        assert_eq!(tokens(&counts, &[], 4), [1, 2, 3, 4]);
        assert_eq!(tokens(&counts, &[5, 5], 3), [1, 3, 5]);
        assert_eq!(tokens(&counts, &[0, 5], 2), [0, 5]);
        assert_eq!(tokens(&counts, &[], 7), [0, 1, 2, 3, 4, 5, 6]);
        assert_eq!(tokens(&counts, &[], 6), [0, 1, 2, 3, 4, 6]);
    }

    #[test]
    fn sizes_that_cannot_be_are_refused() {
        let refused =
            |always: &[u32], size| DraftVocabulary::most_frequent(&[1, 2, 3], always, size).unwrap_err().to_string();
        assert!(refused(&[], 0).contains("0 tokens, expected 1 to 3"));
        assert!(refused(&[], 4).contains("4 tokens, expected 1 to 3"));
        assert!(refused(&[0, 2], 1).contains("1 tokens, expected 2 to 3"));
        assert!(refused(&[3], 2).contains("token 3 is outside the vocabulary of 3"));
    }

    #[test]
    fn tokens_rows_and_offsets_agree() {
        let map = DraftVocabulary::most_frequent(&[0, 5, 2, 9, 2, 0, 2], &[6], 3).unwrap();
        assert_eq!((&map.tokens()[..], map.size(), map.target_vocab()), (&[1, 3, 6][..], 3, 7));
        assert_eq!((0..8).map(|token| map.draft_token(token)).collect::<Vec<_>>()[..4], [None, Some(0), None, Some(1)]);
        assert_eq!((map.draft_token(6), map.draft_token(7)), (Some(2), None));
        let table = Tensor::arange(0f32, 14.0, &Device::Cpu).unwrap().reshape((7, 2)).unwrap();
        assert_eq!(map.rows_of(&table).unwrap().to_vec2::<f32>().unwrap(), [[2.0, 3.0], [6.0, 7.0], [12.0, 13.0]]);
        let [(_, d2t), (_, t2d)] = map.tensors().unwrap();
        assert_eq!(d2t.to_vec1::<i64>().unwrap(), [1, 2, 4]);
        assert_eq!(t2d.to_vec1::<u8>().unwrap(), [0, 1, 0, 1, 0, 0, 1]);
    }
}
