//! Target models: decoder-only transformers of the Llama and Qwen3 families, frozen.
//!
//! One forward over a ragged batch serves prefill, decoding, verification and cache capture: the new tokens of all
//! sequences are rows of one dimension, segments say which rows belong to which cache slot. It returns the final
//! normalised hidden rows and, if asked, the residual stream after chosen layers; logits are computed only for the rows
//! that need them.

use candle_core::{DType, Device, Tensor};
use deepspec_kernels::attention::HeadLayout;
use deepspec_kernels::attention::ragged::{RaggedAttention, Segment, Visibility};
use deepspec_kernels::linear::{Linear, Precision};
use deepspec_kernels::rope::{RopeAngles, RopeFrequencies};
use deepspec_kernels::{add_rms_norm, rms_norm, silu_mul};

use crate::config::TargetConfig;
use crate::error::{Error, Result};
use crate::kv_cache::KvCache;
use crate::weights::Weights;

/// Rows of the MLP that a CPU works through at a time.
const MLP_ROWS: usize = 192;

/// New tokens of one sequence in a batch.
#[derive(Debug, Clone, Copy)]
pub struct NewTokens<'a> {
    /// Cache slot of the sequence.
    pub slot: usize,
    /// Tokens that follow the positions the slot already holds.
    pub tokens: &'a [u32],
}

/// What a forward pass returns; rows are in the order of the batch.
#[derive(Debug)]
pub struct TargetRows {
    /// Final normalised hidden rows `[rows, hidden]`.
    pub hidden: Tensor,
    /// Outputs of the captured layers side by side `[rows, layers · hidden]`, when any were asked for.
    pub features: Option<Tensor>,
}

/// A target model.
#[derive(Debug)]
pub struct Target {
    config: TargetConfig,
    embed_tokens: Tensor,
    layers: Vec<DecoderLayer>,
    norm: Tensor,
    lm_head: Linear,
    rope: RopeFrequencies,
}

#[derive(Debug)]
struct DecoderLayer {
    input_layernorm: Tensor,
    qkv_proj: Linear,
    q_norm: Option<Tensor>,
    k_norm: Option<Tensor>,
    o_proj: Linear,
    post_attention_layernorm: Tensor,
    gate_up_proj: Linear,
    down_proj: Linear,
}

/// Embedding, final norm and output head of a target, which drafters start from or borrow.
#[derive(Debug, Clone)]
pub struct TargetEnds {
    /// `[vocab, hidden]`
    pub embed_tokens: Tensor,
    /// `[vocab, hidden]`; the embedding itself when tied.
    pub lm_head: Tensor,
    /// `[hidden]`
    pub norm: Tensor,
}

impl TargetEnds {
    /// Reads the tensors from a checkpoint.
    ///
    /// # Errors
    /// When one is missing or misshapen.
    pub fn load(config: &TargetConfig, weights: &Weights) -> Result<Self> {
        let table = [config.vocab_size, config.hidden_size];
        let embed_tokens = weights.get("model.embed_tokens.weight", &table)?;
        let lm_head = if config.tie_word_embeddings {
            weights.skip("lm_head.weight");
            embed_tokens.clone()
        } else {
            weights.get("lm_head.weight", &table)?
        };
        Ok(Self { embed_tokens, lm_head, norm: weights.get("model.norm.weight", &[config.hidden_size])? })
    }
}

/// Inverse frequencies and size of the rotation as the configuration has them, scaling applied.
pub fn rope_frequencies(config: &TargetConfig) -> RopeFrequencies {
    let frequencies = RopeFrequencies::new(config.rope.inverse_frequencies(config.head_dim), config.head_dim);
    frequencies.scaled(config.rope.attention_factor())
}

/// Head sizes of a configuration.
pub fn head_layout(config: &TargetConfig) -> HeadLayout {
    HeadLayout { heads: config.num_attention_heads, kv_heads: config.num_key_value_heads, head_dim: config.head_dim }
}

