//! YaRN (Peng et al. 2023, "YaRN: Efficient Context Window Extension of Large Language Models"): low frequencies are stretched by
//! the factor, high ones kept, with a linear ramp over the pairs between, and the rotation is lengthened.
//!
//! The ramp runs between the pairs that turn `beta_fast` and `beta_slow` times over the context of pre-training, counted in pairs as
//! Hugging Face and llama.cpp do. `factor` is what the file says; the ratio of the context lengths is not used for it.

use std::f64::consts::TAU;
use std::path::Path;

use serde_json::{Map, Value, json};

use super::Fields;
use crate::error::{Error, Result};
use crate::gguf::Gguf;

/// Width of a ramp between two pairs that are one, which would have none.
const NARROWEST_RAMP: f64 = 0.001;
/// Turns above which a frequency is kept, and below which it is stretched in full, where a file does not say.
const BETA_FAST: f64 = 32.0;
const BETA_SLOW: f64 = 1.0;

/// Parameters of YaRN.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct YarnScaling {
    /// Divisor of the lowest frequencies.
    pub factor: f64,
    /// Context length of pre-training, in tokens.
    pub original_max_position_embeddings: usize,
    /// Pairs that turn more often over that length keep their frequency.
    pub beta_fast: f64,
    /// Pairs that turn less often are stretched in full.
    pub beta_slow: f64,
    /// Whether the ends of the ramp are rounded outwards to whole pairs.
    pub truncate: bool,
    /// What cosines and sines are multiplied by.
    pub attention_factor: f64,
}

/// How much longer the rotation is for a context stretched by `factor`: the paper's 0.1 ln(s) + 1, with a weight.
fn magnitude(factor: f64, weight: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * weight * factor.ln() + 1.0 }
}

impl YarnScaling {
    /// Keys that a file may state besides those of every rotary embedding.
    pub(super) const KEYS: [&'static str; 8] = [
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "truncate",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
    ];

    /// Reads the parameters; `trained` is the context length of pre-training where they do not state it.
    pub(super) fn from_fields(fields: &Fields, trained: Option<usize>) -> Result<Self> {
        let factor = fields.required("factor", fields.positive("factor")?)?;
        let original = match fields.optional_size("original_max_position_embeddings")? {
            Some(original) => original,
            None => fields.required("original_max_position_embeddings", trained)?,
        };
        let weights = (fields.positive("mscale")?, fields.positive("mscale_all_dim")?);
        let derived = match weights {
            (Some(weight), Some(all)) => magnitude(factor, weight) / magnitude(factor, all),
            (None, None) => magnitude(factor, 1.0),
            // One of them alone is dropped by some programs and used by others.
            (Some(_), None) => return Err(fields.missing("mscale_all_dim")),
            (None, Some(_)) => return Err(fields.missing("mscale")),
        };
        let stated = fields.positive("attention_factor")?;
        if let Some(stated) = stated.filter(|stated| weights.0.is_some() && (stated - derived).abs() > 1e-6) {
            let value = format!("{stated}, {derived} by `mscale` and `mscale_all_dim`");
            return Err(fields.unsupported("attention_factor", value, "one of the two"));
        }
        Ok(Self {
            factor,
            original_max_position_embeddings: original,
            beta_fast: fields.positive("beta_fast")?.unwrap_or(BETA_FAST),
            beta_slow: fields.positive("beta_slow")?.unwrap_or(BETA_SLOW),
            truncate: fields.flag("truncate", true)?,
            attention_factor: stated.unwrap_or(derived),
        })
    }

