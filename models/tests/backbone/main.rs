//! The backbone's options on a tiny random drafter: a sliding window over the context, a mixture of experts.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod moe;
#[path = "../tiny/mod.rs"]
mod tiny;
mod window;

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use deepspec_models::checkpoint;
use deepspec_models::config::DraftConfig;
use deepspec_models::draft::{DSpark, ParameterSource, Parameters, initialise};
use deepspec_models::linear::Precision;
use deepspec_models::weights::Weights;
use serde_json::{Value, json};
use tempfile::TempDir;

use tiny::{flat, random};

const CPU: Device = Device::Cpu;
const VOCAB: usize = 23;
const HIDDEN: usize = 16;
const MASK: u32 = 6;
const BLOCK: usize = 4;

fn assert_close(what: &str, got: &Tensor, expected: &Tensor, tolerance: f32) {
    assert_eq!(got.dims(), expected.dims(), "{what}");
    for (i, (got, expected)) in flat(got).iter().zip(flat(expected)).enumerate() {
        let allowed = tolerance * (1.0 + expected.abs());
        assert!((got - expected).abs() <= allowed, "{what}, element {i}: {got}, expected {expected}");
    }
}

/// A drafter's configuration; `changes` are fields of its `config.json`.
fn config(changes: &Value) -> DraftConfig {
    let mut json = json!({
        "architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "hidden_size": HIDDEN, "intermediate_size": 24,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCAB,
        "max_position_embeddings": 64, "rope_theta": 10000.0, "eos_token_id": 2, "num_target_layers": 4,
        "block_size": BLOCK, "mask_token_id": MASK, "target_layer_ids": [0, 2], "markov_rank": 0,
    });
    for (name, value) in changes.as_object().unwrap() {
        json[name] = value.clone();
    }
    DraftConfig::from_json(Path::new("config.json"), &json).unwrap()
}

/// Random weights, large enough that every part matters.
fn parameters(config: &DraftConfig) -> Parameters {
    let mut parameters = initialise::random(config, 3).unwrap();
    let scaled: Vec<(String, Tensor)> = parameters
        .iter()
        .map(|(name, var)| {
            let scale = if name.ends_with("norm.weight") { 1.0 } else { 12.0 };
            (name.to_owned(), (var.as_tensor() * scale).unwrap())
        })
        .collect();
    for (name, value) in scaled {
        parameters.insert(name, &value).unwrap();
    }
    parameters
}

fn embedding() -> Tensor {
    random(9, VOCAB, HIDDEN)
}

fn trainable(config: &DraftConfig, parameters: &Parameters) -> DSpark {
    DSpark::new(config.clone(), embedding(), ParameterSource::Trainable(parameters)).unwrap()
}

/// The weights as a checkpoint on disk, opened again.
fn saved(config: &DraftConfig, parameters: &Parameters) -> (TempDir, Weights) {
    let folder = TempDir::new().unwrap();
    let tensors: Vec<(String, Tensor)> =
        parameters.iter().map(|(name, var)| (name.to_owned(), var.as_tensor().clone())).collect();
    checkpoint::save(folder.path().join("c"), &config.to_json(), &tensors).unwrap();
    let weights = Weights::from_folder(folder.path().join("c"), DType::F32, &CPU).unwrap();
    (folder, weights)
}

fn frozen(config: &DraftConfig, parameters: &Parameters, precision: Precision) -> DSpark {
    let (_folder, weights) = saved(config, parameters);
    let drafter = DSpark::new(config.clone(), embedding(), ParameterSource::Frozen(&weights, precision)).unwrap();
    weights.finish().unwrap();
    drafter
}
