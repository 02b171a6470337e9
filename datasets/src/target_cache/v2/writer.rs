//! Writes a version 2 cache, one sample after another. Its folder appears when it is complete.

use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};

use super::format::{INDEX_FILE, Manifest, Record, ShardEntry, shard_name};
use crate::target_cache::format::MANIFEST_FILE;
use crate::target_cache::rows::check_rows;
use crate::target_cache::{CacheError, Sample, disk};

/// Size that the reference's shards do not exceed.
pub const MAX_SHARD_BYTES: u64 = 64 << 30;
/// Bytes collected before they are handed to the operating system.
const BUFFER_BYTES: usize = 1 << 20;

/// The one writer of a cache. Dropped early, it leaves a hidden folder, which the next writer of that cache replaces.
#[derive(Debug)]
pub struct Writer {
    dir: PathBuf,
    partial: PathBuf,
    manifest: Manifest,
    max_shard_bytes: u64,
    index: BufWriter<fs_err::File>,
    shard: Option<(BufWriter<fs_err::File>, u64)>,
}

impl Writer {
    /// Starts the cache in `dir`, which must not exist or be empty. A shard is closed before it would exceed `max_shard_bytes`; a
    /// sample that is larger has one of its own.
    ///
    /// # Errors
    /// [`CacheError::Occupied`] when there are files in `dir`, [`CacheError::DiskFull`] or [`CacheError::Io`].
    pub fn create(dir: &Path, manifest: Manifest, max_shard_bytes: u64) -> Result<Self, CacheError> {
        if dir.exists() && (dir.is_file() || fs_err::read_dir(dir)?.next().is_some()) {
            return Err(CacheError::Occupied { dir: dir.into() });
        }
        let name = dir.file_name().ok_or_else(|| CacheError::Occupied { dir: dir.into() })?;
        let partial = dir.with_file_name(format!(".{}.partial", name.to_string_lossy()));
        if partial.exists() {
            fs_err::remove_dir_all(&partial)?;
        }
        fs_err::create_dir_all(&partial)?;
        let index = buffered(&partial.join(INDEX_FILE))?;
        let manifest = Manifest { num_samples: 0, num_shards: 0, shards: Vec::new(), ..manifest };
        Ok(Self { dir: dir.into(), partial, manifest, max_shard_bytes, index, shard: None })
    }

    /// Appends a sample.
    ///
    /// # Errors
    /// [`CacheError::Sample`] when an array has not the length that the description implies, a token does not fit or a row is no
    /// target's,
    /// [`CacheError::DiskFull`] or [`CacheError::Io`].
    pub fn append(&mut self, sample: &Sample<'_>) -> Result<(), CacheError> {
        let fault = |field, found: String, expected: String| {
            Err(CacheError::Sample { shard: None, sample: sample.sample_id, field, found, expected })
        };
        let tokens = sample.input_ids.len();
        if tokens == 0 || tokens > self.manifest.max_length {
            return fault("input_ids", format!("has {tokens} tokens"), format!("1 to {}", self.manifest.max_length));
        }
        if let Some(id) = sample.input_ids.iter().find(|&&id| i32::try_from(id).is_err()) {
            return fault("input_ids", format!("has id {id}"), "ids of 31 bits".into());
        }
        let Some(lengths) = u32::try_from(tokens).ok().and_then(|tokens| self.manifest.array_bytes(tokens)) else {
            return fault("input_ids", format!("has {tokens} tokens"), "fewer".into());
        };
        let attention_mask = vec![1; tokens];
        let arrays: [&[u8]; 5] = [
            bytemuck::cast_slice(sample.input_ids),
            &attention_mask,
            sample.loss_mask,
            bytemuck::cast_slice(sample.features),
            bytemuck::cast_slice(sample.last_hidden),
        ];
        let fields = ["input_ids", "attention_mask", "loss_mask", "features", "last_hidden"];
        for ((array, length), field) in arrays.iter().zip(lengths).zip(fields) {
            if array.len() as u64 != length {
                return fault(field, format!("has {} bytes", array.len()), length.to_string());
            }
        }
        let Manifest { target_layer_ids, hidden_size, .. } = &self.manifest;
        check_rows(sample.sample_id, target_layer_ids, *hidden_size, sample.features, sample.last_hidden)?;
        let total: u64 = lengths.iter().sum();
        if self.shard.as_ref().is_some_and(|(_, written)| written + total > self.max_shard_bytes) {
            self.close_shard()?;
        }
        let (mut file, start) = match self.shard.take() {
            Some(open) => open,
            None => (self.next_shard()?, 0),
        };
        let mut offsets = [start; 5];
        for i in 1..offsets.len() {
            offsets[i] = offsets[i - 1] + lengths[i - 1];
        }
        for array in arrays {
            file.write_all(array)?;
        }
        self.shard = Some((file, start + total));
        let shard_id = self.manifest.shards.len() as u32 - 1;
        let record = Record { sample_id: sample.sample_id, shard_id, seq_len: tokens as u32, offsets };
        self.index.write_all(&record.to_bytes())?;
        self.manifest.num_samples += 1;
        Ok(())
    }

    /// Completes the cache and gives its folder its name.
    ///
    /// # Errors
    /// [`CacheError::ManifestField`] when the description cannot be met or there is no sample, [`CacheError::DiskFull`] or
    /// [`CacheError::Io`].
    pub fn finish(mut self) -> Result<Manifest, CacheError> {
        self.close_shard()?;
        sync(&mut self.index)?;
        self.manifest.num_shards = self.manifest.shards.len();
        let path = self.partial.join(MANIFEST_FILE);
        self.manifest.validate(&path)?;
        disk::write_atomic(&path, &self.manifest.to_json(&path)?)?;
        if self.dir.is_dir() {
            fs_err::remove_dir(&self.dir)?;
        }
        disk::publish(&self.partial, &self.dir)?;
        Ok(self.manifest)
    }

    fn next_shard(&mut self) -> Result<BufWriter<fs_err::File>, CacheError> {
        let shard_id = self.manifest.shards.len() as u32;
        let file_name = shard_name(shard_id);
        let file = buffered(&self.partial.join(&file_name))?;
        self.manifest.shards.push(ShardEntry { file_name, shard_id });
        Ok(file)
    }

    fn close_shard(&mut self) -> Result<(), CacheError> {
        if let Some((mut file, _)) = self.shard.take() {
            sync(&mut file)?;
        }
        Ok(())
    }
}

fn buffered(path: &Path) -> Result<BufWriter<fs_err::File>, CacheError> {
    Ok(BufWriter::with_capacity(BUFFER_BYTES, fs_err::File::create(path)?))
}

fn sync(file: &mut BufWriter<fs_err::File>) -> Result<(), CacheError> {
    file.flush()?;
    file.get_ref().sync_all()?;
    Ok(())
}
