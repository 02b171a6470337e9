//! Text to token ids and back, for BPE vocabularies from a `tokenizer.json` or from the metadata of a GGUF file.
//!
//! Special tokens (control tokens such as `<|im_end|>`) are only recognised where the caller asks for it:
//! [`Tokenizer::encode_text`] takes every text as data, so that nobody can smuggle a control token into a prompt.
//! Other added tokens (such as Qwen's `<think>`) are part of the vocabulary and always recognised. A beginning-of-text
//! token comes from the chat template; only [`Tokenizer::encode_raw`], for texts that no template has made, puts one first.

mod bound;
mod load;
mod stream;

pub use load::GgufVocabulary;
pub use stream::StreamDecoder;

use std::collections::HashSet;
use std::fmt::Debug;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use tokenizers::Tokenizer as Inner;

use crate::error::Error;

/// A token that only a template or the model itself may write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpecialToken {
    /// Its id.
    pub id: u32,
    /// Its text.
    pub text: String,
    /// Swallows white space before it.
    pub lstrip: bool,
    /// Swallows white space after it.
    pub rstrip: bool,
}

/// A piece of a text: plain, or one special token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Bytes of the text.
    pub range: Range<usize>,
    /// The special token that the piece is.
    pub special: Option<u32>,
}

/// A token id and the bytes of the text that it covers.
pub(crate) type Spanned = (u32, Range<usize>);

/// A vocabulary with its rules. Cheap to clone.
#[derive(Clone)]
pub struct Tokenizer {
    parts: Arc<Parts>,
    /// Tokens that a raw text begins with.
    text_start: Arc<[u32]>,
}

struct Parts {
    inner: Inner,
    /// Bytes of each token by id; `None` for ids without a token.
    bytes: Vec<Option<Box<[u8]>>>,
    /// In order of id.
    specials: Vec<SpecialToken>,
    special_ids: HashSet<u32>,
    /// For each byte, whether a special token starts with it.
    special_starts: [bool; 256],
    /// Bytes that no token holds and that would be lost in silence.
    missing_bytes: Vec<u8>,
    /// Tokens that the post-processor puts before a text.
    text_start: Vec<u32>,
    /// Most bytes of a text without special tokens that become one token, where that has a limit.
    bytes_per_token: Option<usize>,
    hash: String,
}

