//! Layout of a version 2 cache.
//!
//! ```text
//! manifest.json     description, counts and shard list, keys in alphabetical order
//! samples.idx       one record of 56 bytes per sample
//! shard-00000.bin   samples one after another, not aligned
//! ```
//!
//! An index record is, little-endian and packed: `sample_id` u64, `shard_id` u32, `seq_len` u32, and five u64 offsets into the
//! shard, in the order of the arrays there. For a sample of T tokens, L feature layers and hidden size d those are
//!
//! | array | type | bytes |
//! | --- | --- | --- |
//! | input ids | i32 | 4·T |
//! | attention mask | u8, all 1; readers take the length instead | T |
//! | loss mask | u8 | T |
//! | outputs of the target layers, per token one layer after another | bf16 | 2·T·L·d |
//! | last hidden states, after the final norm | bf16 | 2·T·d |

use std::collections::HashSet;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::target_cache::CacheError;

/// Version in the manifest.
pub const VERSION: u32 = 2;
/// Bytes of an index record.
pub const RECORD_BYTES: usize = 56;
/// Name of the index.
pub const INDEX_FILE: &str = "samples.idx";

/// Content of `manifest.json`. The order of the fields is that of the file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// Name of the reference's chat parser.
    pub chat_template: String,
    /// Name of the experiment.
    pub exp_name: String,
    /// Commit of the program that wrote it.
    pub git_sha: String,
    /// `bfloat16`.
    pub hidden_dtype: String,
    /// Width d of the residual stream.
    pub hidden_size: usize,
    /// [`RECORD_BYTES`].
    pub index_record_size: usize,
    /// `uint8`.
    pub mask_dtype: String,
    /// Longest sample allowed, in tokens.
    pub max_length: usize,
    /// Samples with fewer supervised tokens were left out.
    pub min_loss_tokens: u64,
    /// Samples in the cache.
    pub num_samples: u64,
    /// Shards of the cache.
    pub num_shards: usize,
    /// Name of the project.
    pub project_name: String,
    /// The shards.
    pub shards: Vec<ShardEntry>,
    /// Files of conversations.
    pub source_jsonl_paths: Vec<String>,
    /// Feature layers, in the order of their rows, as in [`CacheMeta::layer_ids`](crate::target_cache::CacheMeta::layer_ids).
    pub target_layer_ids: Vec<i32>,
    /// Name or path of the target.
    pub target_model_name_or_path: String,
    /// `int32`.
    pub token_dtype: String,
    /// [`VERSION`].
    pub version: u32,
}

/// One shard of a cache.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardEntry {
    /// File name, see [`shard_name`].
    pub file_name: String,
    /// Number that index records name it by.
    pub shard_id: u32,
}

/// File name of shard `id`.
pub fn shard_name(id: u32) -> String {
    format!("shard-{id:05}.bin")
}

impl Manifest {
    /// A manifest of a cache that this program writes; counts and shards are filled in by the writer.
    pub fn new(target: &str, layer_ids: &[i32], hidden_size: usize, max_length: usize) -> Self {
        Self {
            chat_template: String::new(),
            exp_name: String::new(),
            git_sha: "unknown".into(),
            hidden_dtype: "bfloat16".into(),
            hidden_size,
            index_record_size: RECORD_BYTES,
            mask_dtype: "uint8".into(),
            max_length,
            min_loss_tokens: 0,
            num_samples: 0,
            num_shards: 0,
            project_name: "deepspec".into(),
            shards: Vec::new(),
            source_jsonl_paths: Vec::new(),
            target_layer_ids: layer_ids.into(),
            target_model_name_or_path: target.into(),
            token_dtype: "int32".into(),
            version: VERSION,
        }
    }

    /// The bytes of the file: two spaces per level, no newline at the end.
    pub(super) fn to_json(&self, path: &Path) -> Result<Vec<u8>, CacheError> {
        serde_json::to_vec_pretty(self).map_err(|source| CacheError::ManifestJson { path: path.into(), source })
    }

    /// Reads and checks a manifest; the version is looked at first.
    pub(super) fn from_json(path: &Path, json: &[u8]) -> Result<Self, CacheError> {
        #[derive(Deserialize)]
        struct Versioned {
            version: u64,
        }
        let syntax = |source| CacheError::ManifestJson { path: path.into(), source };
        let Versioned { version: found } = serde_json::from_slice(json).map_err(syntax)?;
        if found != u64::from(VERSION) {
            return Err(CacheError::Version { path: path.into(), found, expected: VERSION });
        }
        let manifest: Self = serde_json::from_slice(json).map_err(syntax)?;
        manifest.validate(path)?;
        Ok(manifest)
    }

