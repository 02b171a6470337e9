//! Reads a version 2 cache. Everything is treated as hostile: sizes are checked before memory is taken, offsets before they are used.

use std::collections::{HashMap, HashSet};
use std::io::Read as _;
use std::path::{Path, PathBuf};

use half::bf16;
use memmap2::Mmap;
use serde_json::Value;

use super::format::{INDEX_FILE, Manifest, RECORD_BYTES, Record, VERSION};
use crate::target_cache::format::MANIFEST_FILE;
use crate::target_cache::rows::check_rows;
use crate::target_cache::{CacheError, Report, Sample};

/// A manifest larger than this is not read into memory.
const MAX_MANIFEST_BYTES: u64 = 1 << 28;

/// An open cache.
#[derive(Debug)]
pub struct Reader {
    dir: PathBuf,
    manifest: Manifest,
    records: Vec<Record>,
    /// By shard id.
    shards: HashMap<u32, Shard>,
}

#[derive(Debug)]
struct Shard {
    path: PathBuf,
    map: Mmap,
}

/// A sample, copied out of its shard.
#[derive(Debug, Clone, PartialEq)]
pub struct Decoded {
    /// Id of the sample.
    pub sample_id: u64,
    /// Tokens, `[T]`.
    pub input_ids: Vec<u32>,
    /// As stored, `[T]`.
    pub attention_mask: Vec<u8>,
    /// 1 where the token is supervised, else 0, `[T]`.
    pub loss_mask: Vec<u8>,
    /// Outputs of the feature layers, `[T, L·d]`.
    pub features: Vec<bf16>,
    /// Output of the final norm, `[T, d]`.
    pub last_hidden: Vec<bf16>,
}

impl Decoded {
    /// The sample for a cache of this program's own format, at another place and with a name.
    pub fn as_sample<'a>(&'a self, sample_id: u64, source_id: &'a str) -> Sample<'a> {
        Sample {
            sample_id,
            source_id,
            domain: "",
            input_ids: &self.input_ids,
            loss_mask: &self.loss_mask,
            features: &self.features,
            last_hidden: &self.last_hidden,
        }
    }
}

/// Whether a folder holds a cache of version 2.
pub fn is_v2(dir: &Path) -> bool {
    let manifest =
        read_limited(&dir.join(MANIFEST_FILE)).ok().and_then(|json| serde_json::from_slice::<Value>(&json).ok());
    manifest.is_some_and(|manifest| manifest["version"] == VERSION)
}

impl Reader {
    /// Opens the cache in `dir` and checks that each record of its index lies inside its shard.
    ///
    /// # Errors
    /// [`CacheError::NotACache`], [`CacheError::Version`], [`CacheError::ManifestJson`], [`CacheError::ManifestField`],
    /// [`CacheError::Version2`] for a faulty index or shard, or [`CacheError::Io`].
    pub fn open(dir: &Path) -> Result<Self, CacheError> {
        let path = dir.join(MANIFEST_FILE);
        if !path.is_file() {
            return Err(CacheError::NotACache { dir: dir.into() });
        }
        let manifest = Manifest::from_json(&path, &read_limited(&path)?)?;
        let mut shards = HashMap::new();
        for entry in &manifest.shards {
            let path = dir.join(&entry.file_name);
            let map = map(&path)?;
            shards.insert(entry.shard_id, Shard { path, map });
        }
        let index = dir.join(INDEX_FILE);
        let bytes = map(&index)?;
        let needed = manifest.num_samples.checked_mul(RECORD_BYTES as u64);
        if needed != Some(bytes.len() as u64) {
            let samples = manifest.num_samples;
            let reason = format!("it has {} bytes, expected {RECORD_BYTES} for each of {samples} samples", bytes.len());
            return Err(CacheError::Version2 { path: index, reason });
        }
        let records: Vec<Record> = bytes.as_chunks().0.iter().map(Record::from_bytes).collect();
        let mut seen = HashSet::with_capacity(records.len());
        for (row, record) in records.iter().enumerate() {
            let fault = |reason: String| CacheError::Version2 {
                path: index.clone(),
                reason: format!("record {row}: {reason}"),
            };
            check_record(&manifest, record, &shards).map_err(fault)?;
            if !seen.insert(record.sample_id) {
                return Err(fault(format!("sample {} is listed before", record.sample_id)));
            }
        }
        Ok(Self { dir: dir.into(), manifest, records, shards })
    }

    /// Number of samples.
    pub fn len(&self) -> u64 {
        self.records.len() as u64
    }

    /// Whether there are no samples; a cache that can be opened has some.
    pub fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    /// Description, counts and shards.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The index.
    pub fn records(&self) -> &[Record] {
        &self.records
    }

    /// Size of shard `id`, in bytes; `None` where there is no such shard.
    pub fn shard_bytes(&self, id: u32) -> Option<u64> {
        self.shards.get(&id).map(|shard| shard.map.len() as u64)
    }

    /// Tokens and loss mask of row `row` of the index, as [`Reader::sample`] gives them.
    ///
    /// # Errors
    /// As [`Reader::sample`].
    pub fn tokens(&self, row: u64) -> Result<(Vec<u32>, &[u8]), CacheError> {
        let (record, [ids, _, loss_mask, ..]) = self.arrays(row)?;
        let fault = |field: &str, at: usize, found: i64, expected: &str| {
            let sample = record.sample_id;
            let reason = format!("sample {sample}: `{field}` is {found} at position {at}, expected {expected}");
            Err(CacheError::Version2 { path: self.path_of(record), reason })
        };
        let ids: Vec<i32> = ids.as_chunks().0.iter().map(|bytes| i32::from_le_bytes(*bytes)).collect();
        if let Some(at) = ids.iter().position(|&id| id < 0) {
            return fault("input_ids", at, ids[at].into(), "at least 0");
        }
        if let Some(at) = loss_mask.iter().position(|&mask| mask > 1) {
            return fault("loss_mask", at, loss_mask[at].into(), "0 or 1");
        }
        Ok((ids.into_iter().map(|id| id as u32).collect(), loss_mask))
    }

