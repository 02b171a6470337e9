//! The tiny golden target with a byte-level tokenizer made here, as a model folder that the program can open.

use std::path::{Path, PathBuf};

use serde_json::{Map, json};

/// The character that stands for a byte in byte-level BPE vocabularies.
fn byte_character(byte: u8) -> char {
    let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    if printable(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|&b| !printable(b)).count() as u32;
    char::from_u32(256 + before).unwrap()
}

/// A copy of the golden target with tokenizer and chat template.
pub(crate) fn model_folder(root: &Path) -> PathBuf {
    let folder = root.join("model");
    fs_err::create_dir_all(&folder).unwrap();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/golden/target");
    for name in ["config.json", "generation_config.json", "model.safetensors"] {
        fs_err::copy(golden.join(name), folder.join(name)).unwrap();
    }
    let specials = ["<pad>", "<|im_start|>", "<|im_end|>", "<unused3>", "<unused4>", "<unused5>", "<mask>"];
    let mut vocab = Map::new();
    let mut added = Vec::new();
    for (id, text) in specials.iter().enumerate() {
        vocab.insert((*text).into(), json!(id));
        added.push(json!({
            "id": id, "content": text, "special": true, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false,
        }));
    }
    for byte in 0..=255u8 {
        vocab.insert(byte_character(byte).into(), json!(specials.len() + usize::from(byte)));
    }
    let level = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true });
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": level.clone(), "post_processor": null, "decoder": level,
        "model": { "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": [] },
    });
    fs_err::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
                    {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
    let config = json!({ "chat_template": template, "eos_token": "<|im_end|>", "bos_token": null });
    fs_err::write(folder.join("tokenizer_config.json"), config.to_string()).unwrap();
    folder
}
