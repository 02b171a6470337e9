//! Tokenizer and stream decoder.

use deepspec_datasets::Error;
use deepspec_datasets::tokenizer::Tokenizer;
use proptest::prelude::*;

use crate::vocabulary::{self, SPECIALS};

#[test]
fn merges_words_and_splits_digits() {
    let tokenizer = vocabulary::tokenizer();
    let spelled = |text: &str| -> Vec<String> {
        let ids = tokenizer.encode_text(text).unwrap();
        ids.iter().map(|id| String::from_utf8_lossy(tokenizer.token_bytes(*id).unwrap()).into_owned()).collect()
    };
    assert_eq!(spelled("hello the user12"), ["hello", " the", " ", "user", "1", "2"]);
    assert_eq!(spelled("a\n\n\n"), ["a", "\n\n", "\n"]);
}

#[test]
fn control_text_is_data_unless_asked_for() {
    let tokenizer = vocabulary::tokenizer();
    let text = "a<|im_end|>b<|im_start|<|im_end|>終";
    let plain = tokenizer.encode_text(text).unwrap();
    assert!(plain.iter().all(|id| !tokenizer.is_special(*id)));
    assert_eq!(tokenizer.decode(&plain, true), text);
    let parsed = tokenizer.encode_with_specials(text).unwrap();
    let specials: Vec<u32> = parsed.iter().copied().filter(|id| tokenizer.is_special(*id)).collect();
    let end = tokenizer.id_of("<|im_end|>").unwrap();
    assert_eq!(specials, [end, end, tokenizer.id_of("終").unwrap()]);
    assert_eq!(tokenizer.decode(&parsed, false), text);
    assert_eq!(tokenizer.decode(&parsed, true), "ab<|im_start|");
}

#[test]
fn other_added_tokens_are_always_recognised() {
    let tokenizer = vocabulary::tokenizer();
    let think = tokenizer.id_of("<think>").unwrap();
    assert_eq!(tokenizer.encode_text("<think>").unwrap(), [think]);
    assert!(!tokenizer.is_special(think));
}

#[test]
fn every_pre_tokenizer_round_trips() {
    for pre in ["smollm", "gpt-2", "qwen2", "llama-bpe"] {
        let lists = deepspec_datasets::tokenizer::GgufVocabulary { pre: pre.to_owned(), ..vocabulary::lists() };
        let tokenizer = Tokenizer::from_gguf_parts(lists).unwrap();
        let text = "It's 12345 hello\r\n\n  \tthe  Ünïcödé 你好 👩‍🚀 \u{0}!?";
        assert_eq!(tokenizer.decode(&tokenizer.encode_text(text).unwrap(), false), text, "{pre}");
    }
}

#[test]
fn digit_groups_follow_the_pre_tokenizer() {
    let mut lists = vocabulary::lists();
    for merge in ["1 2", "12 3"] {
        lists.tokens.push(merge.replace(' ', ""));
        lists.token_types.push(1);
        lists.merges.push(merge.to_owned());
    }
    for (pre, count) in [("smollm", 4), ("qwen2", 4), ("gpt-2", 2), ("llama-bpe", 2)] {
        let lists = deepspec_datasets::tokenizer::GgufVocabulary { pre: pre.to_owned(), ..lists.clone() };
        let tokenizer = Tokenizer::from_gguf_parts(lists).unwrap();
        assert_eq!(tokenizer.encode_text("1234").unwrap().len(), count, "{pre}");
    }
}

#[test]
fn bad_vocabularies_are_refused_by_name() {
    let with = |change: fn(&mut deepspec_datasets::tokenizer::GgufVocabulary)| {
        let mut lists = vocabulary::lists();
        change(&mut lists);
        Tokenizer::from_gguf_parts(lists).unwrap_err().to_string()
    };
    assert!(with(|lists| lists.pre = "tekken".to_owned()).contains("tokenizer.ggml.pre `tekken`"));
    assert!(with(|lists| lists.model = "llama".to_owned()).contains("tokenizer.ggml.model `llama`"));
    assert!(with(|lists| lists.token_types.truncate(3)).contains("3 token types"));
    assert!(with(|lists| lists.merges[2] = "hell".to_owned()).contains("merge 2 is \"hell\""));
    assert!(with(|lists| lists.merges[2] = "zz q".to_owned()).contains("zz"));
    assert!(with(|lists| lists.tokens[1] = lists.tokens[0].clone()).contains("has the ids 0 and 1"));
    assert!(
        with(|lists| *lists = deepspec_datasets::tokenizer::GgufVocabulary {
            model: "gpt2".to_owned(),
            pre: "gpt-2".to_owned(),
            ..Default::default()
        })
        .contains("empty")
    );
}

#[test]
fn a_character_without_token_is_an_error_rather_than_lost() {
    let mut lists = vocabulary::lists();
    lists.tokens[0x04] = "unused".to_owned();
    let tokenizer = Tokenizer::from_gguf_parts(lists).unwrap();
    assert!(matches!(tokenizer.encode_text("ok \u{4}"), Err(Error::Unencodable { byte: 4, character: '\u{4}' })));
    assert_eq!(tokenizer.encode_text("ok").unwrap().len(), 2);
}

