//! Checkpoint formats: round trips through each of them, the exact keys and names that others look for, and strict reading.
#![expect(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    reason = "tests read the environment to find golden data and fail as tests do"
)]

mod checkpoints;

use std::path::Path;

use candle_core::{DType, Device};
use checkpoints::{Drafter, Stored, deepspec, read_json, stored, target, write_stored};
use deepspec_models::config::DraftConfig;
use deepspec_models::draft::{DSpark, DraftVocabulary, ParameterSource};
use deepspec_models::error::Error;
use deepspec_models::formats::{Canonical, Format, LayerIds, Lender, PROFILE_FILE, Verifier, detect};
use deepspec_models::linear::Precision;
use serde_json::{Value, json};
use tempfile::TempDir;

const CPU: Device = Device::Cpu;

fn open(dir: &Path, lender: Option<&Lender>) -> Result<Canonical, Error> {
    Canonical::open(dir, lender, DType::F32, &CPU)
}

fn verifier() -> Verifier {
    Verifier { name: Some("org/target".into()), architecture: Some("Qwen3ForCausalLM".into()) }
}

/// Names, types, shapes and values of all tensors.
fn content(canonical: &Canonical) -> Vec<(String, String, Vec<usize>, Vec<f32>)> {
    let weights = &canonical.weights;
    let entry = |name: &str| {
        let shape = weights.shape(name).unwrap().to_vec();
        let kind = weights.stored_type(name).unwrap();
        let values = match kind.as_str() {
            "F32" | "F16" | "BF16" => weights.get(name, &shape).unwrap().flatten_all().unwrap().to_vec1().unwrap(),
            _ => weights.integers(name, &shape).unwrap().into_iter().map(|n| n as f32).collect(),
        };
        (name.to_owned(), kind, shape, values)
    };
    weights.names().map(entry).collect()
}

/// Which drafters each format can hold.
fn holdings() -> Vec<(Format, Drafter)> {
    let mut all: Vec<(Format, Drafter)> = Drafter::ALL.iter().map(|drafter| (Format::Deepspec, *drafter)).collect();
    let heads = [Drafter::DSpark, Drafter::DSparkGated, Drafter::DSparkRnn];
    for (format, others, holds_heads) in [
        (Format::Zlab, &[Drafter::OnePlusN][..], false),
        (
            Format::Speculators,
            &[Drafter::DSparkSmall, Drafter::AnchorFirst, Drafter::OnePlusN, Drafter::Eagle3, Drafter::Eagle3Small],
            true,
        ),
        (Format::Sglang, &[Drafter::Eagle3Small], true),
        (Format::Specforge, &[Drafter::DSparkSmall, Drafter::AnchorFirst, Drafter::Eagle3Small], true),
    ] {
        let heads = heads.into_iter().filter(|_| holds_heads);
        all.extend(others.iter().copied().chain(heads).map(|drafter| (format, drafter)));
    }
    all
}

#[test]
fn every_format_gives_back_what_it_was_given() {
    let folder = TempDir::new().unwrap();
    let lender = Lender::open(target(folder.path())).unwrap();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for (format, drafter) in holdings() {
            let (own, theirs) = (folder.path().join("own"), folder.path().join("theirs"));
            deepspec(&own, drafter, dtype);
            let before = open(&own, None).unwrap();
            before.write(format, &theirs, &verifier(), None).unwrap();
            let after = open(&theirs, Some(&lender)).unwrap();
            // SGLang reads Eagle3 in SpecForge's layout.
            let layout =
                if (format, drafter) == (Format::Sglang, Drafter::Eagle3Small) { Format::Specforge } else { format };
            assert_eq!(after.format, layout, "{drafter:?}");
            assert_eq!(after.config, before.config, "{format:?} {drafter:?}");
            let borrowed = ["embed_tokens.weight", "lm_head.weight"];
            for (before, after) in content(&before).iter().zip(&content(&after)) {
                // The tests' target is stored as f32 and lends its own type.
                let is_borrowed = borrowed.contains(&before.0.as_str()) && before.1 != after.1;
                assert_eq!(before.0, after.0, "{format:?} {drafter:?}");
                assert!(is_borrowed || before == after, "{format:?} {drafter:?} {}", before.0);
            }
            assert_eq!(content(&before).len(), content(&after).len(), "{format:?} {drafter:?}");
        }
    }
}

