//! SmolLM2-135M-Instruct from its GGUF against an independent engine: logits, hidden rows, greedy continuations.
//!
//! The model is found through `DEEPSPEC_SMOLLM2_GGUF`; without it the tests say so and pass.
#![expect(
    clippy::disallowed_methods,
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "tests read the environment to find the model and fail as tests do"
)]

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use deepspec_kernels::linear::Precision;
use deepspec_models::config::TargetConfig;
use deepspec_models::gguf::Gguf;
use deepspec_models::speculate::argmax_first;
use deepspec_models::target::{NewTokens, Target};
use deepspec_models::weights::Weights;
use serde_json::Value;

fn golden(part: &str) -> PathBuf {
    let root = std::env::var("DEEPSPEC_GOLDEN").map_or_else(|_| PathBuf::from("tests/golden"), PathBuf::from);
    root.join("smollm2").join(part)
}

fn smollm2(precision: Precision) -> Option<Target> {
    let Ok(path) = std::env::var("DEEPSPEC_SMOLLM2_GGUF") else {
        println!("skipped: DEEPSPEC_SMOLLM2_GGUF does not name the model");
        return None;
    };
    let gguf = Arc::new(Gguf::open(path).unwrap());
    let config = TargetConfig::from_gguf(&gguf).unwrap();
    let weights = Weights::from_gguf(gguf, DType::F32, &Device::Cpu).unwrap();
    Some(Target::load(config, &weights, precision).unwrap())
}

fn cases() -> Vec<Value> {
    let file: Value = serde_json::from_slice(&fs_err::read(golden("greedy.json")).unwrap()).unwrap();
    file["cases"].as_array().unwrap().clone()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as u32).collect()
}

fn rows(t: &Tensor) -> Vec<Vec<f32>> {
    t.to_dtype(DType::F32).unwrap().to_vec2().unwrap()
}

#[test]
fn golden_smollm2_logits_and_hidden_rows() {
    check_rows(Precision::F32);
}

/// The file's layers are in four bits, and stay as they are.
#[test]
fn golden_smollm2_hidden_rows_in_four_bits() {
    check_rows(Precision::Q4);
}

fn check_rows(precision: Precision) {
    let Some(target) = smollm2(precision) else { return };
    let io: HashMap<String, Tensor> = candle_core::safetensors::load(golden("io.safetensors"), &Device::Cpu).unwrap();
    let layers: Vec<i32> =
        io.keys().filter_map(|key| key.strip_prefix("0.layer")).map(|layer| layer.parse().unwrap()).collect();
    assert!(!layers.is_empty());
    let width = target.config().hidden_size;
    for (i, case) in cases().iter().enumerate() {
        let tokens = ids(&case["ids"]);
        let mut cache = target.new_cache(1, tokens.len()).unwrap();
        let out = target.forward(&mut cache, &[NewTokens { slot: 0, tokens: &tokens }], &layers).unwrap();
        let all: Vec<usize> = (0..tokens.len()).collect();
        // The output head has eight bits in the file, and is rounded to eight bits of another kind.
        let (tolerance, within) = if precision == Precision::Q4 { (0.2, 3e-3) } else { (2e-3, 1e-3) };
        let logits = rows(&target.logits(&out.hidden, &all).unwrap());
        let values = rows(&io[&format!("{i}.top10_values")]);
        let best = io[&format!("{i}.top10_ids")].to_dtype(DType::I64).unwrap().to_vec2::<i64>().unwrap();
        let sums: Vec<f32> = io[&format!("{i}.logsumexp")].to_dtype(DType::F32).unwrap().to_vec1().unwrap();
        for (row, logits) in logits.iter().enumerate() {
            for (value, &id) in values[row].iter().zip(&best[row]) {
                let got = logits[id as usize];
                assert!((got - value).abs() < tolerance, "case {i} row {row} token {id}: {got} against {value}");
            }
            let largest = logits.iter().copied().fold(f32::MIN, f32::max);
            let sum = largest + logits.iter().map(|l| f64::from(l - largest).exp()).sum::<f64>().ln() as f32;
            assert!((sum - sums[row]).abs() < tolerance, "case {i} row {row}: log-sum-exp {sum} against {}", sums[row]);
        }
        let compare = |what: String, got: &Tensor| {
            let expected = rows(&io[&what]);
            let got = rows(&got.narrow(0, tokens.len() - expected.len(), expected.len()).unwrap());
            for (g, e) in got.iter().zip(&expected) {
                let norm = e.iter().map(|x| x * x).sum::<f32>().sqrt();
                let error = g.iter().zip(e).map(|(a, b)| (a - b).powi(2)).sum::<f32>().sqrt();
                assert!(error <= within * norm, "{what}: relative error {}", error / norm);
            }
        };
        compare(format!("{i}.last_hidden"), &out.hidden);
        let features = out.features.unwrap();
        for (at, layer) in layers.iter().enumerate() {
            compare(format!("{i}.layer{layer}"), &features.narrow(1, at * width, width).unwrap());
        }
    }
}

#[test]
fn golden_smollm2_greedy_continuations() {
    let Some(target) = smollm2(Precision::F32) else { return };
    for (i, case) in cases().iter().enumerate() {
        let (prompt, expected) = (ids(&case["ids"]), ids(&case["greedy"]));
        let mut cache = target.new_cache(1, prompt.len() + expected.len()).unwrap();
        let mut new = prompt.clone();
        let mut output: Vec<u32> = Vec::new();
        while output.len() < expected.len() {
            let out = target.forward(&mut cache, &[NewTokens { slot: 0, tokens: &new }], &[]).unwrap();
            let logits = rows(&target.logits(&out.hidden, &[new.len() - 1]).unwrap());
            new = vec![argmax_first(&logits[0]).unwrap()];
            output.extend(&new);
        }
        assert_eq!(output, expected, "case {i}");
    }
}
