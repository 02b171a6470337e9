//! The target cache, version 3: what the frozen target computed for every training sample, kept on disk so that a
//! drafter can train on it many times. `prepare` writes it, `train` and `eval` read it.
//!
//! A cache is a folder. Its files, and what each holds, are described in [`mod@format`].
//!
//! - [`Writer`] appends samples in order. Shards appear whole or not at all, a killed run resumes at the first sample
//!   that is not yet in a finished shard, and the result has the same bytes as an uninterrupted run.
//! - [`Reader`] maps shards into memory and hands out slices of them; nothing is copied. [`Reader::columns`] takes the layers
//!   that a drafter reads out of those that are stored.
//! - [`mod@rows`] says which rows a cache may hold: writer, readers and checks of both versions refuse others.
//! - [`check()`] reads everything once and reports every fault it finds.
//!
//! [`v2`] reads and writes the reference's format, version 2.
//!
//! Files are treated as hostile: all offsets and lengths are checked before use, and a fault is an error, never a panic.

mod check;
mod columns;
mod disk;
mod error;
pub mod format;
mod reader;
pub mod rows;
mod sample;
mod shard;
pub mod v2;
mod writer;

pub use check::{Report, check};
pub use columns::LayerColumns;
pub use disk::{available_bytes, check_space};
pub use error::{CacheError, Mismatch};
pub use format::{CacheMeta, Manifest, ShardEntry, StorageMode, estimate_bytes};
pub use reader::{Expected, Reader};
pub use sample::Sample;
pub use writer::{Plan, Writer};
