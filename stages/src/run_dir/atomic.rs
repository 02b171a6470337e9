//! Replaces a file as a whole, so that a crash leaves the old content or the new one.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::Result;

/// Writes a file beside `path`, flushes it to the disk and renames it to `path`; then flushes the folder.
///
/// # Errors
/// The disk refuses; `path` is then as it was.
pub fn write_atomic(path: impl AsRef<Path>, bytes: &[u8]) -> Result<()> {
    let path = path.as_ref();
    let temporary = temporary_beside(path);
    let written = fs_err::File::create(&temporary).and_then(|mut file| {
        file.write_all(bytes)?;
        file.sync_all()
    });
    if let Err(error) = written.and_then(|()| fs_err::rename(&temporary, path)) {
        // The first error is the one to report.
        _ = fs_err::remove_file(&temporary);
        return Err(error.into());
    }
    sync_folder_of(path)
}

/// A name in the folder of `path` that no other call uses at this time.
pub(crate) fn temporary_beside(path: &Path) -> PathBuf {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    path.with_file_name(format!(".{name}.{}-{count}.tmp", std::process::id()))
}

/// Removes the temporary files that killed processes left in a folder; no other process may be writing there.
pub(super) fn remove_leftovers(folder: &Path) -> Result<()> {
    for entry in fs_err::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.starts_with('.') && name.ends_with(".tmp") && path.is_file() {
            fs_err::remove_file(&path)?;
        }
    }
    Ok(())
}

/// Flushes the folder that holds `path`, which makes a rename in it last.
pub(crate) fn sync_folder_of(path: &Path) -> Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    Ok(fs_err::File::open(folder)?.sync_all()?)
}
