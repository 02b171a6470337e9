//! Writes a target cache, one sample after another. Called by `prepare`.
//!
//! What survives a crash: a shard is written to `shard-NNNNN.arrow.tmp`, synced and renamed, then `progress.json` is
//! replaced by one that lists it. A resumed run therefore trusts the list, reads a shard that is named but not yet
//! listed, and starts again with the first sample of the first missing shard.

use std::fmt;
use std::io::{self, BufWriter, Seek, Write};
use std::path::{Path, PathBuf};

use arrow_ipc::writer::FileWriter;
use arrow_schema::SchemaRef;
use serde_json::json;

use super::disk;
use super::error::CacheError;
use super::format::{
    CacheMeta, LOCK_FILE, MANIFEST_FILE, Manifest, PROGRESS_FILE, ShardEntry, first_difference, shard_name,
};
use super::reader::{read_manifest, read_verified};
use super::sample::{Sample, schema};
use super::shard::Shard;

/// Bytes collected before they are handed to the operating system.
const BUFFER_BYTES: usize = 1 << 20;

/// How many samples a cache will have, and how they are cut into shards. Both are fixed from the start, so that the
/// files do not depend on where a run was stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plan {
    /// Samples in total, at least 1.
    pub samples: u64,
    /// Samples in each shard but the last, at least 1. A stopped run redoes less than this many.
    pub samples_per_shard: u64,
}

/// The one writer of a cache. Dropping it early is as safe as a crash.
#[derive(Debug)]
pub struct Writer {
    dir: PathBuf,
    manifest: Manifest,
    schema: SchemaRef,
    open: Option<OpenShard>,
    /// Keeps the lock; the system releases it with the file, however the process ends.
    _lock: fs_err::File,
}

impl Writer {
    /// Starts the cache in `dir`, or goes on with one that was started with the same `meta` and `plan`.
    ///
    /// # Errors
    /// [`CacheError::Meta`] when the description cannot be met, [`CacheError::Locked`] when another writer is at work,
    /// [`CacheError::ResumeMismatch`] when the cache was started with other settings, [`CacheError::Shard`],
    /// [`CacheError::Sample`] or [`CacheError::Checksum`] when a shard on disk is damaged, the manifest's errors as in
    /// [`Reader::open`](super::Reader::open), [`CacheError::DiskFull`] or [`CacheError::Io`].
    pub fn create_or_resume(dir: &Path, meta: CacheMeta, plan: Plan) -> Result<Self, CacheError> {
        meta.validate()?;
        for (field, value) in [("samples", plan.samples), ("samples_per_shard", plan.samples_per_shard)] {
            if value == 0 {
                return Err(CacheError::Meta { field, found: "0".to_owned(), expected: "at least 1".to_owned() });
            }
        }
        fs_err::create_dir_all(dir)?;
        let lock = lock(dir)?;
        remove_temporaries(dir)?;

        let complete = read_manifest(&dir.join(MANIFEST_FILE))?;
        let was_complete = complete.is_some();
        let wanted = Manifest::new(meta, plan.samples, plan.samples_per_shard);
        // The description on disk is kept, since equal descriptions can still differ in the order of recipe keys.
        let mut manifest = match complete {
            Some(manifest) => manifest,
            None => read_manifest(&dir.join(PROGRESS_FILE))?.unwrap_or_else(|| wanted.clone()),
        };
        if let Some(mismatch) = first_difference("", &identity(&manifest), &identity(&wanted)) {
            return Err(CacheError::ResumeMismatch { dir: dir.to_owned(), mismatch });
        }
        let schema = schema(&manifest.meta)?;
        let listed = std::mem::take(&mut manifest.shards);
        (manifest.tokens, manifest.supervised_tokens) = (0, 0);
        while let Some(entry) = existing_shard(dir, &manifest, &listed, &schema)? {
            manifest.push(entry);
        }
        let writer = Self { dir: dir.to_owned(), manifest, schema, open: None, _lock: lock };
        if !(was_complete && writer.next_sample() == plan.samples) {
            writer.save_progress()?;
            if was_complete {
                fs_err::remove_file(dir.join(MANIFEST_FILE))?;
            }
        }
        Ok(writer)
    }

    /// Number of the sample to append next; `plan.samples` when all are written.
    pub fn next_sample(&self) -> u64 {
        self.manifest.samples_listed() + self.open.as_ref().map_or(0, |shard| shard.entry.samples)
    }

