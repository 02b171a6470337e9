//! Layout and version of the target cache.
//!
//! ```text
//! manifest.json       description, counts and shard list; only a complete cache has it
//! progress.json       the same for a cache that is still being written
//! shard-00000.arrow   Arrow IPC file, uncompressed, buffers aligned to 64 bytes, one record batch of one row per sample
//! lock                held with an advisory lock by the one writer
//! ```
//!
//! Sample `i` is row `i % samples_per_shard` of shard `i / samples_per_shard`. Columns, for a sample of T tokens, L
//! feature layers and hidden size d:
//!
//! | column | type | content |
//! | --- | --- | --- |
//! | `sample_id` | u64 | position in the data set, from 0 |
//! | `source_id` | text | id of the row the sample was made from |
//! | `domain` | text | kind of data, may be empty |
//! | `input_ids` | `[T]` u32 | tokens, prompt and answer |
//! | `loss_mask` | `[T]` u8 | 1 where the token is supervised, else 0 |
//! | `features` | `[T, L·d]` u16 | bf16 bits: per token the layers of `layer_ids` one after another |
//! | `last_hidden` | `[T, d]` u16 | bf16 bits: per token the rows the target's output head reads |
//! | `crc32c` | u32 | checksum of the columns above, in that order |
//!
//! `features` are residual-stream outputs of decoder layers, before any final norm; `last_hidden` is after the final
//! norm. Their numbers are finite and of at most 1e12 in magnitude, no row is all zeros but for the embedding's (see
//! [`rows`](super::rows)). With storage `none` both are empty. All numbers are little-endian. The schema of each shard carries the
//! version and the [`CacheMeta`] under the key `deepspec.target_cache`.

use std::collections::HashSet;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::error::{CacheError, Mismatch};

#[cfg(target_endian = "big")]
compile_error!("the target cache is mapped into memory as it is, which needs a little-endian machine");

/// Version of the format that this build writes and reads.
pub const VERSION: u32 = 3;

/// Name of the manifest of a complete cache.
pub const MANIFEST_FILE: &str = "manifest.json";
/// Name of the manifest of a cache that is still being written.
pub const PROGRESS_FILE: &str = "progress.json";
/// Name of the file that the writer holds locked.
pub const LOCK_FILE: &str = "lock";
/// Key of the cache's description in the schema metadata of each shard.
pub const SCHEMA_KEY: &str = "deepspec.target_cache";

/// Alignment of every buffer in a shard, in bytes.
const ALIGNMENT: u64 = 64;
/// Bytes of a sample apart from the payload: its message header, padded (704); two numbers, two texts with offsets
/// and four more pairs of offsets, each padded to [`ALIGNMENT`] (2 × 64 + 2 × 128 + 4 × 64); a footer entry (24).
const SAMPLE_OVERHEAD_BYTES: u64 = 704 + 640 + 24;

/// How the hidden states are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StorageMode {
    /// Two bytes a number.
    Bf16,
    /// Not at all: training computes them again from the tokens.
    None,
}

/// What a cache was made from, and how. Two caches with equal descriptions and equal samples have equal bytes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CacheMeta {
    /// Name or path of the target, for people.
    pub target: String,
    /// Hash of the target's weights, which is what identifies it.
    pub target_fingerprint: String,
    /// Feature layers, in the order of their rows: `i` is the output of decoder layer `i`, −1 the embedding output.
    pub layer_ids: Vec<i32>,
    /// Width d of the residual stream.
    pub hidden_size: usize,
    /// Rows of the target's embedding; every token id is below it.
    pub vocab_size: u32,
    /// Number type the target computed in, such as `f32` or `bf16`.
    pub dtype: String,
    /// Hash of the tokenizer.
    pub tokenizer_hash: String,
    /// Hash of the chat template.
    pub template_hash: String,
    /// Hash of the samples' tokens and masks, so that a run is not resumed on other data.
    pub data_hash: String,
    /// Token that stands for "not yet known" in a drafter's block; no sample may contain it.
    pub mask_token_id: Option<u32>,
    /// The settings of `prepare` that led here; compared, but not interpreted.
    pub recipe: Value,
    /// Assistant turns that are supervised: `all` or `last`.
    pub loss_on: String,
    /// Longest sample allowed, in tokens.
    pub max_length: usize,
    /// How the hidden states are stored.
    pub storage: StorageMode,
}

