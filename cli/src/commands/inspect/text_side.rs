//! Tokens and text: the tokenizer of a model, facts that decide whether two belong together, and masked tokens as text.

use std::path::Path;

use deepspec_datasets::tokenizer::{GgufVocabulary, Tokenizer};
use deepspec_engine::TextSide;
use deepspec_models::gguf::Vocabulary;
use deepspec_stages::model_source::{ResolvedModel, load_text_side};
use serde_json::{Value, json};

use super::report::Span;

/// Loads tokenizer and template of a model folder or a GGUF file.
pub(super) fn load(path: &Path) -> anyhow::Result<TextSide> {
    Ok(load_text_side(&ResolvedModel { path: path.to_owned(), name: path.display().to_string() })?)
}

/// Builds the tokenizer of a GGUF file.
pub(super) fn from_vocabulary(vocabulary: Vocabulary) -> anyhow::Result<Tokenizer> {
    let parts = GgufVocabulary {
        model: vocabulary.model,
        pre: vocabulary.pre.unwrap_or_default(),
        tokens: vocabulary.tokens,
        token_types: vocabulary.token_types,
        merges: vocabulary.merges,
        add_bos: vocabulary.add_bos.unwrap_or(false),
    };
    Ok(Tokenizer::from_gguf_parts(parts)?)
}

/// Size, identity and special tokens.
pub(super) fn facts(tokenizer: &Tokenizer) -> Value {
    json!({
        "vocab_size": tokenizer.vocab_size(),
        "tokenizer_hash": tokenizer.hash(),
        "special_tokens": tokenizer.special_tokens().len(),
    })
}

/// Tokens in stretches of equal mask, as text or, without a tokenizer, as ids.
pub(super) fn spans(ids: &[u32], loss_mask: &[u8], tokenizer: Option<&Tokenizer>) -> Vec<Span> {
    let mut rest = ids;
    let stretches = loss_mask.chunk_by(|left, right| left == right);
    stretches
        .map(|stretch| {
            let (ids, after) = rest.split_at(stretch.len().min(rest.len()));
            rest = after;
            let text = match tokenizer {
                Some(tokenizer) => tokenizer.decode(ids, false),
                None => ids.iter().map(u32::to_string).collect::<Vec<_>>().join(" ") + " ",
            };
            Span { supervised: stretch[0] == 1, text }
        })
        .collect()
}
