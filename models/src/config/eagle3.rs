//! Configuration of an Eagle3 drafter: read from and written as the `config.json` of its checkpoint.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::draft::same_width;
use super::drafter::check_layer_ids;
use super::fields::Fields;
use super::{DraftConfig, Family, TargetConfig, neutral, read_json};
use crate::error::{Error, Result};

/// Architecture that is written.
const ARCHITECTURE: &str = "Qwen3Eagle3Model";
/// Most steps of training-time test, and tokens of a proposal.
const MAX_TTT_LENGTH: usize = 64;
/// Weight of a step relative to the one before where a checkpoint does not state it; used in training only.
const DEFAULT_STEP_LOSS_DECAY: f64 = 0.8;

/// An Eagle3 drafter's shape. The checkpoint's `config.json` is a copy of the target's with the fields below.
#[derive(Debug, Clone, PartialEq)]
pub struct Eagle3Config {
    /// Shape of the one decoder layer: the target's, with an output head of its own, and `qk_norm` (true unless the file says
    /// otherwise). Its q, k and v projections take twice `hidden_size` inputs.
    pub body: TargetConfig,
    /// Number of layers of the target.
    pub num_target_layers: usize,
    /// Target layers whose outputs are the features, as in [`DraftConfig::target_layer_ids`].
    pub target_layer_ids: Vec<i32>,
    /// Steps of training-time test, and the most tokens of a proposal.
    pub ttt_length: usize,
    /// Step s of training-time test weighs this to the power of s.
    pub step_loss_decay: f64,
    /// Number of tokens that the drafter can propose, as in [`DraftConfig::draft_vocab_size`].
    pub draft_vocab_size: Option<usize>,
    /// Name or path of the target, for people.
    pub target_model_name_or_path: Option<String>,
    /// Whether the layer's residual starts from the hidden row after its norm instead of before.
    pub norm_before_residual: bool,
}

impl Eagle3Config {
    /// Number of tokens that the drafter can propose.
    pub fn draft_vocab(&self) -> usize {
        self.draft_vocab_size.unwrap_or(self.body.vocab_size)
    }

    /// Reads `config.json` of a checkpoint folder.
    ///
    /// # Errors
    /// As [`from_json`](Self::from_json), or the file cannot be read.
    pub fn from_folder(folder: impl AsRef<Path>) -> Result<Self> {
        let path = folder.as_ref().join("config.json");
        Self::from_json(&path, &read_json(&path)?)
    }

    /// Reads the content of a `config.json`; `path` is for messages.
    ///
    /// # Errors
    /// A field is missing, out of range, contradicts another or asks for what is not implemented.
    pub fn from_json(path: &Path, json: &Value) -> Result<Self> {
        let fields = Fields::new(path, json)?;
        match fields.strings("architectures")?.as_slice() {
            [one] if one.contains("Eagle3") => {}
            [one] => return Err(fields.unsupported("architecture", *one, "Eagle3 drafters")),
            _ => return Err(fields.bad("architectures", "a list of one name")),
        }
        let family = Family::parse(path, "model_type", fields.string("model_type")?)?;
        let mut body = TargetConfig::from_fields(&fields, family)?;
        body.qk_norm = fields.flag("qk_norm", true)?;
        for (name, layers) in [
            ("num_hidden_layers", body.num_hidden_layers),
            ("draft_num_hidden_layers", fields.optional_size("draft_num_hidden_layers")?.unwrap_or(1)),
        ] {
            if layers != 1 {
                return Err(fields.unsupported(name, layers.to_string(), "`1`"));
            }
        }
        if let Some(other) = fields.strings("layer_types")?.iter().find(|kind| **kind != "full_attention") {
            return Err(fields.unsupported("layer_types", *other, "`full_attention`"));
        }
        if fields.flag("use_sliding_window", false)? && fields.optional_size("sliding_window")?.is_some() {
            return Err(fields.unsupported("use_sliding_window", "true", "attention to the whole context"));
        }
        for key in ["norm_before_fc", "fc_norm", "norm_output"] {
            if fields.flag(key, false)? {
                return Err(fields.unsupported(key, "true", "`false`"));
            }
        }
        same_width(&fields, body.hidden_size)?;
        super::check_layer_types(&fields, 1)?;
        neutral::check_dense(&fields)?;
        let ids = fields.required("target_layer_ids", fields.integers("target_layer_ids")?)?;
        let as_i32 = |id: i64| i32::try_from(id).map_err(|_| fields.bad("target_layer_ids", "numbers of layers"));
        let config = Self {
            num_target_layers: fields.size("num_target_layers")?,
            target_layer_ids: ids.into_iter().map(as_i32).collect::<Result<_>>()?,
            ttt_length: fields.size("ttt_length")?,
            step_loss_decay: fields.positive("step_loss_decay")?.unwrap_or(DEFAULT_STEP_LOSS_DECAY),
            draft_vocab_size: fields.optional_size("draft_vocab_size")?.filter(|&size| size != body.vocab_size),
            target_model_name_or_path: fields.optional_string("target_model_name_or_path")?.map(str::to_owned),
            norm_before_residual: fields.flag("norm_before_residual", false)?,
            body,
        };
        config.validate(path)?;
        Ok(config)
    }

