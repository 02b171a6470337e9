//! Configurations of targets and drafters.

use deepspec_models::checkpoint;
use deepspec_models::config::{DraftConfig, Family, MarkovHeadType, RopeScaling, TargetConfig};
use deepspec_models::error::Error;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::{parse, parse_draft, tiny_config};

#[test]
fn rope_is_read_in_old_and_new_spelling() {
    let rope = |change: Value| {
        let mut json = tiny_config(Family::Llama);
        json.as_object_mut().unwrap().remove("rope_theta");
        json["head_dim"] = json!(16);
        json.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        parse(&json).map(|config| config.rope)
    };
    assert_eq!(rope(json!({})).unwrap().theta, 10000.0);
    assert_eq!(rope(json!({"rope_theta": 5e5})).unwrap().theta, 5e5);
    let nested = rope(
        json!({"rope_parameters": {"rope_theta": 1000000, "rope_type": "default", "partial_rotary_factor": 0.25}}),
    );
    let nested = nested.unwrap();
    assert_eq!((nested.theta, nested.rotary_dim(16)), (1e6, 4));
    assert_eq!(nested.inverse_frequencies(16), [1.0, 1e-3]);
    assert_eq!(rope(json!({"rope_theta": 1e6, "partial_rotary_factor": 0.25})).unwrap(), nested);
    let linear = rope(json!({"rope_scaling": {"type": "linear", "factor": 4.0}})).unwrap();
    assert_eq!(linear.scaling, RopeScaling::Linear { factor: 4.0 });
    assert_eq!(linear.inverse_frequencies(16)[0], 0.25);

    for (change, part) in [
        (json!({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}), "rope_theta"),
        (json!({"rope_scaling": {"type": "dynamic", "factor": 4.0}}), "dynamic"),
        (json!({"rope_parameters": {"rope_type": "default", "mrope_section": [1]}}), "mrope_section"),
        (json!({"rope_scaling": {"type": "linear"}}), "rope_scaling.factor"),
        (json!({"rope_theta": -1.0}), "rope_theta"),
        (json!({"partial_rotary_factor": 0.2}), "partial_rotary_factor"),
        (json!({"partial_rotary_factor": 1.5}), "partial_rotary_factor"),
        (json!({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}), "full_attention"),
    ] {
        let error = rope(change).unwrap_err().to_string();
        assert!(error.contains(part), "{part}: {error}");
    }
}

#[test]
fn llama3_frequencies_follow_the_published_rule() {
    let mut json = tiny_config(Family::Llama);
    json["head_dim"] = json!(128);
    json["rope_theta"] = json!(500000.0);
    json["rope_scaling"] = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192});
    let found = parse(&json).unwrap().rope.inverse_frequencies(128);
    for (pair, found) in found.into_iter().enumerate() {
        let frequency = 500000f64.powf(-(pair as f64) / 64.0);
        let wavelength = std::f64::consts::TAU / frequency;
        let expected = if wavelength < 8192.0 / 4.0 {
            frequency
        } else if wavelength > 8192.0 {
            frequency / 8.0
        } else {
            let smooth = (8192.0 / wavelength - 1.0) / 3.0;
            (1.0 - smooth) * frequency / 8.0 + smooth * frequency
        };
        assert!((f64::from(found) / expected - 1.0).abs() < 1e-6, "{pair}: {found} {expected}");
    }
}

