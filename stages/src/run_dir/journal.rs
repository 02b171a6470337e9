//! Files of JSON lines that only grow: one record per line, whole or not there at all after a crash.

use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{Error, Result};

/// A file of JSON lines, open for appending.
#[derive(Debug)]
pub struct Journal {
    file: fs_err::File,
    /// Bytes of whole lines.
    len: u64,
    sync_every: u64,
    unsynced: u64,
    dropped_bytes: u64,
}

impl Journal {
    /// Opens or makes a journal and drops a last line that has no end, which is what a crash leaves. Records are
    /// flushed to the disk after every `sync_every` of them; 0 leaves that to [`Journal::sync`].
    ///
    /// # Errors
    /// The disk refuses.
    pub fn open(path: impl AsRef<Path>, sync_every: u64) -> Result<Self> {
        let mut file =
            fs_err::OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path.as_ref())?;
        let size = file.metadata()?.len();
        let len = whole_lines(&mut file, size)?;
        if len < size {
            file.set_len(len)?;
            file.sync_all()?;
        }
        file.seek(SeekFrom::Start(len))?;
        Ok(Self { file, len, sync_every, unsynced: 0, dropped_bytes: size - len })
    }

    /// Size of the torn line that opening dropped.
    pub fn dropped_bytes(&self) -> u64 {
        self.dropped_bytes
    }

    /// Appends a record as one line. It has reached the operating system when this returns.
    ///
    /// # Errors
    /// The record has no JSON form, or the disk refuses; the journal is then as it was.
    pub fn append<T: Serialize + ?Sized>(&mut self, record: &T) -> Result<()> {
        let mut line = serde_json::to_vec(record).map_err(std::io::Error::from)?;
        line.push(b'\n');
        if let Err(error) = self.file.write_all(&line) {
            // A part of the line may be there; the next record must not be glued to it. The first error is the one to
            // report.
            _ = self.file.set_len(self.len);
            _ = self.file.seek(SeekFrom::Start(self.len));
            return Err(error.into());
        }
        self.len += line.len() as u64;
        self.unsynced += 1;
        if self.unsynced == self.sync_every { self.sync() } else { Ok(()) }
    }

    /// Flushes all records to the disk.
    ///
    /// # Errors
    /// The disk refuses.
    pub fn sync(&mut self) -> Result<()> {
        self.file.sync_data()?;
        self.unsynced = 0;
        Ok(())
    }
}

/// The records of a journal, in order; none if there is no such file. A torn last line is left out.
///
/// # Errors
/// The file cannot be read, or a whole line is no such record.
pub fn read_journal<T: DeserializeOwned>(path: impl AsRef<Path>) -> Result<Vec<T>> {
    let path = path.as_ref();
    let bytes = match fs_err::read(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        bytes => bytes?,
    };
    let whole = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |last| last + 1);
    let lines = bytes[..whole].split_inclusive(|byte| *byte == b'\n').enumerate();
    let record = |(index, line): (usize, &[u8])| {
        serde_json::from_slice(line)
            .map_err(|error| Error::Input(format!("cannot read `{}`, line {}: {error}", path.display(), index + 1)))
    };
    lines.map(record).collect()
}

/// Bytes up to and including the last line break, searched from the end.
fn whole_lines(file: &mut fs_err::File, size: u64) -> std::io::Result<u64> {
    const BLOCK: u64 = 64 * 1024;
    let mut block = Vec::new();
    let mut end = size;
    while end > 0 {
        let start = end.saturating_sub(BLOCK);
        block.resize((end - start) as usize, 0);
        file.seek(SeekFrom::Start(start))?;
        file.read_exact(&mut block)?;
        if let Some(last) = block.iter().rposition(|byte| *byte == b'\n') {
            return Ok(start + last as u64 + 1);
        }
        end = start;
    }
    Ok(0)
}