/// The reference's own checkpoints through every format that can hold them.
#[test]
fn golden_checkpoints_come_back_from_every_format() {
    let root = std::env::var("DEEPSPEC_GOLDEN").map_or_else(|_| "tests/golden".into(), std::path::PathBuf::from);
    let folder = TempDir::new().unwrap();
    let heads = [Format::Deepspec, Format::Speculators, Format::Sglang, Format::Specforge];
    let plain = [Format::Deepspec, Format::Speculators, Format::Specforge];
    for (name, formats) in [
        ("dspark_vanilla", &heads[..]),
        ("dspark_gated", &heads),
        ("dspark_rnn", &heads),
        ("dspark_vanilla_noconf", &heads),
        ("dflash", &plain),
        ("eagle3", &plain[..2]),
    ] {
        let path = root.join(name);
        if !path.is_dir() {
            println!("skipped: no golden set `{name}`");
            continue;
        }
        let before = open(&path, None).unwrap();
        assert_eq!(before.format, Format::Deepspec);
        for &format in formats {
            before.write(format, folder.path().join("theirs"), &verifier(), None).unwrap();
            let after = open(&folder.path().join("theirs"), None).unwrap();
            assert_eq!(after.config, before.config, "{format:?} {name}");
            let stored = |(tensor, ..): &(String, String, Vec<usize>, Vec<f32>)| after.weights.contains(tensor);
            let kept: Vec<_> = content(&before).into_iter().filter(stored).collect();
            assert_eq!(kept, content(&after), "{format:?} {name}");
            assert!(kept.len() + 2 >= content(&before).len(), "{format:?} {name}");
        }
    }
}

#[test]
fn types_survive_a_conversion() {
    let folder = TempDir::new().unwrap();
    for (dtype, name) in [(DType::F32, "F32"), (DType::F16, "F16"), (DType::BF16, "BF16")] {
        for (format, drafter) in holdings() {
            let (own, theirs) = (folder.path().join("own"), folder.path().join("theirs"));
            deepspec(&own, drafter, dtype);
            open(&own, None).unwrap().write(format, &theirs, &verifier(), None).unwrap();
            for (tensor, stored) in stored(&theirs) {
                let expected = if tensor == "d2t" {
                    "I64"
                } else if tensor == "t2d" {
                    "BOOL"
                } else {
                    name
                };
                assert_eq!(format!("{:?}", stored.dtype), expected, "{tensor}");
            }
        }
    }
}

/// Heads in each type load and compute; a type that is not read is named.
#[test]
fn heads_load_in_every_float_type() {
    let folder = TempDir::new().unwrap();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        deepspec(folder.path(), Drafter::DSparkSmall, dtype);
        let canonical = open(folder.path(), None).unwrap();
        let config = DraftConfig::from_json(Path::new("config.json"), &canonical.config).unwrap();
        let embed = canonical.weights.get("embed_tokens.weight", &[23, 16]).unwrap();
        let drafter = DSpark::new(config, embed, ParameterSource::Frozen(&canonical.weights, Precision::F32)).unwrap();
        assert!(
            drafter.markov_head().is_some() && drafter.confidence_head().is_some() && drafter.vocabulary().is_some()
        );
    }
}

/// Each stored tensor of each format in turn is dropped, renamed, retyped and reshaped.
#[test]
fn each_faulty_tensor_is_named() {
    let folder = TempDir::new().unwrap();
    for (format, drafter) in holdings() {
        let (own, theirs, bad) = (folder.path().join("own"), folder.path().join("theirs"), folder.path().join("bad"));
        deepspec(&own, drafter, DType::F32);
        open(&own, None).unwrap().write(format, &theirs, &verifier(), None).unwrap();
        let (config, tensors) = (read_json(&theirs.join("config.json")), stored(&theirs));
        let refused = |tensors: &Stored, name: &str, what: &str| {
            write_stored(&bad, &config, tensors);
            let message = open(&bad, None).map(|_| ()).unwrap_err().to_string();
            assert!(message.contains(&format!("`{name}`")), "{format:?} {drafter:?}: {what} {name}: {message}");
        };
        for (at, (name, tensor)) in tensors.iter().enumerate() {
            let is_optional = name == "t2d" || ["embed_tokens.weight", "lm_head.weight"].contains(&name.as_str());
            let needs_head = drafter.is_small() && name == "lm_head.weight";
            let mut dropped = tensors.clone();
            dropped.remove(at);
            if !is_optional || needs_head {
                refused(&dropped, name, "without");
            }
            let mut renamed = tensors.clone();
            renamed[at].0 = format!("{name}.old");
            refused(
                &renamed,
                &if is_optional && !needs_head { format!("{name}.old") } else { name.clone() },
                "renamed",
            );
            let mut reshaped = tensors.clone();
            reshaped[at].1.shape.push(1);
            refused(&reshaped, name, "reshaped");
            let mut retyped = tensors.clone();
            retyped[at].1.dtype =
                if name == "d2t" || name == "t2d" { safetensors::Dtype::F32 } else { safetensors::Dtype::I32 };
            retyped[at].1.data = vec![0; 4 * tensor.shape.iter().product::<usize>()];
            refused(&retyped, name, "retyped");
        }
        let mut more = tensors.clone();
        more.push(("mask_embedding".into(), tensors[0].1.clone()));
        refused(&more, "mask_embedding", "with");
    }
}

