//! What can go wrong with a target cache: facts in the variants, advice in [`CacheError::hint`].

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// A fault of a target cache on disk, or of a call that reads or writes one.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CacheError {
    /// The operating system refused a file operation. The source names the path.
    #[error("cannot access the target cache: {0}")]
    Io(#[source] io::Error),
    /// A write failed because the disk, or the user's quota, is full.
    #[error("the disk is full: {0}")]
    DiskFull(#[source] io::Error),
    /// The free space is too small for what is to be written.
    #[error("`{}` needs {needed} bytes, but its disk has {available} bytes free", dir.display())]
    NotEnoughSpace {
        /// Folder that is to hold the cache.
        dir: PathBuf,
        /// Bytes the cache will need.
        needed: u64,
        /// Bytes that can still be written.
        available: u64,
    },
    /// Another writer is at work in the folder.
    #[error("`{}` is being written by process {pid}", dir.display())]
    Locked {
        /// Folder of the cache.
        dir: PathBuf,
        /// Process id that the other writer left in the lock file.
        pid: String,
    },
    /// There is no manifest in the folder.
    #[error("`{}` is not a target cache: it has no `manifest.json`", dir.display())]
    NotACache {
        /// Folder that was opened.
        dir: PathBuf,
    },
    /// A cache is to be written where other files are.
    #[error("`{}` is not an empty folder", dir.display())]
    Occupied {
        /// Folder that was asked for.
        dir: PathBuf,
    },
    /// The index or a shard of a version 2 cache is damaged.
    #[error("version 2 cache is damaged: `{}`: {reason}", path.display())]
    Version2 {
        /// File at fault.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The run that writes the cache was stopped and has not been resumed yet.
    #[error("target cache `{}` is not complete: {done} of {samples} samples are written", dir.display())]
    Unfinished {
        /// Folder of the cache.
        dir: PathBuf,
        /// Samples written so far.
        done: u64,
        /// Samples planned.
        samples: u64,
    },
    /// The manifest is of another version of the format.
    #[error("cannot read `{}`: version {found}, expected {expected}", path.display())]
    Version {
        /// The manifest.
        path: PathBuf,
        /// Version in the file.
        found: u64,
        /// Version this build reads.
        expected: u32,
    },
    /// The manifest is not JSON, or has missing, unknown or ill-typed fields.
    #[error("cannot parse `{}`: {source}", path.display())]
    ManifestJson {
        /// The manifest.
        path: PathBuf,
        /// Where parsing stopped, and why.
        source: serde_json::Error,
    },
    /// The manifest parses, but a field has a value that cannot be.
    #[error("`{}`: `{field}` is {found}, expected {expected}", path.display())]
    ManifestField {
        /// The manifest.
        path: PathBuf,
        /// Name of the field.
        field: String,
        /// Value in the file.
        found: String,
        /// Values that would be right.
        expected: String,
    },
    /// The description of a new cache is not usable.
    #[error("target cache description: `{field}` is {found}, expected {expected}")]
    Meta {
        /// Field of [`CacheMeta`](super::CacheMeta) or [`Plan`](super::Plan).
        field: &'static str,
        /// Value given.
        found: String,
        /// Values that would be right.
        expected: String,
    },
    /// A run was resumed with settings other than those it began with.
    #[error("cannot resume target cache `{}`: {mismatch}", dir.display())]
    ResumeMismatch {
        /// Folder of the cache.
        dir: PathBuf,
        /// The first setting that differs.
        mismatch: Mismatch,
    },
    /// The cache was made from another target, or for another drafter, than the caller's.
    #[error("target cache `{}` does not fit: {}", dir.display(), join(mismatches))]
    Unfit {
        /// Folder of the cache.
        dir: PathBuf,
        /// Every setting that differs.
        mismatches: Vec<Mismatch>,
    },
    /// A sample breaks the rules of the format, or holds rows that no target computes.
    #[error("sample {sample}{}: `{field}` {found}, expected {expected}", in_shard(shard.as_deref()))]
    Sample {
        /// Shard that holds it; none where a sample is about to be written.
        shard: Option<PathBuf>,
        /// Id of the sample.
        sample: u64,
        /// Column at fault.
        field: &'static str,
        /// What the column holds.
        found: String,
        /// What it should hold.
        expected: String,
    },
    /// A sample was appended out of turn.
    #[error("sample {found} was appended out of order, expected sample {expected}")]
    OutOfOrder {
        /// Id of the sample given.
        found: u64,
        /// Id that is next.
        expected: u64,
    },
    /// A sample number past the end was asked for or appended.
    #[error("sample {sample} is outside target cache `{}`, which has {samples} samples", dir.display())]
    NoSuchSample {
        /// Folder of the cache.
        dir: PathBuf,
        /// Number of the sample.
        sample: u64,
        /// Samples in the cache.
        samples: u64,
    },
    /// No token of the whole data set has its loss mask set, so there is nothing to learn.
    #[error("target cache `{}` has no supervised token in its {samples} samples", dir.display())]
    NothingSupervised {
        /// Folder of the cache.
        dir: PathBuf,
        /// Samples written.
        samples: u64,
    },
    /// A shard is cut short, damaged, or of another cache.
    #[error("shard `{}` is damaged: {reason}", path.display())]
    Shard {
        /// The shard.
        path: PathBuf,
        /// What was found, and what was expected.
        reason: String,
    },
    /// The bytes of a shard, or of a sample in it, are not those that were written.
    #[error("{what} in `{}` is damaged: crc32c {found:08x}, expected {expected:08x}", path.display())]
    Checksum {
        /// The shard.
        path: PathBuf,
        /// `sample 17`, or `file`.
        what: String,
        /// Checksum of the bytes on disk.
        found: u32,
        /// Checksum stored when they were written.
        expected: u32,
    },
    /// The Arrow encoder refused a record batch.
    #[error("cannot encode a record batch of the target cache: {0}")]
    Encode(#[source] arrow_schema::ArrowError),
}

impl CacheError {
    /// What the user can do about it, where something can be done.
    pub fn hint(&self) -> Option<String> {
        let hint = match self {
            Self::DiskFull(_) => "free some space and run `deepspec prepare` again; finished shards are kept",
            Self::NotEnoughSpace { .. } => {
                "free some space, choose a folder on another disk, or prepare less: `data.limit`, `prepare.max_new_tokens` and `prepare.max_length` make the cache smaller"
            }
            Self::Locked { .. } => "wait until that process ends, or give this run a folder of its own",
            Self::NotACache { .. } => "build it with `deepspec prepare`",
            Self::Unfinished { .. } => {
                "run `deepspec prepare` again with the same settings; it goes on where it stopped"
            }
            Self::Version { .. } => {
                "rebuild the cache with `deepspec prepare`; a version 2 cache is taken over by `deepspec prepare --import-cache`"
            }
            Self::ManifestJson { .. } | Self::ManifestField { .. } => {
                "the manifest was edited or damaged; rebuild the cache with `deepspec prepare`"
            }
            Self::Version2 { .. } => "copy the cache again from where it was made",
            Self::Occupied { .. } => "give another folder, or empty this one",
            Self::ResumeMismatch { .. } => "undo that change, or start a new cache in another folder",
            Self::Unfit { .. } => "correct the recipe, or build a cache for it with `deepspec prepare`",
            Self::NothingSupervised { .. } => "check the chat template and `loss_on`: no assistant turn was recognised",
            Self::Shard { .. } | Self::Checksum { .. } | Self::Sample { shard: Some(_), .. } => {
                "delete that shard and run `deepspec prepare` again; it is rebuilt from its first sample"
            }
            Self::Sample { field: "input_ids", .. } => "check that data, tokenizer and target belong together",
            Self::Sample { field: "features" | "last_hidden", .. } => {
                "the target does not compute sound numbers: check its files with `deepspec inspect`, or hold it in another `target.precision`"
            }
            Self::Io(_)
            | Self::Meta { .. }
            | Self::Sample { .. }
            | Self::OutOfOrder { .. }
            | Self::NoSuchSample { .. }
            | Self::Encode(_) => return None,
        };
        Some(hint.to_owned())
    }
}

impl CacheError {
    /// The same fault, of a sample that a shard holds.
    pub(super) fn found_in(mut self, path: &Path) -> Self {
        if let Self::Sample { shard, .. } = &mut self {
            *shard = Some(path.to_owned());
        }
        self
    }
}

impl From<io::Error> for CacheError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Self::DiskFull(error),
            _ => Self::Io(error),
        }
    }
}

impl From<arrow_schema::ArrowError> for CacheError {
    fn from(error: arrow_schema::ArrowError) -> Self {
        match error {
            arrow_schema::ArrowError::IoError(_, io) => io.into(),
            other => Self::Encode(other),
        }
    }
}

/// One setting that a cache and its user do not agree on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mismatch {
    /// Name of the setting; a dotted path for a key inside the recipe.
    pub field: String,
    /// Value the cache was made with.
    pub cache: String,
    /// Value the caller wants.
    pub wanted: String,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` is {} in the cache, but {} is wanted", self.field, self.cache, self.wanted)
    }
}

fn in_shard(shard: Option<&Path>) -> String {
    shard.map_or_else(String::new, |path| format!(" in `{}`", path.display()))
}

fn join(mismatches: &[Mismatch]) -> String {
    mismatches.iter().map(Mismatch::to_string).collect::<Vec<_>>().join("; ")
}
