//! Tiny checkpoints of every kind of drafter in the reference's layout, and files that a test can alter tensor by tensor.

use std::borrow::Cow;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use deepspec_models::checkpoint;
use deepspec_models::config::DraftConfig;
use deepspec_models::draft::trainable_shapes;
use deepspec_models::speculate::{CounterRng, Stream};
use safetensors::{Dtype, SafeTensors, View};
use serde_json::{Value, json};

const VOCAB: usize = 23;
const HIDDEN: usize = 16;
/// Tokens of the reduced vocabularies.
pub(crate) const DRAFT_TOKENS: [u32; 5] = [2, 3, 8, 13, 21];

/// A kind of drafter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Drafter {
    DSpark,
    /// With a draft vocabulary.
    DSparkSmall,
    DSparkGated,
    DSparkRnn,
    /// DFlash as the reference trains it.
    AnchorFirst,
    /// DFlash as z-lab trains it.
    OnePlusN,
    Eagle3,
    /// As most public checkpoints: three layers, a draft vocabulary, no query and key norms.
    Eagle3Small,
}

impl Drafter {
    pub(crate) const ALL: [Self; 8] = [
        Self::DSpark,
        Self::DSparkSmall,
        Self::DSparkGated,
        Self::DSparkRnn,
        Self::AnchorFirst,
        Self::OnePlusN,
        Self::Eagle3,
        Self::Eagle3Small,
    ];

    pub(crate) fn is_eagle3(self) -> bool {
        matches!(self, Self::Eagle3 | Self::Eagle3Small)
    }

    pub(crate) fn is_small(self) -> bool {
        matches!(self, Self::DSparkSmall | Self::Eagle3Small)
    }

    fn config(self) -> Value {
        let mut config = json!({
            "model_type": "qwen3", "hidden_act": "silu", "hidden_size": HIDDEN, "intermediate_size": 24,
            "num_hidden_layers": if self.is_eagle3() { 1 } else { 2 }, "num_attention_heads": 2, "num_key_value_heads": 1,
            "head_dim": 8, "vocab_size": VOCAB, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
            "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": false, "num_target_layers": 6, "dtype": "float32",
        });
        if self.is_small() {
            config["draft_vocab_size"] = json!(DRAFT_TOKENS.len());
        }
        let more = match self {
            Self::Eagle3 | Self::Eagle3Small => json!({
                "architectures": ["Qwen3Eagle3Model"], "ttt_length": 4, "step_loss_decay": 0.8, "draft_num_hidden_layers": 1,
                "target_model_name_or_path": "org/target",
                "target_layer_ids": if self == Self::Eagle3 { json!([0, 1, 2, 3, 4]) } else { json!([0, 2, 4]) },
            }),
            _ => json!({
                "architectures": ["Qwen3DSparkModel"], "block_size": 4, "mask_token_id": 6, "target_layer_ids": [-1, 0, 2],
                "num_anchors": 32, "sample_from_anchor": self != Self::OnePlusN,
            }),
        };
        for (key, value) in more.as_object().unwrap() {
            config[key] = value.clone();
        }
        let head = match self {
            Self::DSpark | Self::DSparkSmall => Some("vanilla"),
            Self::DSparkGated => Some("gated"),
            Self::DSparkRnn => Some("rnn"),
            _ => None,
        };
        if let Some(head) = head {
            config["markov_rank"] = json!(3);
            config["markov_head_type"] = json!(head);
            config["enable_confidence_head"] = json!(true);
            config["confidence_head_with_markov"] = json!(true);
        }
        if self == Self::Eagle3Small {
            config["qk_norm"] = json!(false);
        }
        config
    }

    fn shapes(self, config: &Value) -> Vec<(String, Vec<usize>)> {
        let mut shapes: Vec<(String, Vec<usize>)> = if self.is_eagle3() {
            let features = config["target_layer_ids"].as_array().unwrap().len() * HIDDEN;
            let layer = [
                ("input_layernorm", vec![HIDDEN]),
                ("hidden_norm", vec![HIDDEN]),
                ("post_attention_layernorm", vec![HIDDEN]),
                ("self_attn.q_proj", vec![16, 2 * HIDDEN]),
                ("self_attn.k_proj", vec![8, 2 * HIDDEN]),
                ("self_attn.v_proj", vec![8, 2 * HIDDEN]),
                ("self_attn.o_proj", vec![HIDDEN, 16]),
                ("mlp.gate_proj", vec![24, HIDDEN]),
                ("mlp.up_proj", vec![24, HIDDEN]),
                ("mlp.down_proj", vec![HIDDEN, 24]),
            ];
            let norms = ["self_attn.q_norm", "self_attn.k_norm"].map(|name| (name, vec![8]));
            let norms = norms.into_iter().filter(|_| self == Self::Eagle3);
            let layer = layer.into_iter().chain(norms).map(|(name, shape)| (format!("layers.0.{name}.weight"), shape));
            layer.chain([("fc.weight".into(), vec![HIDDEN, features]), ("norm.weight".into(), vec![HIDDEN])]).collect()
        } else {
            trainable_shapes(&DraftConfig::from_json(Path::new("config.json"), config).unwrap()).into_iter().collect()
        };
        let head = if self.is_small() { DRAFT_TOKENS.len() } else { VOCAB };
        shapes.push(("lm_head.weight".into(), vec![head, HIDDEN]));
        shapes
    }
}

