//! Where a drafter's tensors come from: frozen weights of a checkpoint, or the variables of a training run.
//!
//! Model code asks by the checkpoint's names, so a key can be found by search, and does not know which of the two it gets.

use std::collections::BTreeMap;

use candle_core::{DType, Tensor, Var};
use deepspec_kernels::linear::{Linear, Precision};

use crate::config::{DraftConfig, MarkovHeadType, TargetConfig};
use crate::error::{Error, Result};
use crate::weights::Weights;

/// Trainable tensors by checkpoint name. The order of names is the order of every loop over them.
#[derive(Debug, Default)]
pub struct Parameters {
    vars: BTreeMap<String, Var>,
}

impl Parameters {
    /// Adds or replaces a parameter (kept as f32).
    ///
    /// # Errors
    /// When the tensor cannot be copied.
    pub fn insert(&mut self, name: impl Into<String>, value: &Tensor) -> Result<()> {
        let value = value.to_dtype(DType::F32)?.contiguous()?.copy()?;
        self.vars.insert(name.into(), Var::from_tensor(&value)?);
        Ok(())
    }

    /// The variable of that name.
    pub fn get(&self, name: &str) -> Option<&Var> {
        self.vars.get(name)
    }

    /// All parameters in order of names.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Var)> {
        self.vars.iter().map(|(name, var)| (name.as_str(), var))
    }

    /// Number of parameters' elements.
    pub fn elements(&self) -> usize {
        self.vars.values().map(|var| var.elem_count()).sum()
    }
}

/// Names and shapes of a drafter's trainable tensors, sorted by name.
pub fn trainable_shapes(config: &DraftConfig) -> BTreeMap<String, Vec<usize>> {
    let TargetConfig { hidden_size, vocab_size, .. } = config.body;
    let mut shapes = BTreeMap::new();
    for layer in 0..config.body.num_hidden_layers {
        let at = |name: String| format!("layers.{layer}.{name}");
        shapes.extend(
            layer_shapes(&config.body, hidden_size, config.moe.is_none()).map(|(name, shape)| (at(name), shape)),
        );
        let experts = config.moe.iter().flat_map(|moe| moe.tensors(hidden_size));
        shapes.extend(experts.map(|(name, shape)| (at(name), shape.to_vec())));
    }
    let mut add = |name: String, shape: &[usize]| shapes.insert(name, shape.to_vec());
    add("fc.weight".into(), &[hidden_size, hidden_size * config.target_layer_ids.len()]);
    add("hidden_norm.weight".into(), &[hidden_size]);
    add("norm.weight".into(), &[hidden_size]);
    let rank = config.markov_rank;
    if let Some(kind) = config.markov_head_type {
        add("markov_head.markov_w1.weight".into(), &[vocab_size, rank]);
        add("markov_head.markov_w2.weight".into(), &[config.draft_vocab(), rank]);
        let joined = match kind {
            MarkovHeadType::Vanilla => None,
            MarkovHeadType::Gated => Some(("gate_proj", rank, hidden_size + rank)),
            MarkovHeadType::Rnn => Some(("joint_proj", 3 * rank, 2 * rank + hidden_size)),
        };
        if let Some((name, outputs, inputs)) = joined {
            add(format!("markov_head.{name}.weight"), &[outputs, inputs]);
            add(format!("markov_head.{name}.bias"), &[outputs]);
        }
    }
    if config.enable_confidence_head {
        let width = hidden_size + if config.confidence_head_with_markov { rank } else { 0 };
        add("confidence_head.proj.weight".into(), &[1, width]);
        add("confidence_head.proj.bias".into(), &[1]);
    }
    shapes
}

