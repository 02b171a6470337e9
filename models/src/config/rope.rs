//! Parameters of the rotary position embedding and the frequencies that follow from them.

mod yarn;

use std::f64::consts::TAU;
use std::path::Path;

use candle_core::DType;
use serde_json::{Map, Value, json};

pub use self::yarn::YarnScaling;
use super::fields::Fields;
use crate::error::{Error, Result};
use crate::gguf::Gguf;

/// Base of the rotary frequencies where a model does not state one.
const DEFAULT_THETA: f64 = 10_000.0;
const SUPPORTED_TYPES: &str = "`default`, `linear`, `llama3` and `yarn`";

/// Rotary position embedding, half-split: dimension i of the first half turns together with dimension i of the second half.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeConfig {
    /// Base of the frequencies θ^(−2i/d).
    pub theta: f64,
    /// Share of the head that is rotated, above 0 and at most 1; the rest passes through.
    pub partial_rotary_factor: f64,
    /// Change of the frequencies for contexts longer than in pre-training.
    pub scaling: RopeScaling,
}

/// How the frequencies are stretched.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// All by the same factor.
    Linear {
        /// Divisor of each frequency.
        factor: f64,
    },
    /// Llama 3.1: long wavelengths by the factor, short ones not at all, with a linear blend between.
    Llama3 {
        /// Divisor of the lowest frequencies.
        factor: f64,
        /// Wavelengths above `original_max_position_embeddings / low_freq_factor` are stretched in full.
        low_freq_factor: f64,
        /// Wavelengths below `original_max_position_embeddings / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// Context length of pre-training, in tokens.
        original_max_position_embeddings: usize,
    },
    /// YaRN: as Llama 3.1 with a blend over the pairs, and a longer rotation.
    Yarn(YarnScaling),
}

impl RopeScaling {
    /// Spelling in `config.json`.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "default",
            Self::Linear { .. } => "linear",
            Self::Llama3 { .. } => "llama3",
            Self::Yarn(_) => "yarn",
        }
    }

    /// What a frequency is divided by, where that follows from it alone.
    fn divisor(self, frequency: f64) -> f64 {
        match self {
            Self::None | Self::Yarn(_) => 1.0,
            Self::Linear { factor } => factor,
            Self::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings } => {
                let turns = original_max_position_embeddings as f64 * frequency / TAU;
                let kept = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0);
                1.0 / (kept + (1.0 - kept) / factor)
            }
        }
    }
}

impl RopeConfig {
    /// Number of rotated dimensions of a head.
    pub fn rotary_dim(&self, head_dim: usize) -> usize {
        (head_dim as f64 * self.partial_rotary_factor) as usize
    }

    /// Angle per position of each rotated pair, in radians, computed in f64: `rotary_dim / 2` values.
    pub fn inverse_frequencies(&self, head_dim: usize) -> Vec<f32> {
        let dim = self.rotary_dim(head_dim);
        if let RopeScaling::Yarn(yarn) = self.scaling {
            return yarn.frequencies(self.theta, dim).map(|frequency| frequency as f32).collect();
        }
        self.frequencies(dim).map(|frequency| (frequency / self.scaling.divisor(frequency)) as f32).collect()
    }

    /// What cosines and sines are multiplied by.
    pub fn attention_factor(&self) -> f64 {
        if let RopeScaling::Yarn(yarn) = self.scaling { yarn.attention_factor } else { 1.0 }
    }

    fn frequencies(&self, dim: usize) -> impl Iterator<Item = f64> {
        (0..dim / 2).map(move |pair| self.theta.powf(-2.0 * pair as f64 / dim as f64))
    }