    /// Size of the finished shards, to be taken off the space that the rest will need.
    pub fn bytes_written(&self) -> u64 {
        self.manifest.shards.iter().map(|shard| shard.bytes).sum()
    }

    /// Appends the next sample. A shard that cannot be written is given up, and its space with it; finished shards
    /// stay valid. After an error [`Writer::next_sample`] tells which sample to go on with.
    ///
    /// # Errors
    /// [`CacheError::Sample`] when the sample breaks the rules of the format, [`CacheError::OutOfOrder`] or
    /// [`CacheError::NoSuchSample`] when it is not the next one, [`CacheError::DiskFull`], [`CacheError::Io`] or
    /// [`CacheError::Encode`].
    pub fn append(&mut self, sample: &Sample<'_>) -> Result<(), CacheError> {
        let (found, expected, samples) = (sample.sample_id, self.next_sample(), self.manifest.samples);
        if found >= samples {
            return Err(CacheError::NoSuchSample { dir: self.dir.clone(), sample: found, samples });
        }
        if found != expected {
            return Err(CacheError::OutOfOrder { found, expected });
        }
        sample.validate(&self.manifest.meta)?;

        let index = self.manifest.shards.len();
        let mut shard = match self.open.take() {
            Some(shard) => shard,
            None => OpenShard::create(&self.dir, shard_name(index), &self.schema)?,
        };
        if let Err(error) = shard.write(sample, &self.schema) {
            shard.discard();
            return Err(error);
        }
        if shard.entry.samples == self.manifest.samples_in_shard(index) {
            self.manifest.push(shard.finish(&self.dir)?);
            self.save_progress()?;
        } else {
            self.open = Some(shard);
        }
        Ok(())
    }

    /// Completes the cache once all samples are written.
    ///
    /// # Errors
    /// [`CacheError::Unfinished`] when samples are missing, [`CacheError::NothingSupervised`] when no token of any
    /// sample is supervised, [`CacheError::DiskFull`] or [`CacheError::Io`].
    pub fn finish(self) -> Result<Manifest, CacheError> {
        let (dir, done, samples) = (self.dir.clone(), self.next_sample(), self.manifest.samples);
        if done != samples {
            return Err(CacheError::Unfinished { dir, done, samples });
        }
        if self.manifest.supervised_tokens == 0 {
            return Err(CacheError::NothingSupervised { dir, samples });
        }
        let path = dir.join(MANIFEST_FILE);
        disk::write_atomic(&path, &self.manifest.to_json(&path)?)?;
        remove_if_present(&dir.join(PROGRESS_FILE))?;
        Ok(self.manifest)
    }

    fn save_progress(&self) -> Result<(), CacheError> {
        let path = self.dir.join(PROGRESS_FILE);
        disk::write_atomic(&path, &self.manifest.to_json(&path)?)
    }
}

/// A shard that is being written under a temporary name.
struct OpenShard {
    temporary: PathBuf,
    file: FileWriter<Checksummed<BufWriter<fs_err::File>>>,
    entry: ShardEntry,
}

impl fmt::Debug for OpenShard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpenShard")
            .field("temporary", &self.temporary)
            .field("entry", &self.entry)
            .finish_non_exhaustive()
    }
}

impl OpenShard {
    fn create(dir: &Path, name: String, schema: &SchemaRef) -> Result<Self, CacheError> {
        let temporary = dir.join(format!("{name}.tmp"));
        let file = BufWriter::with_capacity(BUFFER_BYTES, fs_err::File::create(&temporary)?);
        let file = FileWriter::try_new(Checksummed { inner: file, bytes: 0, crc32c: 0 }, schema)?;
        let entry = ShardEntry { name, samples: 0, tokens: 0, supervised_tokens: 0, bytes: 0, crc32c: 0 };
        Ok(Self { temporary, file, entry })
    }

    fn write(&mut self, sample: &Sample<'_>, schema: &SchemaRef) -> Result<(), CacheError> {
        self.file.write(&sample.to_record_batch(schema)?)?;
        count(&mut self.entry, sample);
        Ok(())
    }

    fn finish(mut self, dir: &Path) -> Result<ShardEntry, CacheError> {
        if let Err(error) = self.seal() {
            self.discard();
            return Err(error);
        }
        disk::publish(&self.temporary, &dir.join(&self.entry.name))?;
        Ok(self.entry)
    }