#[test]
fn a_fused_qkv_projection_is_split() {
    let folder = TempDir::new().unwrap();
    let (own, theirs) = (folder.path().join("own"), folder.path().join("theirs"));
    deepspec(&own, Drafter::OnePlusN, DType::BF16);
    let lender = Lender::open(target(folder.path())).unwrap();
    let before = open(&own, None).unwrap();
    before.write(Format::Zlab, &theirs, &verifier(), None).unwrap();
    let separate = content(&open(&theirs, Some(&lender)).unwrap());
    let (config, mut tensors) = (read_json(&theirs.join("config.json")), stored(&theirs));
    for layer in 0..2 {
        let of = |part: &str| format!("layers.{layer}.self_attn.{part}.weight");
        let parts: Vec<_> = ["q_proj", "k_proj", "v_proj"]
            .iter()
            .map(|part| tensors.remove(tensors.iter().position(|(name, _)| *name == of(part)).unwrap()).1)
            .collect();
        let mut fused = parts[0].clone();
        fused.shape[0] = parts.iter().map(|part| part.shape[0]).sum();
        fused.data = parts.iter().flat_map(|part| part.data.clone()).collect();
        tensors.push((of("qkv_proj"), fused));
    }
    write_stored(&theirs, &config, &tensors);
    assert_eq!(content(&open(&theirs, Some(&lender)).unwrap()), separate);
    tensors.last_mut().unwrap().1.shape[0] -= 1;
    let row = tensors.last().unwrap().1.data.len() - 32;
    tensors.last_mut().unwrap().1.data.truncate(row);
    write_stored(&theirs, &config, &tensors);
    let message = open(&theirs, Some(&lender)).unwrap_err().to_string();
    assert!(message.contains("layers.1.self_attn.qkv_proj.weight") && message.contains("[31, 16]"), "{message}");
}

#[test]
fn what_a_checkpoint_leaves_to_the_target_is_borrowed_from_it() {
    let folder = TempDir::new().unwrap();
    let (own, theirs) = (folder.path().join("own"), folder.path().join("theirs"));
    deepspec(&own, Drafter::OnePlusN, DType::F32);
    open(&own, None).unwrap().write(Format::Zlab, &theirs, &verifier(), None).unwrap();
    assert!(!stored(&theirs).iter().any(|(name, _)| name.contains("embed") || name.contains("head")));
    let alone = open(&theirs, None).unwrap();
    assert!(!alone.weights.contains("embed_tokens.weight") && !alone.weights.contains("lm_head.weight"));
    let error = alone.write(Format::Deepspec, folder.path().join("x"), &verifier(), None).unwrap_err();
    assert!(matches!(error, Error::NotStored { tensor: "embed_tokens.weight", .. }), "{error}");

    let lender = Lender::open(target(folder.path())).unwrap();
    let whole = open(&theirs, Some(&lender)).unwrap();
    whole.write(Format::Deepspec, folder.path().join("whole"), &verifier(), None).unwrap();
    assert_eq!(content(&open(&folder.path().join("whole"), None).unwrap()), content(&whole));
    let of_target = checkpoints::target_embedding();
    assert_eq!(whole.weights.get("embed_tokens.weight", &[23, 16]).unwrap().to_vec2::<f32>().unwrap(), of_target);
    // The target of these tests is tied.
    assert_eq!(whole.weights.get("lm_head.weight", &[23, 16]).unwrap().to_vec2::<f32>().unwrap(), of_target);
}

// ---- names ----

fn keys(value: &Value) -> Vec<&str> {
    value.as_object().unwrap().keys().map(String::as_str).collect()
}

fn written(drafter: Drafter, format: Format) -> (Value, Vec<String>) {
    let folder = TempDir::new().unwrap();
    let (own, theirs) = (folder.path().join("own"), folder.path().join("theirs"));
    deepspec(&own, drafter, DType::BF16);
    open(&own, None).unwrap().write(format, &theirs, &verifier(), Some(&json!({ "k": 4 }))).unwrap();
    assert_eq!(read_json(&theirs.join(PROFILE_FILE)), json!({ "k": 4 }));
    (read_json(&theirs.join("config.json")), stored(&theirs).into_iter().map(|(name, _)| name).collect())
}

const BODY: [&str; 11] = [
    "input_layernorm.weight",
    "mlp.down_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "post_attention_layernorm.weight",
    "self_attn.k_norm.weight",
    "self_attn.k_proj.weight",
    "self_attn.o_proj.weight",
    "self_attn.q_norm.weight",
    "self_attn.q_proj.weight",
    "self_attn.v_proj.weight",
];

fn sorted(names: impl IntoIterator<Item = String>) -> Vec<String> {
    let mut names: Vec<String> = names.into_iter().collect();
    names.sort();
    names
}

fn layers(prefixes: &[&str], others: &[&str]) -> Vec<String> {
    let layers = prefixes.iter().flat_map(|prefix| BODY.iter().map(move |name| format!("{prefix}{name}")));
    sorted(layers.chain(others.iter().map(|name| (*name).to_owned())))
}

#[test]
fn deepspec_has_the_references_names_and_the_flag() {
    let (config, names) = written(Drafter::DSpark, Format::Deepspec);
    assert_eq!(config["architectures"], json!(["Qwen3DSparkModel"]));
    assert_eq!((&config["sample_from_anchor"], &config["block_size"]), (&json!(true), &json!(4)));
    assert_eq!(config["target_layer_ids"], json!([-1, 0, 2]));
    let others = [
        "confidence_head.proj.bias",
        "confidence_head.proj.weight",
        "embed_tokens.weight",
        "fc.weight",
        "hidden_norm.weight",
        "lm_head.weight",
        "markov_head.markov_w1.weight",
        "markov_head.markov_w2.weight",
        "norm.weight",
    ];
    assert_eq!(sorted(names), layers(&["layers.0.", "layers.1."], &others));
    let (config, names) = written(Drafter::Eagle3, Format::Deepspec);
    assert_eq!(config["architectures"], json!(["Qwen3Eagle3Model"]));
    let others = ["embed_tokens.weight", "fc.weight", "layers.0.hidden_norm.weight", "lm_head.weight", "norm.weight"];
    assert_eq!(sorted(names), layers(&["layers.0."], &others));
}