    /// Reads `rope_parameters` (new) and `rope_theta` with `rope_scaling` (old). Several may stand in one file, as long as they say the
    /// same.
    pub(super) fn from_fields(fields: &Fields) -> Result<Self> {
        let new = fields.object("rope_parameters")?;
        let old = fields.object("rope_scaling")?;
        let number = |name: &str| -> Result<Option<f64>> {
            let mut found = None;
            for place in [Some(*fields), new, old].into_iter().flatten() {
                let Some(number) = place.positive(name)? else { continue };
                match found {
                    Some((other, first)) if first != number => return Err(place.disagrees(name, &other, name)),
                    _ => found = Some((place, number)),
                }
            }
            Ok(found.map(|(_, number)| number))
        };
        const ORIGINAL: &str = "original_max_position_embeddings";
        let trained = match fields.optional_size(ORIGINAL)? {
            Some(original) => Some(original),
            None => fields.optional_size("max_position_embeddings")?,
        };
        let scaling = |parameters: Option<Fields<'_>>| {
            let read = |parameters: Fields<'_>| {
                fields.or_in(Some(parameters), ORIGINAL)?;
                scaling_from_fields(&parameters, trained)
            };
            parameters.map(read).transpose()
        };
        let scaling = match (scaling(new)?.flatten(), scaling(old)?.flatten()) {
            (Some(new), Some(old)) if new != old => {
                return Err(fields.disagrees("rope_scaling", fields, "rope_parameters"));
            }
            (new, old) => new.or(old).unwrap_or(RopeScaling::None),
        };
        Ok(Self {
            theta: number("rope_theta")?.unwrap_or(DEFAULT_THETA),
            partial_rotary_factor: number("partial_rotary_factor")?.unwrap_or(1.0),
            scaling,
        })
    }

    /// Reads `<arch>.rope.*` and the tensor `rope_freqs.weight`, which holds the divisors of Llama 3 scaling.
    pub(super) fn from_gguf(gguf: &Gguf, arch: &str, head_dim: usize) -> Result<Self> {
        let key = |name: &str| format!("{arch}.rope.{name}");
        let rotary_dim = gguf.u32(&key("dimension_count"))?.map_or(head_dim, |n| n as usize);
        if rotary_dim == 0 || rotary_dim > head_dim {
            return Err(Error::field(gguf.path(), key("dimension_count"), rotary_dim, format!("1 to {head_dim}")));
        }
        let (factor, linear) = (gguf.f64(&key("scaling.factor"))?, gguf.f64(&key("scale_linear"))?);
        let disagree = |left: &str, left_value: String, right: &str, right_value: String| {
            let path = gguf.path().into();
            Err(Error::FieldsDisagree { path, left: key(left), left_value, right: key(right), right_value })
        };
        if let (Some(factor), Some(linear)) = (factor, linear)
            && factor != linear
        {
            return disagree("scaling.factor", factor.to_string(), "scale_linear", linear.to_string());
        }
        let scaling = match (gguf.string(&key("scaling.type"))?, factor.or(linear)) {
            (Some("none"), Some(factor)) if factor != 1.0 => {
                return disagree("scaling.type", "none".into(), "scaling.factor", factor.to_string());
            }
            (Some("none"), _) | (None, None) => RopeScaling::None,
            (Some("linear") | None, Some(factor)) => RopeScaling::Linear { factor },
            (Some("yarn"), Some(factor)) => RopeScaling::Yarn(YarnScaling::from_gguf(gguf, arch, factor)?),
            (Some("linear" | "yarn"), None) => gguf.required(&key("scaling.factor"), None)?,
            (Some(other), _) => {
                return Err(Error::Unsupported {
                    path: gguf.path().into(),
                    field: key("scaling.type"),
                    found: other.into(),
                    supported: "`none`, `linear` and `yarn`",
                });
            }
        };
        let mut config = Self {
            theta: gguf.f64(&key("freq_base"))?.unwrap_or(DEFAULT_THETA),
            partial_rotary_factor: rotary_dim as f64 / head_dim as f64,
            scaling,
        };
        if gguf.tensor_info("rope_freqs.weight").is_some() {
            config.scaling = config.llama3_from_divisors(gguf, rotary_dim)?;
        }
        Ok(config)
    }

    /// Finds the Llama 3 parameters whose divisors the file lists. All published models use 1, 4 and 8192 besides the factor.
    fn llama3_from_divisors(&self, gguf: &Gguf, rotary_dim: usize) -> Result<RopeScaling> {
        let tensor = gguf.tensor_f32("rope_freqs.weight")?;
        let divisors = tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
        let scaling = RopeScaling::Llama3 {
            factor: divisors.iter().copied().fold(1.0, f32::max).into(),
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 8192,
        };
        let explained = self.scaling == RopeScaling::None
            && divisors.len() == rotary_dim / 2
            && self.frequencies(rotary_dim).zip(&divisors).all(|(frequency, &divisor)| {
                let expected = scaling.divisor(frequency);
                (expected - f64::from(divisor)).abs() <= 1e-3 * expected
            });
        if explained {
            return Ok(scaling);
        }
        Err(Error::Unsupported {
            path: gguf.path().into(),
            field: "tensor".into(),
            found: "rope_freqs.weight".into(),
            supported: "divisors of Llama 3 scaling with 1, 4 and 8192",
        })
    }

    pub(super) fn validate(&self, path: &Path, head_dim: usize) -> Result<()> {
        let check = |ok: bool, field: &str, found: f64, expected: &str| {
            if ok { Ok(()) } else { Err(Error::field(path, field, found, expected)) }
        };
        check(self.theta.is_finite() && self.theta > 1.0, "rope_theta", self.theta, "a number above 1")?;
        let share = self.partial_rotary_factor;
        check(share > 0.0 && share <= 1.0, "partial_rotary_factor", share, "above 0 and at most 1")?;
        let dim = self.rotary_dim(head_dim);
        let even = format!("an even number of rotated dimensions out of {head_dim}, not {dim}");
        check(dim > 0 && dim.is_multiple_of(2), "partial_rotary_factor", share, &even)?;
        match self.scaling {
            RopeScaling::None => Ok(()),
            RopeScaling::Linear { factor } => {
                let is_usable = factor.is_finite() && factor > 0.0 && (1.0 / factor) < f64::from(f32::MAX);
                check(is_usable, "factor", factor, "above 0, with an inverse in single precision")
            }
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, .. } => {
                check(factor.is_finite() && factor >= 1.0, "factor", factor, "at least 1")?;
                let expected = format!("above low_freq_factor {low_freq_factor}");
                check(high_freq_factor > low_freq_factor, "high_freq_factor", high_freq_factor, &expected)
            }
            RopeScaling::Yarn(yarn) => yarn.validate(path, self.theta, dim),
        }
    }

    /// Writes both spellings: `rope_parameters`, and `rope_theta` with `rope_scaling` for older readers.
    pub(super) fn write(&self, json: &mut Map<String, Value>) {
        let mut parameters = Map::new();
        parameters.insert("rope_type".into(), json!(self.scaling.name()));
        match self.scaling {
            RopeScaling::None => {}
            RopeScaling::Linear { factor } => {
                parameters.insert("factor".into(), json!(factor));
            }
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings } => {
                parameters.insert("factor".into(), json!(factor));
                parameters.insert("low_freq_factor".into(), json!(low_freq_factor));
                parameters.insert("high_freq_factor".into(), json!(high_freq_factor));
                let original = json!(original_max_position_embeddings);
                parameters.insert("original_max_position_embeddings".into(), original);
            }
            RopeScaling::Yarn(yarn) => yarn.write(&mut parameters),
        }
        let old = if self.scaling == RopeScaling::None { Value::Null } else { json!(parameters) };
        parameters.insert("rope_theta".into(), json!(self.theta));
        json.insert("rope_theta".into(), json!(self.theta));
        if self.partial_rotary_factor != 1.0 {
            parameters.insert("partial_rotary_factor".into(), json!(self.partial_rotary_factor));
            json.insert("partial_rotary_factor".into(), json!(self.partial_rotary_factor));
        }
        json.insert("rope_scaling".into(), old);
        json.insert("rope_parameters".into(), json!(parameters));
    }
}

