//! Weights of a checkpoint under their Hugging Face names, whatever file they come from, loaded strictly.
//!
//! A model asks for each tensor with the shape that its config implies ([`Weights::get`]) and at the end states that it is done
//! ([`Weights::finish`]), so that a missing, misshapen, mistyped or unused tensor is an error that names it. Called by the target
//! families, the drafters and [`crate::checkpoint`].

mod assemble;
mod finite;

use std::collections::BTreeMap;
use std::ops::{Deref, Range};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::{DType, Device, Tensor};
use memmap2::Mmap;
use safetensors::tensor::TensorInfo;
use safetensors::{Dtype, SafeTensors};

pub(crate) use self::assemble::Part;
use crate::config::{Family, TargetConfig, read_json};
use crate::error::{Error, Result};
use crate::gguf::{Gguf, map_file};

/// File of an unsharded checkpoint.
pub const SINGLE_FILE: &str = "model.safetensors";
/// Index of a sharded checkpoint.
pub const INDEX_FILE: &str = "model.safetensors.index.json";

/// Buffers that some writers store although they follow from the config.
const DERIVED_BUFFERS: [&str; 2] = ["rotary_emb.inv_freq", "rope_freqs.weight"];
/// Windows per tensor and bytes per window that [`Weights::fingerprint`] reads.
const SAMPLE_WINDOWS: usize = 16;
const SAMPLE_BYTES: usize = 256;

/// An open checkpoint.
#[derive(Debug)]
pub struct Weights {
    path: PathBuf,
    dtype: DType,
    device: Device,
    entries: BTreeMap<String, Entry>,
}

#[derive(Debug)]
struct Entry {
    shape: Vec<usize>,
    place: Place,
    used: AtomicBool,
    /// Whether the values are known to be finite.
    is_checked: AtomicBool,
}

#[derive(Debug, Clone)]
enum Place {
    Shard {
        bytes: Arc<Bytes>,
        range: Range<usize>,
        dtype: Dtype,
        /// Name in the file, and the row of it that `range` begins with.
        name: String,
        first_row: usize,
    },
    Gguf {
        file: Arc<Gguf>,
        name: String,
        /// Number of heads whose rows stand in interleaved order.
        interleaved_heads: Option<usize>,
    },
}

/// A safetensors file: mapped, or one that was never written.
#[derive(Debug)]
struct Bytes {
    path: PathBuf,
    content: Content,
}

#[derive(Debug)]
enum Content {
    File(Mmap),
    Memory(Vec<u8>),
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.content {
            Content::File(map) => map,
            Content::Memory(bytes) => bytes,
        }
    }
}

impl Weights {
    /// Opens a folder in Hugging Face layout or a GGUF file; tensors are converted to `dtype` on `device` when asked for.
    ///
    /// # Errors
    /// As [`from_folder`](Self::from_folder) and [`from_gguf`](Self::from_gguf).
    pub fn open(path: impl AsRef<Path>, dtype: DType, device: &Device) -> Result<Self> {
        let path = path.as_ref();
        if path.is_dir() {
            Self::from_folder(path, dtype, device)
        } else {
            Self::from_gguf(Arc::new(Gguf::open(path)?), dtype, device)
        }
    }

    /// Maps `model.safetensors`, or the shards that `model.safetensors.index.json` lists.
    ///
    /// # Errors
    /// There is neither, a file is damaged, or the index and its shards disagree.
    pub fn from_folder(folder: impl AsRef<Path>, dtype: DType, device: &Device) -> Result<Self> {
        let folder = folder.as_ref();
        let (files, index) = if folder.join(SINGLE_FILE).is_file() {
            (vec![SINGLE_FILE.to_string()], None)
        } else if folder.join(INDEX_FILE).is_file() {
            let index = read_index(&folder.join(INDEX_FILE))?;
            let mut files: Vec<_> = index.values().cloned().collect();
            files.sort_unstable();
            files.dedup();
            (files, Some(index))
        } else {
            let expected = "a folder with model.safetensors or model.safetensors.index.json";
            return Err(Error::NotAModel { path: folder.into(), expected });
        };
        let disagree = |path: &Path, tensor: &str, problem: String| Error::ShardIndex {
            path: path.into(),
            tensor: tensor.into(),
            problem,
        };

        let mut entries = BTreeMap::new();
        for file in &files {
            let path = folder.join(file);
            for (name, entry) in shard_entries(&path, Content::File(map_file(&path)?))? {
                if let Some(listed) = index.as_ref().map(|index| index.get(&name))
                    && listed != Some(file)
                {
                    let problem = match listed {
                        Some(other) => format!("is in this shard, but the index says `{other}`"),
                        None => "is in this shard, but not in the index".into(),
                    };
                    return Err(disagree(&path, &name, problem));
                }
                entries.insert(name, entry);
            }
        }
        if let Some((name, file)) = index.iter().flatten().find(|(name, _)| !entries.contains_key(*name)) {
            let problem = format!("the index says it is in `{file}`, which lacks it");
            return Err(disagree(&folder.join(INDEX_FILE), name, problem));
        }
        Ok(Self { path: folder.into(), dtype, device: device.clone(), entries })
    }