fn random(seed: u64, shape: &[usize]) -> Tensor {
    let rng = CounterRng::new(seed, Stream::Init, 1 << 40);
    let values: Vec<f32> = (0..shape.iter().product::<usize>()).map(|i| rng.normal(i as u64) as f32).collect();
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

/// Embedding of the target, and of every drafter.
fn embedding() -> Tensor {
    random(99, &[VOCAB, HIDDEN])
}

pub(crate) fn target_embedding() -> Vec<Vec<f32>> {
    embedding().to_vec2().unwrap()
}

/// Writes a drafter in the reference's layout. A full head is the tied target's, as in any drafter that borrows it.
pub(crate) fn deepspec(dir: &Path, drafter: Drafter, dtype: DType) {
    let config = drafter.config();
    let mut tensors: Vec<(String, Tensor)> = Vec::new();
    for (seed, (name, shape)) in drafter.shapes(&config).into_iter().enumerate() {
        let is_copy = name == "lm_head.weight" && !drafter.is_small();
        tensors.push((name, if is_copy { embedding() } else { random(seed as u64, &shape) }));
    }
    tensors.push(("embed_tokens.weight".into(), embedding()));
    for (_, tensor) in &mut tensors {
        *tensor = tensor.to_dtype(dtype).unwrap();
    }
    if drafter.is_small() {
        let offsets: Vec<i64> = (0..).zip(DRAFT_TOKENS).map(|(draft, token)| i64::from(token) - draft).collect();
        let flags: Vec<u8> = (0..VOCAB as u32).map(|token| u8::from(DRAFT_TOKENS.contains(&token))).collect();
        tensors.push(("d2t".into(), Tensor::from_vec(offsets, DRAFT_TOKENS.len(), &Device::Cpu).unwrap()));
        tensors.push(("t2d".into(), Tensor::from_vec(flags, VOCAB, &Device::Cpu).unwrap()));
    }
    checkpoint::save(dir, &config, &tensors).unwrap();
}

/// A tied target of six layers, of which only what it lends is there.
pub(crate) fn target(dir: &Path) -> PathBuf {
    let config = json!({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": HIDDEN, "intermediate_size": 24,
        "num_hidden_layers": 6, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": VOCAB,
        "max_position_embeddings": 64, "eos_token_id": 2, "tie_word_embeddings": true,
    });
    let path = dir.join("target");
    checkpoint::save(&path, &config, &[("model.embed_tokens.weight", embedding())]).unwrap();
    path
}

/// A tensor as a file holds it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Bytes {
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    pub(crate) data: Vec<u8>,
}

impl View for &Bytes {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.data)
    }

    fn data_len(&self) -> usize {
        self.data.len()
    }
}

/// Tensors of a file by name.
pub(crate) type Stored = Vec<(String, Bytes)>;

pub(crate) fn stored(dir: &Path) -> Stored {
    let file = fs_err::read(dir.join("model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&file).unwrap();
    let mut all: Stored = tensors
        .tensors()
        .into_iter()
        .map(|(name, view)| {
            (name, Bytes { dtype: view.dtype(), shape: view.shape().to_vec(), data: view.data().to_vec() })
        })
        .collect();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all
}

pub(crate) fn write_stored(dir: &Path, config: &Value, tensors: &Stored) {
    fs_err::create_dir_all(dir).unwrap();
    checkpoint::write_json(&dir.join("config.json"), config).unwrap();
    let views = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor));
    safetensors::serialize_to_file(views, None, &dir.join("model.safetensors")).unwrap();
}

pub(crate) fn read_json(path: &Path) -> Value {
    serde_json::from_slice(&fs_err::read(path).unwrap()).unwrap()
}