impl CacheMeta {
    /// Checks that the description can be met.
    ///
    /// # Errors
    /// [`CacheError::Meta`], which names the field.
    pub fn validate(&self) -> Result<(), CacheError> {
        let fault = |field, found: String, expected: &str| {
            Err(CacheError::Meta { field, found, expected: expected.to_owned() })
        };
        if self.hidden_size == 0 {
            return fault("hidden_size", "0".to_owned(), "at least 1");
        }
        if self.max_length == 0 {
            return fault("max_length", "0".to_owned(), "at least 1");
        }
        if self.vocab_size == 0 {
            return fault("vocab_size", "0".to_owned(), "at least 1");
        }
        if let Some(id) = self.mask_token_id.filter(|&id| id >= self.vocab_size) {
            return fault("mask_token_id", id.to_string(), &format!("less than `vocab_size` {}", self.vocab_size));
        }
        let mut seen = HashSet::new();
        if self.layer_ids.is_empty() || !self.layer_ids.iter().all(|&id| id >= -1 && seen.insert(id)) {
            return fault(
                "layer_ids",
                format!("{:?}", self.layer_ids),
                "one or more different layers, each at least -1",
            );
        }
        Ok(())
    }

    /// Lengths that `features` and `last_hidden` must have for a sample of `tokens` tokens, or `None` on overflow.
    pub(super) fn hidden_lens(&self, tokens: usize) -> Option<(usize, usize)> {
        match self.storage {
            StorageMode::None => Some((0, 0)),
            StorageMode::Bf16 => {
                let last_hidden = tokens.checked_mul(self.hidden_size)?;
                Some((last_hidden.checked_mul(self.layer_ids.len())?, last_hidden))
            }
        }
    }
}

/// Content of `manifest.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// [`VERSION`].
    pub version: u32,
    /// What the cache was made from, and how.
    pub meta: CacheMeta,
    /// What the rows of `features` are.
    pub feature_rows: FeatureRows,
    /// What the rows of `last_hidden` are.
    pub last_hidden_rows: LastHiddenRows,
    /// Samples in the cache.
    pub samples: u64,
    /// Samples in each shard but the last, which may have fewer.
    pub samples_per_shard: u64,
    /// Tokens of all samples in `shards`.
    pub tokens: u64,
    /// Tokens of all samples in `shards` whose loss mask is 1.
    pub supervised_tokens: u64,
    /// The shards, in order.
    pub shards: Vec<ShardEntry>,
}

/// Meaning of the rows of `features`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FeatureRows {
    /// Residual stream after a decoder layer, before any final norm.
    DecoderLayerOutput,
}

/// Meaning of the rows of `last_hidden`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LastHiddenRows {
    /// Input of the output head: after the final norm.
    FinalNormOutput,
}

/// One shard of a cache.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShardEntry {
    /// File name, see [`shard_name`].
    pub name: String,
    /// Samples in the shard.
    pub samples: u64,
    /// Tokens of these samples.
    pub tokens: u64,
    /// Tokens whose loss mask is 1.
    pub supervised_tokens: u64,
    /// Size of the file.
    pub bytes: u64,
    /// Checksum of the whole file.
    pub crc32c: u32,
}

impl Manifest {
    /// A manifest without shards.
    pub(super) fn new(meta: CacheMeta, samples: u64, samples_per_shard: u64) -> Self {
        Self {
            version: VERSION,
            meta,
            feature_rows: FeatureRows::DecoderLayerOutput,
            last_hidden_rows: LastHiddenRows::FinalNormOutput,
            samples,
            samples_per_shard,
            tokens: 0,
            supervised_tokens: 0,
            shards: Vec::new(),
        }
    }

    /// Samples that shard `index` holds when it is complete.
    pub(super) fn samples_in_shard(&self, index: usize) -> u64 {
        let first = (index as u64).saturating_mul(self.samples_per_shard);
        self.samples.saturating_sub(first).min(self.samples_per_shard)
    }

    /// Samples in the shards listed.
    pub(super) fn samples_listed(&self) -> u64 {
        (self.shards.len() as u64).saturating_mul(self.samples_per_shard).min(self.samples)
    }

    /// Adds a shard to the list and to the counts.
    pub(super) fn push(&mut self, entry: ShardEntry) {
        self.tokens = self.tokens.saturating_add(entry.tokens);
        self.supervised_tokens = self.supervised_tokens.saturating_add(entry.supervised_tokens);
        self.shards.push(entry);
    }