    /// Checks what the fields must satisfy together; `path` is for messages.
    ///
    /// # Errors
    /// Names the first field at fault.
    pub fn validate(&self, path: &Path) -> Result<()> {
        if self.body.num_hidden_layers != 1 {
            return Err(Error::field(path, "num_hidden_layers", self.body.num_hidden_layers, "1"));
        }
        if !(1..=MAX_TTT_LENGTH).contains(&self.ttt_length) {
            return Err(Error::field(path, "ttt_length", self.ttt_length, format!("1 to {MAX_TTT_LENGTH}")));
        }
        let decay = self.step_loss_decay;
        if !(decay > 0.0 && decay <= 1.0) {
            return Err(Error::field(path, "step_loss_decay", decay, "above 0, at most 1"));
        }
        check_layer_ids(path, &self.target_layer_ids, self.num_target_layers)?;
        if let Some(size) = self.draft_vocab_size.filter(|size| !(1..self.body.vocab_size).contains(size)) {
            let expected = format!("1 to vocab_size {}", self.body.vocab_size);
            return Err(Error::field(path, "draft_vocab_size", size, expected));
        }
        Ok(())
    }

    /// The `config.json`, in a fixed order: the body's fields, then the drafter's. [`from_json`](Self::from_json) gives the same
    /// config back.
    pub fn to_json(&self) -> Value {
        let mut json: Map<String, Value> = self.body.to_json();
        let mut put = |key: &str, value: Value| json.insert(key.into(), value);
        put("architectures", json!([ARCHITECTURE]));
        put("layer_types", json!(["full_attention"]));
        put("max_window_layers", json!(1));
        put("draft_num_hidden_layers", json!(1));
        put("num_target_layers", json!(self.num_target_layers));
        put("target_layer_ids", json!(self.target_layer_ids));
        put("ttt_length", json!(self.ttt_length));
        put("step_loss_decay", json!(self.step_loss_decay));
        if let Some(size) = self.draft_vocab_size {
            put("draft_vocab_size", json!(size));
        }
        if let Some(name) = &self.target_model_name_or_path {
            put("target_model_name_or_path", json!(name));
        }
        if self.norm_before_residual {
            put("norm_before_residual", json!(true));
        }
        if !self.body.qk_norm {
            put("qk_norm", json!(false));
        }
        Value::Object(json)
    }

    /// Shape of the decoder layer for a target.
    pub fn body_of(target: &TargetConfig) -> TargetConfig {
        DraftConfig::body_of(target, 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn json() -> Value {
        json!({
            "architectures": ["Qwen3Eagle3Model"], "model_type": "qwen3", "hidden_size": 8, "intermediate_size": 16,
            "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "vocab_size": 20,
            "max_position_embeddings": 64, "num_target_layers": 4, "target_layer_ids": [-1, 2], "ttt_length": 3,
            "draft_num_hidden_layers": 1, "rope_theta": 10000.0, "eos_token_id": 2,
        })
    }

    fn read(json: &Value) -> Result<Eagle3Config> {
        Eagle3Config::from_json(Path::new("config.json"), json)
    }

    #[test]
    fn configs_come_back_from_json() {
        let mut config = read(&json()).unwrap();
        assert!(config.body.qk_norm && !config.norm_before_residual);
        assert_eq!((config.step_loss_decay, config.draft_vocab()), (0.8, 20));
        assert_eq!(read(&config.to_json()).unwrap(), config);
        config.draft_vocab_size = Some(7);
        config.norm_before_residual = true;
        config.body.qk_norm = false;
        config.step_loss_decay = 1.0;
        config.target_model_name_or_path = Some("org/target".into());
        assert_eq!(read(&config.to_json()).unwrap(), config);
    }

    #[test]
    fn what_cannot_be_is_refused_by_name() {
        for (key, value) in [
            ("architectures", json!(["Qwen3DSparkModel"])),
            ("num_hidden_layers", json!(2)),
            ("draft_num_hidden_layers", json!(2)),
            ("ttt_length", Value::Null),
            ("ttt_length", json!(65)),
            ("step_loss_decay", json!(1.5)),
            ("target_layer_ids", json!([3])),
            ("target_layer_ids", json!([0, 0])),
            ("draft_vocab_size", json!(21)),
            ("layer_types", json!(["sliding_attention"])),
        ] {
            let mut changed = json();
            changed[key] = value;
            let text = read(&changed).unwrap_err().to_string();
            assert!(text.contains(key.trim_end_matches('s')), "{key}: {text}");
        }
    }
}
