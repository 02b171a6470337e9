//! YaRN against the numbers of transformers and against the rule written out once more, and rotary embeddings that two places of
//! a file state differently.

use std::f64::consts::TAU;

use candle_core::Tensor;
use deepspec_models::config::{Family, RopeConfig, RopeScaling, TargetConfig, YarnScaling};
use deepspec_models::error::{Error, Result};
use deepspec_models::target::rope_frequencies;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::{CPU, flat, parse, parse_draft, tiny_config, tiny_gguf, tiny_tensors, write_bytes};

fn rope_of(head_dim: usize, change: Value) -> Result<RopeConfig> {
    let mut json = tiny_config(Family::Qwen3);
    json.as_object_mut().unwrap().remove("rope_theta");
    json["head_dim"] = json!(head_dim);
    json.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
    parse(&json).map(|config| config.rope)
}

fn assert_close(found: &[f32], expected: &[f64]) {
    assert_eq!(found.len(), expected.len());
    for (pair, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert!((f64::from(*found) / expected - 1.0).abs() < 2e-6, "pair {pair}: {found}, expected {expected}");
    }
}

/// What `_compute_yarn_parameters` of transformers 5.24 returns.
#[test]
fn yarn_gives_the_frequencies_and_attention_factors_of_transformers() {
    let cases: [(usize, f64, Value, f64, &[f64]); 3] = [
        (
            32,
            1e6,
            json!({"factor": 4.0, "original_max_position_embeddings": 32768}),
            1.138629436111989,
            &[
                1.0,
                0.421696514,
                0.177827939,
                0.0749894157,
                0.0316227786,
                0.0133352149,
                0.00477990136,
                0.00165996165,
                0.000549999997,
                0.000168678613,
                4.44569851e-05,
                1.87473561e-05,
                7.90569356e-06,
                3.33380399e-06,
                1.40585337e-06,
                5.92843435e-07,
            ],
        ),
        (
            24,
            1e4,
            json!({"factor": 16.0, "original_max_position_embeddings": 256, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": false}),
            1.2772588722239782,
            &[
                1.0,
                0.464158893,
                0.157131344,
                0.0383304954,
                0.00290099275,
                0.00134652189,
                0.000624999986,
                0.000290099357,
                0.000134652146,
                6.2500003e-05,
                2.90099379e-05,
                1.34652137e-05,
            ],
        ),
        (
            16,
            5e5,
            json!({"factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 0.707}),
            1.0857263992561355,
            &[
                1.0,
                0.193922758,
                0.0253840704,
                0.00255243247,
                3.53553369e-05,
                6.85620444e-06,
                1.32957405e-06,
                2.57834614e-07,
            ],
        ),
    ];
    for (head_dim, theta, mut parameters, attention, expected) in cases {
        parameters["rope_type"] = json!("yarn");
        parameters["rope_theta"] = json!(theta);
        let rope = rope_of(head_dim, json!({ "rope_parameters": parameters })).unwrap();
        assert_close(&rope.inverse_frequencies(head_dim), expected);
        assert!((rope.attention_factor() - attention).abs() < 1e-12, "{}", rope.attention_factor());
    }
}

/// With exact ends the ramp over pairs is one over the logarithm of the turns: a pair that turns r times over the context of
/// pre-training keeps the share ln(r / slow) / ln(fast / slow) of its frequency. Outside the ramp that is the paper's rule.
#[test]
fn yarn_follows_the_turns_of_each_pair_over_the_context_of_training() {
    for (theta, head_dim, length, factor, fast, slow) in [
        (1e4_f64, 64, 4096, 8.0_f64, 32.0_f64, 1.0_f64),
        (1e6, 128, 32768, 4.0, 32.0, 1.0),
        (5e5, 32, 1000, 2.5, 10.0, 0.5),
    ] {
        let rope = rope_of(
            head_dim,
            json!({"rope_theta": theta, "rope_scaling": {"rope_type": "yarn", "factor": factor, "truncate": false,
                "original_max_position_embeddings": length, "beta_fast": fast, "beta_slow": slow}}),
        )
        .unwrap();
        let expected: Vec<f64> = (0..head_dim / 2)
            .map(|pair| {
                let frequency = (-(theta.ln()) * 2.0 * f64::from(pair as u32) / head_dim as f64).exp();
                let turns = f64::from(length) / (TAU / frequency);
                let kept = ((turns / slow).ln() / (fast / slow).ln()).clamp(0.0, 1.0);
                kept * frequency + (1.0 - kept) * frequency / factor
            })
            .collect();
        assert_close(&rope.inverse_frequencies(head_dim), &expected);
        let scale: f64 = 0.1 * factor.ln() + 1.0;
        assert!((rope.attention_factor() - scale).abs() < 1e-12);
    }
}

#[test]
fn the_rotation_is_longer_by_the_attention_factor_and_leaves_the_rest_of_the_head() {
    let mut json = tiny_config(Family::Qwen3);
    json["head_dim"] = json!(8);
    json["partial_rotary_factor"] = json!(0.5);
    json["rope_scaling"] = json!({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64});
    let config = parse(&json).unwrap();
    let scale = 0.1 * 4f64.ln() + 1.0;
    let x = Tensor::new(&[[1f32, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]; 2], &CPU).unwrap();
    let found = flat(&rope_frequencies(&config).at(&[0, 3]).apply(&x).unwrap());
    let frequencies = config.rope.inverse_frequencies(8);
    for (row, position) in [0f64, 3.0].into_iter().enumerate() {
        for pair in 0..2 {
            let (sin, cos) = (position * f64::from(frequencies[pair])).sin_cos();
            let (a, b) = (f64::from(pair as u32) + 1.0, f64::from(pair as u32) + 3.0);
            let expected = [scale * (a * cos - b * sin), scale * (b * cos + a * sin)];
            for (found, expected) in [found[8 * row + pair], found[8 * row + pair + 2]].iter().zip(expected) {
                assert!((f64::from(*found) - expected).abs() < 1e-5, "{found} {expected}");
            }
        }
        assert_eq!(found[8 * row + 4..8 * row + 8], [5.0, 6.0, 7.0, 8.0]);
    }
}

#[test]
fn yarn_is_written_and_read_back_by_targets_and_drafters() {
    for parameters in [
        json!({"rope_type": "yarn", "factor": 4.0}),
        json!({"type": "yarn", "factor": 4, "original_max_position_embeddings": 20, "truncate": false}),
        json!({"rope_type": "yarn", "factor": 2.0, "mscale": 0.7, "mscale_all_dim": 1.0, "beta_fast": 20, "beta_slow": 0.5}),
        json!({"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.25}),
    ] {
        let mut json = tiny_config(Family::Qwen3);
        json["rope_scaling"] = parameters;
        let config = parse(&json).unwrap();
        assert!(matches!(config.rope.scaling, RopeScaling::Yarn(_)));
        assert_eq!(parse(&Value::Object(config.to_json())).unwrap(), config);
        for (key, value) in [
            ("architectures", json!(["Qwen3DSparkModel"])),
            ("num_target_layers", json!(4)),
            ("block_size", json!(3)),
            ("mask_token_id", json!(6)),
            ("target_layer_ids", json!([0])),
        ] {
            json[key] = value;
        }
        let drafter = parse_draft(&json).unwrap();
        assert_eq!(drafter.body.rope, config.rope);
        assert_eq!(parse_draft(&drafter.to_json()).unwrap(), drafter);
    }
    // Without a length of pre-training it is the model's own context.
    let RopeScaling::Yarn(yarn) = rope_of(6, json!({"rope_scaling": {"type": "yarn", "factor": 4.0}})).unwrap().scaling
    else {
        panic!("not YaRN")
    };
    assert_eq!(yarn.original_max_position_embeddings, 64);
    // Or what stands beside the parameters.
    let beside = json!({"original_max_position_embeddings": 32, "rope_scaling": {"type": "yarn", "factor": 4.0}});
    let inside = json!({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}});
    assert_eq!(rope_of(6, beside).unwrap(), rope_of(6, inside).unwrap());
}

#[test]
fn yarn_parameters_that_cannot_be_are_refused_by_name() {
    for (change, part) in [
        (json!({"factor": Value::Null}), "factor"),
        (json!({"factor": 0.5}), "factor"),
        (json!({"beta_fast": 1.0, "beta_slow": 2.0}), "beta_fast"),
        (json!({"beta_slow": -1}), "beta_slow"),
        (json!({"attention_factor": 0}), "attention_factor"),
        (json!({"attention_factor": 1.3, "mscale": 1.0, "mscale_all_dim": 1.0}), "attention_factor"),
        (json!({"mscale": 1.0}), "mscale_all_dim"),
        (json!({"truncate": "no"}), "truncate"),
        (json!({"original_max_position_embeddings": 1}), "original_max_position_embeddings"),
        (json!({"low_freq_factor": 1.0}), "low_freq_factor"),
        (json!({"type": "linear"}), "rope_scaling.type"),
    ] {
        let mut parameters = json!({"rope_type": "yarn", "factor": 4.0});
        parameters.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        let error = rope_of(16, json!({ "rope_scaling": parameters })).unwrap_err();
        assert!(error.to_string().contains(part) && error.hint().is_some(), "{part}: {error}");
    }
    let longrope =
        rope_of(16, json!({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}})).unwrap_err().to_string();
    assert!(longrope.contains("longrope") && longrope.contains("`yarn`"), "{longrope}");
}

#[test]
fn rotary_embeddings_that_two_places_state_differently_are_refused_with_both() {
    let yarn = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32});
    for (change, parts) in [
        (
            json!({"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}, "rope_scaling": yarn}),
            ["`rope_scaling`", "yarn", "`rope_parameters`", "default"],
        ),
        (
            json!({"rope_parameters": yarn, "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}}),
            ["`rope_scaling`", "2.0", "`rope_parameters`", "4.0"],
        ),
        (
            json!({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}),
            ["`rope_parameters.rope_theta`", "1000000", "`rope_theta`", "10000"],
        ),
        (
            json!({"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": {"type": "linear", "factor": 2.0, "rope_theta": 5e5}}),
            ["`rope_scaling.rope_theta`", "500000", "`rope_parameters.rope_theta`", "1000000"],
        ),
        (
            json!({"original_max_position_embeddings": 16, "rope_scaling": yarn}),
            ["`rope_scaling.original_max_position_embeddings`", "32", "`original_max_position_embeddings`", "16"],
        ),
        (
            json!({"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 1.0}}),
            ["`rope_parameters.partial_rotary_factor`", "1.0", "`partial_rotary_factor`", "0.5"],
        ),
    ] {
        let error = rope_of(16, change).unwrap_err();
        assert!(matches!(error, Error::FieldsDisagree { .. }) && error.hint().is_some(), "{error}");
        let text = error.to_string();
        assert!(parts.iter().all(|part| text.contains(part)), "{text}");
    }
}

#[test]
fn what_both_spellings_say_alike_is_read() {
    let yarn = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32});
    let alone = rope_of(16, json!({ "rope_scaling": yarn })).unwrap();
    let mut old = yarn.clone();
    old.as_object_mut().unwrap().remove("rope_type");
    old["type"] = json!("yarn");
    assert_eq!(rope_of(16, json!({"rope_parameters": yarn, "rope_scaling": old})).unwrap(), alone);
    // Parameters without a type say nothing of the scaling.
    assert_eq!(rope_of(16, json!({"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": yarn})).unwrap(), alone);
}

#[test]
fn yarn_is_read_from_a_gguf_file() {
    let config = parse(&tiny_config(Family::Qwen3)).unwrap();
    let folder = TempDir::new().unwrap();
    let open = |change: &dyn Fn(&mut super::GgufWriter)| {
        let mut writer = tiny_gguf(&config, &tiny_tensors(&config));
        writer.string("qwen3.rope.scaling.type", "yarn");
        change(&mut writer);
        TargetConfig::open(write_bytes(&folder, &writer.bytes()))
    };
    let read = open(&|w| {
        w.f32("qwen3.rope.scaling.factor", 4.0).u32("qwen3.rope.scaling.original_context_length", 16);
        w.raw("qwen3.rope.scaling.finetuned", 7, &[1]);
    });
    let expected = YarnScaling {
        factor: 4.0,
        original_max_position_embeddings: 16,
        beta_fast: 32.0,
        beta_slow: 1.0,
        truncate: true,
        attention_factor: 0.1 * 4f64.ln() + 1.0,
    };
    assert_eq!(read.unwrap().rope.scaling, RopeScaling::Yarn(expected));
    let read = open(&|w| {
        w.f32("qwen3.rope.scaling.factor", 4.0).f32("qwen3.rope.scaling.attn_factor", 0.5);
        w.f32("qwen3.rope.scaling.yarn_beta_fast", 16.0).f32("qwen3.rope.scaling.yarn_beta_slow", 2.0);
    });
    let expected = YarnScaling {
        original_max_position_embeddings: 64,
        beta_fast: 16.0,
        beta_slow: 2.0,
        attention_factor: 0.5 * expected.attention_factor,
        ..expected
    };
    assert_eq!(read.unwrap().rope.scaling, RopeScaling::Yarn(expected));
    for (name, value) in [("yarn_ext_factor", 0.0), ("yarn_log_multiplier", 0.1), ("factor", 0.5)] {
        let error = open(&|w| {
            if name != "factor" {
                w.f32("qwen3.rope.scaling.factor", 4.0);
            }
            w.f32(&format!("qwen3.rope.scaling.{name}"), value);
        });
        let text = error.unwrap_err().to_string();
        assert!(text.contains(name), "{text}");
    }
    let text = open(&|_| {}).unwrap_err().to_string();
    assert!(text.contains("qwen3.rope.scaling.factor"), "{text}");
    let text = open(&|w| {
        w.f32("qwen3.rope.scaling.factor", 4.0).f32("qwen3.rope.scale_linear", 2.0);
    });
    let text = text.unwrap_err().to_string();
    assert!(text.contains("`qwen3.rope.scaling.factor` is 4") && text.contains("scale_linear` is 2"), "{text}");
}