/// The scaling that an object of parameters states; `None` where it says nothing of it. `trained` is the context length in the rest of
/// the file.
fn scaling_from_fields(parameters: &Fields, trained: Option<usize>) -> Result<Option<RopeScaling>> {
    let (new, old) = (parameters.optional_string("rope_type")?, parameters.optional_string("type")?);
    if new.is_some() && old.is_some() && new != old {
        return Err(parameters.disagrees("rope_type", parameters, "type"));
    }
    let kind = new.or(old);
    let number = |name: &str| parameters.required(name, parameters.positive(name)?);
    let (scaling, keys): (_, &[&str]) = match kind.unwrap_or("default") {
        "default" => (RopeScaling::None, &[]),
        "linear" => (RopeScaling::Linear { factor: number("factor")? }, &["factor"]),
        "llama3" => (
            RopeScaling::Llama3 {
                factor: number("factor")?,
                low_freq_factor: number("low_freq_factor")?,
                high_freq_factor: number("high_freq_factor")?,
                original_max_position_embeddings: parameters.size("original_max_position_embeddings")?,
            },
            &["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"],
        ),
        "yarn" => (RopeScaling::Yarn(YarnScaling::from_fields(parameters, trained)?), &YarnScaling::KEYS),
        other => return Err(parameters.unsupported("rope_type", other, SUPPORTED_TYPES)),
    };
    // A parameter that the type does not know would change the frequencies elsewhere; it must not be dropped.
    let common = ["rope_type", "type", "rope_theta", "partial_rotary_factor"];
    match parameters.keys().find(|key| !common.contains(key) && !keys.contains(key)) {
        Some(key) => {
            let found = format!("{} with {key}", scaling.name());
            Err(parameters.unsupported("rope_type", found, SUPPORTED_TYPES))
        }
        None => Ok(kind.map(|_| scaling)),
    }
}
