//! File operations that survive a crash, and free space. Used by the writer, and by `prepare` before it starts.

use std::io::Write;
use std::path::Path;

use super::error::CacheError;

/// Bytes that this user can still write to the disk that holds `dir`, or that would hold it once it is created.
///
/// # Errors
/// [`CacheError::Io`] when the file system cannot be asked.
pub fn available_bytes(dir: &Path) -> Result<u64, CacheError> {
    let existing = dir.ancestors().find(|path| path.exists()).unwrap_or(Path::new("."));
    let stat = rustix::fs::statvfs(existing).map_err(|errno| {
        let error = std::io::Error::from(errno);
        std::io::Error::new(error.kind(), format!("free space of `{}`: {error}", existing.display()))
    })?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// Makes sure that `needed` bytes can be written to `dir`, which need not exist yet.
///
/// # Errors
/// [`CacheError::NotEnoughSpace`], which names both numbers, or [`CacheError::Io`].
pub fn check_space(dir: &Path, needed: u64) -> Result<(), CacheError> {
    let available = available_bytes(dir)?;
    if needed > available {
        return Err(CacheError::NotEnoughSpace { dir: dir.to_owned(), needed, available });
    }
    Ok(())
}

/// Replaces `path` in one step: after a crash it holds the old bytes or the new ones, nothing between.
pub(super) fn write_atomic(path: &Path, bytes: &[u8]) -> Result<(), CacheError> {
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(".tmp");
    let temporary = Path::new(&temporary);
    let mut file = fs_err::File::create(temporary)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    publish(temporary, path)
}

/// Gives a file that is already synced its final name, and makes the name last.
pub(super) fn publish(temporary: &Path, path: &Path) -> Result<(), CacheError> {
    fs_err::rename(temporary, path)?;
    sync_folder_of(path)
}

/// Makes creations, renames and removals in the folder of `path` last.
pub(super) fn sync_folder_of(path: &Path) -> Result<(), CacheError> {
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    fs_err::File::open(dir)?.sync_all()?;
    Ok(())
}
