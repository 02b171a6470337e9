//! Reader of GGUF files: metadata, tensor directory, vocabulary and dequantised tensors over a memory map.
//!
//! A file from outside is parsed as hostile. Each length is checked against what is left of the file before anything is
//! allocated, nesting and array sizes are bounded, and every tensor's bytes lie inside the file without overlap, so that a
//! damaged file gives an [`Error::Corrupt`] with its position and never a panic. Called by [`crate::config`] and
//! [`crate::weights`].

mod parser;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use candle_core::quantized::{GgmlDType, QStorage, QTensor};
use candle_core::{Device, Tensor};
use memmap2::Mmap;

use crate::error::{Error, Result};

/// Tensor types that [`Gguf::tensor_f32`] reads.
const SUPPORTED_TYPES: &str = "F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 or Q2_K to Q6_K";

/// A metadata value.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// Any unsigned integer, 8 to 64 bits.
    Unsigned(u64),
    /// Any signed integer, 8 to 64 bits.
    Signed(i64),
    /// 32-bit float.
    F32(f32),
    /// 64-bit float.
    F64(f64),
    /// Boolean.
    Bool(bool),
    /// UTF-8 text.
    String(String),
    /// Values of one type.
    Array(Vec<Value>),
}

impl Value {
    /// Any number.
    pub(crate) fn as_f64(&self) -> Option<f64> {
        match *self {
            Self::Unsigned(v) => Some(v as f64),
            Self::Signed(v) => Some(v as f64),
            Self::F32(v) => Some(v.into()),
            Self::F64(v) => Some(v),
            Self::Bool(_) | Self::String(_) | Self::Array(_) => None,
        }
    }

    pub(crate) fn describe(&self) -> String {
        match self {
            Self::Unsigned(v) => v.to_string(),
            Self::Signed(v) => v.to_string(),
            Self::F32(v) => v.to_string(),
            Self::F64(v) => v.to_string(),
            Self::Bool(v) => v.to_string(),
            Self::String(v) if v.chars().count() <= 40 => format!("`{}`", v.escape_debug()),
            Self::String(v) => format!("a string of {} bytes", v.len()),
            Self::Array(v) => format!("an array of {} values", v.len()),
        }
    }

    fn as_u32(&self) -> Option<u32> {
        match *self {
            Self::Unsigned(v) => v.try_into().ok(),
            Self::Signed(v) => v.try_into().ok(),
            _ => None,
        }
    }
}

/// Where a tensor lies and what it is.
#[derive(Debug, Clone)]
pub struct TensorInfo {
    /// Row-major shape, slowest dimension first (the file lists it the other way round).
    pub shape: Vec<usize>,
    /// Block type; `None` when [`Gguf::tensor_f32`] cannot read it.
    pub dtype: Option<GgmlDType>,
    /// The file's number for the type.
    pub type_id: u32,
    range: Range<usize>,
}

/// What a tokenizer can be built from, as the file holds it.
#[derive(Debug, Clone, PartialEq)]
pub struct Vocabulary {
    /// `tokenizer.ggml.model`: `gpt2` is byte-level BPE, `llama` is SentencePiece.
    pub model: String,
    /// `tokenizer.ggml.pre`: name of the pre-tokenizer.
    pub pre: Option<String>,
    /// Token texts; the index is the id.
    pub tokens: Vec<String>,
    /// One per token: 1 normal, 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte. Empty when absent.
    pub token_types: Vec<i32>,
    /// One per token, SentencePiece only. Empty when absent.
    pub scores: Vec<f32>,
    /// Merge rules of BPE, best first, the two parts separated by a space.
    pub merges: Vec<String>,
    /// Jinja source of the chat template.
    pub chat_template: Option<String>,
    /// Begin of sequence.
    pub bos: Option<u32>,
    /// End of sequence.
    pub eos: Option<u32>,
    /// End of turn, where it differs from `eos`.
    pub eot: Option<u32>,
    /// Padding.
    pub pad: Option<u32>,
    /// Unknown token.
    pub unk: Option<u32>,
    /// Whether `bos` is put before a text; `None` when the file does not say.
    pub add_bos: Option<bool>,
}

