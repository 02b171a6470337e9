//! Builds a tokenizer from a `tokenizer.json` or from GGUF lists, and checks that the lists fit together.

use std::collections::{BTreeMap, HashSet};

use serde_json::Value;
use sha2::{Digest, Sha256};
use tokenizers::models::ModelWrapper;
use tokenizers::models::bpe::BPE;
use tokenizers::normalizers::unicode::NFC;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, Encoding, PostProcessor as _, SplitDelimiterBehavior, Token, Tokenizer as Inner};

use super::{Parts, SpecialToken, bound};
use crate::error::Error;
use crate::jsonl::hex;

/// The tokenizer lists of a GGUF file, as its metadata names them.
#[derive(Clone, Debug, Default)]
pub struct GgufVocabulary {
    /// `tokenizer.ggml.model`; only `gpt2` (byte-level BPE) is known.
    pub model: String,
    /// `tokenizer.ggml.pre`: `smollm`, `gpt-2`, `qwen2` or `llama-bpe`.
    pub pre: String,
    /// `tokenizer.ggml.tokens`, by id.
    pub tokens: Vec<String>,
    /// `tokenizer.ggml.token_type`, by id: 3 is a control token, 4 is user-defined.
    pub token_types: Vec<i32>,
    /// `tokenizer.ggml.merges`, best first, each two tokens and a space between.
    pub merges: Vec<String>,
    /// `tokenizer.ggml.add_bos_token`. The lists do not say which token that is: whoever knows it calls
    /// [`Tokenizer::with_text_start`](super::Tokenizer::with_text_start).
    pub add_bos: bool,
}

const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;

/// How the spelling of a token in the vocabulary maps to bytes.
#[derive(Clone, Copy, PartialEq)]
enum Spelling {
    /// Each byte is one printable character.
    ByteLevel,
    /// Characters stand for themselves, `▁` for a space, `<0x0A>` for a byte.
    ByteFallback,
}

/// What pieces of text, numbers and spaces BPE may join, by `tokenizer.ggml.pre`.
fn pre_tokenizer(pre: &str) -> Option<Result<PreTokenizerWrapper, tokenizers::Error>> {
    const WORDS: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|";
    const REST: &str = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    let bytes = |use_regex| PreTokenizerWrapper::from(ByteLevel::new(false, true, use_regex));
    let split = |numbers: &str| {
        let pattern = SplitPattern::Regex(format!("{WORDS}{numbers}{REST}"));
        let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false)?;
        Ok(Sequence::new(vec![split.into(), bytes(false)]).into())
    };
    match pre {
        "gpt-2" => Some(Ok(bytes(true))),
        "smollm" => Some(Ok(Sequence::new(vec![Digits::new(true).into(), bytes(true)]).into())),
        "qwen2" => Some(split(r"\p{N}")),
        "llama-bpe" => Some(split(r"\p{N}{1,3}")),
        _ => None,
    }
}

pub(super) fn from_gguf(vocabulary: GgufVocabulary) -> Result<Parts, Error> {
    const ORIGIN: &str = "GGUF metadata";
    let GgufVocabulary { model, pre, tokens, token_types, merges, .. } = vocabulary;
    let invalid = |problem: String| Error::Tokenizer { origin: ORIGIN.to_owned(), problem };
    let unknown = |what, found: &str, expected| Error::UnknownTokenizerKind {
        origin: ORIGIN.to_owned(),
        what,
        found: found.escape_debug().to_string(),
        expected,
    };
    if model != "gpt2" {
        return Err(unknown("tokenizer.ggml.model", &model, "gpt2"));
    }
    let pre_tokenizer = pre_tokenizer(&pre)
        .ok_or_else(|| unknown("tokenizer.ggml.pre", &pre, "smollm, gpt-2, qwen2 or llama-bpe"))?
        .map_err(|error| invalid(error.to_string()))?;
    if token_types.len() != tokens.len() {
        return Err(invalid(format!("{} tokens but {} token types", tokens.len(), token_types.len())));
    }
    let pairs = merges
        .iter()
        .enumerate()
        .map(|(index, merge)| split_merge(merge).ok_or_else(|| invalid(format!("merge {index} is {merge:?}"))))
        .collect::<Result<Vec<_>, _>>()?;
    let mut ids = tokenizers::models::bpe::Vocab::default();
    for (id, token) in tokens.iter().enumerate() {
        let id = u32::try_from(id).map_err(|_| invalid("more tokens than ids".to_owned()))?;
        if let Some(first) = ids.insert(token.clone(), id) {
            return Err(invalid(format!("token {token:?} has the ids {first} and {id}")));
        }
    }
    let bpe = BPE::builder()
        .vocab_and_merges(ids, pairs.clone())
        .ignore_merges(pre == "llama-bpe")
        .build()
        .map_err(|error| invalid(error.to_string()))?;
    let mut inner = Inner::new(bpe);
    inner.with_pre_tokenizer(Some(pre_tokenizer));
    if pre == "qwen2" {
        inner.with_normalizer(Some(NFC)).map_err(|error| invalid(error.to_string()))?;
    }
    let added = tokens.into_iter().zip(token_types).filter(|(_, kind)| matches!(*kind, CONTROL | USER_DEFINED));
    let added = added.map(|(text, kind)| AddedToken::from(text, kind == CONTROL).normalized(false));
    inner.add_tokens(added).map_err(|error| invalid(error.to_string()))?;
    finish(inner, &pairs, Spelling::ByteLevel, ORIGIN)
}

