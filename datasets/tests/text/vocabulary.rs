//! A small byte-level vocabulary with the control tokens of several model families.

use std::sync::LazyLock;

use deepspec_datasets::tokenizer::{GgufVocabulary, Tokenizer};

pub(crate) const SPECIALS: [&str; 11] = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<bos>",
    "<start_of_turn>",
    "<end_of_turn>",
    "終",
];

/// Not special, as in Qwen's vocabulary.
const USER_DEFINED: [&str; 2] = ["<think>", "</think>"];

const MERGES: [&str; 14] =
    ["h e", "l l", "he ll", "hell o", "Ġ t", "Ġt he", "u s", "e r", "us er", "Ċ Ċ", "ĊĊ ĊĊ", "Ġ Ġ", "< |", "i m"];

/// The printable character for each byte, written as the ranges that GPT-2 lists.
fn alphabet() -> Vec<String> {
    let printable: Vec<u32> = (0x21..=0x7e).chain(0xa1..=0xac).chain(0xae..=0xff).collect();
    let mut free = 0x100..;
    let character = |byte: u32| if printable.contains(&byte) { byte } else { free.next().unwrap() };
    (0..=255).map(character).map(|c| char::from_u32(c).unwrap().to_string()).collect()
}

pub(crate) fn lists() -> GgufVocabulary {
    let mut tokens = alphabet();
    tokens.extend(MERGES.iter().map(|merge| merge.replace(' ', "")));
    let mut token_types = vec![1; tokens.len()];
    for (texts, kind) in [(&SPECIALS[..], 3), (&USER_DEFINED[..], 4)] {
        tokens.extend(texts.iter().map(|text| (*text).to_owned()));
        token_types.resize(tokens.len(), kind);
    }
    GgufVocabulary {
        model: "gpt2".to_owned(),
        pre: "smollm".to_owned(),
        tokens,
        token_types,
        merges: MERGES.iter().map(|merge| (*merge).to_owned()).collect(),
        add_bos: false,
    }
}

/// Built once, since property tests ask for it in every case.
pub(crate) fn tokenizer() -> Tokenizer {
    static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(|| Tokenizer::from_gguf_parts(lists()).unwrap());
    TOKENIZER.clone()
}