#[test]
fn zlab_has_no_embedding_and_its_own_keys() {
    let (config, names) = written(Drafter::OnePlusN, Format::Zlab);
    assert_eq!(config["architectures"], json!(["DFlashDraftModel"]));
    assert_eq!(config["auto_map"], json!({ "AutoModel": "dflash.DFlashDraftModel" }));
    assert_eq!(config["dflash_config"], json!({ "mask_token_id": 6, "target_layer_ids": [-1, 0, 2] }));
    assert_eq!((&config["block_size"], &config["num_target_layers"]), (&json!(4), &json!(6)));
    assert_eq!((&config["sample_from_anchor"], &config["model_type"]), (&json!(false), &json!("qwen3")));
    assert_eq!(sorted(names), layers(&["layers.0.", "layers.1."], &["fc.weight", "hidden_norm.weight", "norm.weight"]));
}

#[test]
fn speculators_has_the_keys_that_vllm_reads() {
    let (config, names) = written(Drafter::DSparkSmall, Format::Speculators);
    let expected = [
        "architectures",
        "auto_map",
        "aux_hidden_state_layer_ids",
        "block_size",
        "confidence_head_with_markov",
        "draft_vocab_size",
        "enable_confidence_head",
        "markov_head_type",
        "markov_rank",
        "mask_token_id",
        "sample_from_anchor",
        "sliding_window_non_causal",
        "speculators_config",
        "speculators_model_type",
        "speculators_version",
        "target_hidden_size",
        "tie_word_embeddings",
        "transformer_layer_config",
    ];
    assert_eq!(sorted(keys(&config).into_iter().map(Into::into)), expected);
    assert_eq!(config["architectures"], json!(["DSparkSpeculator"]));
    assert_eq!(config["auto_map"], json!({ "": "config.DSparkSpeculatorConfig" }));
    assert_eq!(config["aux_hidden_state_layer_ids"], json!([0, 1, 3]));
    assert_eq!((&config["sample_from_anchor"], &config["draft_vocab_size"]), (&json!(true), &json!(5)));
    assert_eq!((&config["mask_token_id"], &config["target_hidden_size"]), (&json!(6), &Value::Null));
    let proposals = json!([{ "proposal_type": "greedy", "speculative_tokens": 4, "verifier_accept_k": 1, "accept_tolerance": 0.0 }]);
    assert_eq!(config["speculators_config"]["algorithm"], json!("dspark"));
    assert_eq!(config["speculators_config"]["default_proposal_method"], json!("greedy"));
    assert_eq!(config["speculators_config"]["proposal_methods"], proposals);
    let target = json!({ "name_or_path": "org/target", "architectures": ["Qwen3ForCausalLM"] });
    assert_eq!(config["speculators_config"]["verifier"], target);
    assert_eq!(config["transformer_layer_config"]["model_type"], json!("qwen3"));
    assert!(["d2t", "t2d", "lm_head.weight"].iter().all(|name| names.iter().any(|written| written == name)));

    let (config, _) = written(Drafter::OnePlusN, Format::Speculators);
    assert_eq!(config["speculators_model_type"], json!("dflash"));
    assert_eq!(config["speculators_config"]["proposal_methods"][0]["speculative_tokens"], json!(3));
    assert_eq!(config["sample_from_anchor"], json!(false));

    let (config, names) = written(Drafter::Eagle3, Format::Speculators);
    assert_eq!(config["architectures"], json!(["Eagle3Speculator"]));
    assert_eq!(config["eagle_aux_hidden_state_layer_ids"], json!([1, 2, 3, 4, 5]));
    assert_eq!((&config["norm_before_residual"], &config["draft_vocab_size"]), (&json!(false), &json!(23)));
    assert_eq!(config["transformer_layer_config"]["model_type"], json!("qwen3"));
    assert!(names.iter().any(|name| name == "layers.0.hidden_norm.weight"));
    let (config, _) = written(Drafter::Eagle3Small, Format::Speculators);
    assert_eq!(config["transformer_layer_config"]["model_type"], json!("llama"));
}

#[test]
fn sglang_has_flat_keys_and_their_duplicates() {
    let (config, _) = written(Drafter::DSpark, Format::Sglang);
    let dspark = json!({ "markov_rank": 3, "markov_head_type": "vanilla", "mask_token_id": 6 });
    assert_eq!(config["dspark_config"], dspark);
    assert_eq!(config["dflash_config"], json!({ "block_size": 4, "mask_token_id": 6, "target_layer_ids": [-1, 0, 2] }));
    assert_eq!((&config["markov_rank"], &config["block_size"]), (&json!(3), &json!(4)));
    assert_eq!((&config["mask_token_id"], &config["sample_from_anchor"]), (&json!(6), &json!(true)));
}

