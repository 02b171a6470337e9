//! Reads a complete target cache. Shards are mapped on first use; samples are slices of the maps.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use arrow_schema::SchemaRef;

use super::error::{CacheError, Mismatch};
use super::format::{CacheMeta, MANIFEST_FILE, Manifest, PROGRESS_FILE};
use super::sample::{Sample, schema};
use super::shard::{Shard, Stored};

/// A manifest larger than this is not read into memory; a million shards need a fifth of it.
const MAX_MANIFEST_BYTES: u64 = 1 << 30;

/// A complete target cache, open for reading. It can be shared between threads.
#[derive(Debug)]
pub struct Reader {
    dir: PathBuf,
    manifest: Manifest,
    schema: SchemaRef,
    shards: Vec<OnceLock<Shard>>,
}

/// What the user of a cache needs it to be, see [`Reader::expect_matches`].
#[derive(Debug, Clone, Copy)]
pub struct Expected<'a> {
    /// Name of the target, for the message.
    pub target: &'a str,
    /// Hash of the target's weights.
    pub target_fingerprint: &'a str,
    /// Feature layers that are read; the cache may hold more.
    pub layer_ids: &'a [i32],
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Hash of the tokenizer.
    pub tokenizer_hash: &'a str,
}

impl Reader {
    /// Opens the cache in `dir`: reads its manifest, and checks that every shard is there with its full size.
    ///
    /// # Errors
    /// [`CacheError::NotACache`], [`CacheError::Unfinished`], [`CacheError::Version`], [`CacheError::ManifestJson`],
    /// [`CacheError::ManifestField`], [`CacheError::Shard`] or [`CacheError::Io`].
    pub fn open(dir: &Path) -> Result<Self, CacheError> {
        let reader = Self::open_manifest(dir)?;
        for entry in &reader.manifest.shards {
            let path = dir.join(&entry.name);
            let found = fs_err::metadata(&path)?.len();
            if found != entry.bytes {
                let reason = format!("it has {found} bytes, expected {}", entry.bytes);
                return Err(CacheError::Shard { path, reason });
            }
        }
        Ok(reader)
    }

    /// Opens the cache without a look at its shards.
    pub(super) fn open_manifest(dir: &Path) -> Result<Self, CacheError> {
        let path = dir.join(MANIFEST_FILE);
        let Some(manifest) = read_manifest(&path)? else {
            return Err(match read_manifest(&dir.join(PROGRESS_FILE))? {
                Some(progress) => CacheError::Unfinished {
                    dir: dir.to_owned(),
                    done: progress.samples_listed(),
                    samples: progress.samples,
                },
                None => CacheError::NotACache { dir: dir.to_owned() },
            });
        };
        let listed = manifest.samples_listed();
        if listed != manifest.samples {
            return Err(CacheError::ManifestField {
                path,
                field: "shards".to_owned(),
                found: format!("a list with {listed} samples"),
                expected: manifest.samples.to_string(),
            });
        }
        let schema = schema(&manifest.meta)?;
        let shards = manifest.shards.iter().map(|_| OnceLock::new()).collect();
        Ok(Self { dir: dir.to_owned(), manifest, schema, shards })
    }

    /// Number of samples.
    pub fn len(&self) -> u64 {
        self.manifest.samples
    }

    /// Whether there are no samples; a cache that can be opened has some.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What the cache was made from, and how.
    pub fn meta(&self) -> &CacheMeta {
        &self.manifest.meta
    }