    /// The sample of row `row` of the index, everything in it checked.
    ///
    /// # Errors
    /// [`CacheError::NoSuchSample`], or [`CacheError::Version2`] when it holds a negative token, a mask with other values than it has or rows
    /// that are no target's (see [`rows`](crate::target_cache::rows)).
    pub fn sample(&self, row: u64) -> Result<Decoded, CacheError> {
        let (record, [_, attention_mask, _, features, last_hidden]) = self.arrays(row)?;
        let (input_ids, loss_mask) = self.tokens(row)?;
        if let Some(at) = attention_mask.iter().position(|&mask| mask != 1) {
            let (sample, found) = (record.sample_id, attention_mask[at]);
            let reason = format!("sample {sample}: `attention_mask` is {found} at position {at}, expected 1");
            return Err(CacheError::Version2 { path: self.path_of(record), reason });
        }
        let (features, last_hidden) = (bf16_values(features), bf16_values(last_hidden));
        let Manifest { target_layer_ids, hidden_size, .. } = &self.manifest;
        check_rows(record.sample_id, target_layer_ids, *hidden_size, &features, &last_hidden)
            .map_err(|fault| CacheError::Version2 { path: self.path_of(record), reason: fault.to_string() })?;
        Ok(Decoded {
            sample_id: record.sample_id,
            input_ids,
            attention_mask: attention_mask.into(),
            loss_mask: loss_mask.into(),
            features,
            last_hidden,
        })
    }

    /// The shard that holds a sample.
    fn path_of(&self, record: &Record) -> PathBuf {
        self.shards.get(&record.shard_id).map_or_else(|| self.dir.join(INDEX_FILE), |shard| shard.path.clone())
    }

    fn arrays(&self, row: u64) -> Result<(&Record, [&[u8]; 5]), CacheError> {
        let none = || CacheError::NoSuchSample { dir: self.dir.clone(), sample: row, samples: self.len() };
        let record = usize::try_from(row).ok().and_then(|row| self.records.get(row)).ok_or_else(none)?;
        // Checked when the cache was opened.
        let shard = self.shards.get(&record.shard_id).ok_or_else(none)?;
        let lengths = self.manifest.array_bytes(record.seq_len).ok_or_else(none)?;
        let array = |i: usize| &shard.map[record.offsets[i] as usize..][..lengths[i] as usize];
        Ok((record, std::array::from_fn(array)))
    }
}

/// Reads the whole cache once and lists everything that is wrong with its samples.
///
/// # Errors
/// Those of [`Reader::open`].
pub fn check(dir: &Path) -> Result<Report, CacheError> {
    let reader = Reader::open(dir)?;
    let mut report =
        Report { bytes: reader.shards.values().map(|shard| shard.map.len() as u64).sum(), ..Report::default() };
    for row in 0..reader.len() {
        match reader.sample(row) {
            Err(problem) => report.problems.push(problem),
            Ok(sample) => {
                report.samples += 1;
                report.tokens += sample.input_ids.len() as u64;
                report.supervised_tokens += sample.loss_mask.iter().map(|&mask| u64::from(mask)).sum::<u64>();
            }
        }
    }
    Ok(report)
}

/// Says what is wrong with a record.
fn check_record(manifest: &Manifest, record: &Record, shards: &HashMap<u32, Shard>) -> Result<(), String> {
    let Some(shard) = shards.get(&record.shard_id) else {
        return Err(format!("shard {} is not in the manifest", record.shard_id));
    };
    let tokens = record.seq_len as usize;
    if tokens == 0 || tokens > manifest.max_length {
        return Err(format!("{tokens} tokens, expected 1 to {}", manifest.max_length));
    }
    let lengths = manifest.array_bytes(record.seq_len).ok_or("its size is beyond any file")?;
    let end = shard.map.len() as u64;
    for (offset, length) in record.offsets.into_iter().zip(lengths) {
        if offset.checked_add(length).is_none_or(|last| last > end) {
            let name = shard.path.display();
            return Err(format!("{length} bytes at {offset} are not inside `{name}`, which has {end}"));
        }
    }
    // Arrays lie one behind the other, so lengths that the manifest or the record get wrong show here.
    for (at, length) in lengths.into_iter().enumerate().take(lengths.len() - 1) {
        let (start, next) = (record.offsets[at], record.offsets[at + 1]);
        if start.checked_add(length) != Some(next) {
            return Err(format!("array {} starts at {next}, expected {length} bytes after {start}", at + 1));
        }
    }
    Ok(())
}

fn bf16_values(bytes: &[u8]) -> Vec<bf16> {
    bytes.as_chunks().0.iter().map(|bytes| bf16::from_le_bytes(*bytes)).collect()
}

fn read_limited(path: &Path) -> Result<Vec<u8>, CacheError> {
    let mut json = Vec::new();
    fs_err::File::open(path)?.take(MAX_MANIFEST_BYTES).read_to_end(&mut json)?;
    Ok(json)
}

fn map(path: &Path) -> Result<Mmap, CacheError> {
    let file = fs_err::File::open(path)?;
    // SAFETY: the files of a complete cache are not changed in place, and what another process does to them can make the values
    // wrong but no access invalid: every offset is checked against the length of the map.
    Ok(unsafe { Mmap::map(file.file()) }?)
}