#[test]
fn specforge_nests_dspark_and_calls_the_eagle_layer_midlayer() {
    let (config, names) = written(Drafter::DSpark, Format::Specforge);
    assert_eq!(config["architectures"], json!(["DSparkDraftModel"]));
    assert_eq!(config["auto_map"], json!({ "AutoModel": "dspark.DSparkDraftModel" }));
    let nested = json!({
        "attention_mode": "gqa", "projector_type": "dspark", "mask_token_id": 6, "target_layer_ids": [-1, 0, 2], "markov_rank": 3,
        "markov_head_type": "vanilla", "enable_confidence_head": true, "confidence_head_with_markov": true,
    });
    assert_eq!(config["dflash_config"], nested);
    assert!(!names.iter().any(|name| name.contains("embed_tokens") || name.contains("lm_head")));
    for format in [Format::Specforge, Format::Sglang] {
        let (config, names) = written(Drafter::Eagle3Small, format);
        assert_eq!(config["architectures"], json!(["LlamaForCausalLMEagle3"]));
        assert_eq!((&config["model_type"], &config["draft_vocab_size"]), (&json!("llama"), &json!(5)));
        assert_eq!(config["eagle_config"]["eagle_aux_hidden_state_layer_ids"], json!([0, 2, 4]));
        let own =
            ["midlayer.hidden_norm.weight", "midlayer.input_layernorm.weight", "midlayer.self_attn.q_proj.weight"];
        let plain = ["fc.weight", "norm.weight", "lm_head.weight", "t2d", "d2t"];
        assert!(own.iter().chain(&plain).all(|name| names.iter().any(|written| written == name)), "{names:?}");
        assert!(!names.iter().any(|name| name.starts_with("layers.")));
    }
}

// ---- conventions ----

/// The embedding, layers and the last layer in each convention and back.
#[test]
fn layer_ids_in_four_conventions() {
    let ours = [-1, 0, 2, 3];
    for (convention, theirs) in [
        (LayerIds::Output, [-1, 0, 2, 3]),
        (LayerIds::HiddenStates, [0, 1, 3, 4]),
        (LayerIds::GgufInput, [0, 1, 3, 4]),
        (LayerIds::Sglang, [-1, 0, 2, 3]),
    ] {
        assert_eq!(convention.write(&ours), theirs);
        assert_eq!(convention.read(Path::new("c"), "ids", &theirs).unwrap(), ours);
        let before = theirs[0] - 1;
        let message = convention.read(Path::new("c"), "ids", &[before]).unwrap_err().to_string();
        assert!(message.contains(&before.to_string()) && message.contains("ids"), "{message}");
        assert!(convention.read(Path::new("c"), "ids", &[1 << 40]).is_err());
    }
}

/// −1 passes through every format, the target's last layer is refused in every one, never clamped.
#[test]
fn the_last_layer_is_refused_in_every_format() {
    let folder = TempDir::new().unwrap();
    for (format, drafter) in holdings() {
        let (own, theirs) = (folder.path().join("own"), folder.path().join("theirs"));
        deepspec(&own, drafter, DType::F32);
        open(&own, None).unwrap().write(format, &theirs, &verifier(), None).unwrap();
        let (mut config, tensors) = (read_json(&theirs.join("config.json")), stored(&theirs));
        let ids = if drafter == Drafter::Eagle3 { vec![-1, 0, 1, 2, 5] } else { vec![-1, 0, 5] };
        let last = json!(format.layer_ids().write(&ids));
        for pointer in [
            "/target_layer_ids",
            "/dflash_config/target_layer_ids",
            "/aux_hidden_state_layer_ids",
            "/eagle_aux_hidden_state_layer_ids",
            "/eagle_config/eagle_aux_hidden_state_layer_ids",
        ] {
            if let Some(ids) = config.pointer_mut(pointer) {
                *ids = last.clone();
            }
        }
        write_stored(&theirs, &config, &tensors);
        let message = open(&theirs, None).unwrap_err().to_string();
        assert!(
            message.contains(&format!("{ids:?}")) && message.contains("last layer is not allowed"),
            "{format:?}: {message}"
        );
    }
}

/// A checkpoint of a format whose config `change` has altered.
fn reopened(format: Format, drafter: Drafter, change: impl FnOnce(&mut Value)) -> Result<Canonical, Error> {
    let folder = TempDir::new().unwrap();
    let (own, theirs) = (folder.path().join("own"), folder.path().join("theirs"));
    deepspec(&own, drafter, DType::F32);
    open(&own, None).unwrap().write(format, &theirs, &verifier(), None).unwrap();
    let (mut config, tensors) = (read_json(&theirs.join("config.json")), stored(&theirs));
    change(&mut config);
    write_stored(&theirs, &config, &tensors);
    open(&theirs, None)
}

fn without(key: &'static str) -> impl Fn(&mut Value) {
    move |config| {
        config.as_object_mut().unwrap().remove(key);
    }
}

