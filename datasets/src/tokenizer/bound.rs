//! How many tokens a text has at least, known from its length alone: a text that is far too long for a model can be refused
//! without encoding it, which takes half a microsecond and a hundred bytes for each of its own.
//!
//! A token stands for no more bytes than the longest one of the vocabulary, as long as nothing on the way to the tokens takes
//! parts of the text away. Tokenizers with steps that might do so have no such limit, and their texts no bound.

use serde_json::Value;
use tokenizers::{AddedToken, Tokenizer as Inner};

use super::Tokenizer;

/// Bytes of a text that the canonical composition of Unicode may turn into one: three, for Hangul syllables.
const COMPOSITION: usize = 3;

/// Most bytes of a text that one token may stand for, from the longest spelling of a token.
pub(super) fn bytes_per_token(inner: &Inner, longest: usize) -> Option<usize> {
    // Their own descriptions; a step that cannot give one has no limit.
    let pre_tokenizer = serde_json::to_value(inner.get_pre_tokenizer()).ok()?;
    let normalizer = serde_json::to_value(inner.get_normalizer()).ok()?;
    // Of special tokens, `Tokenizer::segments` takes the white space away before this matters.
    let trims = |token: &AddedToken| !token.special && (token.lstrip || token.rstrip);
    let has_trims = inner.get_added_tokens_decoder().values().any(trims);
    if has_trims || !keeps_text(&pre_tokenizer) {
        return None;
    }
    longest.max(1).checked_mul(shrinks(&normalizer)?)
}

/// How many bytes of a text a normalizer may turn into one.
fn shrinks(normalizer: &Value) -> Option<usize> {
    match normalizer["type"].as_str() {
        None => normalizer.is_null().then_some(1),
        Some("NFC") => Some(COMPOSITION),
        Some("NFD" | "Prepend" | "ByteLevel") => Some(1),
        Some("Replace") => {
            let (old, new) = (normalizer["pattern"]["String"].as_str()?, normalizer["content"].as_str()?);
            (new.len() >= old.len()).then_some(1)
        }
        Some("Sequence") => {
            let mut steps = normalizer["normalizers"].as_array()?.iter();
            steps.try_fold(1_usize, |factor, step| factor.checked_mul(shrinks(step)?))
        }
        Some(_) => None,
    }
}

/// Whether a pre-tokenizer only cuts the text.
fn keeps_text(step: &Value) -> bool {
    match step["type"].as_str() {
        None => step.is_null(),
        Some("ByteLevel" | "Digits" | "Metaspace") => true,
        Some("Split" | "Punctuation") => step["behavior"].as_str().is_some_and(|behavior| behavior != "Removed"),
        Some("Sequence") => step["pretokenizers"].as_array().is_some_and(|steps| steps.iter().all(keeps_text)),
        Some(_) => false,
    }
}

impl Tokenizer {
    /// Tokens that a text has at the least, as [`Tokenizer::encode_with_specials`] reads it; 0 where that cannot be told.
    /// Takes no time to speak of.
    pub fn fewest_tokens(&self, text: &str) -> usize {
        let Some(most) = self.parts.bytes_per_token else { return 0 };
        if self.parts.specials.iter().any(|token| token.lstrip || token.rstrip) {
            let pieces = self.segments(text).into_iter();
            return pieces
                .map(|piece| if piece.special.is_some() { 1 } else { piece.range.len().div_ceil(most) })
                .sum();
        }
        text.len().div_ceil(most)
    }
}
