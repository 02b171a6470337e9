//! The reference's target cache, version 2: read, checked and written. `prepare --import-cache` and `export --to cache-v2` turn one
//! version into the other.
//!
//! The files are described in [`mod@format`]. They carry no checksum, and nothing that identifies the target but its name.

pub mod format;
mod reader;
mod writer;

pub use format::{Manifest, VERSION};
pub use reader::{Decoded, Reader, check, is_v2};
pub use writer::{MAX_SHARD_BYTES, Writer};