/// What each format means without the flag.
#[test]
fn the_block_rule_without_a_flag_is_that_of_the_format() {
    for (format, drafter, expected) in [
        (Format::Deepspec, Drafter::DSpark, true),
        (Format::Deepspec, Drafter::AnchorFirst, true),
        (Format::Zlab, Drafter::OnePlusN, false),
        (Format::Speculators, Drafter::DSpark, true),
        (Format::Speculators, Drafter::OnePlusN, false),
        (Format::Sglang, Drafter::DSpark, true),
        (Format::Specforge, Drafter::DSpark, true),
    ] {
        let canonical = reopened(format, drafter, without("sample_from_anchor")).unwrap();
        assert_eq!(canonical.config["sample_from_anchor"], json!(expected), "{format:?} {drafter:?}");
    }
    let shifted = |value: bool| {
        move |config: &mut Value| {
            without("sample_from_anchor")(config);
            config["dflash_config"]["shift_label"] = json!(value);
        }
    };
    for value in [true, false] {
        let canonical = reopened(Format::Specforge, Drafter::DSpark, shifted(value)).unwrap();
        assert_eq!(canonical.config["sample_from_anchor"], json!(value));
    }
    // An explicit flag wins over the rule.
    let flipped =
        reopened(Format::Zlab, Drafter::OnePlusN, |config| config["sample_from_anchor"] = json!(true)).unwrap();
    assert_eq!(flipped.config["sample_from_anchor"], json!(true));
}

#[test]
fn heads_that_a_config_does_not_tell_follow_from_the_tensors() {
    let keys = [
        "markov_rank",
        "markov_head_type",
        "enable_confidence_head",
        "confidence_head_with_markov",
        "draft_vocab_size",
    ];
    let told = reopened(Format::Speculators, Drafter::DSparkSmall, |_| ()).unwrap();
    let untold =
        reopened(Format::Speculators, Drafter::DSparkSmall, |config| keys.iter().for_each(|key| without(key)(config)));
    assert_eq!(untold.unwrap().config, told.config);
}

#[test]
fn contradictions_and_unknown_variants_are_refused_by_name() {
    type Change = fn(&mut Value);
    let cases: [(Format, Drafter, Change, &str); 16] = [
        (Format::Sglang, Drafter::DSpark, |c| c["dspark_config"]["markov_rank"] = json!(9), "markov_rank"),
        (Format::Sglang, Drafter::DSpark, |c| c["dspark_noise_token_id"] = json!(9), "dspark_noise_token_id"),
        (Format::Zlab, Drafter::OnePlusN, |c| c["dflash_config"]["causal"] = json!(true), "dflash_config.causal"),
        (Format::Zlab, Drafter::OnePlusN, |c| c["dflash_config"]["surprise"] = json!(1), "dflash_config.surprise"),
        (Format::Zlab, Drafter::OnePlusN, |c| c["selector_rank"] = json!(4), "selector_rank"),
        (
            Format::Zlab,
            Drafter::OnePlusN,
            |c| c["dflash_config"] = json!({ "target_layer_ids": [0, 1, 2] }),
            "mask_token_id",
        ),
        (Format::Zlab, Drafter::OnePlusN, |c| c["logit_scale"] = json!(0.5), "logit_scale"),
        (Format::Specforge, Drafter::DSpark, |c| c["dflash_config"]["projector_type"] = json!("domino"), "domino"),
        (Format::Speculators, Drafter::DSpark, |c| c["target_hidden_size"] = json!(99), "target_hidden_size"),
        (Format::Speculators, Drafter::DSpark, |c| c["speculators_model_type"] = json!("peagle"), "peagle"),
        (
            Format::Speculators,
            Drafter::DSpark,
            |c| without("aux_hidden_state_layer_ids")(c),
            "aux_hidden_state_layer_ids",
        ),
        (
            Format::Speculators,
            Drafter::DSpark,
            |c| {
                c["transformer_layer_config"]["layer_types"] = json!(["sliding_attention", "sliding_attention"]);
                c["transformer_layer_config"]["sliding_window"] = json!(8);
            },
            "sliding_window_non_causal",
        ),
        (Format::Speculators, Drafter::Eagle3, |c| c["fc_norm"] = json!(true), "fc_norm"),
        (Format::Speculators, Drafter::Eagle3, |c| c["norm_before_fc"] = json!(true), "norm_before_fc"),
        (Format::Speculators, Drafter::Eagle3, |c| without("norm_before_residual")(c), "norm_before_residual"),
        (
            Format::Specforge,
            Drafter::Eagle3Small,
            |c| c["eagle_aux_hidden_state_layer_ids"] = json!([1, 3, 6]),
            "eagle_aux",
        ),
    ];
    for (format, drafter, change, part) in cases {
        let message = reopened(format, drafter, change).map(|_| ()).unwrap_err().to_string();
        assert!(message.contains(part), "{part}: {message}");
    }
}

