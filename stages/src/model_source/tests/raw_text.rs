//! What raw texts begin with, by the files of a model.

use std::path::Path;

use deepspec_datasets::conversation::{Message, Role};
use serde_json::{Value, json};

use super::{TEMPLATE, tiny_folder};
use crate::model_source::{ResolvedModel, load_text_side};

/// The ids of "hi" as a raw text, and of a chat.
fn raw_and_chat(model: &ResolvedModel) -> (Vec<u32>, Vec<u32>) {
    let side = load_text_side(model).unwrap();
    let chat = side.renderer.render_prompt(&[Message::new(Role::User, "hi")], None).unwrap();
    (side.tokenizer().encode_raw("hi").unwrap(), chat)
}

#[test]
fn a_raw_text_begins_as_the_files_of_the_model_say() {
    let processor = json!({"type": "TemplateProcessing", "pair": [],
        "single": [{"SpecialToken": {"id": "<start>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "special_tokens": {"<start>": {"id": "<start>", "ids": [257], "tokens": ["<start>"]}}});
    let (h, i) = (u32::from(b'h'), u32::from(b'i'));
    for (has_processor, stated, expected) in [
        (false, None, vec![h, i]),
        (true, None, vec![257, h, i]),
        (false, Some(true), vec![257, h, i]),
        (false, Some(false), vec![h, i]),
        (true, Some(false), vec![h, i]),
        (true, Some(true), vec![257, h, i]),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let mut settings = json!({ "chat_template": TEMPLATE, "bos_token": "<start>", "eos_token": "<end>" });
        if let Some(stated) = stated {
            settings["add_bos_token"] = json!(stated);
        }
        let model = tiny_folder(folder.path(), &settings);
        if has_processor {
            let path = folder.path().join("tokenizer.json");
            let mut file: Value = serde_json::from_slice(&fs_err::read(&path).unwrap()).unwrap();
            file["post_processor"] = processor.clone();
            fs_err::write(&path, file.to_string()).unwrap();
        }
        let (raw, chat) = raw_and_chat(&model);
        assert_eq!(raw, expected, "post-processor {has_processor}, `add_bos_token` {stated:?}");
        // The template writes it, once.
        assert_eq!(chat.iter().filter(|&&token| token == 257).count(), 1, "{chat:?}");
    }
}

#[test]
fn a_beginning_that_is_no_token_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let settings =
        json!({ "chat_template": TEMPLATE, "bos_token": "<none>", "eos_token": "<end>", "add_bos_token": true });
    let model = tiny_folder(folder.path(), &settings);
    let path = folder.path().join("config.json");
    let text = fs_err::read_to_string(&path).unwrap().replace("\"bos_token_id\":257,", "");
    fs_err::write(&path, text).unwrap();
    let error = load_text_side(&model).unwrap_err();
    assert!(error.to_string().contains("`add_bos_token` is true, but `bos_token` names no token"), "{error}");
    assert!(error.hint().is_some());
}

/// A GGUF file: the configuration of a small Llama model and a vocabulary of bytes and two control tokens.
fn tiny_gguf(folder: &Path, pre: &str, add_bos: Option<bool>, bos: Option<u32>) -> ResolvedModel {
    let mut entries: Vec<Vec<u8>> = Vec::new();
    let text = |text: &str| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
    let mut entry = |key: &str, kind: u32, value: &[u8]| {
        entries.push([&text(key)[..], &kind.to_le_bytes(), value].concat());
    };
    entry("general.architecture", 8, &text("llama"));
    for (key, value) in [
        ("block_count", 2_u32),
        ("embedding_length", 8),
        ("feed_forward_length", 16),
        ("attention.head_count", 2),
        ("attention.head_count_kv", 2),
        ("context_length", 64),
    ] {
        entry(&format!("llama.{key}"), 4, &value.to_le_bytes());
    }
    for (key, value) in [("attention.layer_norm_rms_epsilon", 1e-5_f32), ("rope.freq_base", 1e4)] {
        entry(&format!("llama.{key}"), 6, &value.to_le_bytes());
    }
    let printable: Vec<u32> = (0x21..=0x7e).chain(0xa1..=0xac).chain(0xae..=0xff).collect();
    let mut free = 0x100..;
    let character = |byte: u32| if printable.contains(&byte) { byte } else { free.next().unwrap() };
    let mut tokens: Vec<String> = (0..=255).map(character).map(|c| char::from_u32(c).unwrap().to_string()).collect();
    tokens.extend(["<start>".to_owned(), "<end>".to_owned()]);
    let kinds: Vec<u8> = (0..258).flat_map(|id: i32| (if id < 256 { 1_i32 } else { 3 }).to_le_bytes()).collect();
    let list = |kind: u32, count: usize, values: &[u8]| {
        [&kind.to_le_bytes()[..], &(count as u64).to_le_bytes(), values].concat()
    };
    entry("tokenizer.ggml.model", 8, &text("gpt2"));
    entry("tokenizer.ggml.pre", 8, &text(pre));
    let spelled: Vec<u8> = tokens.iter().flat_map(|token| text(token)).collect();
    entry("tokenizer.ggml.tokens", 9, &list(8, tokens.len(), &spelled));
    entry("tokenizer.ggml.token_type", 9, &list(5, tokens.len(), &kinds));
    entry("tokenizer.ggml.merges", 9, &list(8, 0, &[]));
    entry("tokenizer.ggml.eos_token_id", 4, &257_u32.to_le_bytes());
    entry("tokenizer.chat_template", 8, &text(TEMPLATE));
    if let Some(bos) = bos {
        entry("tokenizer.ggml.bos_token_id", 4, &bos.to_le_bytes());
    }
    if let Some(add_bos) = add_bos {
        entry("tokenizer.ggml.add_bos_token", 7, &[u8::from(add_bos)]);
    }
    let head =
        [&b"GGUF"[..], &3_u32.to_le_bytes(), &1_u64.to_le_bytes(), &(entries.len() as u64).to_le_bytes()].concat();
    // Its rows tell the size of the vocabulary: two dimensions, in f32, at the start of the data.
    let mut tensor = text("token_embd.weight");
    tensor.extend(2_u32.to_le_bytes());
    tensor.extend([8_u64, 258].iter().flat_map(|dim| dim.to_le_bytes()));
    tensor.extend([&0_u32.to_le_bytes()[..], &0_u64.to_le_bytes()].concat());
    let mut file = [head, entries.concat(), tensor].concat();
    file.resize(file.len().next_multiple_of(32) + 258 * 8 * 4, 0);
    let path = folder.join("tiny.gguf");
    fs_err::write(&path, file).unwrap();
    ResolvedModel { path, name: "tiny".into() }
}

#[test]
fn a_raw_text_begins_as_the_metadata_of_a_gguf_file_say() {
    let (h, i) = (u32::from(b'h'), u32::from(b'i'));
    for (pre, add_bos, bos, expected) in [
        ("llama-bpe", Some(true), Some(256), vec![256, h, i]),
        ("llama-bpe", Some(false), Some(256), vec![h, i]),
        // Files of before that key.
        ("llama-bpe", None, Some(256), vec![256, h, i]),
        ("llama-bpe", None, None, vec![h, i]),
        ("smollm", None, Some(256), vec![h, i]),
        ("qwen2", Some(false), None, vec![h, i]),
        ("gpt-2", Some(true), Some(256), vec![256, h, i]),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let model = tiny_gguf(folder.path(), pre, add_bos, bos);
        let (raw, chat) = raw_and_chat(&model);
        assert_eq!(raw, expected, "{pre}, {add_bos:?}");
        assert!(chat.iter().filter(|&&token| token == 256).count() <= 1, "{chat:?}");
    }
    let folder = tempfile::tempdir().unwrap();
    let error = load_text_side(&tiny_gguf(folder.path(), "gpt-2", Some(true), None)).unwrap_err().to_string();
    assert!(error.contains("`tokenizer.ggml.bos_token_id` names no token"), "{error}");
}