pub(super) fn from_json(bytes: &[u8], origin: &str) -> Result<Parts, Error> {
    let invalid = |problem: String| Error::Tokenizer { origin: origin.to_owned(), problem };
    let json: Value = serde_json::from_slice(bytes).map_err(|error| invalid(error.to_string()))?;
    let kind = json["model"]["type"].as_str().unwrap_or("BPE");
    if kind != "BPE" {
        return Err(Error::UnknownTokenizerKind {
            origin: origin.to_owned(),
            what: "model.type",
            found: kind.escape_debug().to_string(),
            expected: "BPE",
        });
    }
    let spelling = spelling(&json["decoder"]).ok_or_else(|| Error::UnknownTokenizerKind {
        origin: origin.to_owned(),
        what: "decoder",
        found: json["decoder"].to_string().chars().take(200).collect(),
        expected: "ByteLevel, or a Sequence of Replace, ByteFallback and Fuse",
    })?;
    let merges = json["model"]["merges"].as_array().map_or(&[][..], Vec::as_slice);
    let pairs = merges
        .iter()
        .enumerate()
        .map(|(index, merge)| {
            let pair = match merge {
                Value::String(text) => split_merge(text),
                Value::Array(pair) => match pair.as_slice() {
                    [Value::String(left), Value::String(right)] => Some((left.clone(), right.clone())),
                    _ => None,
                },
                _ => None,
            };
            pair.ok_or_else(|| invalid(format!("model.merges[{index}] is {merge}")))
        })
        .collect::<Result<Vec<_>, _>>()?;
    let mut inner = Inner::from_bytes(bytes).map_err(|error| invalid(error.to_string()))?;
    let text_start = text_start(&inner).map_err(|error| invalid(error.to_string()))?;
    inner.with_padding(None).with_post_processor(None::<tokenizers::PostProcessorWrapper>);
    inner.with_truncation(None).map_err(|error| invalid(error.to_string()))?;
    Ok(Parts { text_start, ..finish(inner, &pairs, spelling, origin)? })
}

/// The tokens that the post-processor puts before a text. What it puts after one is of no use here: texts are continued.
fn text_start(inner: &Inner) -> Result<Vec<u32>, tokenizers::Error> {
    // No vocabulary has this id.
    const TEXT: u32 = u32::MAX;
    let Some(processor) = inner.get_post_processor() else { return Ok(Vec::new()) };
    let text = Encoding::from_tokens(vec![Token::new(TEXT, "a".into(), (0, 1))], 0);
    let processed = processor.process(text, None, true)?;
    Ok(processed.get_ids().iter().copied().take_while(|&id| id != TEXT).collect())
}

fn split_merge(merge: &str) -> Option<(String, String)> {
    let (left, right) = merge.split_once(' ')?;
    let whole = !left.is_empty() && !right.is_empty() && !right.contains(' ');
    whole.then(|| (left.to_owned(), right.to_owned()))
}

fn spelling(decoder: &Value) -> Option<Spelling> {
    let one = |decoder: &Value| decoder["type"].as_str().unwrap_or_default().to_owned();
    match decoder["decoders"].as_array() {
        None => (one(decoder) == "ByteLevel").then_some(Spelling::ByteLevel),
        Some(steps) => {
            let steps: Vec<String> = steps.iter().map(one).collect();
            let only = |known: &[&str]| steps.iter().all(|step| known.contains(&step.as_str()));
            if steps.iter().any(|step| step == "ByteLevel") && only(&["ByteLevel", "Fuse"]) {
                Some(Spelling::ByteLevel)
            } else if steps.iter().any(|step| step == "ByteFallback") && only(&["Replace", "ByteFallback", "Fuse"]) {
                Some(Spelling::ByteFallback)
            } else {
                None
            }
        }
    }
}