/// An open GGUF file.
#[derive(Debug)]
pub struct Gguf {
    path: PathBuf,
    map: Mmap,
    metadata: BTreeMap<String, Value>,
    tensors: BTreeMap<String, TensorInfo>,
}

impl Gguf {
    /// Maps `path` and reads its directory; tensor data stays on disk until asked for.
    ///
    /// # Errors
    /// The file cannot be opened or mapped, is corrupt, or has a version other than 2 and 3 (little endian).
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let map = map_file(path)?;
        let (metadata, tensors) = parser::directory(path, &map)?;
        Ok(Self { path: path.into(), metadata, tensors, map })
    }

    /// The file this was read from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Metadata value of `key`.
    pub fn metadata(&self, key: &str) -> Option<&Value> {
        self.metadata.get(key)
    }

    /// All metadata, sorted by key.
    pub fn all_metadata(&self) -> &BTreeMap<String, Value> {
        &self.metadata
    }

    /// Names of all tensors, sorted.
    pub fn tensor_names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Shape and type of a tensor.
    pub fn tensor_info(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(name)
    }

    /// Whether most weights of the layers are in four bits.
    pub fn is_four_bit(&self) -> bool {
        let weights = |counts: fn(&TensorInfo) -> bool| -> usize {
            let layers = self.tensors.iter().filter(|(name, info)| name.starts_with("blk.") && counts(info));
            layers.map(|(_, info)| info.shape.iter().product::<usize>()).sum()
        };
        let four = weights(|info| matches!(info.dtype, Some(GgmlDType::Q4_0 | GgmlDType::Q4_1 | GgmlDType::Q4K)));
        2 * four > weights(|_| true)
    }

    /// Stored bytes of a tensor, in blocks of its type.
    pub fn tensor_bytes(&self, name: &str) -> Option<&[u8]> {
        self.tensors.get(name).map(|info| &self.map[info.range.clone()])
    }

    /// The tensor `name` as f32 on the CPU, dequantised.
    ///
    /// # Errors
    /// There is no such tensor, or its type is not read.
    pub fn tensor_f32(&self, name: &str) -> Result<Tensor> {
        let info = self.tensors.get(name).ok_or_else(|| Error::TensorMissing {
            path: self.path.clone(),
            tensor: name.into(),
            expected: Vec::new(),
        })?;
        let dtype = info.dtype.ok_or_else(|| Error::TensorDtype {
            path: self.path.clone(),
            tensor: name.into(),
            found: format!("GGML type {}", info.type_id),
            expected: SUPPORTED_TYPES,
        })?;
        let bytes = &self.map[info.range.clone()];
        QStorage::from_data(bytes.into(), &Device::Cpu, dtype)
            .and_then(|storage| QTensor::new(storage, info.shape.as_slice())?.dequantize(&Device::Cpu))
            .map_err(Error::tensor(format!("cannot dequantise tensor `{name}` of `{}`", self.path.display())))
    }

    /// An integer that fits 32 bits; `None` when the key is absent.
    ///
    /// # Errors
    /// The value is of another type or out of range.
    pub fn u32(&self, key: &str) -> Result<Option<u32>> {
        self.typed(key, "an integer of 32 bits", Value::as_u32)
    }

    /// A float of 32 or 64 bits; a 32-bit one becomes the shortest decimal that it stands for, so that 1e-5 stays 1e-5.
    ///
    /// # Errors
    /// The value is of another type.
    pub fn f64(&self, key: &str) -> Result<Option<f64>> {
        self.typed(key, "a float", |value| match *value {
            Value::F32(v) => v.to_string().parse().ok(),
            Value::F64(v) => Some(v),
            _ => None,
        })
    }

    /// A boolean.
    ///
    /// # Errors
    /// The value is of another type.
    pub fn bool(&self, key: &str) -> Result<Option<bool>> {
        self.typed(key, "a boolean", |value| if let Value::Bool(v) = *value { Some(v) } else { None })
    }

    /// A string.
    ///
    /// # Errors
    /// The value is of another type.
    pub fn string(&self, key: &str) -> Result<Option<&str>> {
        self.typed(key, "a string", |value| if let Value::String(v) = value { Some(v.as_str()) } else { None })
    }

    /// An array whose every element `convert` accepts; empty when the key is absent.
    fn array<'a, T>(&'a self, key: &str, expected: &str, convert: impl Fn(&'a Value) -> Option<T>) -> Result<Vec<T>> {
        let values = self.typed(key, expected, |value| match value {
            Value::Array(values) => values.iter().map(convert).collect::<Option<Vec<_>>>(),
            _ => None,
        })?;
        Ok(values.unwrap_or_default())
    }

    fn typed<'a, T>(
        &'a self,
        key: &str,
        expected: &str,
        convert: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>> {
        let Some(value) = self.metadata.get(key) else { return Ok(None) };
        convert(value).map(Some).ok_or_else(|| Error::field(&self.path, key, value.describe(), expected))
    }

    /// For a required key: turns `None` into an error that names it.
    pub(crate) fn required<T>(&self, key: &str, value: Option<T>) -> Result<T> {
        value.ok_or_else(|| Error::FieldMissing { path: self.path.clone(), field: key.into() })
    }

    /// The vocabulary and chat template.
    ///
    /// # Errors
    /// A key is missing, of a wrong type, or contradicts the number of tokens.
    pub fn vocabulary(&self) -> Result<Vocabulary> {
        const TOKENS: &str = "tokenizer.ggml.tokens";
        let text = |value: &Value| if let Value::String(v) = value { Some(v.clone()) } else { None };
        let int = |value: &Value| match *value {
            Value::Signed(v) => v.try_into().ok(),
            Value::Unsigned(v) => v.try_into().ok(),
            _ => None,
        };
        let float = |value: &Value| if let Value::F32(v) = *value { Some(v) } else { None };

        let model = self.required("tokenizer.ggml.model", self.string("tokenizer.ggml.model")?)?.to_string();
        self.required(TOKENS, self.metadata(TOKENS))?;
        let tokens = self.array(TOKENS, "an array of strings", text)?;
        let token_types = self.array("tokenizer.ggml.token_type", "an array of integers", int)?;
        let scores = self.array("tokenizer.ggml.scores", "an array of floats", float)?;
        for (key, len) in [("tokenizer.ggml.token_type", token_types.len()), ("tokenizer.ggml.scores", scores.len())] {
            if len != 0 && len != tokens.len() {
                let expected = format!("{} values, one per token", tokens.len());
                return Err(Error::field(&self.path, key, format!("an array of {len} values"), expected));
            }
        }
        let id = |name: &str| -> Result<Option<u32>> {
            let key = format!("tokenizer.ggml.{name}_token_id");
            let id = self.u32(&key)?;
            match id {
                Some(id) if id as usize >= tokens.len() => {
                    Err(Error::field(&self.path, key, id, format!("below the {} tokens", tokens.len())))
                }
                _ => Ok(id),
            }
        };
        Ok(Vocabulary {
            model,
            pre: self.string("tokenizer.ggml.pre")?.map(Into::into),
            token_types,
            scores,
            merges: self.array("tokenizer.ggml.merges", "an array of strings", text)?,
            chat_template: self.string("tokenizer.chat_template")?.map(Into::into),
            bos: id("bos")?,
            eos: id("eos")?,
            eot: id("eot")?,
            pad: id("padding")?,
            unk: id("unknown")?,
            add_bos: self.bool("tokenizer.ggml.add_bos_token")?,
            tokens,
        })
    }
}

/// Maps a file for reading.
pub(crate) fn map_file(path: &Path) -> Result<Mmap> {
    let file = fs_err::File::open(path)?;
    // SAFETY: the map is only read, as plain bytes. A file that another process changes meanwhile can alter those bytes, as with
    // any reader of weights; ranges were checked against the mapped length, which stays fixed.
    let map = unsafe { Mmap::map(file.file()) };
    Ok(map.map_err(|source| std::io::Error::new(source.kind(), format!("cannot map `{}`: {source}", path.display())))?)
}