    /// Takes the content of a safetensors file that is not on the disk; `name` stands for its path in messages.
    ///
    /// # Errors
    /// The bytes are no safetensors file.
    pub fn from_bytes(name: &str, bytes: Vec<u8>, dtype: DType, device: &Device) -> Result<Self> {
        let path = PathBuf::from(name);
        let entries = shard_entries(&path, Content::Memory(bytes))?.into_iter().collect();
        Ok(Self { path, dtype, device: device.clone(), entries })
    }

    /// Takes the tensors of a GGUF file under their Hugging Face names. Architecture `llama` stores the rows of q and k in the order
    /// of interleaved rotation; they are handed out in half-split order.
    ///
    /// # Errors
    /// The metadata is not that of a supported target.
    pub fn from_gguf(gguf: Arc<Gguf>, dtype: DType, device: &Device) -> Result<Self> {
        let config = TargetConfig::from_gguf(&gguf)?;
        let mut entries = BTreeMap::new();
        for name in gguf.tensor_names() {
            let Some(info) = gguf.tensor_info(name) else { continue };
            let hf_name = hugging_face_name(name).unwrap_or_else(|| name.into());
            let heads = match config.family {
                Family::Llama if hf_name.contains(".self_attn.q_proj.") => Some(config.num_attention_heads),
                Family::Llama if hf_name.contains(".self_attn.k_proj.") => Some(config.num_key_value_heads),
                Family::Llama | Family::Qwen3 => None,
            };
            let place = Place::Gguf { file: Arc::clone(&gguf), name: name.into(), interleaved_heads: heads };
            entries.insert(hf_name, Entry::new(info.shape.clone(), place));
        }
        Ok(Self { path: gguf.path().into(), dtype, device: device.clone(), entries })
    }

    /// Folder or file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Type of the tensors handed out.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Where the tensors handed out live.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Hugging Face names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// Whether the checkpoint holds the tensor; does not count as use.
    pub fn contains(&self, name: &str) -> bool {
        self.entries.contains_key(name)
    }

