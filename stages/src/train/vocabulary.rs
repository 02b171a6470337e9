//! Which tokens a drafter with a draft vocabulary can propose: the most frequent supervised ones of the target cache.
//!
//! The map is a function of the cache and the recipe, so that a resumed run finds the same one.

use std::collections::BTreeSet;
use std::fmt;

use deepspec_datasets::target_cache::Reader;
use deepspec_models::config::TargetConfig;
use deepspec_models::draft::DraftVocabulary;

use crate::error::{Error, Result};

/// Share of the samples, the last ones, that the coverage of unseen text is measured on.
const HELD_OUT: f64 = 0.02;

/// How much of the supervised text a draft vocabulary has the tokens of.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Coverage {
    /// Draft tokens.
    pub tokens: usize,
    /// Tokens of the target.
    pub target_tokens: usize,
    /// Share of the supervised tokens of all samples.
    pub training: f64,
    /// The same for the last 2 % of the samples (at least one) under the vocabulary that the others alone would give: what to
    /// expect of text that was not counted. `None` when there are no others.
    pub held_out: Option<f64>,
}

impl fmt::Display for Coverage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { tokens, target_tokens, training, .. } = self;
        write!(f, "{tokens} of {target_tokens} tokens cover {:.2} % of the data", training * 100.0)?;
        match self.held_out {
            Some(share) => write!(f, ", {:.2} % of samples that were not counted", share * 100.0),
            None => Ok(()),
        }
    }
}

/// A draft vocabulary of `size` tokens and what it covers; `None` without a size, when the drafter has the target's whole vocabulary.
/// The tokens that end the target's text are always in it.
///
/// # Errors
/// When it is too small for those tokens or the cache is damaged.
pub fn build(
    size: Option<usize>,
    target: &TargetConfig,
    cache: &Reader,
) -> Result<Option<(DraftVocabulary, Coverage)>> {
    let Some(size) = size else { return Ok(None) };
    let samples = cache.len();
    let held_out = ((samples as f64 * HELD_OUT) as u64).max(1).min(samples);
    let counted = supervised_counts(cache, target.vocab_size, 0..samples - held_out)?;
    let unseen = supervised_counts(cache, target.vocab_size, samples - held_out..samples)?;
    let all: Vec<u64> = counted.iter().zip(&unseen).map(|(a, b)| a + b).collect();
    let ends: BTreeSet<u32> = target.stop_ids.iter().chain(&target.eos_token_ids).copied().collect();
    let ends: Vec<u32> = ends.into_iter().collect();
    if size < ends.len() {
        let problem = format!(
            "`draft.vocab_size` is {size}, allowed: at least {}, the tokens {ends:?} that end a text",
            ends.len()
        );
        return Err(Error::Recipe { origin: "for this target".into(), problem });
    }
    let vocabulary = DraftVocabulary::most_frequent(&all, &ends, size)?;
    let of_the_others =
        if held_out < samples { share(&unseen, &DraftVocabulary::most_frequent(&counted, &ends, size)?) } else { None };
    let coverage = Coverage {
        tokens: size,
        target_tokens: target.vocab_size,
        training: share(&all, &vocabulary).unwrap_or(0.0),
        held_out: of_the_others,
    };
    Ok(Some((vocabulary, coverage)))
}

/// How often each token is supervised in some samples.
fn supervised_counts(cache: &Reader, vocab: usize, samples: std::ops::Range<u64>) -> Result<Vec<u64>> {
    let mut counts = vec![0; vocab];
    for index in samples {
        let (input_ids, loss_mask) = cache.tokens(index)?;
        for (&token, _) in input_ids.iter().zip(loss_mask).filter(|(_, mask)| **mask == 1) {
            *counts.get_mut(token as usize).ok_or(deepspec_models::Error::TokenRange { token, vocab })? += 1;
        }
    }
    Ok(counts)
}

/// Share of counted tokens that a vocabulary has; `None` of none.
fn share(counts: &[u64], vocabulary: &DraftVocabulary) -> Option<f64> {
    let total: u64 = counts.iter().sum();
    let had: u64 = vocabulary.tokens().iter().map(|&token| counts[token as usize]).sum();
    (total > 0).then(|| had as f64 / total as f64)
}