#[test]
fn bad_target_configs_name_field_and_value() {
    for (field, value, parts) in [
        ("num_key_value_heads", json!(3), ["num_key_value_heads", "3"]),
        ("hidden_size", json!(0), ["hidden_size", "0"]),
        ("hidden_size", json!("8"), ["hidden_size", "\"8\""]),
        ("hidden_size", Value::Null, ["hidden_size", "lacks"]),
        ("hidden_size", json!(1u64 << 40), ["hidden_size", "1099511627776"]),
        ("head_dim", json!(5), ["head_dim", "5"]),
        ("hidden_act", json!("gelu"), ["hidden_act", "gelu"]),
        ("architectures", json!(["MixtralForCausalLM"]), ["architecture", "MixtralForCausalLM"]),
        ("architectures", json!([]), ["model_type", "mixtral"]),
        ("eos_token_id", json!([2, 10]), ["eos_token_id", "10"]),
        ("eos_token_id", json!(-2), ["eos_token_id", "-2"]),
        ("rms_norm_eps", json!(0), ["rms_norm_eps", "0"]),
        ("tie_word_embeddings", json!(1), ["tie_word_embeddings", "1"]),
        ("use_sliding_window", json!(true), ["use_sliding_window", "full attention"]),
        ("layer_types", json!(["full_attention", "sliding_attention"]), ["layer_types", "sliding_attention"]),
        ("quantization_config", json!({"bits": 4}), ["quantization_config", "f16"]),
        ("quantization", json!({"bits": 4}), ["quantization", "f16"]),
        ("model_type", json!("llama"), ["model_type", "Qwen3ForCausalLM"]),
        ("qk_norm", json!(false), ["qk_norm", "false"]),
        ("num_experts", json!(8), ["num_experts", "8"]),
        ("layer_types", json!(["full_attention"]), ["layer_types", "num_hidden_layers"]),
        ("final_logit_softcapping", json!(30.0), ["final_logit_softcapping", "30"]),
        ("logits_scaling", json!(8), ["logits_scaling", "8"]),
        ("no_rope_layers", json!([1, 0]), ["no_rope_layers", "[1,0]"]),
        ("hidden_activation", json!("gelu"), ["hidden_activation", "gelu"]),
        ("use_bidirectional_attention", json!(true), ["use_bidirectional_attention", "true"]),
        ("layer_norm_eps", json!(1e-3), ["layer_norm_eps", "rms_norm_eps"]),
    ] {
        let mut json = tiny_config(Family::Qwen3);
        json["sliding_window"] = json!(16);
        if field == "architectures" {
            json["model_type"] = json!("mixtral");
        }
        json[field] = value;
        let error = parse(&json).unwrap_err();
        let message = error.to_string();
        assert!(parts.iter().all(|part| message.contains(part)), "{field}: {message}");
        assert!(message.contains("config.json") && error.hint().is_some(), "{message}");
    }
    assert!(parse(&json!([1])).unwrap_err().to_string().contains("a list"));
    // Other architectures' keys with the values that change nothing.
    let mut json = tiny_config(Family::Qwen3);
    for (key, value) in [
        ("logit_scale", json!(1.0)),
        ("no_rope_layers", json!([1, 1])),
        ("num_experts", json!(0)),
        ("hidden_activation", json!("silu")),
        ("final_logit_softcapping", Value::Null),
        ("layer_types", json!(["full_attention", "full_attention"])),
    ] {
        json[key] = value;
    }
    parse(&json).unwrap();
    // The window is configured but not in use.
    let mut json = tiny_config(Family::Qwen3);
    json.as_object_mut().unwrap().extend(
        json!({"sliding_window": 16, "use_sliding_window": true, "max_window_layers": 2}).as_object().unwrap().clone(),
    );
    parse(&json).unwrap();
}

#[test]
fn stop_ids_merge_both_files() {
    let folder = TempDir::new().unwrap();
    checkpoint::write_json(&folder.path().join("config.json"), &tiny_config(Family::Llama)).unwrap();
    assert_eq!(TargetConfig::open(folder.path()).unwrap().stop_ids, [2]);
    let write = |ids: Value| {
        checkpoint::write_json(&folder.path().join("generation_config.json"), &json!({"eos_token_id": ids})).unwrap();
        TargetConfig::open(folder.path())
    };
    assert_eq!(write(json!(5)).unwrap().stop_ids, [2, 5]);
    assert_eq!(write(json!([7, 2, 3])).unwrap().stop_ids, [2, 3, 7]);
    let error = write(json!([70])).unwrap_err().to_string();
    assert!(error.contains("generation_config.json") && error.contains("70"), "{error}");
    fs_err::write(folder.path().join("config.json"), "{").unwrap();
    assert!(TargetConfig::open(folder.path()).unwrap_err().to_string().contains("config.json"));
}

#[test]
fn target_config_round_trips() {
    let mut json = tiny_config(Family::Llama);
    json["eos_token_id"] = json!([2, 3]);
    json["mlp_bias"] = json!(true);
    json["partial_rotary_factor"] = json!(1.0 / 3.0);
    json["rope_scaling"] = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192});
    for json in [json, tiny_config(Family::Qwen3)] {
        let config = parse(&json).unwrap();
        let text = serde_json::to_string(&config.to_json()).unwrap();
        assert_eq!(parse(&serde_json::from_str(&text).unwrap()).unwrap(), config);
    }
}

fn tiny_draft() -> DraftConfig {
    DraftConfig {
        body: DraftConfig::body_of(&parse(&tiny_config(Family::Llama)).unwrap(), 2),
        num_target_layers: 4,
        block_size: 5,
        draft_vocab_size: None,
        mask_token_id: 6,
        target_layer_ids: vec![-1, 0, 2],
        num_anchors: 64,
        enable_confidence_head: true,
        confidence_head_with_markov: true,
        markov_rank: 4,
        markov_head_type: Some(MarkovHeadType::Gated),
        sample_from_anchor: true,
        sliding_window: None,
        moe: None,
    }
}

