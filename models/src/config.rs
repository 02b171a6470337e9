//! Configuration of target models, read from a Hugging Face `config.json` or from GGUF metadata.
//!
//! Everything that would change the numbers and is not implemented is refused by name instead of being ignored.
//! Configurations of drafters are in [`draft`], [`eagle3`] and [`drafter`], rotary embeddings in [`rope`].

pub mod draft;
pub mod drafter;
pub mod eagle3;
pub(crate) mod fields;
mod moe;
mod neutral;
pub mod rope;

use std::path::Path;

use serde_json::{Map, Value, json};

pub use self::draft::{BlockLayout, DraftConfig, MarkovHeadType};
pub use self::drafter::DrafterConfig;
pub use self::eagle3::Eagle3Config;
use self::fields::Fields;
pub use self::moe::MoeConfig;
pub use self::rope::{RopeConfig, RopeScaling, YarnScaling};
use crate::error::{Error, Result};
use crate::gguf::Gguf;

/// Most layers that a file may state; far more than any model has, and few enough to list their tensors.
const MAX_LAYERS: usize = 4096;

/// Architecture of a target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// `LlamaForCausalLM`: Llama, SmolLM2 and others of that shape.
    Llama,
    /// `Qwen3ForCausalLM`: as Llama, with an RMS norm on each query and key head.
    Qwen3,
}

impl Family {
    const SUPPORTED: &'static str = "`llama` (LlamaForCausalLM) and `qwen3` (Qwen3ForCausalLM)";

    /// Hugging Face's `model_type`, also GGUF's architecture name.
    pub fn model_type(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Qwen3 => "qwen3",
        }
    }

    fn architecture(self) -> &'static str {
        match self {
            Self::Llama => "LlamaForCausalLM",
            Self::Qwen3 => "Qwen3ForCausalLM",
        }
    }

    fn parse(path: &Path, field: &str, name: &str) -> Result<Self> {
        let known = [Self::Llama, Self::Qwen3];
        known.into_iter().find(|family| [family.model_type(), family.architecture()].contains(&name)).ok_or_else(|| {
            Error::Unsupported {
                path: path.into(),
                field: field.into(),
                found: name.into(),
                supported: Self::SUPPORTED,
            }
        })
    }
}

/// Shape and constants of a decoder-only transformer. Field names are those of `config.json`.
#[derive(Debug, Clone, PartialEq)]
pub struct TargetConfig {
    /// Architecture.
    pub family: Family,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width inside the MLP.
    pub intermediate_size: usize,
    /// Number of decoder layers.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key and value heads; divides `num_attention_heads`.
    pub num_key_value_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// Rows of the embedding and of the output head.
    pub vocab_size: usize,
    /// Added to the mean square in each RMS norm.
    pub rms_norm_eps: f64,
    /// Rotary embedding.
    pub rope: RopeConfig,
    /// Whether the output head is the embedding matrix, so that no `lm_head.weight` is read.
    pub tie_word_embeddings: bool,
    /// Whether q, k, v and o projections have biases.
    pub attention_bias: bool,
    /// Whether gate, up and down projections have biases.
    pub mlp_bias: bool,
    /// Whether each query and key head is normalised before the rotary embedding.
    pub qk_norm: bool,
    /// Longest context the model was made for, in tokens.
    pub max_position_embeddings: usize,
    /// Begin of sequence.
    pub bos_token_id: Option<u32>,
    /// Padding.
    pub pad_token_id: Option<u32>,
    /// End of sequence, as config.json lists it.
    pub eos_token_ids: Vec<u32>,
    /// Tokens that end generation, sorted: `eos_token_ids` together with those of `generation_config.json`, or with GGUF's end of
    /// turn and end of message.
    pub stop_ids: Vec<u32>,
}

