//! Eagle3's decoder layer: attention over `[input_layernorm(embedding) ; hidden_norm(hidden)]`, residual from the hidden row.

use candle_core::Tensor;
use deepspec_kernels::linear::Linear;
use deepspec_kernels::rms_norm;
use deepspec_kernels::rope::RopeAngles;

use crate::config::{Eagle3Config, TargetConfig};
use crate::draft::mlp::GatedMlp;
use crate::draft::parallel_linear::ParallelLinear;
use crate::draft::parameters::ParameterSource;
use crate::error::Result;
use crate::target::head_norm;

/// The layer.
#[derive(Debug)]
pub(super) struct Eagle3Layer {
    input_layernorm: Tensor,
    hidden_norm: Tensor,
    qkv_proj: ParallelLinear<3>,
    q_norm: Option<Tensor>,
    k_norm: Option<Tensor>,
    o_proj: Linear,
    post_attention_layernorm: Tensor,
    mlp: GatedMlp,
    norm_before_residual: bool,
    head_dim: usize,
    eps: f64,
}

/// Queries, keys and values of rows, positions applied, and what the residual stream starts from.
pub(super) struct LayerInput {
    /// `[rows, heads · head_dim]`
    pub(super) q: Tensor,
    /// `[rows, kv_heads · head_dim]`
    pub(super) k: Tensor,
    /// `[rows, kv_heads · head_dim]`
    pub(super) v: Tensor,
    /// `[rows, hidden]`
    pub(super) residual: Tensor,
}

impl Eagle3Layer {
    pub(super) fn new(config: &Eagle3Config, source: ParameterSource<'_>) -> Result<Self> {
        let TargetConfig { hidden_size, intermediate_size, head_dim, attention_bias, mlp_bias, .. } = config.body;
        let (q_width, kv_width) =
            (config.body.num_attention_heads * head_dim, config.body.num_key_value_heads * head_dim);
        let at = |name: &str| format!("layers.0.{name}");
        let part = |(name, outputs): (&str, usize)| (at(name), outputs);
        let norm = |name: &str| source.tensor(&at(name), &[hidden_size]);
        let head_norm = |name: &str| config.body.qk_norm.then(|| source.tensor(&at(name), &[head_dim])).transpose();
        let qkv = [("self_attn.q_proj", q_width), ("self_attn.k_proj", kv_width), ("self_attn.v_proj", kv_width)];
        Ok(Self {
            input_layernorm: norm("input_layernorm.weight")?,
            hidden_norm: norm("hidden_norm.weight")?,
            qkv_proj: ParallelLinear::new(qkv.map(part), 2 * hidden_size, attention_bias, source)?,
            q_norm: head_norm("self_attn.q_norm.weight")?,
            k_norm: head_norm("self_attn.k_norm.weight")?,
            o_proj: source.linear(&at("self_attn.o_proj"), hidden_size, q_width, attention_bias)?,
            post_attention_layernorm: norm("post_attention_layernorm.weight")?,
            mlp: GatedMlp::new(&at("mlp"), hidden_size, intermediate_size, mlp_bias, source)?,
            norm_before_residual: config.norm_before_residual,
            head_dim,
            eps: config.body.rms_norm_eps,
        })
    }

    /// Projections of rows.
    ///
    /// # Shapes
    /// embedding and hidden `[rows, hidden]`
    pub(super) fn project(&self, embedding: &Tensor, hidden: &Tensor, angles: &RopeAngles) -> Result<LayerInput> {
        let normed = rms_norm(hidden, &self.hidden_norm, self.eps)?;
        let input = Tensor::cat(&[&rms_norm(embedding, &self.input_layernorm, self.eps)?, &normed], 1)?;
        let [q, k, v] = self.qkv_proj.forward(&input)?;
        let q = head_norm(&q, self.q_norm.as_ref(), self.head_dim, self.eps)?;
        let k = head_norm(&k, self.k_norm.as_ref(), self.head_dim, self.eps)?;
        let residual = if self.norm_before_residual { normed } else { hidden.clone() };
        Ok(LayerInput { q: angles.apply(&q)?, k: angles.apply(&k)?, v, residual })
    }

    /// Output of the layer, given what attention mixed.
    ///
    /// # Shapes
    /// residual `[rows, hidden]`, mixed `[rows, heads · head_dim]` → `[rows, hidden]`
    pub(super) fn finish(&self, residual: &Tensor, mixed: &Tensor) -> Result<Tensor> {
        let x = (residual + self.o_proj.forward(mixed)?)?;
        let mlp = self.mlp.forward(&rms_norm(&x, &self.post_attention_layernorm, self.eps)?)?;
        Ok((x + mlp)?)
    }
}
