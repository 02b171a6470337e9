//! Keys of other architectures that would change the numbers: they may only have the value that changes nothing.
//!
//! A config is often a copy of another model's, and a class that does not know a key ignores it. Whoever wrote it meant something by
//! it, so it is refused by name instead.

use serde_json::Value;

use super::fields::Fields;
use crate::error::Result;

/// The value with which a key changes nothing.
enum Neutral {
    /// Absence alone.
    Absent,
    Number(f64),
    Flag(bool),
    Text(&'static str),
    /// An empty list, or one of ones.
    Ones,
}

use Neutral::{Absent, Flag, Number, Ones, Text};

/// Keys, and what they may be.
const KEYS: &[(&str, Neutral, &str)] = &[
    // ---- scores and logits ----
    ("attention_multiplier", Absent, "scores divided by the square root of `head_dim`"),
    ("query_pre_attn_scalar", Absent, "scores divided by the square root of `head_dim`"),
    ("attn_logit_softcapping", Absent, "scores without a cap"),
    ("final_logit_softcapping", Absent, "logits without a cap"),
    ("logits_scaling", Number(1.0), "`1`"),
    ("logit_scale", Number(1.0), "`1`"),
    // ---- widths of the residual stream ----
    ("embedding_multiplier", Number(1.0), "`1`"),
    ("residual_multiplier", Number(1.0), "`1`"),
    ("scale_emb", Number(1.0), "`1`"),
    ("scale_depth", Absent, "unscaled layers"),
    ("dim_model_base", Absent, "unscaled logits"),
    // ---- attention ----
    ("clip_qkv", Absent, "projections without a clip"),
    ("is_causal", Flag(true), "`true`"),
    ("use_bidirectional_attention", Flag(false), "`false`"),
    ("attention_chunk_size", Absent, "attention to the whole context"),
    ("alibi", Flag(false), "rotary embeddings"),
    ("qkv_bias", Flag(false), "the key `attention_bias`"),
    ("kv_lora_rank", Absent, "full keys and values"),
    ("q_lora_rank", Absent, "full queries"),
    ("num_kv_shared_layers", Number(0.0), "keys and values of each layer's own"),
    // ---- rotary embedding ----
    ("rotary_pct", Number(1.0), "the key `partial_rotary_factor`"),
    ("rope_traditional", Flag(false), "half-split rotation"),
    ("no_rope_layers", Ones, "a rotary embedding in every layer"),
    ("no_rope_layer_interval", Number(0.0), "a rotary embedding in every layer"),
    // ---- form of the layers ----
    ("hidden_activation", Text("silu"), "`silu`"),
    ("activation_function", Text("silu"), "`silu`"),
    ("use_parallel_residual", Flag(false), "attention before the MLP"),
    ("parallel_attn", Flag(false), "attention before the MLP"),
    ("sandwich_norm", Flag(false), "norms before attention and MLP alone"),
    ("layer_norm_eps", Absent, "the key `rms_norm_eps`"),
    ("layer_norm_epsilon", Absent, "the key `rms_norm_eps`"),
    ("norm_epsilon", Absent, "the key `rms_norm_eps`"),
    // ---- stored weights ----
    ("compression_config", Absent, "weights stored as f32, f16 or bf16"),
    ("quantization", Absent, "weights stored as f32, f16 or bf16"),
];

/// Keys of mixtures of experts, which targets cannot have.
const EXPERTS: [&str; 4] = ["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"];

impl Neutral {
    fn is_met(&self, value: &Value) -> bool {
        match self {
            Absent => false,
            Number(number) => value.as_f64() == Some(*number),
            Flag(flag) => value.as_bool() == Some(*flag),
            Text(text) => value.as_str() == Some(text),
            Ones => value.as_array().is_some_and(|list| list.iter().all(|one| one.as_f64() == Some(1.0))),
        }
    }
}

/// Refuses the first key that would change the numbers.
pub(super) fn check(fields: &Fields) -> Result<()> {
    for (key, neutral, supported) in KEYS {
        if let Some(value) = fields.get(key).filter(|value| !neutral.is_met(value)) {
            return Err(fields.unsupported(key, value.to_string(), supported));
        }
    }
    Ok(())
}

/// Refuses a target with experts.
pub(super) fn check_dense(fields: &Fields) -> Result<()> {
    let is_some = |value: &&Value| value.as_u64() != Some(0);
    match EXPERTS.iter().find_map(|key| Some((key, fields.get(key).filter(is_some)?))) {
        Some((key, value)) => Err(fields.unsupported(key, value.to_string(), "dense models")),
        None => Ok(()),
    }
}