fn finish(mut inner: Inner, merges: &[(String, String)], spelling: Spelling, origin: &str) -> Result<Parts, Error> {
    inner.set_encode_special_tokens(true);
    let added: BTreeMap<u32, AddedToken> = inner.get_added_tokens_decoder().into_iter().collect();
    let invalid = |problem: String| Error::Tokenizer { origin: origin.to_owned(), problem };
    let mut vocabulary = BTreeMap::new();
    for (token, id) in inner.get_vocab(true) {
        if vocabulary.insert(id, token).is_some() {
            return Err(invalid(format!("two tokens have the id {id}")));
        }
    }
    let Some((&largest, _)) = vocabulary.last_key_value() else {
        return Err(invalid("the vocabulary is empty".to_owned()));
    };
    // Every id costs memory, so one far beyond the others is refused.
    if largest as usize > 2 * vocabulary.len() + 65_536 {
        return Err(invalid(format!("id {largest} in a vocabulary of {} tokens", vocabulary.len())));
    }
    let byte_of: BTreeMap<char, u8> = byte_characters().into_iter().zip(0..=255).collect();
    let mut bytes = vec![None; largest as usize + 1];
    for (&id, token) in &vocabulary {
        let raw = match (added.get(&id), spelling) {
            (Some(added), _) => added.content.as_bytes().to_vec(),
            (None, Spelling::ByteLevel) => byte_level_bytes(token, &byte_of),
            (None, Spelling::ByteFallback) => fallback_bytes(token),
        };
        bytes[id as usize] = Some(raw.into_boxed_slice());
    }
    let specials: Vec<SpecialToken> = added
        .iter()
        .filter(|(_, token)| token.special && !token.content.is_empty())
        .map(|(&id, token)| SpecialToken {
            id,
            text: token.content.clone(),
            lstrip: token.lstrip,
            rstrip: token.rstrip,
        })
        .collect();
    let missing_bytes = if spelling == Spelling::ByteLevel { missing_bytes(&inner) } else { Vec::new() };
    let covers_bytes = match spelling {
        Spelling::ByteLevel => missing_bytes.is_empty(),
        Spelling::ByteFallback => {
            let falls_back = matches!(inner.get_model(), ModelWrapper::BPE(bpe) if bpe.byte_fallback);
            falls_back && (0..=255_u8).all(|byte| inner.token_to_id(&format!("<0x{byte:02X}>")).is_some())
        }
    };
    let longest = match spelling {
        Spelling::ByteLevel => bytes.iter().flatten().map(|bytes| bytes.len()).max(),
        // The character that spells a space has three bytes, and a text may hold it itself.
        Spelling::ByteFallback => vocabulary.values().map(String::len).max(),
    };
    let bytes_per_token = longest.filter(|_| covers_bytes).and_then(|longest| bound::bytes_per_token(&inner, longest));
    Ok(Parts {
        special_ids: specials.iter().map(|token| token.id).collect(),
        hash: hash(&vocabulary, merges, &added),
        inner,
        bytes,
        special_starts: std::array::from_fn(|byte| specials.iter().any(|t| usize::from(t.text.as_bytes()[0]) == byte)),
        specials,
        missing_bytes,
        text_start: Vec::new(),
        bytes_per_token,
    })
}

/// The printable character that stands for each byte: itself where it is printable, else the next free one from U+0100.
fn byte_characters() -> Vec<char> {
    let mut next = 0x100;
    let character = |byte: u8| {
        if matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff) {
            return char::from(byte);
        }
        next += 1;
        char::from_u32(next - 1).expect("U+0100 and the 67 after it are characters")
    };
    (0..=255).map(character).collect()
}

/// Bytes of a byte-level token; a spelling with other characters stands for itself.
fn byte_level_bytes(token: &str, byte_of: &BTreeMap<char, u8>) -> Vec<u8> {
    let bytes: Option<Vec<u8>> = token.chars().map(|c| byte_of.get(&c).copied()).collect();
    bytes.unwrap_or_else(|| token.as_bytes().to_vec())
}

fn fallback_bytes(token: &str) -> Vec<u8> {
    let byte = token.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
    match byte.and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
        Some(byte) => vec![byte],
        None => token.replace('▁', " ").into_bytes(),
    }
}

/// Bytes of UTF-8 for which there is no token; BPE drops them without a word.
fn missing_bytes(inner: &Inner) -> Vec<u8> {
    let never: HashSet<u8> = [0xc0, 0xc1].into_iter().chain(0xf5..=0xff).collect();
    let characters = byte_characters().into_iter().zip(0..=255_u8);
    let is_missing = |character: char| inner.token_to_id(character.encode_utf8(&mut [0; 4])).is_none();
    characters
        .filter(|(character, byte)| !never.contains(byte) && is_missing(*character))
        .map(|(_, byte)| byte)
        .collect()
}

/// Lengths are hashed too, so that different lists never give the same bytes.
fn hash(vocabulary: &BTreeMap<u32, String>, merges: &[(String, String)], added: &BTreeMap<u32, AddedToken>) -> String {
    let mut hash = Sha256::new();
    let mut text = |text: &str| {
        hash.update((text.len() as u64).to_le_bytes());
        hash.update(text);
    };
    for (id, token) in vocabulary {
        text(&id.to_string());
        text(token);
    }
    text("merges");
    for (left, right) in merges {
        text(left);
        text(right);
    }
    text("added");
    for (id, token) in added {
        text(&id.to_string());
        text(&token.content);
        text(if token.special { "special" } else { "plain" });
    }
    hex(&hash.finalize())
}