impl TargetConfig {
    /// Reads the config of a folder in Hugging Face layout or of a GGUF file.
    ///
    /// # Errors
    /// As [`from_folder`](Self::from_folder) and [`from_gguf`](Self::from_gguf).
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        if path.is_dir() { Self::from_folder(path) } else { Self::from_gguf(&Gguf::open(path)?) }
    }

    /// Reads `config.json` and, where it exists, `generation_config.json` of a folder.
    ///
    /// # Errors
    /// A file cannot be read, a field is missing, out of range or asks for something that is not implemented.
    pub fn from_folder(folder: impl AsRef<Path>) -> Result<Self> {
        let folder = folder.as_ref();
        let path = folder.join("config.json");
        if !path.is_file() {
            return Err(Error::NotAModel { path: folder.into(), expected: "a folder with config.json" });
        }
        let mut config = Self::from_json(&path, &read_json(&path)?)?;
        let path = folder.join("generation_config.json");
        if path.is_file() {
            config.merge_stop_ids(&path, &read_json(&path)?)?;
        }
        Ok(config)
    }

    /// Reads the content of a `config.json`; `path` is for messages.
    ///
    /// # Errors
    /// A field is missing, out of range or asks for something that is not implemented.
    pub fn from_json(path: &Path, json: &Value) -> Result<Self> {
        let fields = Fields::new(path, json)?;
        let family = match fields.strings("architectures")?.as_slice() {
            [architecture] => Family::parse(path, "architecture", architecture)?,
            [] => Family::parse(path, "model_type", fields.string("model_type")?)?,
            several => {
                return Err(Error::field(
                    path,
                    "architectures",
                    format!("`{}`", several.join("`, `")),
                    "one architecture",
                ));
            }
        };
        if fields.optional_string("model_type")?.is_some_and(|kind| kind != family.model_type()) {
            return Err(fields.disagrees("model_type", &fields, "architectures"));
        }
        if let Some(flag) = fields.optional_flag("qk_norm")?.filter(|&flag| flag != (family == Family::Qwen3)) {
            return Err(fields.unsupported("qk_norm", flag.to_string(), "what the architecture has"));
        }
        neutral::check_dense(&fields)?;
        let config = Self::from_fields(&fields, family)?;
        if fields.flag("use_sliding_window", false)? && fields.optional_size("sliding_window")?.is_some() {
            let first = fields.optional_size("max_window_layers")?.unwrap_or(0);
            if first < config.num_hidden_layers {
                return Err(fields.unsupported("use_sliding_window", "true", "full attention in every layer"));
            }
        }
        if let Some(other) = fields.strings("layer_types")?.iter().find(|kind| **kind != "full_attention") {
            return Err(fields.unsupported("layer_types", *other, "`full_attention`"));
        }
        check_layer_types(&fields, config.num_hidden_layers)?;
        Ok(config)
    }

    /// The part that targets and drafters share.
    fn from_fields(fields: &Fields, family: Family) -> Result<Self> {
        let activation = fields.optional_string("hidden_act")?.unwrap_or("silu");
        if activation != "silu" {
            return Err(fields.unsupported("hidden_act", activation, "`silu`"));
        }
        if fields.get("quantization_config").is_some() {
            return Err(fields.unsupported("quantization_config", "present", "weights stored as f32, f16 or bf16"));
        }
        neutral::check(fields)?;
        if fields.flag("rope_interleaved", false)? {
            return Err(fields.unsupported("rope_interleaved", "true", "half-split rotation"));
        }
        let hidden_size = fields.size("hidden_size")?;
        let num_attention_heads = fields.size("num_attention_heads")?;
        let head_dim = match (fields.optional_size("head_dim")?, family) {
            (Some(head_dim), _) => head_dim,
            (None, Family::Qwen3) => 128,
            (None, Family::Llama) if hidden_size.is_multiple_of(num_attention_heads) => {
                hidden_size / num_attention_heads
            }
            (None, Family::Llama) => {
                let expected = format!("a divisor of hidden_size {hidden_size}, or a field `head_dim`");
                return Err(Error::field(fields.path, "num_attention_heads", num_attention_heads, expected));
            }
        };
        let eos_token_ids = fields.ids("eos_token_id")?;
        let config = Self {
            family,
            hidden_size,
            intermediate_size: fields.size("intermediate_size")?,
            num_hidden_layers: fields.size("num_hidden_layers")?,
            num_attention_heads,
            num_key_value_heads: fields.optional_size("num_key_value_heads")?.unwrap_or(num_attention_heads),
            head_dim,
            vocab_size: fields.size("vocab_size")?,
            rms_norm_eps: fields.positive("rms_norm_eps")?.unwrap_or(1e-6),
            rope: RopeConfig::from_fields(fields)?,
            tie_word_embeddings: fields.flag("tie_word_embeddings", false)?,
            attention_bias: fields.flag("attention_bias", false)?,
            mlp_bias: fields.flag("mlp_bias", false)?,
            qk_norm: family == Family::Qwen3,
            max_position_embeddings: fields.size("max_position_embeddings")?,
            bos_token_id: fields.ids("bos_token_id")?.first().copied(),
            pad_token_id: fields.optional_id("pad_token_id")?,
            stop_ids: sorted(eos_token_ids.clone()),
            eos_token_ids,
        };
        config.validate(fields.path)?;
        Ok(config)
    }

    /// Reads the metadata of a GGUF file of architecture `llama` or `qwen3`.
    ///
    /// # Errors
    /// A key is missing, of a wrong type, out of range or asks for something that is not implemented.
    pub fn from_gguf(gguf: &Gguf) -> Result<Self> {
        let path = gguf.path();
        let unsupported = |field: &str, found: String, supported: &'static str| Error::Unsupported {
            path: path.into(),
            field: field.into(),
            found,
            supported,
        };
        let arch = gguf.required("general.architecture", gguf.string("general.architecture")?)?;
        let family = Family::parse(path, "general.architecture", arch)?;
        let key = |name: &str| format!("{arch}.{name}");
        let optional = |name: &str| -> Result<Option<usize>> { Ok(gguf.u32(&key(name))?.map(|n| n as usize)) };
        let size = |name: &str| -> Result<usize> {
            match gguf.required(&key(name), optional(name)?)? {
                0 => Err(Error::field(path, key(name), 0, "at least 1")),
                n => Ok(n),
            }
        };
        let split_count = gguf.u32("split.count")?.unwrap_or(1);
        if split_count > 1 {
            return Err(unsupported("split.count", split_count.to_string(), "files in one part"));
        }
        for (name, supported) in
            [("expert_count", "dense models"), ("attention.sliding_window", "full attention in every layer")]
        {
            if let Some(n) = optional(name)?.filter(|&n| n > 0) {
                return Err(unsupported(&key(name), n.to_string(), supported));
            }
        }

        check_gguf_keys(gguf, arch)?;

        let hidden_size = size("embedding_length")?;
        let num_attention_heads = size("attention.head_count")?;
        let head_dim = optional("attention.key_length")?.unwrap_or(hidden_size / num_attention_heads);
        let value_dim = optional("attention.value_length")?.unwrap_or(head_dim);
        if value_dim != head_dim {
            return Err(unsupported(&key("attention.value_length"), value_dim.to_string(), "the width of the keys"));
        }
        let rope = RopeConfig::from_gguf(gguf, arch, head_dim)?;
        if family == Family::Llama && rope.partial_rotary_factor != 1.0 {
            let found = optional("rope.dimension_count")?.unwrap_or(0).to_string();
            return Err(unsupported(&key("rope.dimension_count"), found, "the whole head for architecture llama"));
        }
        let embedding = gguf.required("token_embd.weight", gguf.tensor_info("token_embd.weight"))?;
        let vocab_size = embedding.shape[0];
        if let Some(crate::gguf::Value::Array(tokens)) = gguf.metadata("tokenizer.ggml.tokens")
            && tokens.len() != vocab_size
        {
            let expected = format!("{vocab_size}, the rows of token_embd.weight");
            return Err(Error::field(path, "tokenizer.ggml.tokens", format!("a list of {}", tokens.len()), expected));
        }
        let id = |name: &str| gguf.u32(&format!("tokenizer.ggml.{name}_token_id"));
        let eos_token_ids: Vec<u32> = id("eos")?.into_iter().collect();
        let mut stop_ids = eos_token_ids.clone();
        stop_ids.extend(id("eot")?);
        stop_ids.extend(id("eom")?);
        let eps_key = key("attention.layer_norm_rms_epsilon");
        let config = Self {
            family,
            hidden_size,
            intermediate_size: size("feed_forward_length")?,
            num_hidden_layers: size("block_count")?,
            num_attention_heads,
            num_key_value_heads: optional("attention.head_count_kv")?.unwrap_or(num_attention_heads),
            head_dim,
            vocab_size,
            rms_norm_eps: gguf.required(&eps_key, gguf.f64(&eps_key)?)?,
            rope,
            tie_word_embeddings: gguf.tensor_info("output.weight").is_none(),
            attention_bias: gguf.tensor_info("blk.0.attn_q.bias").is_some(),
            mlp_bias: gguf.tensor_info("blk.0.ffn_gate.bias").is_some(),
            qk_norm: family == Family::Qwen3,
            max_position_embeddings: size("context_length")?,
            bos_token_id: id("bos")?,
            pad_token_id: id("padding")?,
            stop_ids: sorted(stop_ids),
            eos_token_ids,
        };
        config.validate(path)?;
        Ok(config)
    }

    /// Adds the `eos_token_id` of a `generation_config.json` (a number or a list) to `stop_ids`; `path` is for messages.
    ///
    /// # Errors
    /// The field is of another type or names an id outside the vocabulary.
    pub fn merge_stop_ids(&mut self, path: &Path, generation_config: &Value) -> Result<()> {
        let ids = Fields::new(path, generation_config)?.ids("eos_token_id")?;
        if let Some(id) = ids.iter().find(|&&id| id as usize >= self.vocab_size) {
            return Err(Error::field(path, "eos_token_id", id, format!("below vocab_size {}", self.vocab_size)));
        }
        self.stop_ids = sorted([self.stop_ids.as_slice(), &ids].concat());
        Ok(())
    }

    fn validate(&self, path: &Path) -> Result<()> {
        if self.num_hidden_layers > MAX_LAYERS {
            return Err(Error::field(
                path,
                "num_hidden_layers",
                self.num_hidden_layers,
                format!("at most {MAX_LAYERS}"),
            ));
        }
        let kv = self.num_key_value_heads;
        if kv == 0 || !self.num_attention_heads.is_multiple_of(kv) {
            let expected = format!("a divisor of the {} attention heads", self.num_attention_heads);
            return Err(Error::field(path, "num_key_value_heads", kv, expected));
        }
        if self.head_dim == 0 || !self.head_dim.is_multiple_of(2) {
            return Err(Error::field(path, "head_dim", self.head_dim, "an even number above 0"));
        }
        if !(self.rms_norm_eps.is_finite() && self.rms_norm_eps > 0.0) {
            return Err(Error::field(path, "rms_norm_eps", self.rms_norm_eps, "a number above 0"));
        }
        self.rope.validate(path, self.head_dim)?;
        let ids = self.stop_ids.iter().map(|&id| ("eos_token_id", id));
        let ids = ids.chain(self.bos_token_id.map(|id| ("bos_token_id", id)));
        for (field, id) in ids.chain(self.pad_token_id.map(|id| ("pad_token_id", id))) {
            if id as usize >= self.vocab_size {
                return Err(Error::field(path, field, id, format!("below vocab_size {}", self.vocab_size)));
            }
        }
        Ok(())
    }

    /// The fields as a `config.json`, in a fixed order; [`from_json`](Self::from_json) gives the same config back, except that
    /// `stop_ids` beyond `eos_token_ids` belong to `generation_config.json`.
    pub fn to_json(&self) -> Map<String, Value> {
        let mut json = Map::new();
        let mut put = |key: &str, value: Value| json.insert(key.into(), value);
        put("architectures", json!([self.family.architecture()]));
        put("model_type", json!(self.family.model_type()));
        put("hidden_act", json!("silu"));
        put("hidden_size", json!(self.hidden_size));
        put("intermediate_size", json!(self.intermediate_size));
        put("num_hidden_layers", json!(self.num_hidden_layers));
        put("num_attention_heads", json!(self.num_attention_heads));
        put("num_key_value_heads", json!(self.num_key_value_heads));
        put("head_dim", json!(self.head_dim));
        put("vocab_size", json!(self.vocab_size));
        put("rms_norm_eps", json!(self.rms_norm_eps));
        put("attention_bias", json!(self.attention_bias));
        put("mlp_bias", json!(self.mlp_bias));
        put("tie_word_embeddings", json!(self.tie_word_embeddings));
        put("max_position_embeddings", json!(self.max_position_embeddings));
        put("use_sliding_window", json!(false));
        put("sliding_window", Value::Null);
        put("bos_token_id", json!(self.bos_token_id));
        put("pad_token_id", json!(self.pad_token_id));
        put(
            "eos_token_id",
            match self.eos_token_ids.as_slice() {
                [] => Value::Null,
                [id] => json!(id),
                ids => json!(ids),
            },
        );
        self.rope.write(&mut json);
        json
    }
}