#[test]
fn layers_that_a_config_does_not_tell_follow_from_the_format() {
    let mut config = Value::Null;
    let found = reopened(Format::Zlab, Drafter::OnePlusN, |c| {
        c["dflash_config"].as_object_mut().unwrap().remove("target_layer_ids");
        config = c.clone();
    });
    // Two draft layers mean two target layers, for which this checkpoint's `fc` is too wide.
    assert!(found.unwrap_err().to_string().contains("expected [16, 32]"));
    let eagle = |layers: u64| {
        reopened(Format::Specforge, Drafter::Eagle3Small, |c| {
            without("eagle_config")(c);
            c["num_target_layers"] = json!(layers);
        })
    };
    assert_eq!(eagle(28).unwrap().config["target_layer_ids"], json!([1, 13, 24]));
    // Hidden states 2, 3 and 3 of six layers: the rule needs a deeper target.
    assert!(eagle(6).unwrap_err().to_string().contains("[1, 2, 2]"));
    let vllm = reopened(Format::Specforge, Drafter::Eagle3Small, |c| {
        without("eagle_config")(c);
        c["eagle_aux_hidden_state_layer_ids"] = json!([1, 3, 5]);
    });
    assert_eq!(vllm.unwrap().config["target_layer_ids"], json!([0, 2, 4]));
}

#[test]
fn what_a_format_cannot_hold_is_refused_with_the_reason() {
    let folder = TempDir::new().unwrap();
    for (format, drafter, reason) in [
        (Format::Sglang, Drafter::AnchorFirst, "DSPARK refuses rank 0"),
        (Format::Sglang, Drafter::OnePlusN, "write `zlab`"),
        (Format::Sglang, Drafter::DSparkSmall, "draft vocabulary"),
        (Format::Zlab, Drafter::AnchorFirst, "anchor-first"),
        (Format::Zlab, Drafter::DSpark, "Markov"),
        (Format::Zlab, Drafter::Eagle3, "Eagle3"),
        (Format::Specforge, Drafter::OnePlusN, "1+N"),
        (Format::Specforge, Drafter::Eagle3, "query and key norms"),
    ] {
        deepspec(&folder.path().join("own"), drafter, DType::F32);
        let own = open(&folder.path().join("own"), None).unwrap();
        let error = own.write(format, folder.path().join("out"), &verifier(), None).unwrap_err();
        assert!(matches!(error, Error::NotExpressible { .. }) && error.to_string().contains(reason), "{error}");
        assert!(!folder.path().join("out").exists());
    }
    type Change = fn(&mut Value);
    let changes: [(Drafter, Change, &str, &[Format]); 4] = [
        (Drafter::DSpark, |c| c["sample_from_anchor"] = json!(false), "1+N", &[Format::Sglang, Format::Specforge]),
        (
            Drafter::DSpark,
            |c| c["num_experts"] = json!(4),
            "experts",
            &[Format::Sglang, Format::Specforge, Format::Speculators],
        ),
        (
            Drafter::DSpark,
            |c| c["qk_norm"] = json!(false),
            "qk_norm",
            &[Format::Sglang, Format::Specforge, Format::Speculators],
        ),
        (
            Drafter::Eagle3Small,
            |c| c["norm_before_residual"] = json!(true),
            "residual",
            &[Format::Sglang, Format::Specforge],
        ),
    ];
    for (drafter, change, reason, formats) in changes {
        deepspec(&folder.path().join("own"), drafter, DType::F32);
        let mut own = open(&folder.path().join("own"), None).unwrap();
        change(&mut own.config);
        for format in formats {
            let message = own.config_in(*format, &verifier()).unwrap_err().to_string();
            assert!(message.contains(reason), "{format:?}: {message}");
        }
    }
}

// ---- detection ----

#[test]
fn layouts_are_told_apart_or_refused_with_what_was_found() {
    let of = |config: Value, names: &[&str]| detect(Path::new("folder"), &config, names.iter().copied());
    let class = |name: &str| json!({ "architectures": [name] });
    assert_eq!(of(class("Qwen3DSparkModel"), &[]).unwrap(), Format::Deepspec);
    assert_eq!(of(class("Gemma4Eagle3Model"), &[]).unwrap(), Format::Deepspec);
    assert_eq!(of(class("DFlashDraftModel"), &[]).unwrap(), Format::Zlab);
    assert_eq!(of(class("DSparkDraftModel"), &[]).unwrap(), Format::Specforge);
    assert_eq!(of(class("LlamaForCausalLMEagle3"), &["midlayer.hidden_norm.weight"]).unwrap(), Format::Specforge);
    // The library's checkpoints carry other classes too.
    for name in ["DSparkSpeculator", "DSparkDraftModel", "DFlashDraftModel", "Eagle3DraftModel"] {
        let config = json!({ "architectures": [name], "speculators_model_type": "dspark" });
        assert_eq!(of(config, &[]).unwrap(), Format::Speculators, "{name}");
    }
    let flat = json!({ "architectures": ["Qwen3DSparkModel"], "dspark_markov_rank": 256 });
    assert_eq!(of(flat, &[]).unwrap(), Format::Sglang);

    let none = of(class("MedusaModel"), &["medusa.0.weight"]).unwrap_err();
    assert!(matches!(&none, Error::Layout { fits, .. } if fits.is_empty()), "{none}");
    assert!(none.to_string().contains("MedusaModel") && none.to_string().contains("medusa"), "{none}");
    let both =
        json!({ "architectures": ["Qwen3DSparkModel"], "dspark_config": {}, "speculators_model_type": "dspark" });
    let several = of(both, &[]).unwrap_err().to_string();
    assert!(several.contains("speculators, sglang"), "{several}");
    let mixed = of(class("Qwen3Eagle3Model"), &["midlayer.hidden_norm.weight"]).unwrap_err().to_string();
    assert!(mixed.contains("specforge, deepspec"), "{mixed}");
}

