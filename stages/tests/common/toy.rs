//! A toy language whose target sees nothing but the last token, so that its distribution is known exactly, and what drafters for it
//! are made of.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use deepspec_models::checkpoint;
use deepspec_models::config::TargetConfig;
use deepspec_models::linear::Precision as Packing;
use deepspec_models::target::Target;
use deepspec_models::weights::Weights;
use serde_json::{Value, json};

/// Tokens of the language; one more is the mask of block drafters.
pub(crate) const TOKENS: usize = 12;
pub(crate) const MASK: usize = TOKENS;
pub(crate) const VOCAB: usize = TOKENS + 1;
pub(crate) const HIDDEN: usize = 16;
pub(crate) const HEAD_DIM: usize = 16;

pub(crate) type Named = Vec<(String, Tensor)>;

/// A matrix by its entries that are not 0.
pub(crate) fn matrix(rows: usize, cols: usize, entries: impl IntoIterator<Item = (usize, usize, f64)>) -> Tensor {
    let mut values = vec![0f32; rows * cols];
    for (row, col, value) in entries {
        values[row * cols + col] += value as f32;
    }
    Tensor::from_vec(values, (rows, cols), &Device::Cpu).unwrap()
}

pub(crate) fn ones() -> Tensor {
    Tensor::ones(HIDDEN, DType::F32, &Device::Cpu).unwrap()
}

/// Each token is a dimension.
pub(crate) fn embedding() -> Tensor {
    matrix(VOCAB, HIDDEN, (0..VOCAB).map(|token| (token, token, 1.0)))
}

pub(crate) fn body(heads: usize, layers: usize) -> Value {
    json!({
        "hidden_act": "silu", "hidden_size": HIDDEN, "intermediate_size": 8, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": 1, "head_dim": HEAD_DIM, "vocab_size": VOCAB,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": false, "max_position_embeddings": 512,
        "eos_token_id": 0,
    })
}

/// A layer that adds nothing.
pub(crate) fn layer(prefix: &str, heads: usize, inputs: usize) -> Named {
    let zeros = |name: &str, rows, cols| (format!("{prefix}.{name}.weight"), matrix(rows, cols, []));
    vec![
        (format!("{prefix}.input_layernorm.weight"), ones()),
        (format!("{prefix}.post_attention_layernorm.weight"), ones()),
        zeros("self_attn.q_proj", heads * HEAD_DIM, inputs),
        zeros("self_attn.k_proj", HEAD_DIM, inputs),
        zeros("self_attn.v_proj", HEAD_DIM, inputs),
        zeros("self_attn.o_proj", HIDDEN, heads * HEAD_DIM),
        zeros("mlp.gate_proj", 8, HIDDEN),
        zeros("mlp.up_proj", 8, HIDDEN),
        zeros("mlp.down_proj", HIDDEN, 8),
    ]
}

/// A target that sees nothing but the last token.
pub(crate) fn target(folder: &Path, lm_head: &Tensor, precision: Packing) -> Target {
    let mut config = body(1, 2);
    config["architectures"] = json!(["LlamaForCausalLM"]);
    config["model_type"] = json!("llama");
    let mut tensors: Named = (0..2).flat_map(|i| layer(&format!("model.layers.{i}"), 1, HIDDEN)).collect();
    tensors.push(("model.embed_tokens.weight".into(), embedding()));
    tensors.push(("model.norm.weight".into(), ones()));
    tensors.push(("lm_head.weight".into(), lm_head.clone()));
    let path = folder.join("target");
    checkpoint::save(&path, &config, &tensors).unwrap();
    let weights = Weights::from_folder(&path, DType::F32, &Device::Cpu).unwrap();
    Target::load(TargetConfig::from_folder(&path).unwrap(), &weights, precision).unwrap()
}