/// `layer_types` names one type per layer, where it is there.
fn check_layer_types(fields: &Fields, layers: usize) -> Result<()> {
    match fields.strings("layer_types")?.len() {
        0 => Ok(()),
        count if count == layers => Ok(()),
        _ => Err(fields.disagrees("layer_types", fields, "num_hidden_layers")),
    }
}

/// Refuses metadata of other architectures that would change the numbers.
fn check_gguf_keys(gguf: &Gguf, arch: &str) -> Result<()> {
    const KEYS: [(&str, f64); 12] = [
        ("attention.scale", 0.0),
        ("attention.clamp_kqv", 0.0),
        ("attention.max_alibi_bias", 0.0),
        ("attention.value_scale", 1.0),
        ("attention.temperature_scale", 0.0),
        ("attn_logit_softcapping", 0.0),
        ("final_logit_softcapping", 0.0),
        ("logit_scale", 1.0),
        ("residual_scale", 1.0),
        ("embedding_scale", 1.0),
        ("attention.layer_norm_epsilon", f64::NAN),
        ("attention.shared_kv_layers", 0.0),
    ];
    for (name, neutral) in KEYS {
        let key = format!("{arch}.{name}");
        if let Some(value) = gguf.metadata(&key).filter(|value| value.as_f64() != Some(neutral)) {
            let (path, found) = (gguf.path().into(), value.describe());
            let supported = "models without it, as `llama` and `qwen3` are";
            return Err(Error::Unsupported { path, field: key, found, supported });
        }
    }
    for (name, neutral) in [("attention.causal", true), ("use_parallel_residual", false)] {
        let key = format!("{arch}.{name}");
        if let Some(found) = gguf.bool(&key)?.filter(|&found| found != neutral) {
            let supported = if neutral { "`true`" } else { "`false`" };
            return Err(Error::Unsupported {
                path: gguf.path().into(),
                field: key,
                found: found.to_string(),
                supported,
            });
        }
    }
    Ok(())
}

/// Reads a JSON file whose errors name it.
pub(crate) fn read_json(path: &Path) -> Result<Value> {
    let text = fs_err::read(path)?;
    serde_json::from_slice(&text).map_err(|source| Error::Json { path: path.into(), source })
}

fn sorted(mut ids: Vec<u32>) -> Vec<u32> {
    ids.sort_unstable();
    ids.dedup();
    ids
}