    /// Checks what the fields must satisfy.
    pub(super) fn validate(&self, path: &Path) -> Result<(), CacheError> {
        let check = |fits: bool, field: &str, found: String, expected: String| {
            let fault = || CacheError::ManifestField { path: path.into(), field: field.into(), found, expected };
            if fits { Ok(()) } else { Err(fault()) }
        };
        for (field, found, expected) in [
            ("hidden_dtype", &self.hidden_dtype, "bfloat16"),
            ("mask_dtype", &self.mask_dtype, "uint8"),
            ("token_dtype", &self.token_dtype, "int32"),
        ] {
            check(found == expected, field, format!("`{found}`"), format!("`{expected}`"))?;
        }
        let size = self.index_record_size;
        check(size == RECORD_BYTES, "index_record_size", size.to_string(), RECORD_BYTES.to_string())?;
        check(self.hidden_size > 0, "hidden_size", "0".into(), "at least 1".into())?;
        check(self.max_length > 0, "max_length", "0".into(), "at least 1".into())?;
        check(self.num_samples > 0, "num_samples", "0".into(), "at least 1".into())?;
        let (ids, mut seen) = (&self.target_layer_ids, HashSet::new());
        let distinct = !ids.is_empty() && ids.iter().all(|&id| id >= -1 && seen.insert(id));
        let expected = "one or more different layers, each at least -1";
        check(distinct, "target_layer_ids", format!("{ids:?}"), expected.into())?;
        let listed = self.shards.len();
        check(self.num_shards == listed, "num_shards", self.num_shards.to_string(), format!("{listed}, as listed"))?;
        let mut seen = HashSet::new();
        for (index, ShardEntry { file_name, shard_id }) in self.shards.iter().enumerate() {
            // A shard lies in the cache's folder; a path could lead out of it.
            let is_bin = Path::new(file_name).extension().is_some_and(|extension| extension == "bin");
            let is_plain = is_bin && !file_name.contains(['/', '\\']);
            let expected = "a file name ending in .bin";
            check(is_plain, &format!("shards.{index}.file_name"), format!("`{file_name}`"), expected.into())?;
            let is_new = seen.insert(*shard_id);
            check(is_new, &format!("shards.{index}.shard_id"), shard_id.to_string(), "each id once".into())?;
        }
        Ok(())
    }

    /// Bytes of the five arrays of a sample of `tokens` tokens, in their order; `None` on overflow.
    pub(super) fn array_bytes(&self, tokens: u32) -> Option<[u64; 5]> {
        let tokens = u64::from(tokens);
        let last_hidden = tokens.checked_mul(2)?.checked_mul(self.hidden_size as u64)?;
        let features = last_hidden.checked_mul(self.target_layer_ids.len() as u64)?;
        Some([4 * tokens, tokens, tokens, features, last_hidden])
    }
}

/// An index record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record {
    /// Id of the sample.
    pub sample_id: u64,
    /// Shard it is in.
    pub shard_id: u32,
    /// Its tokens.
    pub seq_len: u32,
    /// Where its arrays start in the shard: ids, attention mask, loss mask, features, last hidden states.
    pub offsets: [u64; 5],
}

impl Record {
    /// The bytes of the record.
    pub fn to_bytes(&self) -> [u8; RECORD_BYTES] {
        let mut bytes = [0; RECORD_BYTES];
        bytes[..8].copy_from_slice(&self.sample_id.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.shard_id.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.seq_len.to_le_bytes());
        for (slot, offset) in bytes[16..].as_chunks_mut::<8>().0.iter_mut().zip(self.offsets) {
            *slot = offset.to_le_bytes();
        }
        bytes
    }

    /// The record of these bytes.
    pub fn from_bytes(bytes: &[u8; RECORD_BYTES]) -> Self {
        let words = bytes.as_chunks::<8>().0;
        let word = |at: usize| u64::from_le_bytes(words[at]);
        Self {
            sample_id: word(0),
            shard_id: word(1) as u32,
            seq_len: (word(1) >> 32) as u32,
            offsets: std::array::from_fn(|i| word(2 + i)),
        }
    }
}