    /// Shape as stored; does not count as use.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.entries.get(name).map(|entry| entry.shape.as_slice())
    }

    /// The tensor `name`, which must have exactly `shape` and a float type. All its values are checked.
    ///
    /// # Errors
    /// It is missing, has another shape, is stored in a type that is not read, or holds values that are not finite.
    pub fn get(&self, name: &str, shape: &[usize]) -> Result<Tensor> {
        let entry = self.entry(name, shape)?;
        let context = || Error::tensor(format!("cannot load tensor `{name}` of `{}`", self.path.display()));
        let tensor = match &entry.place {
            Place::Shard { bytes, range, dtype, .. } => {
                let stored = match dtype {
                    Dtype::F32 => DType::F32,
                    Dtype::F16 => DType::F16,
                    Dtype::BF16 => DType::BF16,
                    other => {
                        return Err(Error::TensorDtype {
                            path: self.path.clone(),
                            tensor: name.into(),
                            found: format!("{other:?}"),
                            expected: "F32, F16 or BF16",
                        });
                    }
                };
                entry.check_finite()?;
                Tensor::from_raw_buffer(&bytes[range.clone()], stored, shape, &self.device)
                    .and_then(|tensor| tensor.to_dtype(self.dtype))
                    .map_err(context())?
            }
            Place::Gguf { file, name, interleaved_heads } => {
                let tensor = file.tensor_f32(name)?;
                entry.check_finite_values(&tensor)?;
                let tensor = match interleaved_heads {
                    Some(heads) => half_split_rows(&tensor, *heads).map_err(context())?,
                    None => tensor,
                };
                tensor.to_dtype(self.dtype).and_then(|tensor| tensor.to_device(&self.device)).map_err(context())?
            }
        };
        entry.used.store(true, Ordering::Relaxed);
        Ok(tensor)
    }

    /// The whole numbers of tensor `name`, which must have exactly `shape` and be stored as I64, I32, U8 or BOOL.
    ///
    /// # Errors
    /// It is missing, has another shape, or is stored in another type.
    pub fn integers(&self, name: &str, shape: &[usize]) -> Result<Vec<i64>> {
        let entry = self.entry(name, shape)?;
        let refuse = |found| {
            let (path, tensor) = (self.path.clone(), name.into());
            Err(Error::TensorDtype { path, tensor, found, expected: "I64, I32, U8 or BOOL" })
        };
        let Place::Shard { bytes, range, dtype, .. } = &entry.place else { return refuse(entry.stored().1) };
        let bytes = &bytes[range.clone()];
        let numbers = match dtype {
            Dtype::I64 => bytes.as_chunks().0.iter().map(|bytes| i64::from_le_bytes(*bytes)).collect(),
            Dtype::I32 => bytes.as_chunks().0.iter().map(|bytes| i32::from_le_bytes(*bytes).into()).collect(),
            Dtype::U8 | Dtype::BOOL => bytes.iter().map(|&byte| byte.into()).collect(),
            other => return refuse(format!("{other:?}")),
        };
        entry.used.store(true, Ordering::Relaxed);
        Ok(numbers)
    }

    /// The entry of tensor `name`, which must have exactly `shape`.
    fn entry(&self, name: &str, shape: &[usize]) -> Result<&Entry> {
        let (path, tensor, expected) = (self.path.clone(), name.to_owned(), shape.to_vec());
        match self.entries.get(name) {
            None => Err(Error::TensorMissing { path, tensor, expected }),
            Some(entry) if entry.shape != shape => {
                Err(Error::TensorShape { path, tensor, expected, found: entry.shape.clone() })
            }
            Some(entry) => Ok(entry),
        }
    }

    /// Counts a tensor as used without reading it: for one that is known to repeat another, such as the `lm_head.weight` that some
    /// checkpoints with tied embeddings store. Returns whether it is there.
    pub fn skip(&self, name: &str) -> bool {
        let entry = self.entries.get(name);
        entry.inspect(|entry| entry.used.store(true, Ordering::Relaxed)).is_some()
    }

    /// States that the model is complete.
    ///
    /// # Errors
    /// Tensors were not asked for; all are named. Rotary frequency buffers may stay unused. Or one that was skipped holds values
    /// that are not finite: others than this program would read it.
    pub fn finish(&self) -> Result<()> {
        let unused = self.entries.iter().filter(|(_, entry)| !entry.used.load(Ordering::Relaxed));
        let tensors: Vec<String> = unused.map(|(name, _)| name.clone()).filter(|name| !is_derived(name)).collect();
        if !tensors.is_empty() {
            return Err(Error::TensorsUnused { path: self.path.clone(), tensors });
        }
        let skipped = |entry: &&Entry| entry.used.load(Ordering::Relaxed) && !entry.is_checked.load(Ordering::Relaxed);
        self.entries.values().filter(skipped).try_for_each(Entry::check_finite)
    }

    /// A stable identity of config and weights: 16 hexadecimal digits.
    ///
    /// The first eight are the CRC-32C of the config as [`TargetConfig::to_json`] writes it and of each tensor's name, type and shape, in
    /// order of names; the last eight that of up to 16 windows of 256 bytes, evenly spread over each tensor. The same weights
    /// sharded otherwise have the same fingerprint; training changes it; a few altered bytes may escape it.
    pub fn fingerprint(&self, config: &TargetConfig) -> String {
        let config = serde_json::Value::Object(config.to_json()).to_string();
        let mut directory = crc32c::crc32c(config.as_bytes());
        let mut samples = 0;
        for (name, entry) in &self.entries {
            let (bytes, dtype) = entry.stored();
            let line = format!("{name} {dtype} {:?}\n", entry.shape);
            directory = crc32c::crc32c_append(directory, line.as_bytes());
            if bytes.len() <= SAMPLE_WINDOWS * SAMPLE_BYTES {
                samples = crc32c::crc32c_append(samples, bytes);
                continue;
            }
            let last = bytes.len() - SAMPLE_BYTES;
            for window in 0..SAMPLE_WINDOWS {
                let start = (last as u128 * window as u128 / (SAMPLE_WINDOWS as u128 - 1)) as usize;
                samples = crc32c::crc32c_append(samples, &bytes[start..start + SAMPLE_BYTES]);
            }
        }
        format!("{directory:08x}{samples:08x}")
    }
}

impl Entry {
    fn new(shape: Vec<usize>, place: Place) -> Self {
        Self { shape, place, used: AtomicBool::new(false), is_checked: AtomicBool::new(false) }
    }