#[test]
fn draft_config_round_trips() {
    let base = tiny_draft();
    let mut no_norm = base.clone();
    no_norm.body.qk_norm = false;
    let dflash = DraftConfig {
        enable_confidence_head: false,
        confidence_head_with_markov: false,
        markov_rank: 0,
        markov_head_type: None,
        sample_from_anchor: false,
        sliding_window: Some(128),
        draft_vocab_size: Some(3),
        ..base.clone()
    };
    assert_eq!((base.draft_vocab(), dflash.draft_vocab()), (10, 3));
    for config in [base.clone(), no_norm, dflash.clone()] {
        let json = config.to_json();
        assert!(json["sample_from_anchor"].is_boolean());
        assert_eq!(json.get("qk_norm").is_some(), !config.body.qk_norm);
        assert_eq!(json["layer_types"].as_array().unwrap().len(), 2);
        assert_eq!(parse_draft(&json).unwrap(), config);
    }
    assert_eq!((base.proposals(), dflash.proposals()), (5, 4));
}

#[test]
fn block_layout_is_told_inferred_or_refused() {
    let mut json = tiny_draft().to_json();
    json.as_object_mut().unwrap().remove("sample_from_anchor");
    assert!(parse_draft(&json).unwrap().sample_from_anchor);
    for (architecture, model_type, from_anchor) in [
        ("DFlashDraftModel", Value::Null, false),
        ("DFlashDraftModel", json!("dflash"), false),
        ("DSparkDraftModel", json!("dspark"), true),
        ("DSparkSpeculator", json!("dspark"), true),
        ("DFlashSpeculator", json!("dflash"), false),
    ] {
        json["architectures"] = json!([architecture]);
        json["speculators_model_type"] = model_type;
        assert_eq!(parse_draft(&json).unwrap().sample_from_anchor, from_anchor, "{architecture}");
    }
    for (architecture, model_type) in
        [("DSparkDraftModel", Value::Null), ("DFlashSpeculator", Value::Null), ("Qwen3DSparkModel", json!("peagle"))]
    {
        json["architectures"] = json!([architecture]);
        json["speculators_model_type"] = model_type;
        let error = parse_draft(&json).unwrap_err();
        assert!(matches!(&error, Error::AmbiguousLayout { .. }) && error.to_string().contains(architecture), "{error}");
        assert!(error.hint().unwrap().contains("sample_from_anchor"));
    }
    json["sample_from_anchor"] = json!(false);
    assert!(!parse_draft(&json).unwrap().sample_from_anchor);
    json["architectures"] = json!(["Qwen3Eagle3Model"]);
    assert!(parse_draft(&json).unwrap_err().to_string().contains("Qwen3Eagle3Model"));
}

#[test]
fn draft_fields_may_be_nested() {
    let mut json = tiny_draft().to_json();
    let map = json.as_object_mut().unwrap();
    let names = [
        "mask_token_id",
        "target_layer_ids",
        "markov_rank",
        "markov_head_type",
        "enable_confidence_head",
        "block_size",
    ];
    let nested: serde_json::Map<_, _> =
        names.iter().map(|&name| (name.to_string(), map.remove(name).unwrap())).collect();
    map.insert("dflash_config".into(), nested.into());
    assert_eq!(parse_draft(&json).unwrap(), tiny_draft());
    json["dflash_config"]["mask_token_id"] = json!(-7);
    assert!(parse_draft(&json).unwrap_err().to_string().contains("dflash_config.mask_token_id"));
}

#[test]
fn bad_draft_configs_name_field_and_value() {
    for (field, value, part) in [
        ("target_layer_ids", json!([0, 3]), "[0, 3]"),
        ("target_layer_ids", json!([-2]), "[-2]"),
        ("target_layer_ids", json!([1, 1]), "each id once"),
        ("target_layer_ids", json!([]), "at least one"),
        ("target_layer_ids", json!([1u64 << 40]), "1099511627776"),
        ("mask_token_id", json!(10), "vocab_size 10"),
        ("mask_token_id", json!(2), "bos, eos and pad"),
        ("mask_token_id", Value::Null, "lacks"),
        ("draft_vocab_size", json!(11), "1 to vocab_size 10"),
        ("draft_vocab_size", json!(0), "draft_vocab_size"),
        ("draft_vocab_size", json!(true), "draft_vocab_size"),
        ("block_size", json!(0), "0"),
        ("block_size", json!(1000), "1000"),
        ("markov_rank", json!(0), "confidence_head_with_markov"),
        ("markov_head_type", json!("lstm"), "lstm"),
        ("markov_head_type", Value::Null, "markov_head_type"),
        ("confidence_head_with_markov", Value::Null, "confidence_head_with_markov"),
        ("layer_types", json!(["full_attention", "sliding_attention"]), "mixture"),
        ("num_target_layers", json!(1), "target_layer_ids"),
    ] {
        let mut json = tiny_draft().to_json();
        json[field] = value;
        let message = parse_draft(&json).unwrap_err().to_string();
        assert!(message.contains(part), "{field}: {message}");
    }
}