/// Names within a decoder layer and shapes of the tensors that every kind of drafter has there: attention over `inputs` features,
/// its two norms, and the MLP where it `has_mlp`.
pub(super) fn layer_shapes(
    body: &TargetConfig,
    inputs: usize,
    has_mlp: bool,
) -> impl Iterator<Item = (String, Vec<usize>)> + use<> {
    let TargetConfig { hidden_size, intermediate_size, head_dim, attention_bias, mlp_bias, .. } = *body;
    let (q, kv) = (body.num_attention_heads * head_dim, body.num_key_value_heads * head_dim);
    let attention = [
        ("self_attn.q_proj", q, inputs, attention_bias),
        ("self_attn.k_proj", kv, inputs, attention_bias),
        ("self_attn.v_proj", kv, inputs, attention_bias),
        ("self_attn.o_proj", hidden_size, q, attention_bias),
    ];
    let mlp = [
        ("mlp.gate_proj", intermediate_size, hidden_size, mlp_bias),
        ("mlp.up_proj", intermediate_size, hidden_size, mlp_bias),
        ("mlp.down_proj", hidden_size, intermediate_size, mlp_bias),
    ];
    let linears = attention.into_iter().chain(mlp.into_iter().filter(move |_| has_mlp));
    let linears = linears.flat_map(|(name, outputs, inputs, has_bias)| {
        let bias = has_bias.then(|| (format!("{name}.bias"), vec![outputs]));
        [(format!("{name}.weight"), vec![outputs, inputs])].into_iter().chain(bias)
    });
    let norms = ["input_layernorm", "post_attention_layernorm"].map(|name| (name, hidden_size));
    let head_norms = ["self_attn.q_norm", "self_attn.k_norm"].map(|name| (name, head_dim));
    let has_head_norms = body.qk_norm;
    let norms = norms.into_iter().chain(head_norms.into_iter().filter(move |_| has_head_norms));
    linears.chain(norms.map(|(name, width)| (format!("{name}.weight"), vec![width])))
}

/// Source of a drafter's tensors.
#[derive(Clone, Copy)]
pub enum ParameterSource<'a> {
    /// Inference: weights are packed in the given precision.
    Frozen(&'a Weights, Precision),
    /// Training: tensors are the variables themselves.
    Trainable(&'a Parameters),
}

impl ParameterSource<'_> {
    /// The same tensors, packed in f32.
    pub fn in_f32(self) -> Self {
        match self {
            Self::Frozen(weights, _) => Self::Frozen(weights, Precision::F32),
            Self::Trainable(parameters) => Self::Trainable(parameters),
        }
    }

    /// A plain tensor.
    ///
    /// # Errors
    /// When it is missing or misshapen.
    pub fn tensor(&self, name: &str, shape: &[usize]) -> Result<Tensor> {
        match self {
            Self::Frozen(weights, _) => weights.get(name, shape),
            Self::Trainable(parameters) => {
                let missing =
                    || Error::TensorMissing { path: "parameters".into(), tensor: name.into(), expected: shape.into() };
                let var = parameters.get(name).ok_or_else(missing)?;
                if var.dims() != shape {
                    return Err(Error::TensorShape {
                        path: "parameters".into(),
                        tensor: name.into(),
                        expected: shape.into(),
                        found: var.dims().into(),
                    });
                }
                Ok(var.as_tensor().clone())
            }
        }
    }

    /// A linear layer `name.weight` (and `name.bias`) of `[outputs, inputs]`.
    ///
    /// # Errors
    /// When a tensor is missing or misshapen.
    pub fn linear(&self, name: &str, outputs: usize, inputs: usize, has_bias: bool) -> Result<Linear> {
        let weight = self.tensor(&format!("{name}.weight"), &[outputs, inputs])?;
        let bias = has_bias.then(|| self.tensor(&format!("{name}.bias"), &[outputs])).transpose()?;
        match self {
            Self::Frozen(_, precision) => Ok(Linear::frozen(&[&weight], bias.as_ref(), *precision)?),
            Self::Trainable(_) => Ok(Linear::trainable(weight, bias)),
        }
    }
}