    /// Bytes and type of a tensor as stored.
    fn stored(&self) -> (&[u8], String) {
        match &self.place {
            Place::Shard { bytes, range, dtype, .. } => (&bytes[range.clone()], format!("{dtype:?}")),
            Place::Gguf { file, name, .. } => {
                let bytes = file.tensor_bytes(name).unwrap_or_default();
                (bytes, file.tensor_info(name).map_or_else(String::new, |info| format!("ggml {}", info.type_id)))
            }
        }
    }
}

/// Whether a tensor is a buffer that follows from the config, so that it need not be read.
pub(crate) fn is_derived(name: &str) -> bool {
    DERIVED_BUFFERS.iter().any(|buffer| name.ends_with(buffer))
}

/// The tensors of a safetensors file.
fn shard_entries(path: &Path, content: Content) -> Result<Vec<(String, Entry)>> {
    let fail = |source| Error::Safetensors { path: path.into(), source: Box::new(source) };
    let bytes = Bytes { path: path.into(), content };
    let (header, metadata) = SafeTensors::read_metadata(&bytes).map_err(fail)?;
    let (data_start, bytes) = (size_of::<u64>() + header, Arc::new(bytes));
    let entry = |(name, info): (String, &TensorInfo)| {
        let (start, end) = info.data_offsets;
        let range = data_start + start..data_start + end;
        let bytes = Arc::clone(&bytes);
        let place = Place::Shard { bytes, range, dtype: info.dtype, name: name.clone(), first_row: 0 };
        (name, Entry::new(info.shape.clone(), place))
    };
    Ok(metadata.tensors().into_iter().map(entry).collect())
}

/// Tensor name to shard file name.
fn read_index(path: &Path) -> Result<BTreeMap<String, String>> {
    let json = read_json(path)?;
    let map =
        json.get("weight_map").ok_or_else(|| Error::FieldMissing { path: path.into(), field: "weight_map".into() })?;
    let map = map.as_object().ok_or_else(|| Error::field(path, "weight_map", map, "an object of tensor names"))?;
    map.iter()
        .map(|(tensor, file)| {
            // A shard lies in the checkpoint's folder; a path could lead out of it.
            let plain = |file: &&str| file.ends_with(".safetensors") && !file.contains(['/', '\\']);
            match file.as_str().filter(plain) {
                Some(file) => Ok((tensor.clone(), file.into())),
                None => {
                    Err(Error::field(path, format!("weight_map.{tensor}"), file, "a file name ending in .safetensors"))
                }
            }
        })
        .collect()
}

/// Hugging Face name of a GGUF tensor; `None` for names that no supported target has.
fn hugging_face_name(name: &str) -> Option<String> {
    let outer = match name {
        "token_embd.weight" => Some("model.embed_tokens.weight"),
        "output_norm.weight" => Some("model.norm.weight"),
        "output.weight" => Some("lm_head.weight"),
        _ => None,
    };
    if let Some(outer) = outer {
        return Some(outer.into());
    }
    let (layer, part) = name.strip_prefix("blk.")?.split_once('.')?;
    let (part, kind) = part.rsplit_once('.')?;
    if !(layer.bytes().all(|digit| digit.is_ascii_digit()) && matches!(kind, "weight" | "bias")) {
        return None;
    }
    let part = match part {
        "attn_q" => "self_attn.q_proj",
        "attn_k" => "self_attn.k_proj",
        "attn_v" => "self_attn.v_proj",
        "attn_output" => "self_attn.o_proj",
        "attn_q_norm" => "self_attn.q_norm",
        "attn_k_norm" => "self_attn.k_norm",
        "attn_norm" => "input_layernorm",
        "ffn_norm" => "post_attention_layernorm",
        "ffn_gate" => "mlp.gate_proj",
        "ffn_up" => "mlp.up_proj",
        "ffn_down" => "mlp.down_proj",
        _ => return None,
    };
    Some(format!("model.layers.{layer}.{part}.{kind}"))
}

/// Rows of q or k from the order of interleaved rotation, [head, pair, 2], to that of half-split rotation, [head, 2, pair].
fn half_split_rows(tensor: &Tensor, heads: usize) -> candle_core::Result<Tensor> {
    let shape = tensor.dims().to_vec();
    let columns: usize = shape[1..].iter().product();
    let rows_per_head = shape[0] / heads;
    tensor.reshape((heads, rows_per_head / 2, 2, columns))?.transpose(1, 2)?.contiguous()?.reshape(shape)
}
