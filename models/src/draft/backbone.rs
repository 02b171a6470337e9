//! The parallel backbone of DFlash and DSpark (DSpark paper, Eq. 2–3).
//!
//! Draft layers have the target's shape. In each layer, keys and values are projected by the same weights from two
//! sources: the *context rows* as they are (projected target features, one per committed position, not passed through the
//! layer's input norm) and the *block rows* after the input norm. Block rows see all context before their anchor and the
//! whole block.

use candle_core::Tensor;
use deepspec_kernels::linear::Linear;
use deepspec_kernels::rms_norm;
use deepspec_kernels::rope::RopeAngles;

use super::mlp::Mlp;
use super::moe::Routing;
use super::parallel_linear::ParallelLinear;
use super::parameters::ParameterSource;
use crate::config::{DraftConfig, TargetConfig};
use crate::error::Result;
use crate::target::head_norm;

/// One draft layer.
#[derive(Debug)]
pub struct DraftLayer {
    input_layernorm: Tensor,
    qkv_proj: ParallelLinear<3>,
    /// Keys and values alone, for context rows; frozen weights are held twice for it.
    kv_proj: ParallelLinear<2>,
    o_proj: Linear,
    q_norm: Option<Tensor>,
    k_norm: Option<Tensor>,
    post_attention_layernorm: Tensor,
    mlp: Mlp,
    head_dim: usize,
    eps: f64,
}

/// Queries, keys and values of a block's rows, positions applied.
pub struct BlockProjections {
    /// `[rows, heads · head_dim]`
    pub q: Tensor,
    /// `[rows, kv_heads · head_dim]`
    pub k: Tensor,
    /// `[rows, kv_heads · head_dim]`
    pub v: Tensor,
}

impl DraftLayer {
    /// Layer `index` of a backbone.
    ///
    /// # Errors
    /// When a tensor is missing or misshapen.
    pub fn new(drafter: &DraftConfig, index: usize, source: ParameterSource<'_>) -> Result<Self> {
        let config = &drafter.body;
        let TargetConfig { hidden_size, head_dim, attention_bias, .. } = *config;
        let (q_width, kv_width) = (config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim);
        let at = |name: &str| format!("layers.{index}.{name}");
        let norm = |name: &str| source.tensor(&at(name), &[hidden_size]);
        let linear = |name: &str, outputs, inputs, bias| source.linear(&at(name), outputs, inputs, bias);
        let part = |(name, outputs): (&str, usize)| (at(name), outputs);
        let (q, k, v) = (("self_attn.q_proj", q_width), ("self_attn.k_proj", kv_width), ("self_attn.v_proj", kv_width));
        let head_norm = |name: &str| config.qk_norm.then(|| source.tensor(&at(name), &[head_dim])).transpose();
        Ok(Self {
            input_layernorm: norm("input_layernorm.weight")?,
            qkv_proj: ParallelLinear::new([q, k, v].map(part), hidden_size, attention_bias, source)?,
            kv_proj: ParallelLinear::new([k, v].map(part), hidden_size, attention_bias, source)?,
            o_proj: linear("self_attn.o_proj", hidden_size, q_width, attention_bias)?,
            q_norm: head_norm("self_attn.q_norm.weight")?,
            k_norm: head_norm("self_attn.k_norm.weight")?,
            post_attention_layernorm: norm("post_attention_layernorm.weight")?,
            mlp: Mlp::new(drafter, index, source)?,
            head_dim,
            eps: config.rms_norm_eps,
        })
    }

    /// Keys and values of context rows.
    ///
    /// # Shapes
    /// `[rows, hidden]` → two of `[rows, kv_heads · head_dim]`
    ///
    /// # Errors
    /// When shapes do not fit.
    pub fn context_keys_values(&self, context: &Tensor, angles: &RopeAngles) -> Result<(Tensor, Tensor)> {
        let [k, v] = self.kv_proj.forward(context)?;
        let k = head_norm(&k, self.k_norm.as_ref(), self.head_dim, self.eps)?;
        Ok((angles.apply(&k)?, v))
    }

    /// Projections of block rows.
    ///
    /// # Errors
    /// When shapes do not fit.
    pub fn project(&self, x: &Tensor, angles: &RopeAngles) -> Result<BlockProjections> {
        let [q, k, v] = self.qkv_proj.forward(&rms_norm(x, &self.input_layernorm, self.eps)?)?;
        let q = head_norm(&q, self.q_norm.as_ref(), self.head_dim, self.eps)?;
        let k = head_norm(&k, self.k_norm.as_ref(), self.head_dim, self.eps)?;
        Ok(BlockProjections { q: angles.apply(&q)?, k: angles.apply(&k)?, v })
    }

    /// Output of the layer, given what attention mixed.
    ///
    /// # Shapes
    /// x `[rows, hidden]`, mixed `[rows, heads · head_dim]` → `[rows, hidden]`
    ///
    /// # Errors
    /// When shapes do not fit.
    pub fn finish(&self, x: &Tensor, mixed: &Tensor) -> Result<Tensor> {
        Ok(self.finish_routed(x, mixed, None)?.0)
    }

    /// As [`finish`](Self::finish), with only the rows `routed` going to routed experts where the MLP is a mixture, and where they went.
    ///
    /// # Errors
    /// When shapes do not fit.
    pub fn finish_routed(
        &self,
        x: &Tensor,
        mixed: &Tensor,
        routed: Option<&[u32]>,
    ) -> Result<(Tensor, Option<Routing>)> {
        let x = (x + self.o_proj.forward(mixed)?)?;
        let (y, routing) = self.mlp.forward(&rms_norm(&x, &self.post_attention_layernorm, self.eps)?, routed)?;
        Ok(((x + y)?, routing))
    }
}