    /// Reads `<arch>.rope.scaling.*`; without a length of pre-training it is the file's context length.
    pub(super) fn from_gguf(gguf: &Gguf, arch: &str, factor: f64) -> Result<Self> {
        let key = |name: &str| format!("{arch}.rope.scaling.{name}");
        let number = |name: &str| gguf.f64(&key(name));
        for (name, neutral) in [("yarn_ext_factor", 1.0), ("yarn_log_multiplier", 0.0)] {
            if let Some(found) = number(name)?.filter(|&found| found != neutral) {
                let supported = if neutral == 1.0 { "1" } else { "0" };
                let (path, found) = (gguf.path().into(), found.to_string());
                return Err(Error::Unsupported { path, field: key(name), found, supported });
            }
        }
        let context = format!("{arch}.context_length");
        let original = match gguf.u32(&key("original_context_length"))? {
            Some(original) => original,
            None => gguf.required(&context, gguf.u32(&context)?)?,
        };
        let multiplier = number("attn_factor")?.unwrap_or(1.0) * number("yarn_attn_factor")?.unwrap_or(1.0);
        Ok(Self {
            factor,
            original_max_position_embeddings: original as usize,
            beta_fast: number("yarn_beta_fast")?.unwrap_or(BETA_FAST),
            beta_slow: number("yarn_beta_slow")?.unwrap_or(BETA_SLOW),
            truncate: true,
            attention_factor: multiplier * magnitude(factor, 1.0),
        })
    }

    /// Angle per position of each of the `dim / 2` pairs, in radians.
    pub(super) fn frequencies(self, theta: f64, dim: usize) -> impl Iterator<Item = f64> {
        let (low, high) = self.ramp(theta, dim);
        (0..dim / 2).map(move |pair| {
            let frequency = theta.powf(-2.0 * pair as f64 / dim as f64);
            let stretched = ((pair as f64 - low) / (high - low)).clamp(0.0, 1.0);
            frequency * (stretched / self.factor + 1.0 - stretched)
        })
    }

    /// The pairs between which the ramp runs.
    fn ramp(self, theta: f64, dim: usize) -> (f64, f64) {
        let length = self.original_max_position_embeddings as f64;
        let pair_of = |turns: f64| dim as f64 * (length / (turns * TAU)).ln() / (2.0 * theta.ln());
        let (mut low, mut high) = (pair_of(self.beta_fast), pair_of(self.beta_slow));
        if self.truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        let (low, high) = (low.max(0.0), high.min(dim as f64 - 1.0));
        (low, if high == low { low + NARROWEST_RAMP } else { high })
    }

    /// Checks what the parameters must satisfy for a rotation of `dim` dimensions.
    pub(super) fn validate(self, path: &Path, theta: f64, dim: usize) -> Result<()> {
        let check = |ok: bool, field: &str, found: f64, expected: &str| {
            if ok { Ok(()) } else { Err(Error::field(path, field, found, expected)) }
        };
        check(self.factor.is_finite() && self.factor >= 1.0, "factor", self.factor, "at least 1")?;
        let attention = self.attention_factor;
        let fits = attention > 0.0 && attention < f64::from(f32::MAX);
        check(fits, "attention_factor", attention, "above 0, in single precision")?;
        check(self.beta_slow > 0.0 && self.beta_slow.is_finite(), "beta_slow", self.beta_slow, "above 0")?;
        let expected = format!("above beta_slow {}", self.beta_slow);
        let above = self.beta_fast.is_finite() && self.beta_fast > self.beta_slow;
        check(above, "beta_fast", self.beta_fast, &expected)?;
        let (low, high) = self.ramp(theta, dim);
        let original = self.original_max_position_embeddings as f64;
        let expected = "a length over which some pair turns at least `beta_slow` times";
        check(high > low, "original_max_position_embeddings", original, expected)
    }

    /// Adds the parameters to those of a `config.json`.
    pub(super) fn write(self, parameters: &mut Map<String, Value>) {
        let mut put = |key: &str, value: Value| parameters.insert(key.into(), value);
        put("factor", json!(self.factor));
        put("original_max_position_embeddings", json!(self.original_max_position_embeddings));
        put("beta_fast", json!(self.beta_fast));
        put("beta_slow", json!(self.beta_slow));
        if !self.truncate {
            put("truncate", json!(false));
        }
        // Engines that do not know the key have the paper's value.
        if self.attention_factor != magnitude(self.factor, 1.0) {
            put("attention_factor", json!(self.attention_factor));
        }
    }
}
