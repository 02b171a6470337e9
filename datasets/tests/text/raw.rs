//! Texts that are continued as they stand: what they begin with, and how many tokens they have at least.

use deepspec_datasets::chat_template::ChatTemplate;
use deepspec_datasets::conversation::{Message, Role};
use deepspec_datasets::renderer::Renderer;
use deepspec_datasets::tokenizer::{GgufVocabulary, Tokenizer};
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::vocabulary::{self, SPECIALS};

const BOS: &str = "<|begin_of_text|>";

/// The vocabulary of these tests as a `tokenizer.json`.
fn file() -> Value {
    let lists = vocabulary::lists();
    let vocab: serde_json::Map<String, Value> =
        lists.tokens.iter().enumerate().map(|(id, token)| (token.clone(), id.into())).collect();
    let is_added = |(id, _): &(usize, &String)| lists.token_types[*id] != 1;
    let added = lists.tokens.iter().enumerate().filter(is_added).map(|(id, token)| {
        json!({"id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
            "special": lists.token_types[id] == 3})
    });
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added.collect::<Vec<_>>(),
        "normalizer": null, "pre_tokenizer": byte_level, "post_processor": byte_level, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocab, "merges": lists.merges},
    })
}

fn load(file: &Value) -> Tokenizer {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    fs_err::write(&path, file.to_string()).unwrap();
    Tokenizer::from_file(&path).unwrap()
}

fn id(token: &str) -> u32 {
    vocabulary::tokenizer().id_of(token).unwrap()
}

/// As Llama 3 has it: the bytes first, then the template.
fn llama_processor(single: &Value) -> Value {
    json!({"type": "Sequence", "processors": [
        {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": false, "use_regex": true},
        {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": {
            BOS: {"id": BOS, "ids": [id(BOS)], "tokens": [BOS]},
            "<|eot_id|>": {"id": "<|eot_id|>", "ids": [id("<|eot_id|>")], "tokens": ["<|eot_id|>"]},
        }},
    ]})
}

#[test]
fn a_raw_text_begins_with_what_the_post_processor_puts_before_it() {
    let bos = json!({"SpecialToken": {"id": BOS, "type_id": 0}});
    let eot = json!({"SpecialToken": {"id": "<|eot_id|>", "type_id": 0}});
    let text = json!({"Sequence": {"id": "A", "type_id": 0}});
    let with = |processor: Value| {
        let mut file = file();
        file["post_processor"] = processor;
        load(&file)
    };
    let plain = vocabulary::tokenizer().encode_text("hello the user").unwrap();
    let begun: Vec<u32> = [id(BOS)].into_iter().chain(plain.iter().copied()).collect();
    for processor in [
        llama_processor(&json!([bos, text])),
        // The end is left out: the text goes on.
        llama_processor(&json!([bos, text, eot])),
        json!({"type": "RobertaProcessing", "sep": ["<|eot_id|>", id("<|eot_id|>")], "cls": [BOS, id(BOS)],
            "trim_offsets": false, "add_prefix_space": false}),
    ] {
        let tokenizer = with(processor);
        assert_eq!(tokenizer.text_start(), [id(BOS)]);
        assert_eq!(tokenizer.encode_raw("hello the user").unwrap(), begun);
        assert_eq!(tokenizer.encode_raw("").unwrap(), [id(BOS)]);
        // Whoever writes it gets it once.
        assert_eq!(tokenizer.encode_raw(&format!("{BOS}hello the user")).unwrap(), begun);
        // Nothing else begins with it.
        assert_eq!(tokenizer.encode_text("hello the user").unwrap(), plain);
        assert_eq!(tokenizer.encode_with_specials("hello the user").unwrap(), plain);
        assert_eq!(tokenizer.hash(), vocabulary::tokenizer().hash(), "the vocabulary is the same");
    }
    for processor in [llama_processor(&json!([text, eot])), file()["post_processor"].clone(), Value::Null] {
        let tokenizer = with(processor);
        assert!(tokenizer.text_start().is_empty());
        assert_eq!(tokenizer.encode_raw("hello the user").unwrap(), plain);
    }
}