impl Target {
    /// Loads and packs a model; every tensor of the checkpoint must be used.
    ///
    /// # Errors
    /// When a tensor is missing, misshapen or left over, or the precision is [`Precision::Q4`] and no weights are in four bits.
    pub fn load(config: TargetConfig, weights: &Weights, precision: Precision) -> Result<Self> {
        let TargetEnds { embed_tokens, lm_head, norm } = TargetEnds::load(&config, weights)?;
        let layers = (0..config.num_hidden_layers)
            .map(|i| DecoderLayer::load(&config, weights, i, precision))
            .collect::<Result<_>>()?;
        let lm_head = Linear::frozen(&[&lm_head], None, precision)?;
        weights.finish()?;
        let rope = rope_frequencies(&config);
        let target = Self { config, embed_tokens, layers, norm, lm_head, rope };
        if precision == Precision::Q4 && target.four_bit_bytes() == 0 {
            return Err(Error::NoFourBits { path: weights.path().to_owned(), layers: target.linears().count() });
        }
        Ok(target)
    }

    /// All linear layers.
    fn linears(&self) -> impl Iterator<Item = &Linear> {
        self.layers.iter().flat_map(DecoderLayer::linears).chain([&self.lm_head])
    }

    /// The model's configuration.
    pub fn config(&self) -> &TargetConfig {
        &self.config
    }

    /// Device of the weights.
    pub fn device(&self) -> &Device {
        self.embed_tokens.device()
    }

    /// The output head.
    pub fn lm_head(&self) -> &Linear {
        &self.lm_head
    }

    /// The embedding table `[vocab, hidden]`.
    pub fn embed_tokens(&self) -> &Tensor {
        &self.embed_tokens
    }

    /// Bytes of the packed weights that a decoding step reads.
    pub fn weight_bytes(&self) -> usize {
        self.linears().map(Linear::bytes).sum()
    }

    /// Bytes of those that are in four bits.
    pub fn four_bit_bytes(&self) -> usize {
        let is_four_bit = |l: &&Linear| matches!(l, Linear::Frozen { weight } if weight.precision() == Precision::Q4);
        self.linears().filter(is_four_bit).map(Linear::bytes).sum()
    }

    /// Bytes of the embedding table, of which a step reads a row per token.
    pub fn embedding_bytes(&self) -> usize {
        self.embed_tokens.elem_count() * self.embed_tokens.dtype().size_in_bytes()
    }

    /// An empty cache for this model.
    ///
    /// # Errors
    /// When the memory cannot be had.
    pub fn new_cache(&self, slots: usize, capacity: usize) -> Result<KvCache> {
        KvCache::new(self.layers.len(), slots, capacity, head_layout(&self.config), self.device())
    }