// ---- draft vocabulary ----

/// The map or the head of a reduced vocabulary is missing; the map holds offsets.
#[test]
fn a_draft_vocabulary_needs_its_map_and_head() {
    let folder = TempDir::new().unwrap();
    let lender = Lender::open(target(folder.path())).unwrap();
    for (format, drafter) in holdings().into_iter().filter(|(_, drafter)| drafter.is_small()) {
        let (own, theirs) = (folder.path().join("own"), folder.path().join("theirs"));
        deepspec(&own, drafter, DType::F32);
        open(&own, None).unwrap().write(format, &theirs, &verifier(), None).unwrap();
        let (config, tensors) = (read_json(&theirs.join("config.json")), stored(&theirs));
        for name in ["d2t", "lm_head.weight"] {
            let left = tensors.iter().filter(|(tensor, _)| tensor != name).cloned().collect();
            write_stored(&theirs, &config, &left);
            // Even with the target at hand its head must not be taken for the drafter's.
            for lender in [None, Some(&lender)] {
                let message = open(&theirs, lender).unwrap_err().to_string();
                assert!(message.contains(&format!("lacks tensor `{name}`")), "{format:?}: {message}");
            }
        }
        if !drafter.is_eagle3() {
            write_stored(&theirs, &config, &tensors);
            let canonical = open(&theirs, None).unwrap();
            let config = DraftConfig::from_json(Path::new("config.json"), &canonical.config).unwrap();
            let map = DraftVocabulary::read(&canonical.weights, &config).unwrap().unwrap();
            assert_eq!(map.tokens()[..], checkpoints::DRAFT_TOKENS);
        }
    }
}

/// A config exactly as the reference's published 4B drafter has it loads with no extra flag.
#[test]
fn a_reference_checkpoint_loads_with_no_extra_flags() {
    let folder = TempDir::new().unwrap();
    deepspec(folder.path(), Drafter::DSpark, DType::BF16);
    let tensors = stored(folder.path());
    let config = json!({
        "architectures": ["Qwen3DSparkModel"], "attention_bias": false, "attention_dropout": 0.0, "block_size": 4, "bos_token_id": 1,
        "confidence_head_with_markov": true, "dtype": "bfloat16", "enable_confidence_head": true, "eos_token_id": 2, "head_dim": 8,
        "hidden_act": "silu", "hidden_size": 16, "initializer_range": 0.02, "intermediate_size": 24,
        "layer_types": ["full_attention", "full_attention"], "markov_head_type": "vanilla", "markov_rank": 3, "mask_token_id": 6,
        "max_position_embeddings": 64, "max_window_layers": 36, "model_type": "qwen3", "num_anchors": 512,
        "num_attention_heads": 2, "num_hidden_layers": 2, "num_key_value_heads": 1, "num_target_layers": 6, "rms_norm_eps": 1e-6,
        "rope_scaling": null, "rope_theta": 1_000_000, "sliding_window": null, "target_layer_ids": [-1, 0, 2],
        "tie_word_embeddings": false, "transformers_version": "4.57.1", "use_cache": true, "use_sliding_window": false, "vocab_size": 23,
    });
    write_stored(folder.path(), &config, &tensors);
    let canonical = open(folder.path(), None).unwrap();
    assert_eq!((canonical.format, &canonical.config["sample_from_anchor"]), (Format::Deepspec, &json!(true)));
    let config = DraftConfig::from_json(Path::new("config.json"), &canonical.config).unwrap();
    assert_eq!((config.markov_rank, config.proposals()), (3, 4));
}

/// Partial rotation and the nested base of the frequencies come through a format unchanged.
#[test]
fn rotary_parameters_come_through_every_format() {
    let folder = TempDir::new().unwrap();
    for (format, drafter) in holdings().into_iter().filter(|(_, drafter)| !drafter.is_eagle3()) {
        let (own, theirs) = (folder.path().join("own"), folder.path().join("theirs"));
        deepspec(&own, drafter, DType::F32);
        let (mut config, tensors) = (read_json(&own.join("config.json")), stored(&own));
        without("rope_theta")(&mut config);
        config["rope_parameters"] = json!({ "rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.25 });
        write_stored(&own, &config, &tensors);
        open(&own, None).unwrap().write(format, &theirs, &verifier(), None).unwrap();
        let config = DraftConfig::from_json(Path::new("c"), &open(&theirs, None).unwrap().config).unwrap();
        assert_eq!((config.body.rope.theta, config.body.rope.partial_rotary_factor), (5e5, 0.25), "{format:?}");
        assert_eq!(config.body.rope.rotary_dim(config.body.head_dim), 2);
    }
}