#[test]
fn the_hash_sees_tokens_merges_and_kinds() {
    let base = vocabulary::tokenizer().hash().to_owned();
    assert_eq!(base.len(), 64);
    assert_eq!(base, vocabulary::tokenizer().hash());
    let mut merges = vocabulary::lists();
    merges.merges.swap(0, 1);
    let mut kinds = vocabulary::lists();
    *kinds.token_types.last_mut().unwrap() = 1;
    for lists in [merges, kinds] {
        assert_ne!(base, Tokenizer::from_gguf_parts(lists).unwrap().hash());
    }
}

#[test]
fn a_tokenizer_file_gives_the_same_ids_and_hash_as_its_lists() {
    let lists = vocabulary::lists();
    let vocab: serde_json::Map<String, serde_json::Value> =
        lists.tokens.iter().enumerate().map(|(id, token)| (token.clone(), id.into())).collect();
    let added: Vec<serde_json::Value> = lists
        .tokens
        .iter()
        .enumerate()
        .filter(|(id, _)| lists.token_types[*id] != 1)
        .map(|(id, token)| {
            serde_json::json!({"id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": lists.token_types[id] == 3})
        })
        .collect();
    let byte_level = serde_json::json!(
        {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let json = serde_json::json!({
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        "padding": null,
        "added_tokens": added,
        "normalizer": null,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Digits", "individual_digits": true}, byte_level]},
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocab, "merges": lists.merges}
    });
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    fs_err::write(&path, json.to_string()).unwrap();
    let from_file = Tokenizer::from_file(&path).unwrap();
    let from_lists = vocabulary::tokenizer();
    let text = "hello the user 12 <|im_end|> <think> 👩‍🚀\n\n";
    assert_eq!(from_file.encode_text(text).unwrap(), from_lists.encode_text(text).unwrap());
    assert_eq!(from_file.encode_with_specials(text).unwrap(), from_lists.encode_with_specials(text).unwrap());
    assert_eq!(from_file.hash(), from_lists.hash());
    assert_eq!(from_file.vocab_size(), from_lists.vocab_size());

    fs_err::write(&path, json.to_string().replace("\"BPE\"", "\"Unigram\"")).unwrap();
    let error = Tokenizer::from_file(&path).unwrap_err().to_string();
    assert!(error.contains("model.type") && error.contains("Unigram"), "{error}");
}

#[test]
fn half_characters_are_held_back() {
    let tokenizer = vocabulary::tokenizer();
    let mut decoder = tokenizer.stream_decoder(false);
    let ids = tokenizer.encode_text("é!").unwrap();
    let pieces: Vec<String> = ids.iter().map(|id| decoder.push(*id)).collect();
    assert_eq!(pieces, ["", "é", "!"]);
    assert_eq!(decoder.push(0xf0), "");
    assert_eq!(decoder.push(0x9f), "");
    assert_eq!(decoder.push(u32::from(b'a')), "\u{fffd}a", "the broken start is certain once another character comes");
    assert_eq!(decoder.push(0xf0), "");
    assert_eq!(decoder.finish(), "\u{fffd}");
    assert_eq!(decoder.finish(), "");
    assert_eq!(decoder.push(9_999_999), "\u{fffd}", "an id without a token");
}

proptest! {
    #[test]
    fn streamed_pieces_join_to_the_decoded_whole(
        ids in prop::collection::vec(prop_oneof![4 => 0..256_u32, 1 => 0x80..0xc0_u32, 1 => 250..300_u32], 0..60),
        skip_special: bool,
    ) {
        let tokenizer = vocabulary::tokenizer();
        let mut decoder = tokenizer.stream_decoder(skip_special);
        let mut text = String::new();
        for (index, id) in ids.iter().enumerate() {
            text.push_str(&decoder.push(*id));
            prop_assert!(tokenizer.decode(&ids[..=index], skip_special).starts_with(&text));
        }
        text.push_str(&decoder.finish());
        prop_assert_eq!(text, tokenizer.decode(&ids, skip_special));
    }

    #[test]
    fn valid_text_never_streams_a_replacement(text in "\\PC{0,30}") {
        let tokenizer = vocabulary::tokenizer();
        let mut decoder = tokenizer.stream_decoder(false);
        let ids = tokenizer.encode_text(&text).unwrap();
        let streamed: String = ids.iter().map(|id| decoder.push(*id)).collect();
        prop_assert_eq!(&streamed, &text);
        prop_assert_eq!(decoder.finish(), "");
    }

    #[test]
    fn no_text_encodes_to_a_control_token(
        parts in prop::collection::vec(prop_oneof![prop::sample::select(&SPECIALS[..]).prop_map(str::to_owned), "\\PC{0,4}"], 0..8)
    ) {
        let tokenizer = vocabulary::tokenizer();
        let text = parts.concat();
        let ids = tokenizer.encode_text(&text).unwrap();
        prop_assert!(ids.iter().all(|id| !tokenizer.is_special(*id)));
        prop_assert_eq!(tokenizer.decode(&ids, false), text);
    }
}
