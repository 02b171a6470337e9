//! Configuration of a drafter's mixture of experts, under the names that Qwen's MoE models have in `config.json`.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::TargetConfig;
use super::fields::Fields;
use crate::error::{Error, Result};

/// Most routed experts of a layer that a file may state.
const MAX_EXPERTS: usize = 1024;

/// Shape of the mixture that stands in the place of every draft layer's MLP.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MoeConfig {
    /// Routed experts of a layer.
    pub num_experts: usize,
    /// Routed experts that a row goes to.
    pub num_experts_per_tok: usize,
    /// Width inside a routed expert.
    pub moe_intermediate_size: usize,
    /// Whether the router's weights of a row's experts are scaled to sum to 1. With one expert per row they would then be constant
    /// and the router would learn from its own losses alone.
    pub norm_topk_prob: bool,
    /// Width inside the shared expert; 0 = none. It is added as it is, without a gate.
    pub shared_expert_intermediate_size: usize,
}

impl MoeConfig {
    /// Reads the fields; `None` where `num_experts` is absent or 0.
    pub(super) fn from_fields(fields: &Fields<'_>) -> Result<Option<Self>> {
        let Some(num_experts) = fields.optional_count("num_experts")?.filter(|&count| count > 0) else {
            return Ok(None);
        };
        if fields.optional_size("decoder_sparse_step")?.is_some_and(|step| step != 1) {
            return Err(fields.unsupported("decoder_sparse_step", "not 1", "experts in every layer"));
        }
        if fields.integers("mlp_only_layers")?.is_some_and(|layers| !layers.is_empty()) {
            return Err(fields.unsupported("mlp_only_layers", "a list of layers", "experts in every layer"));
        }
        let norm = fields.optional_flag("norm_topk_prob")?;
        Ok(Some(Self {
            num_experts,
            num_experts_per_tok: fields.size("num_experts_per_tok")?,
            moe_intermediate_size: fields.size("moe_intermediate_size")?,
            norm_topk_prob: fields.required("norm_topk_prob", norm)?,
            shared_expert_intermediate_size: fields.optional_count("shared_expert_intermediate_size")?.unwrap_or(0),
        }))
    }

    /// Checks what the fields must satisfy together and with the `body` around them.
    pub(super) fn validate(&self, path: &Path, body: &TargetConfig) -> Result<()> {
        let Self { num_experts, num_experts_per_tok, moe_intermediate_size, .. } = *self;
        if !(1..=num_experts).contains(&num_experts_per_tok) {
            let expected = format!("1 to num_experts {num_experts}");
            return Err(Error::field(path, "num_experts_per_tok", num_experts_per_tok, expected));
        }
        if num_experts > MAX_EXPERTS {
            return Err(Error::field(path, "num_experts", num_experts, format!("at most {MAX_EXPERTS}")));
        }
        if moe_intermediate_size == 0 {
            return Err(Error::field(path, "moe_intermediate_size", 0, "at least 1"));
        }
        if body.mlp_bias {
            return Err(Error::field(path, "mlp_bias", "true", "false with `num_experts`"));
        }
        Ok(())
    }

    /// Adds the fields to a `config.json`.
    pub(super) fn write(&self, json: &mut Map<String, Value>) {
        let mut put = |key: &str, value: Value| json.insert(key.into(), value);
        put("num_experts", json!(self.num_experts));
        put("num_experts_per_tok", json!(self.num_experts_per_tok));
        put("moe_intermediate_size", json!(self.moe_intermediate_size));
        put("norm_topk_prob", json!(self.norm_topk_prob));
        put("shared_expert_intermediate_size", json!(self.shared_expert_intermediate_size));
    }

    /// Names and shapes of a layer's tensors, below `layers.{i}.`.
    pub fn tensors(&self, hidden: usize) -> Vec<(String, [usize; 2])> {
        let mlp = |name: String, inner: usize| {
            let weight = |part: &str, shape| (format!("mlp.{name}.{part}_proj.weight"), shape);
            [weight("gate", [inner, hidden]), weight("up", [inner, hidden]), weight("down", [hidden, inner])]
        };
        let mut tensors = vec![("mlp.gate.weight".into(), [self.num_experts, hidden])];
        tensors.extend((0..self.num_experts).flat_map(|e| mlp(format!("experts.{e}"), self.moe_intermediate_size)));
        if self.shared_expert_intermediate_size > 0 {
            tensors.extend(mlp("shared_expert".into(), self.shared_expert_intermediate_size));
        }
        tensors
    }

    /// Weights that one row meets in a layer.
    pub fn active_weights(&self, hidden: usize) -> usize {
        let inner = self.num_experts_per_tok * self.moe_intermediate_size + self.shared_expert_intermediate_size;
        hidden * (self.num_experts + 3 * inner)
    }
}

impl std::fmt::Display for MoeConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { num_experts, num_experts_per_tok, moe_intermediate_size, .. } = self;
        write!(f, "{num_experts} experts of width {moe_intermediate_size}, {num_experts_per_tok} per token")?;
        match self.shared_expert_intermediate_size {
            0 => Ok(()),
            width => write!(f, ", and a shared one of {width}"),
        }
    }
}