    /// Writes the footer and waits until all bytes are on the disk.
    fn seal(&mut self) -> Result<(), CacheError> {
        self.file.finish()?;
        let Checksummed { inner, bytes, crc32c } = self.file.get_ref();
        inner.get_ref().sync_all()?;
        (self.entry.bytes, self.entry.crc32c) = (*bytes, *crc32c);
        Ok(())
    }

    /// Gives the space back. The write error that led here is what the caller needs to see; a file that stays behind
    /// is removed when the run is resumed.
    fn discard(self) {
        let _ = fs_err::remove_file(&self.temporary);
    }
}

/// Counts the bytes that pass, and their checksum.
#[derive(Debug)]
struct Checksummed<W> {
    inner: W,
    bytes: u64,
    crc32c: u32,
}

impl<W: Write> Write for Checksummed<W> {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        let written = self.inner.write(buffer)?;
        self.bytes += written as u64;
        self.crc32c = crc32c::crc32c_append(self.crc32c, &buffer[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

fn count(entry: &mut ShardEntry, sample: &Sample<'_>) {
    entry.samples += 1;
    entry.tokens += sample.input_ids.len() as u64;
    entry.supervised_tokens += sample.supervised_tokens();
}

/// What has to be the same for a run to be resumed.
fn identity(manifest: &Manifest) -> serde_json::Value {
    let mut identity = json!(manifest.meta);
    identity["samples"] = json!(manifest.samples);
    identity["samples_per_shard"] = json!(manifest.samples_per_shard);
    identity
}

/// The entry of the shard that follows those in `manifest`, if its file is there. A listed shard has to have its
/// size, footer and number of samples; one that is not listed is read as a whole.
fn existing_shard(
    dir: &Path,
    manifest: &Manifest,
    listed: &[ShardEntry],
    schema: &SchemaRef,
) -> Result<Option<ShardEntry>, CacheError> {
    let index = manifest.shards.len();
    let samples = manifest.samples_in_shard(index);
    let path = dir.join(shard_name(index));
    if samples == 0 || !path.exists() {
        return Ok(None);
    }
    let shard = Shard::open(path, schema, samples)?;
    if let Some(entry) = listed.get(index) {
        if shard.bytes() != entry.bytes {
            let reason = format!("it has {} bytes, expected {}", shard.bytes(), entry.bytes);
            return Err(CacheError::Shard { path: shard.path().to_owned(), reason });
        }
        return Ok(Some(entry.clone()));
    }
    let mut entry = ShardEntry {
        name: shard_name(index),
        samples: 0,
        tokens: 0,
        supervised_tokens: 0,
        bytes: shard.bytes(),
        crc32c: shard.crc32c(),
    };
    for row in 0..samples {
        let sample_id = manifest.samples_listed() + row;
        let stored = read_verified(&shard, row as usize, sample_id, &manifest.meta)?;
        count(&mut entry, &stored.sample);
    }
    Ok(Some(entry))
}

/// Takes the lock of the folder and leaves this process's id in it.
fn lock(dir: &Path) -> Result<fs_err::File, CacheError> {
    let path = dir.join(LOCK_FILE);
    let mut file = fs_err::OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path)?;
    match file.try_lock() {
        Ok(()) => {}
        Err(std::fs::TryLockError::WouldBlock) => {
            let pid = fs_err::read_to_string(&path)?.trim().to_owned();
            return Err(CacheError::Locked { dir: dir.to_owned(), pid });
        }
        Err(std::fs::TryLockError::Error(error)) => return Err(error.into()),
    }
    file.set_len(0)?;
    file.rewind()?;
    writeln!(file, "{}", std::process::id())?;
    Ok(file)
}

/// Removes what a run that was killed left unfinished.
fn remove_temporaries(dir: &Path) -> Result<(), CacheError> {
    for entry in fs_err::read_dir(dir)? {
        let name = entry?.file_name();
        let name = name.to_string_lossy();
        let ours = name.starts_with("shard-") || name.starts_with(MANIFEST_FILE) || name.starts_with(PROGRESS_FILE);
        if ours && name.ends_with(".tmp") {
            fs_err::remove_file(dir.join(&*name))?;
        }
    }
    Ok(())
}

fn remove_if_present(path: &Path) -> Result<(), CacheError> {
    match fs_err::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error.into()),
        _ => Ok(()),
    }
}