#[test]
fn a_stated_beginning_counts_before_the_post_processor() {
    let mut file = file();
    file["post_processor"] = llama_processor(&json!([
        {"SpecialToken": {"id": BOS, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]));
    let tokenizer = load(&file);
    assert_eq!(tokenizer.clone().with_text_start(&[]).encode_raw("hello").unwrap(), [id("hello")]);
    assert_eq!(tokenizer.with_text_start(&[id("<bos>")]).encode_raw("hello").unwrap(), [id("<bos>"), id("hello")]);
}

#[test]
fn a_chat_gets_the_beginning_once_from_its_template() {
    let template = "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>{{ m.content }}<|eot_id|>\
        {% endfor %}";
    let template = ChatTemplate::new(template, BOS, "<|eot_id|>").unwrap();
    let tokenizer = vocabulary::tokenizer().with_text_start(&[id(BOS)]);
    let renderer = Renderer::new(template, tokenizer, &[]).unwrap();
    let ids = renderer.render_prompt(&[Message::new(Role::User, "hello")], None).unwrap();
    assert_eq!((ids[0], ids.iter().filter(|&&token| token == id(BOS)).count()), (id(BOS), 1));
}

#[test]
fn a_long_text_has_many_tokens_whatever_they_are() {
    let longest = SPECIALS.iter().map(|token| token.len()).max().unwrap();
    for (pre, shrinks) in [("smollm", 1), ("gpt-2", 1), ("llama-bpe", 1), ("qwen2", 3)] {
        let lists = GgufVocabulary { pre: pre.to_owned(), ..vocabulary::lists() };
        let tokenizer = Tokenizer::from_gguf_parts(lists).unwrap();
        assert_eq!(tokenizer.fewest_tokens(&"a".repeat(1 << 20)), (1_usize << 20).div_ceil(shrinks * longest), "{pre}");
        assert_eq!(tokenizer.fewest_tokens(""), 0);
    }
}

#[test]
fn tokenizers_that_may_drop_text_give_no_bound() {
    let text = "a".repeat(1 << 16);
    let bound = |change: &dyn Fn(&mut Value)| {
        let mut file = file();
        change(&mut file);
        load(&file).fewest_tokens(&text)
    };
    assert!(bound(&|_| {}) > 1000);
    assert!(bound(&|file| file["normalizer"] = json!({"type": "NFC"})) > 1000);
    let replace = |content: &str| json!({"type": "Replace", "pattern": {"String": "ab"}, "content": content});
    assert!(bound(&|file| file["normalizer"] = json!({"type": "Sequence", "normalizers": [replace("xyz")]})) > 1000);
    assert_eq!(bound(&|file| file["normalizer"] = replace("x")), 0);
    assert_eq!(
        bound(&|file| file["normalizer"] = json!({"type": "Strip", "strip_left": true, "strip_right": true})),
        0
    );
    let removes = json!({"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": false});
    let byte_level = file()["pre_tokenizer"].clone();
    let both = json!({"type": "Sequence", "pretokenizers": [removes, byte_level]});
    assert_eq!(bound(&|file| file["pre_tokenizer"] = both.clone()), 0);
    // `<think>`, which is no special token, swallows white space.
    let swallow = |file: &mut Value| {
        let tokens = file["added_tokens"].as_array_mut().unwrap();
        tokens.iter_mut().find(|token| token["content"] == "<think>").unwrap()["rstrip"] = json!(true);
    };
    assert_eq!(bound(&swallow), 0);
}

#[test]
fn white_space_that_a_special_token_swallows_is_not_counted() {
    let mut file = file();
    file["added_tokens"][0]["lstrip"] = json!(true);
    let tokenizer = load(&file);
    let text = format!("a{}<|endoftext|>", " ".repeat(5000));
    assert_eq!(tokenizer.encode_with_specials(&text).unwrap().len(), 2);
    assert!(tokenizer.fewest_tokens(&text) <= 2);
    assert!(tokenizer.fewest_tokens(&format!("{}<|endoftext|>", "a".repeat(5000))) > 100);
}

proptest! {
    #[test]
    fn no_text_has_fewer_tokens_than_the_bound(
        parts in prop::collection::vec(
            prop_oneof![
                prop::sample::select(&SPECIALS[..]).prop_map(str::to_owned),
                // Composed to a third of their bytes.
                Just("\u{1112}\u{1161}\u{11ab}".repeat(20)),
                Just("\u{3b1}\u{313}\u{300}\u{345}".repeat(20)),
                Just("hello the user".repeat(9)),
                "\\PC{0,20}",
            ],
            0..8,
        ),
        pre in prop::sample::select(&["smollm", "gpt-2", "qwen2", "llama-bpe"][..]),
    ) {
        let lists = GgufVocabulary { pre: pre.to_owned(), ..vocabulary::lists() };
        let tokenizer = Tokenizer::from_gguf_parts(lists).unwrap();
        let text = parts.concat();
        prop_assert!(tokenizer.fewest_tokens(&text) <= tokenizer.encode_with_specials(&text).unwrap().len());
    }
}