    /// Its folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The whole manifest, with counts and shards.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Sample `index`, borrowed from the mapped shard. When it is first read through this reader, everything is checked: lengths,
    /// tokens, mask, that its rows can be a target's (see [`rows`](super::rows)), and its checksum.
    ///
    /// # Errors
    /// [`CacheError::NoSuchSample`], or [`CacheError::Shard`], [`CacheError::Sample`], [`CacheError::Checksum`] or
    /// [`CacheError::Io`] when the shard is damaged.
    pub fn sample(&self, index: u64) -> Result<Sample<'_>, CacheError> {
        let (shard, row) = self.place(index)?;
        if shard.is_verified(row) {
            return Ok(shard.read(row)?.sample);
        }
        let stored = read_verified(shard, row, index, self.meta())?;
        shard.set_verified(row);
        Ok(stored.sample)
    }

    /// As [`Reader::sample`], checked again however often it was read before.
    ///
    /// # Errors
    /// Those of [`Reader::sample`].
    pub fn verify_sample(&self, index: u64) -> Result<Sample<'_>, CacheError> {
        let (shard, row) = self.place(index)?;
        Ok(read_verified(shard, row, index, self.meta())?.sample)
    }

    /// Tokens and loss mask of sample `index`, for passes over a whole cache that need no rows: those are neither read from the
    /// disk nor checked, and nor is the checksum, which is over everything.
    ///
    /// # Errors
    /// Those of [`Reader::sample`] but for rows and checksum.
    pub fn tokens(&self, index: u64) -> Result<(&[u32], &[u8]), CacheError> {
        let (shard, row) = self.place(index)?;
        let Sample { input_ids, loss_mask, .. } = read_shaped(shard, row, index, self.meta())?.sample;
        Ok((input_ids, loss_mask))
    }

    /// Makes sure that the cache was made from this target and tokenizer and holds these layers.
    ///
    /// # Errors
    /// [`CacheError::Unfit`], which names both sides of everything that differs.
    pub fn expect_matches(&self, expected: &Expected<'_>) -> Result<(), CacheError> {
        let meta = self.meta();
        let target = |name: &str, fingerprint: &str| format!("`{name}` (weights {fingerprint})");
        let mut mismatches = Vec::new();
        let mut compare = |field: &str, equal: bool, cache: String, wanted: String| {
            if !equal {
                mismatches.push(Mismatch { field: field.to_owned(), cache, wanted });
            }
        };
        compare(
            "target",
            meta.target_fingerprint == expected.target_fingerprint,
            target(&meta.target, &meta.target_fingerprint),
            target(expected.target, expected.target_fingerprint),
        );
        compare(
            "layer_ids",
            self.columns(expected.layer_ids).is_ok(),
            format!("{:?}", meta.layer_ids),
            format!("{:?}", expected.layer_ids),
        );
        compare(
            "hidden_size",
            meta.hidden_size == expected.hidden_size,
            meta.hidden_size.to_string(),
            expected.hidden_size.to_string(),
        );
        compare(
            "tokenizer_hash",
            meta.tokenizer_hash == expected.tokenizer_hash,
            meta.tokenizer_hash.clone(),
            expected.tokenizer_hash.to_owned(),
        );
        if mismatches.is_empty() { Ok(()) } else { Err(CacheError::Unfit { dir: self.dir.clone(), mismatches }) }
    }

    /// Shard `index`, mapped on first use.
    pub(super) fn shard(&self, index: usize) -> Result<&Shard, CacheError> {
        let slot = &self.shards[index];
        if let Some(shard) = slot.get() {
            return Ok(shard);
        }
        let entry = &self.manifest.shards[index];
        let shard = Shard::open(self.dir.join(&entry.name), &self.schema, entry.samples)?;
        Ok(slot.get_or_init(|| shard))
    }

    /// The shard of sample `index`, and the sample's row in it.
    fn place(&self, index: u64) -> Result<(&Shard, usize), CacheError> {
        let samples = self.manifest.samples;
        if index >= samples {
            return Err(CacheError::NoSuchSample { dir: self.dir.clone(), sample: index, samples });
        }
        let per_shard = self.manifest.samples_per_shard;
        Ok((self.shard((index / per_shard) as usize)?, (index % per_shard) as usize))
    }
}

/// The sample in `row`, which must have id `index` and lengths, tokens and mask of the format.
fn read_shaped<'a>(shard: &'a Shard, row: usize, index: u64, meta: &CacheMeta) -> Result<Stored<'a>, CacheError> {
    let stored = shard.read(row)?;
    let found = stored.sample.sample_id;
    if found != index {
        let reason = format!("record batch {row} holds sample {found}, expected sample {index}");
        return Err(CacheError::Shard { path: shard.path().to_owned(), reason });
    }
    stored.sample.validate_shape(meta).map_err(|error| error.found_in(shard.path()))?;
    Ok(stored)
}

/// The sample in `row`, which must obey the format in everything and have the checksum that it was written with. Rows come before
/// the checksum, since that fault has a place.
pub(super) fn read_verified<'a>(
    shard: &'a Shard,
    row: usize,
    index: u64,
    meta: &CacheMeta,
) -> Result<Stored<'a>, CacheError> {
    let stored = read_shaped(shard, row, index, meta)?;
    stored.sample.validate_rows(meta).map_err(|error| error.found_in(shard.path()))?;
    let found = stored.sample.crc32c();
    if found != stored.crc32c {
        return Err(CacheError::Checksum {
            path: shard.path().to_owned(),
            what: format!("sample {index}"),
            found,
            expected: stored.crc32c,
        });
    }
    Ok(stored)
}

/// The manifest at `path`, or `None` when there is no such file.
pub(super) fn read_manifest(path: &Path) -> Result<Option<Manifest>, CacheError> {
    let file = match fs_err::File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let mut json = Vec::new();
    let read = file.take(MAX_MANIFEST_BYTES).read_to_end(&mut json)? as u64;
    if read == MAX_MANIFEST_BYTES {
        return Err(CacheError::ManifestField {
            path: path.to_owned(),
            field: "file size".to_owned(),
            found: format!("{MAX_MANIFEST_BYTES} bytes or more"),
            expected: "less".to_owned(),
        });
    }
    Manifest::from_json(path, &json).map(Some)
}
