//! Faults put into drafters one at a time: each tensor with one value that is not finite, each key of each layout's config with
//! another type, without it, and with another value. Whatever is wrong is refused by name, and nothing panics.
#![expect(clippy::unwrap_used, reason = "tests fail as tests do")]

#[expect(dead_code, reason = "shared with the tests of formats, which use all of it")]
mod checkpoints;

use std::path::Path;

use candle_core::{DType, Device};
use checkpoints::{Drafter, Stored, deepspec, read_json, stored, target, write_stored};
use deepspec_models::checkpoint;
use deepspec_models::config::{DrafterConfig, TargetConfig};
use deepspec_models::draft::{DSpark, Eagle3, ParameterSource};
use deepspec_models::error::{Error, Result};
use deepspec_models::formats::{Canonical, Format, Lender, Verifier};
use deepspec_models::linear::Precision;
use proptest::prelude::*;
use safetensors::Dtype;
use serde_json::{Value, json};
use tempfile::TempDir;

const CPU: Device = Device::Cpu;

/// Layouts that hold a drafter.
fn layouts(drafter: Drafter) -> Vec<Format> {
    let mut layouts = vec![Format::Deepspec];
    layouts.extend(match drafter {
        Drafter::OnePlusN => &[Format::Zlab, Format::Speculators][..],
        Drafter::AnchorFirst | Drafter::DSparkSmall | Drafter::Eagle3Small => &[Format::Speculators, Format::Specforge],
        Drafter::DSpark | Drafter::DSparkGated | Drafter::DSparkRnn => {
            &[Format::Speculators, Format::Sglang, Format::Specforge]
        }
        Drafter::Eagle3 => &[Format::Speculators],
    });
    layouts
}

/// Writes a drafter in a layout and returns its config and tensors.
fn written(folder: &Path, drafter: Drafter, format: Format, dtype: DType) -> (Value, Stored) {
    let (own, theirs) = (folder.join("own"), folder.join("theirs"));
    deepspec(&own, drafter, dtype);
    let verifier = Verifier { name: Some("org/target".into()), architecture: Some("Qwen3ForCausalLM".into()) };
    Canonical::open(&own, None, DType::F32, &CPU).unwrap().write(format, &theirs, &verifier, None).unwrap();
    (read_json(&theirs.join("config.json")), stored(&theirs))
}

/// Loads a drafter as whoever decodes with it does; every tensor must be used.
fn load(dir: &Path, lender: Option<&Lender>) -> Result<Value> {
    let Canonical { config, weights, .. } = Canonical::open(dir, lender, DType::F32, &CPU)?;
    let config = DrafterConfig::from_json(&dir.join("config.json"), &config)?;
    let (vocab, hidden, draft_vocab) = (config.body().vocab_size, config.body().hidden_size, config.draft_vocab());
    let embed = weights.get("embed_tokens.weight", &[vocab, hidden])?;
    weights.get("lm_head.weight", &[draft_vocab, hidden])?;
    let json = config.to_json();
    let source = ParameterSource::Frozen(&weights, Precision::F32);
    match config {
        DrafterConfig::Block(config) => drop(DSpark::new(config, embed, source)?),
        DrafterConfig::Eagle3(config) => drop(Eagle3::new(config, embed, source)?),
    }
    weights.finish()?;
    Ok(json)
}