    /// The bytes of the file.
    pub(super) fn to_json(&self, path: &Path) -> Result<Vec<u8>, CacheError> {
        let mut json = serde_json::to_vec_pretty(self)
            .map_err(|source| CacheError::ManifestJson { path: path.to_owned(), source })?;
        json.push(b'\n');
        Ok(json)
    }

    /// Reads and checks a manifest. The version is looked at first, since the other fields depend on it.
    pub(super) fn from_json(path: &Path, json: &[u8]) -> Result<Self, CacheError> {
        #[derive(Deserialize)]
        struct Versioned {
            version: u64,
        }
        let syntax = |source| CacheError::ManifestJson { path: path.to_owned(), source };
        let Versioned { version: found } = serde_json::from_slice(json).map_err(syntax)?;
        if found != u64::from(VERSION) {
            return Err(CacheError::Version { path: path.to_owned(), found, expected: VERSION });
        }
        let manifest: Self = serde_json::from_slice(json).map_err(syntax)?;
        manifest.validate(path)?;
        Ok(manifest)
    }

    fn validate(&self, path: &Path) -> Result<(), CacheError> {
        let fault = |field: &str, found: String, expected: String| {
            Err(CacheError::ManifestField { path: path.to_owned(), field: field.to_owned(), found, expected })
        };
        if let Err(CacheError::Meta { field, found, expected }) = self.meta.validate() {
            return fault(&format!("meta.{field}"), found, expected);
        }
        if self.samples == 0 || self.samples_per_shard == 0 {
            let field = if self.samples == 0 { "samples" } else { "samples_per_shard" };
            return fault(field, "0".to_owned(), "at least 1".to_owned());
        }
        for (index, shard) in self.shards.iter().enumerate() {
            if shard.name != shard_name(index) {
                return fault(
                    &format!("shards.{index}.name"),
                    format!("`{}`", shard.name),
                    format!("`{}`", shard_name(index)),
                );
            }
            let expected = self.samples_in_shard(index);
            if shard.samples != expected || expected == 0 {
                return fault(&format!("shards.{index}.samples"), shard.samples.to_string(), expected.to_string());
            }
        }
        let total = |count: fn(&ShardEntry) -> u64| self.shards.iter().map(count).fold(0_u64, u64::saturating_add);
        let counts = [
            ("tokens", self.tokens, total(|shard| shard.tokens)),
            ("supervised_tokens", self.supervised_tokens, total(|shard| shard.supervised_tokens)),
        ];
        for (field, found, sum) in counts {
            if found != sum {
                return fault(field, found.to_string(), format!("the sum over all shards, {sum}"));
            }
        }
        Ok(())
    }
}

/// File name of shard `index`.
pub fn shard_name(index: usize) -> String {
    format!("shard-{index:05}.arrow")
}

/// Size that the shards of a cache will have, within 1 % unless ids and domains are longer than 64 bytes.
///
/// `samples` and `tokens` count the whole data set, `layers` the feature layers, `hidden_size` is d.
pub fn estimate_bytes(samples: u64, tokens: u64, layers: usize, hidden_size: usize, storage: StorageMode) -> u64 {
    let (hidden_bytes, hidden_columns) = match storage {
        StorageMode::Bf16 => (2 * hidden_size as u64 * (layers as u64 + 1), 2),
        StorageMode::None => (0, 0),
    };
    let payload = tokens.saturating_mul(hidden_bytes.saturating_add(4 + 1));
    // A column ends anywhere in its last aligned unit: half a unit each, on average.
    let padding = samples.saturating_mul((2 + hidden_columns) * ALIGNMENT / 2);
    payload.saturating_add(padding).saturating_add(samples.saturating_mul(SAMPLE_OVERHEAD_BYTES))
}

/// First place where two descriptions differ, as a dotted path with both values.
pub(super) fn first_difference(path: &str, cache: &Value, wanted: &Value) -> Option<Mismatch> {
    if let (Value::Object(cache), Value::Object(wanted)) = (cache, wanted) {
        let keys = cache.keys().chain(wanted.keys().filter(|key| !cache.contains_key(*key)));
        return keys.into_iter().find_map(|key| {
            let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
            let absent = Value::String("(absent)".to_owned());
            first_difference(&path, cache.get(key).unwrap_or(&absent), wanted.get(key).unwrap_or(&absent))
        });
    }
    (cache != wanted).then(|| Mismatch { field: path.to_owned(), cache: cache.to_string(), wanted: wanted.to_string() })
}
