//! Eagle3 in every form of its layer: all trainable tensors learn, and drafting computes what training did.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod tiny;

use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use deepspec_models::checkpoint;
use deepspec_models::config::{DrafterConfig, Eagle3Config};
use deepspec_models::draft::eagle3::{Eagle3, StepRows, initialise};
use deepspec_models::draft::{ParameterSource, Parameters};
use deepspec_models::linear::{Packed, Precision};
use deepspec_models::loss::dspark::LossHead;
use deepspec_models::loss::eagle3::eagle3_loss;
use deepspec_models::weights::Weights;
use serde_json::json;

use tiny::{flat, random};

const VOCAB: usize = 40;
const HIDDEN: usize = 16;

fn config(qk_norm: bool, bias: bool, norm_before_residual: bool) -> Eagle3Config {
    let json = json!({
        "architectures": ["Qwen3Eagle3Model"], "model_type": "qwen3", "hidden_size": HIDDEN, "intermediate_size": 24,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCAB,
        "max_position_embeddings": 64, "rope_theta": 10000.0, "eos_token_id": 2, "num_target_layers": 5,
        "target_layer_ids": [0, 3], "ttt_length": 4, "qk_norm": qk_norm, "attention_bias": bias, "mlp_bias": bias,
        "norm_before_residual": norm_before_residual,
    });
    Eagle3Config::from_json(Path::new("config.json"), &json).unwrap()
}

fn forms() -> impl Iterator<Item = Eagle3Config> {
    (0..8).map(|i| config(i & 1 != 0, i & 2 != 0, i & 4 != 0))
}

/// Random parameters in which no tensor is at a special value.
fn parameters(config: &Eagle3Config) -> Parameters {
    let mut parameters = initialise::random(config, 3).unwrap();
    let names: Vec<String> = parameters.iter().map(|(name, _)| name.to_owned()).collect();
    for (i, name) in names.into_iter().enumerate() {
        let var = parameters.get(&name).unwrap().as_tensor().clone();
        let noise = random(50 + i as u64, 1, var.elem_count()).reshape(var.shape()).unwrap();
        parameters.insert(name, &(var + (noise * 0.1).unwrap()).unwrap()).unwrap();
    }
    parameters
}

const TOKENS: [&[u32]; 2] = [&[3, 1, 4, 1, 5, 9, 2, 6, 5, 3], &[27, 18, 28, 18, 28, 4]];

#[test]
fn every_trainable_tensor_has_a_gradient_in_every_form() {
    let lm_head = random(1, VOCAB, HIDDEN);
    let packed = Packed::new(&[&flat(&lm_head)], HIDDEN, None, Precision::F32).unwrap();
    let head = LossHead::new(&lm_head, Arc::new(packed), None).unwrap();
    let (features, target) = (random(4, 16, 2 * HIDDEN), random(5, 16, HIDDEN));
    let masks: [&[u8]; 2] = [&[0, 0, 0, 1, 1, 1, 1, 1, 1, 1], &[0, 0, 1, 1, 0, 1]];
    for config in forms() {
        // Also in the plain random start.
        for parameters in [parameters(&config), initialise::random(&config, 3).unwrap()] {
            let source = ParameterSource::Trainable(&parameters);
            let drafter = Eagle3::new(config.clone(), random(2, VOCAB, HIDDEN), source).unwrap();
            let rows = StepRows::supervised(&masks, config.ttt_length);
            let steps = drafter.train_hidden(&TOKENS, &features, &rows).unwrap();
            let loss = eagle3_loss(&drafter, &head, &masks, &rows, &steps, &target, 20).unwrap();
            let grads = loss.loss.backward().unwrap();
            assert_eq!(parameters.iter().count(), DrafterConfig::Eagle3(config.clone()).trainable_shapes().len());
            for (name, var) in parameters.iter() {
                let grad = flat(grads.get(var).unwrap_or_else(|| panic!("no gradient of {name}")));
                assert!(grad.iter().any(|g| *g != 0.0), "gradient of {name} is zero in {config:?}");
            }
        }
    }
}

#[test]
fn drafting_computes_what_training_did_in_every_form() {
    let folder = tempfile::tempdir().unwrap();
    for (number, config) in forms().enumerate() {
        let parameters = parameters(&config);
        let embed_tokens = random(2, VOCAB, HIDDEN);
        let trained =
            Eagle3::new(config.clone(), embed_tokens.clone(), ParameterSource::Trainable(&parameters)).unwrap();
        let features = random(4, 16, 2 * HIDDEN);
        let steps = trained.train_hidden(&TOKENS, &features, &StepRows::all(16, config.ttt_length)).unwrap();

        let path = folder.path().join(number.to_string());
        let tensors: Vec<(&str, Tensor)> =
            parameters.iter().map(|(name, var)| (name, var.as_tensor().clone())).collect();
        checkpoint::save(&path, &config.to_json(), &tensors).unwrap();
        assert_eq!(DrafterConfig::from_folder(&path).unwrap(), DrafterConfig::Eagle3(config.clone()));
        let weights = Weights::from_folder(&path, DType::F32, &Device::Cpu).unwrap();
        let source = ParameterSource::Frozen(&weights, Precision::F32);
        let drafter = Eagle3::new(config.clone(), embed_tokens, source).unwrap();
        weights.finish().unwrap();

        let hidden = drafter.feature_rows(&features).unwrap();
        let mut context = drafter.new_context(2, 16).unwrap();
        let mut first = 0;
        for (slot, tokens) in TOKENS.iter().enumerate() {
            // What is committed comes one or two positions at a time.
            let mut known = 0;
            while known + 1 < tokens.len() {
                let len = (1 + known % 2).min(tokens.len() - 1 - known);
                let rows = hidden.narrow(0, first + known, len).unwrap();
                let next = &tokens[known + 1..=known + len];
                let mut out = drafter.extend_context(&mut context, &rows, next, &[(slot, len)]).unwrap();
                known += len;
                for (step, expected) in steps.iter().enumerate() {
                    let Some(&token) = tokens.get(known + step) else { break };
                    if step > 0 {
                        out = drafter.draft_rows(&context, &out, &[token], &[slot], step - 1).unwrap();
                    }
                    let expected = flat(&expected.narrow(0, first + known - 1, 1).unwrap().detach());
                    for (got, expected) in flat(&out).iter().zip(&expected) {
                        assert!((got - expected).abs() < 1e-4, "row {known}, step {step}: {got}, {expected}");
                    }
                }
            }
            first += tokens.len();
        }
    }
}