    /// Runs new tokens of several sequences and appends them to their slots.
    ///
    /// `capture` names the layers whose outputs are returned: i = output of decoder layer i, −1 = embedding.
    ///
    /// # Errors
    /// [`Error::CacheFull`] when a slot cannot take its tokens, [`Error::TokenRange`] for a token outside the
    /// vocabulary, [`Error::LayerRange`] for a captured layer that does not exist or is the last one.
    pub fn forward(&self, cache: &mut KvCache, batch: &[NewTokens<'_>], capture: &[i32]) -> Result<TargetRows> {
        let segments = segments(cache, batch)?;
        let tokens: Vec<u32> = batch.iter().flat_map(|new| new.tokens.iter().copied()).collect();
        let positions: Vec<usize> = segments.iter().flat_map(|s| s.start..s.start + s.len).collect();
        let angles = self.rope.at(&positions);
        let attention = RaggedAttention {
            segments: segments.into(),
            capacity: cache.capacity(),
            heads: head_layout(&self.config),
            visibility: Visibility::Causal,
            window: None,
        };
        for &layer in capture {
            if layer < -1 || layer >= self.layers.len() as i32 - 1 {
                return Err(Error::LayerRange { layer, layers: self.layers.len() });
            }
        }
        let mut captured: Vec<Option<Tensor>> = vec![None; capture.len()];
        let mut keep = |layer: i32, x: &Tensor| {
            for (slot, _) in captured.iter_mut().zip(capture).filter(|(_, wanted)| **wanted == layer) {
                *slot = Some(x.clone());
            }
        };
        let mut x = embed(&self.embed_tokens, &tokens)?;
        keep(-1, &x);
        let eps = self.config.rms_norm_eps;
        let first_norm = self.layers.first().map_or(&self.norm, |layer| &layer.input_layernorm);
        let mut normed = rms_norm(&x, first_norm, eps)?;
        for (i, layer) in self.layers.iter().enumerate() {
            let next_norm = self.layers.get(i + 1).map_or(&self.norm, |layer| &layer.input_layernorm);
            let caches = (&cache.keys[i], &cache.values[i]);
            (x, normed) = layer.forward(&x, &normed, next_norm, &angles, &attention, caches, eps)?;
            keep(i as i32, &x);
        }
        for segment in attention.segments.iter() {
            cache.advance(segment.slot, segment.len);
        }
        let captured: Vec<Tensor> = captured.into_iter().flatten().collect();
        let features = if captured.is_empty() { None } else { Some(Tensor::cat(&captured, 1)?) };
        Ok(TargetRows { hidden: normed, features })
    }

    /// Logits of chosen rows of a forward pass.
    ///
    /// # Shapes
    /// hidden `[rows, hidden]` → `[chosen, vocab]`
    ///
    /// # Errors
    /// When a row index is out of range.
    pub fn logits(&self, hidden: &Tensor, rows: &[usize]) -> Result<Tensor> {
        let all = rows.len() == hidden.dims()[0] && rows.iter().enumerate().all(|(i, &row)| i == row);
        let chosen = if all { hidden.clone() } else { select_rows(hidden, rows)? };
        Ok(self.lm_head.forward(&chosen)?)
    }
}

/// Where the new tokens of each sequence go in the cache.
fn segments(cache: &KvCache, batch: &[NewTokens<'_>]) -> Result<Vec<Segment>> {
    let mut segments = Vec::with_capacity(batch.len());
    for (i, new) in batch.iter().enumerate() {
        if new.slot >= cache.slots() || batch[..i].iter().any(|other| other.slot == new.slot) {
            return Err(Error::Batch(format!("slot {} is not there, or twice in a batch", new.slot)));
        }
        cache.room(new.slot, new.tokens.len())?;
        segments.push(Segment { slot: new.slot, start: cache.len(new.slot), len: new.tokens.len() });
    }
    Ok(segments)
}

/// Rows of an embedding table.
///
/// # Errors
/// [`Error::TokenRange`] for a token outside the table.
pub fn embed(table: &Tensor, tokens: &[u32]) -> Result<Tensor> {
    let vocab = table.dims()[0];
    if let Some(&token) = tokens.iter().find(|&&token| token as usize >= vocab) {
        return Err(Error::TokenRange { token, vocab });
    }
    let ids = Tensor::from_slice(tokens, tokens.len(), table.device())?;
    Ok(table.index_select(&ids, 0)?.to_dtype(DType::F32)?)
}

/// Chosen rows of a matrix.
///
/// # Errors
/// When an index is out of range.
pub fn select_rows(rows: &Tensor, indices: &[usize]) -> Result<Tensor> {
    let ids: Vec<u32> = indices.iter().map(|&i| i as u32).collect();
    Ok(rows.index_select(&Tensor::from_vec(ids, indices.len(), rows.device())?, 0)?)
}

impl DecoderLayer {
    fn linears(&self) -> [&Linear; 4] {
        [&self.qkv_proj, &self.o_proj, &self.gate_up_proj, &self.down_proj]
    }

    fn load(config: &TargetConfig, weights: &Weights, index: usize, precision: Precision) -> Result<Self> {
        let TargetConfig { hidden_size, intermediate_size, head_dim, .. } = *config;
        let (q_width, kv_width) = (config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim);
        let get = |name: &str, shape: &[usize]| weights.get(&format!("model.layers.{index}.{name}"), shape);
        let linear = |parts: &[(&str, usize)], inputs: usize, has_bias: bool| -> Result<Linear> {
            let mut matrices = Vec::new();
            let mut biases = Vec::new();
            for (name, outputs) in parts {
                matrices.push(get(&format!("{name}.weight"), &[*outputs, inputs])?);
                if has_bias {
                    biases.push(get(&format!("{name}.bias"), &[*outputs])?);
                }
            }
            let bias = if has_bias { Some(Tensor::cat(&biases, 0)?) } else { None };
            Ok(Linear::frozen(&matrices.iter().collect::<Vec<_>>(), bias.as_ref(), precision)?)
        };
        let head_norm = |name: &str| config.qk_norm.then(|| get(name, &[head_dim])).transpose();
        let attention_parts =
            [("self_attn.q_proj", q_width), ("self_attn.k_proj", kv_width), ("self_attn.v_proj", kv_width)];
        let mlp_parts = [("mlp.gate_proj", intermediate_size), ("mlp.up_proj", intermediate_size)];
        Ok(Self {
            input_layernorm: get("input_layernorm.weight", &[hidden_size])?,
            qkv_proj: linear(&attention_parts, hidden_size, config.attention_bias)?,
            q_norm: head_norm("self_attn.q_norm.weight")?,
            k_norm: head_norm("self_attn.k_norm.weight")?,
            o_proj: linear(&[("self_attn.o_proj", hidden_size)], q_width, config.attention_bias)?,
            post_attention_layernorm: get("post_attention_layernorm.weight", &[hidden_size])?,
            gate_up_proj: linear(&mlp_parts, hidden_size, config.mlp_bias)?,
            down_proj: linear(&[("mlp.down_proj", hidden_size)], intermediate_size, config.mlp_bias)?,
        })
    }

    /// Output of the layer and its norm by `next_norm`, given the input and its norm.
    fn forward(
        &self,
        x: &Tensor,
        normed: &Tensor,
        next_norm: &Tensor,
        angles: &RopeAngles,
        attention: &RaggedAttention,
        (keys, values): (&Tensor, &Tensor),
        eps: f64,
    ) -> Result<(Tensor, Tensor)> {
        let HeadLayout { heads, kv_heads, head_dim } = attention.heads;
        let (q_width, kv_width) = (heads * head_dim, kv_heads * head_dim);
        let qkv = self.qkv_proj.forward(normed)?;
        let q = head_norm(&qkv.narrow(1, 0, q_width)?, self.q_norm.as_ref(), head_dim, eps)?;
        let k = head_norm(&qkv.narrow(1, q_width, kv_width)?, self.k_norm.as_ref(), head_dim, eps)?;
        let v = qkv.narrow(1, q_width + kv_width, kv_width)?;
        attention.store(&angles.apply(&k)?, &v, keys, values)?;
        let mixed = attention.forward(&angles.apply(&q)?, keys, values)?;
        let (x, normed) = add_rms_norm(x, &self.o_proj.forward(&mixed)?, &self.post_attention_layernorm, eps)?;
        Ok(add_rms_norm(&x, &self.mlp(&normed)?, next_norm, eps)?)
    }

    /// The MLP; on a CPU a limited number of rows at a time, so that its wide rows stay in the cache.
    fn mlp(&self, x: &Tensor) -> Result<Tensor> {
        let rows = x.dims()[0];
        let part = |first: usize, count: usize| -> Result<Tensor> {
            let gate_up = self.gate_up_proj.forward(&x.narrow(0, first, count)?)?;
            let width = gate_up.dims()[1] / 2;
            let activated = silu_mul(&gate_up.narrow(1, 0, width)?, &gate_up.narrow(1, width, width)?)?;
            Ok(self.down_proj.forward(&activated)?)
        };
        if rows <= MLP_ROWS || !x.device().is_cpu() {
            return part(0, rows);
        }
        let firsts = (0..rows).step_by(MLP_ROWS);
        let parts: Vec<Tensor> = firsts.map(|first| part(first, MLP_ROWS.min(rows - first))).collect::<Result<_>>()?;
        Ok(Tensor::cat(&parts, 0)?)
    }
}

/// RMSNorm of each head of each row, where the family has it.
pub(crate) fn head_norm(rows: &Tensor, weight: Option<&Tensor>, head_dim: usize, eps: f64) -> Result<Tensor> {
    let Some(weight) = weight else { return Ok(rows.clone()) };
    let (count, width) = rows.dims2()?;
    let heads = rows.contiguous()?.reshape((count * (width / head_dim), head_dim))?;
    Ok(rms_norm(&heads, weight, eps)?.reshape((count, width))?)
}