/// Bit patterns that are not finite, and the name of their kind.
fn poisons(dtype: Dtype) -> [(Vec<u8>, &'static str); 2] {
    match dtype {
        Dtype::F32 => [(vec![0, 0, 0xc0, 0x7f], "NaN"), (vec![0, 0, 0x80, 0xff], "infinity")],
        Dtype::BF16 => [(vec![0xc0, 0x7f], "NaN"), (vec![0x80, 0xff], "infinity")],
        _ => [(vec![0, 0x7e], "NaN"), (vec![0, 0xfc], "infinity")],
    }
}

#[test]
fn one_value_that_is_not_finite_in_any_tensor_of_any_drafter_in_any_layout_is_refused_by_name() {
    let folder = TempDir::new().unwrap();
    let lender = Lender::open(target(folder.path())).unwrap();
    let bad = folder.path().join("bad");
    let mut checked = 0;
    for (number, drafter) in Drafter::ALL.into_iter().enumerate() {
        let dtype = [DType::F32, DType::BF16, DType::F16][number % 3];
        for format in layouts(drafter) {
            let (config, tensors) = written(folder.path(), drafter, format, dtype);
            write_stored(&bad, &config, &tensors);
            load(&bad, Some(&lender)).unwrap();
            for at in 0..tensors.len() {
                let (name, tensor) = &tensors[at];
                if name == "d2t" || name == "t2d" {
                    continue;
                }
                for (bits, kind) in poisons(tensor.dtype) {
                    let mut changed = tensors.clone();
                    let place = (7 * at + 3) % (tensor.data.len() / bits.len());
                    changed[at].1.data[bits.len() * place..bits.len() * (place + 1)].copy_from_slice(&bits);
                    write_stored(&bad, &config, &changed);
                    let error = load(&bad, Some(&lender)).unwrap_err();
                    let text = error.to_string();
                    let place = match tensor.shape.as_slice() {
                        [_, columns] => format!("row {}, column {}", place / columns, place % columns),
                        _ => format!("entry {place}"),
                    };
                    let parts =
                        [format!("tensor `{name}` holds {kind} (1 of its values)"), place, "model.safetensors".into()];
                    assert!(parts.iter().all(|part| text.contains(part)), "{format:?} {drafter:?}: {text}");
                    assert!(error.hint().is_some());
                    checked += 1;
                }
            }
        }
    }
    assert!(checked > 800, "{checked}");
}

#[test]
fn a_value_in_a_fused_projection_is_named_by_its_row_there() {
    let folder = TempDir::new().unwrap();
    let lender = Lender::open(target(folder.path())).unwrap();
    let (config, mut tensors) = written(folder.path(), Drafter::OnePlusN, Format::Zlab, DType::F32);
    let of = |part: &str| format!("layers.1.self_attn.{part}.weight");
    let parts: Vec<_> = ["q_proj", "k_proj", "v_proj"]
        .iter()
        .map(|part| tensors.remove(tensors.iter().position(|(name, _)| *name == of(part)).unwrap()).1)
        .collect();
    let mut fused = parts[0].clone();
    fused.shape[0] = parts.iter().map(|part| part.shape[0]).sum();
    fused.data = parts.iter().flat_map(|part| part.data.clone()).collect();
    // In v, the last of the three.
    let at = 4 * (27 * 16 + 2);
    fused.data[at..at + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    tensors.push((of("qkv_proj"), fused));
    let bad = folder.path().join("bad");
    write_stored(&bad, &config, &tensors);
    let text = load(&bad, Some(&lender)).unwrap_err().to_string();
    assert!(text.contains(&of("qkv_proj")) && text.contains("row 27, column 2"), "{text}");
}

#[test]
fn a_value_in_what_a_drafter_borrows_is_the_targets() {
    let folder = TempDir::new().unwrap();
    let path = target(folder.path());
    let (config, mut tensors) = (read_json(&path.join("config.json")), stored(&path));
    tensors[0].1.data[4..8].copy_from_slice(&f32::INFINITY.to_le_bytes());
    write_stored(&path, &config, &tensors);
    let (config, tensors) = written(folder.path(), Drafter::OnePlusN, Format::Zlab, DType::F32);
    let bad = folder.path().join("bad");
    write_stored(&bad, &config, &tensors);
    let text = load(&bad, Some(&Lender::open(&path).unwrap())).unwrap_err().to_string();
    assert!(text.contains("target/model.safetensors") && text.contains("`model.embed_tokens.weight`"), "{text}");
}

// ---- configurations ----

/// Another JSON value than the one given, of other types and of the same.
fn others(value: &Value) -> Vec<Value> {
    let mut others = vec![
        Value::Null,
        json!("nonsense"),
        json!([]),
        json!([[1]]),
        json!({ "a": 1 }),
        json!(-1),
        json!(0),
        json!(1.5),
        json!(u64::MAX),
        json!(true),
        json!(1e300),
    ];
    match value {
        Value::Number(number) => {
            if let Some(number) = number.as_u64() {
                others.extend([json!(number + 1), json!(number / 2), json!(2 * number)]);
            }
            others.extend(number.as_f64().map(|number| json!(number * 1.5)));
        }
        Value::Bool(flag) => others.push(json!(!flag)),
        Value::Array(list) => {
            others.push(list.iter().rev().cloned().collect());
            others.push(list.iter().skip(1).cloned().collect());
            others.push(list.iter().chain(list).cloned().collect());
        }
        Value::String(text) => others.push(json!(format!("{text}x"))),
        Value::Null | Value::Object(_) => {}
    }
    others
}

/// Paths to all keys of a config, those of nested objects too.
fn paths(value: &Value, prefix: &str) -> Vec<String> {
    let mut found = Vec::new();
    for (key, inner) in value.as_object().into_iter().flatten() {
        let path = format!("{prefix}/{key}");
        found.extend(paths(inner, &path));
        found.push(path);
    }
    found
}

/// The last name of a path.
fn key_of(path: &str) -> &str {
    path.rsplit('/').next().unwrap()
}

fn changed(config: &Value, path: &str, value: Option<Value>) -> Value {
    let mut config = config.clone();
    if let Some(value) = value {
        *config.pointer_mut(path).unwrap() = value;
    } else {
        let (parent, key) = path.rsplit_once('/').unwrap();
        config.pointer_mut(parent).unwrap().as_object_mut().unwrap().remove(key);
    }
    config
}

/// Every key of every layout's config with other values and without it: the drafter is refused with a message that says something, or it
/// loads. A value of a wrong type is never taken for another one: what loads is read back the same.
#[test]
fn no_value_of_any_key_of_a_drafters_config_panics() {
    let folder = TempDir::new().unwrap();
    let lender = Lender::open(target(folder.path())).unwrap();
    let bad = folder.path().join("bad");
    for drafter in [Drafter::DSparkSmall, Drafter::DSpark, Drafter::OnePlusN, Drafter::Eagle3Small] {
        for format in layouts(drafter) {
            let (config, tensors) = written(folder.path(), drafter, format, DType::F32);
            write_stored(&bad, &config, &tensors);
            for path in paths(&config, "") {
                let other = others(config.pointer(&path).unwrap()).into_iter().map(Some).chain([None]);
                for value in other {
                    let json = changed(&config, &path, value.clone());
                    checkpoint::write_json(&bad.join("config.json"), &json).unwrap();
                    match load(&bad, Some(&lender)) {
                        Ok(read) => {
                            let again = DrafterConfig::from_json(Path::new("config.json"), &read).unwrap();
                            assert_eq!(again.to_json(), read, "{format:?} {path} {value:?}");
                        }
                        Err(error) => assert!(error.to_string().len() > 20, "{format:?} {path} {value:?}: {error}"),
                    }
                }
            }
        }
    }
}

/// A wrong type of a key that is read is refused by the key's name.
#[test]
fn a_key_of_another_type_is_refused_by_its_name() {
    let folder = TempDir::new().unwrap();
    let lender = Lender::open(target(folder.path())).unwrap();
    let bad = folder.path().join("bad");
    // What says nothing of the model, or is another program's affair.
    let silent = [
        "auto_map",
        "dtype",
        "speculators_version",
        "transformers_version",
        "default_proposal_method",
        "accept_tolerance",
        "proposal_type",
        "verifier_accept_k",
        "architectures",
        "name_or_path",
        "target_model_name_or_path",
        "AutoModel",
        "",
        "embed_requires_grad",
        "sliding_window_non_causal",
        "tie_word_embeddings",
        "speculative_tokens",
        "proposal_methods",
        "verifier",
        "algorithm",
        "max_window_layers",
        "sliding_window",
        "num_anchors",
    ];
    for drafter in [Drafter::DSparkSmall, Drafter::DSpark, Drafter::OnePlusN, Drafter::Eagle3Small] {
        for format in layouts(drafter) {
            let (config, tensors) = written(folder.path(), drafter, format, DType::F32);
            write_stored(&bad, &config, &tensors);
            for path in paths(&config, "").iter().filter(|path| !silent.contains(&key_of(path))) {
                let value = config.pointer(path).unwrap();
                // An id may also be a list of ids.
                let wrong = if value.is_string() { json!(7) } else { json!("nonsense") };
                if value.is_null() {
                    continue;
                }
                checkpoint::write_json(&bad.join("config.json"), &changed(&config, path, Some(wrong))).unwrap();
                let error = load(&bad, Some(&lender)).map(|_| ()).unwrap_err();
                let text = error.to_string();
                // Without its mark a layout is another one, or none.
                let is_named = text.contains(key_of(path)) || matches!(error, Error::Layout { .. });
                assert!(is_named, "{format:?} {drafter:?} {path}: {text}");
            }
        }
    }
}

/// The same key in two places with two values.
#[test]
fn what_two_places_of_a_config_say_differently_is_refused_with_both() {
    let folder = TempDir::new().unwrap();
    let lender = Lender::open(target(folder.path())).unwrap();
    let bad = folder.path().join("bad");
    let nested = |key: &str, value: Value| ("dflash_config", json!({ key: value }));
    for (drafter, format, (key, value), parts) in [
        (
            Drafter::DSpark,
            Format::Deepspec,
            nested("block_size", json!(5)),
            ["block_size` is 4", "dflash_config.block_size` is 5"],
        ),
        (
            Drafter::DSpark,
            Format::Deepspec,
            nested("mask_token_id", json!(7)),
            ["mask_token_id` is 6", "dflash_config.mask_token_id` is 7"],
        ),
        (
            Drafter::DSpark,
            Format::Deepspec,
            nested("target_layer_ids", json!([0, -1, 2])),
            ["target_layer_ids` is [-1,0,2]", "dflash_config.target_layer_ids` is [0,-1,2]"],
        ),
        (
            Drafter::DSpark,
            Format::Deepspec,
            nested("sample_from_anchor", json!(false)),
            ["sample_from_anchor` is true", "dflash_config.sample_from_anchor` is false"],
        ),
        (Drafter::DSpark, Format::Deepspec, nested("causal", json!(true)), ["dflash_config.causal", "true"]),
        (
            Drafter::DSpark,
            Format::Deepspec,
            ("aux_hidden_state_layer_ids", json!([0, 1, 4])),
            ["aux_hidden_state_layer_ids` is [-1, 0, 3]", "target_layer_ids` is [-1, 0, 2]"],
        ),
        (
            Drafter::DSpark,
            Format::Deepspec,
            ("target_hidden_size", json!(32)),
            ["target_hidden_size` is 32", "hidden_size` is 16"],
        ),
        (Drafter::DSpark, Format::Deepspec, ("selector_rank", json!(4)), ["selector_rank", "DSpark and DFlash"]),
        (
            Drafter::DSpark,
            Format::Sglang,
            ("dspark_block_size", json!(5)),
            ["block_size` is 4", "dspark_block_size` is 5"],
        ),
        (Drafter::DSpark, Format::Sglang, ("dspark_top_k", json!(5)), ["dspark_top_k", "5"]),
        (
            Drafter::OnePlusN,
            Format::Zlab,
            ("mask_token_id", json!(9)),
            ["mask_token_id` is 9", "dflash_config.mask_token_id` is 6"],
        ),
        (
            Drafter::OnePlusN,
            Format::Speculators,
            ("rms_norm_eps", json!(1e-3)),
            ["rms_norm_eps` is 1e-6", "rms_norm_eps` is 0.001"],
        ),
        (
            Drafter::OnePlusN,
            Format::Speculators,
            ("quantization_config", json!({ "bits": 4 })),
            ["quantization_config", "bf16"],
        ),
        (
            Drafter::Eagle3Small,
            Format::Specforge,
            ("target_layer_ids", json!([0, 1, 4])),
            ["target_layer_ids` is [0,1,4]", "[0,2,4]"],
        ),
        (Drafter::Eagle3Small, Format::Deepspec, ("norm_before_fc", json!(true)), ["norm_before_fc", "true"]),
        (Drafter::Eagle3Small, Format::Deepspec, ("num_experts", json!(4)), ["num_experts", "dense"]),
        (
            Drafter::DSpark,
            Format::Deepspec,
            ("rope_parameters", json!({ "rope_theta": 5e5 })),
            ["rope_parameters.rope_theta` is 500000", "rope_theta` is 10000"],
        ),
        (
            Drafter::Eagle3,
            Format::Deepspec,
            ("rope_scaling", json!({ "rope_type": "yarn", "factor": 4.0 })),
            ["rope_scaling` is", "rope_parameters` is"],
        ),
    ] {
        let (mut config, tensors) = written(folder.path(), drafter, format, DType::F32);
        if key == "rope_scaling" {
            config["rope_parameters"] = json!({ "rope_type": "default" });
        }
        config[key] = value;
        write_stored(&bad, &config, &tensors);
        let error = load(&bad, Some(&lender)).map(|_| ()).unwrap_err();
        let text = error.to_string();
        assert!(parts.iter().all(|part| text.contains(part)) && error.hint().is_some(), "{format:?} {key}: {text}");
    }
}

#[test]
fn windows_that_contradict_the_types_of_the_layers_are_refused() {
    let folder = TempDir::new().unwrap();
    let (config, tensors) = written(folder.path(), Drafter::AnchorFirst, Format::Deepspec, DType::F32);
    let bad = folder.path().join("bad");
    let window = |types: Value, flag: Value, first: Value| {
        let mut config = config.clone();
        config["layer_types"] = types;
        config["use_sliding_window"] = flag;
        config["max_window_layers"] = first;
        config["sliding_window"] = json!(8);
        write_stored(&bad, &config, &tensors);
        load(&bad, None).map(|read| read["sliding_window"].clone()).map_err(|error| error.to_string())
    };
    let (sliding, full) =
        (json!(["sliding_attention", "sliding_attention"]), json!(["full_attention", "full_attention"]));
    assert_eq!(window(sliding.clone(), Value::Null, Value::Null), Ok(json!(8)));
    assert_eq!(window(Value::Null, json!(true), json!(0)), Ok(json!(8)));
    assert_eq!(window(full, json!(true), json!(28)), Ok(Value::Null));
    assert_eq!(window(Value::Null, json!(true), json!(28)), Ok(Value::Null));
    let text = window(sliding, json!(false), Value::Null).unwrap_err();
    assert!(text.contains("`use_sliding_window` is false") && text.contains("`layer_types` is"), "{text}");
    let text = window(Value::Null, json!(true), json!(1)).unwrap_err();
    assert!(text.contains("max_window_layers"), "{text}");
    let text = window(json!(["sliding_attention"]), Value::Null, Value::Null).unwrap_err();
    assert!(text.contains("`layer_types` is") && text.contains("`num_hidden_layers` is 2"), "{text}");
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(512) })]

    /// Any number for any key of a target's config, with or without a scaled rotary embedding.
    #[test]
    fn no_number_in_a_targets_config_panics(key in 0usize..16, number in prop_oneof![
        any::<f64>().prop_map(|n| json!(n)), any::<i64>().prop_map(|n| json!(n)), (0u32..70).prop_map(|n| json!(n)),
    ], kind in 0usize..4) {
        let kinds = ["default", "linear", "llama3", "yarn"];
        let mut config = json!({
            "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 16, "intermediate_size": 24,
            "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 23,
            "max_position_embeddings": 64, "eos_token_id": 2, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
            "rope_scaling": { "rope_type": kinds[kind], "factor": 4.0, "original_max_position_embeddings": 32,
                "low_freq_factor": 1.0, "high_freq_factor": 4.0, "beta_fast": 32, "beta_slow": 1, "attention_factor": 1.1 },
        });
        let keep: &[&str] = match kind {
            0 => &["rope_type"],
            1 => &["rope_type", "factor"],
            2 => &["rope_type", "factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"],
            _ => &["rope_type", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"],
        };
        config["rope_scaling"].as_object_mut().unwrap().retain(|key, _| keep.contains(&key.as_str()));
        let all: Vec<String> = paths(&config, "").into_iter().filter(|path| {
            !["architectures", "model_type", "rope_type", "rope_scaling"].contains(&key_of(path))
        }).collect();
        let path = &all[key % all.len()];
        let json = changed(&config, path, Some(number));
        if let Ok(read) = TargetConfig::from_json(Path::new("config.json"), &json) {
            let frequencies = if read.head_dim < 1 << 16 { read.rope.inverse_frequencies(read.head_dim) } else { vec![1.0] };
            prop_assert!(frequencies.iter().all(|frequency| frequency.is_finite()));
            prop_assert!(read.rope.attention_factor().is_finite());
            let again = TargetConfig::from_json(Path::new("config.json"), &Value::Object(read.to_json())).unwrap();
            prop_assert_eq!(again, read);
        }
    }
}