impl Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer")
            .field("vocab_size", &self.vocab_size())
            .field("hash", &self.parts.hash)
            .finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// Loads a `tokenizer.json`. Its padding and truncation are not used; of its post-processor, what it puts before a text
    /// is kept for [`Tokenizer::encode_raw`].
    ///
    /// # Errors
    /// [`Error::Read`], [`Error::Tokenizer`], or [`Error::UnknownTokenizerKind`] for anything but BPE over bytes or with
    /// byte fallback.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self, Error> {
        let path = path.as_ref();
        let bytes = fs_err::read(path)?;
        load::from_json(&bytes, &path.display().to_string()).map(Self::from_parts)
    }

    /// Builds a byte-level BPE tokenizer from the vocabulary of a GGUF file.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] for lists that do not fit together, [`Error::UnknownTokenizerKind`] for an unknown model or
    /// pre-tokenizer.
    pub fn from_gguf_parts(vocabulary: GgufVocabulary) -> Result<Self, Error> {
        load::from_gguf(vocabulary).map(Self::from_parts)
    }

    fn from_parts(mut parts: Parts) -> Self {
        let text_start = std::mem::take(&mut parts.text_start).into();
        Tokenizer { parts: Arc::new(parts), text_start }
    }

    /// Sets the tokens that a raw text begins with, for models that say so beside the tokenizer (`add_bos_token`).
    #[must_use]
    pub fn with_text_start(self, ids: &[u32]) -> Self {
        Tokenizer { text_start: ids.into(), ..self }
    }

    /// The tokens that a raw text begins with: the beginning-of-text token, or none.
    pub fn text_start(&self) -> &[u32] {
        &self.text_start
    }

    /// Encodes a text that is to be continued as it stands, as the model's own tokenizer does it: the texts of special tokens
    /// are those tokens, and the text begins with [`Tokenizer::text_start`], but not twice where it has those tokens already.
    ///
    /// # Errors
    /// As [`Tokenizer::encode_text`].
    pub fn encode_raw(&self, text: &str) -> Result<Vec<u32>, Error> {
        let ids = self.encode_with_specials(text)?;
        if ids.starts_with(&self.text_start) {
            return Ok(ids);
        }
        Ok([&self.text_start[..], &ids].concat())
    }

    /// Encodes a text in which nothing is a special token.
    ///
    /// # Errors
    /// [`Error::Unencodable`] for a character that the vocabulary has no token for.
    pub fn encode_text(&self, text: &str) -> Result<Vec<u32>, Error> {
        self.check_bytes(text)?;
        let encoding = self.parts.inner.encode_fast(text, false).map_err(encode_error)?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Encodes a text in which the texts of special tokens are those tokens. Nothing is added.
    ///
    /// # Errors
    /// As [`Tokenizer::encode_text`].
    pub fn encode_with_specials(&self, text: &str) -> Result<Vec<u32>, Error> {
        let mut ids = Vec::new();
        for segment in self.segments(text) {
            match segment.special {
                Some(id) => ids.push(id),
                None => ids.extend(self.encode_text(&text[segment.range])?),
            }
        }
        Ok(ids)
    }

    /// As [`Tokenizer::encode_text`], with the bytes of `text` that each token covers. Tokens that share a character
    /// all cover it whole.
    pub(crate) fn encode_spanned(&self, text: &str) -> Result<Vec<Spanned>, Error> {
        self.check_bytes(text)?;
        let encoding = self.parts.inner.encode(text, false).map_err(encode_error)?;
        let spans = encoding.get_offsets().iter().map(|&(start, end)| start..end);
        Ok(encoding.get_ids().iter().copied().zip(spans).collect())
    }

    /// Splits a text at the special tokens in it, the longest first where several start at one place. The pieces cover
    /// the text; none is empty.
    pub fn segments(&self, text: &str) -> Vec<Segment> {
        self.segments_unless(text, |_| false)
    }

    /// As [`Tokenizer::segments`], leaving out matches whose bytes `is_data` claims.
    pub(crate) fn segments_unless(&self, text: &str, is_data: impl Fn(&Range<usize>) -> bool) -> Vec<Segment> {
        let mut segments = Vec::new();
        let mut plain = 0;
        let mut at = 0;
        while at < text.len() {
            let Some(token) = self.special_at(text, at).filter(|token| !is_data(&(at..at + token.text.len()))) else {
                at += 1;
                continue;
            };
            let mut range = at..at + token.text.len();
            if token.lstrip {
                range.start = plain + text[plain..range.start].trim_end().len();
            }
            if token.rstrip {
                range.end = text.len() - text[range.end..].trim_start().len();
            }
            if plain < range.start {
                segments.push(Segment { range: plain..range.start, special: None });
            }
            at = range.end;
            plain = range.end;
            segments.push(Segment { range, special: Some(token.id) });
        }
        if plain < text.len() {
            segments.push(Segment { range: plain..text.len(), special: None });
        }
        segments
    }

    fn special_at(&self, text: &str, at: usize) -> Option<&SpecialToken> {
        let rest = &text.as_bytes()[at..];
        if !self.parts.special_starts[usize::from(*rest.first()?)] {
            return None;
        }
        let starts = |token: &&SpecialToken| rest.starts_with(token.text.as_bytes());
        self.parts.specials.iter().filter(starts).max_by_key(|token| token.text.len())
    }

    /// Whether the text of a special token starts at a byte of a text.
    pub(crate) fn special_starts_at(&self, text: &str, at: usize) -> bool {
        self.special_at(text, at).is_some()
    }

    /// Encodes a text in one go by the tokenizer's own rule for special tokens, on a copy. Slow; for checks.
    pub(crate) fn encode_whole(&self, text: &str) -> Result<Vec<u32>, Error> {
        let mut inner = self.parts.inner.clone();
        inner.set_encode_special_tokens(false);
        Ok(inner.encode_fast(text, false).map_err(encode_error)?.get_ids().to_vec())
    }

    /// Decodes ids to text; bytes that are no UTF-8, and ids without a token, become U+FFFD.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let kept = ids.iter().filter(|id| !(skip_special && self.is_special(**id)));
        let bytes: Vec<u8> = kept.flat_map(|id| self.token_bytes(*id).unwrap_or(REPLACEMENT)).copied().collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// A decoder for ids that arrive one at a time.
    pub fn stream_decoder(&self, skip_special: bool) -> StreamDecoder {
        StreamDecoder::new(self.clone(), skip_special)
    }

    /// The bytes that a token stands for; they need not be whole characters. `None` for an id without a token.
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        self.parts.bytes.get(id as usize)?.as_deref()
    }

    /// The id of a token by its spelling in the vocabulary.
    pub fn id_of(&self, token: &str) -> Option<u32> {
        self.parts.inner.token_to_id(token)
    }

    /// All special tokens in order of id.
    pub fn special_tokens(&self) -> &[SpecialToken] {
        &self.parts.specials
    }

    /// Whether an id is a special token.
    pub fn is_special(&self, id: u32) -> bool {
        self.parts.special_ids.contains(&id)
    }

    /// One more than the largest id.
    pub fn vocab_size(&self) -> usize {
        self.parts.bytes.len()
    }

    /// SHA-256 over vocabulary, merges and added tokens, as 64 hex digits. The same for a `tokenizer.json` and a GGUF
    /// file that hold the same lists.
    pub fn hash(&self) -> &str {
        &self.parts.hash
    }

    fn check_bytes(&self, text: &str) -> Result<(), Error> {
        let missing = &self.parts.missing_bytes;
        if missing.is_empty() {
            return Ok(());
        }
        let Some(at) = text.bytes().position(|byte| missing.binary_search(&byte).is_ok()) else { return Ok(()) };
        let character = text.char_indices().take_while(|(start, _)| *start <= at).last().map_or('\u{fffd}', |(_, c)| c);
        Err(Error::Unencodable { byte: text.as_bytes()[at], character })
    }
}

const REPLACEMENT: &[u8] = "\u{fffd}".as_bytes();

fn encode_error(error: tokenizers::Error) -> Error {
    Error::Encode { problem: error.to_string() }
}
