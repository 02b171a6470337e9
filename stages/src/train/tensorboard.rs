//! Scalar curves as a TensorBoard event file, written without any TensorBoard code. Training calls it; it reads no clock.
//!
//! A file is a sequence of records: payload length (u64), masked CRC-32C of those eight bytes, payload, masked CRC-32C of
//! the payload, all little endian. A payload is a protobuf `Event`; four of its fields are enough for curves.

use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use fs_err::{File, OpenOptions};
use thiserror::Error;

const FILE_VERSION: &[u8] = b"brain.Event:2";

/// Why an event file cannot be written or continued.
#[derive(Debug, Error)]
pub enum EventFileError {
    /// The file system refused; the message names the path.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// The file to be continued does not start like an event file.
    #[error("cannot continue event file `{path}`: first record is not `brain.Event:2`")]
    NotAnEventFile {
        /// The file.
        path: PathBuf,
    },
    /// A complete record of the file to be continued has the wrong checksum.
    #[error(
        "cannot continue event file `{path}`: checksum at byte {offset} is {found:#010x}, expected {expected:#010x}"
    )]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// Where the checksum stands.
        offset: usize,
        /// The checksum in the file.
        found: u32,
        /// The checksum of the bytes.
        expected: u32,
    },
}

impl EventFileError {
    /// What the user can do about it, where there is something.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Io(_) => None,
            Self::NotAnEventFile { path } | Self::Corrupt { path, .. } => {
                Some(format!("move `{}` away; training then starts a new event file", path.display()))
            }
        }
    }
}

/// Appends scalars to one event file.
#[derive(Debug)]
pub struct EventWriter {
    file: BufWriter<File>,
    path: PathBuf,
}

impl EventWriter {
    /// Creates `events.out.tfevents.<seconds>.deepspec` in `dir`, which is created if missing. `start_time_seconds` is the
    /// time since the Unix epoch.
    ///
    /// # Errors
    /// The file exists already or cannot be written.
    pub fn create(dir: &Path, start_time_seconds: f64) -> Result<Self, EventFileError> {
        fs_err::create_dir_all(dir)?;
        let path = dir.join(format!("events.out.tfevents.{:010}.deepspec", start_time_seconds.max(0.0) as u64));
        let file = BufWriter::new(OpenOptions::new().write(true).create_new(true).open(&path)?);
        let mut writer = Self { file, path };
        let mut event = event(start_time_seconds, 0);
        put_bytes(&mut event, 3, FILE_VERSION);
        writer.record(&event)?;
        writer.flush()?;
        Ok(writer)
    }

    /// Continues `path` after a resume from `last_step`: what was written later than that step, and a record that a crash cut
    /// short, is removed, so the curves become those of an uninterrupted run.
    ///
    /// # Errors
    /// The file cannot be opened, is no event file, or has a record with a wrong checksum.
    pub fn resume(path: &Path, last_step: u64) -> Result<Self, EventFileError> {
        let kept = length_up_to(path, &fs_err::read(path)?, last_step)?;
        let mut file = OpenOptions::new().write(true).open(path)?;
        file.set_len(kept as u64)?;
        file.seek(SeekFrom::End(0))?;
        Ok(Self { file: BufWriter::new(file), path: path.to_owned() })
    }

    /// The newest event file in `dir`, by the time in its name; `None` if there is none.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn latest_in(dir: &Path) -> Result<Option<PathBuf>, EventFileError> {
        let mut newest = None;
        for entry in fs_err::read_dir(dir)? {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if name.starts_with("events.out.tfevents.") && name.ends_with(".deepspec") {
                newest = newest.max(Some(path));
            }
        }
        Ok(newest)
    }

    /// Adds one point to the curve `tag`. `wall_time` is in seconds since the Unix epoch.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn scalar(&mut self, tag: &str, step: u64, value: f32, wall_time: f64) -> Result<(), EventFileError> {
        let mut point = Vec::new();
        put_bytes(&mut point, 1, tag.as_bytes());
        point.push(key(2, FIXED_32));
        point.extend(value.to_le_bytes());
        let mut summary = Vec::new();
        put_bytes(&mut summary, 1, &point);
        let mut event = event(wall_time, step);
        put_bytes(&mut event, 5, &summary);
        self.record(&event)
    }

    /// Hands everything written so far to the operating system.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn flush(&mut self) -> Result<(), EventFileError> {
        Ok(self.file.flush()?)
    }

    /// Where the file is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn record(&mut self, payload: &[u8]) -> Result<(), EventFileError> {
        let length = (payload.len() as u64).to_le_bytes();
        self.file.write_all(&length)?;
        self.file.write_all(&masked_crc(&length).to_le_bytes())?;
        self.file.write_all(payload)?;
        self.file.write_all(&masked_crc(payload).to_le_bytes())?;
        Ok(())
    }
}

/// Checksum of a record part, rotated and shifted as the format asks.
fn masked_crc(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

const VARINT: u8 = 0;
const FIXED_64: u8 = 1;
const LENGTH_DELIMITED: u8 = 2;
const FIXED_32: u8 = 5;

/// First byte of a protobuf field.
const fn key(field: u8, wire_type: u8) -> u8 {
    field << 3 | wire_type
}

/// An `Event` with its wall time (field 1) and step (field 2, left out when 0).
fn event(wall_time: f64, step: u64) -> Vec<u8> {
    let mut event = vec![key(1, FIXED_64)];
    event.extend(wall_time.to_le_bytes());
    if step > 0 {
        event.push(key(2, VARINT));
        put_varint(&mut event, step);
    }
    event
}

fn put_bytes(message: &mut Vec<u8>, field: u8, bytes: &[u8]) {
    message.push(key(field, LENGTH_DELIMITED));
    put_varint(message, bytes.len() as u64);
    message.extend(bytes);
}

fn put_varint(message: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        message.push(value as u8 | 0x80);
        value >>= 7;
    }
    message.push(value as u8);
}

/// Step of an event as [`event`] lays it out.
fn step_of(event: &[u8]) -> u64 {
    if event.get(9) != Some(&key(2, VARINT)) {
        return 0;
    }
    let mut step = 0;
    for (number, byte) in event[10..].iter().take(10).enumerate() {
        step |= u64::from(byte & 0x7f) << (7 * number);
        if byte & 0x80 == 0 {
            break;
        }
    }
    step
}

/// Length of the part of an event file that holds complete records up to `last_step`.
fn length_up_to(path: &Path, file: &[u8], last_step: u64) -> Result<usize, EventFileError> {
    let mut offset = 0;
    while let Some((payload, end)) = record_at(path, file, offset)? {
        if offset == 0 && !payload.ends_with(FILE_VERSION) {
            break;
        }
        if step_of(payload) > last_step {
            return Ok(offset);
        }
        offset = end;
    }
    if offset == 0 { Err(EventFileError::NotAnEventFile { path: path.to_owned() }) } else { Ok(offset) }
}

/// Payload and end of the record at `offset`, or `None` if the file ends within it.
fn record_at<'a>(path: &Path, file: &'a [u8], offset: usize) -> Result<Option<(&'a [u8], usize)>, EventFileError> {
    let check = |bytes: &[u8], crc: [u8; 4], offset| {
        let (found, expected) = (u32::from_le_bytes(crc), masked_crc(bytes));
        if found == expected {
            Ok(())
        } else {
            Err(EventFileError::Corrupt { path: path.to_owned(), offset, found, expected })
        }
    };
    let Some((length, rest)) = file[offset..].split_first_chunk::<8>() else { return Ok(None) };
    let Some((&crc, rest)) = rest.split_first_chunk::<4>() else { return Ok(None) };
    check(length, crc, offset + 8)?;
    let size = usize::try_from(u64::from_le_bytes(*length)).unwrap_or(usize::MAX);
    let Some((payload, rest)) = rest.split_at_checked(size) else { return Ok(None) };
    let Some(&crc) = rest.first_chunk::<4>() else { return Ok(None) };
    check(payload, crc, offset + 12 + size)?;
    Ok(Some((payload, offset + 16 + size)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write_run(dir: &Path, steps: std::ops::RangeInclusive<u64>) -> PathBuf {
        let mut writer = EventWriter::create(dir, 1_700_000_000.25).unwrap();
        for step in steps {
            writer.scalar("train/loss", step, 1.0 / step as f32, 1_700_000_000.5 + step as f64).unwrap();
            writer.scalar("train/lr", step, 6e-4, 1_700_000_000.5 + step as f64).unwrap();
        }
        writer.flush().unwrap();
        writer.path().to_owned()
    }

    /// Bytes written by TensorBoard's own Python record writer and protobuf classes for the same events.
    #[test]
    fn bytes_are_those_of_the_python_writer() {
        let expected = concat!(
            "1800000000000000a37f4b220900001040fc54d9411a0d627261696e2e4576656e743a32338d2fe9",
            "2100000000000000017becf60900002040fc54d94110ac022a130a110a0a747261696e2f6c6f7373150000003f3d90db3a",
            "16000000000000004f61be280900006040fc54d9412a0b0a090a026c721552491d3a85fb7ea5",
        );
        let dir = tempfile::tempdir().unwrap();
        let mut writer = EventWriter::create(dir.path(), 1_700_000_000.25).unwrap();
        writer.scalar("train/loss", 300, 0.5, 1_700_000_000.5).unwrap();
        writer.scalar("lr", 0, 6e-4, 1_700_000_001.5).unwrap();
        writer.flush().unwrap();
        assert_eq!(writer.path().file_name().unwrap(), "events.out.tfevents.1700000000.deepspec");
        let found = fs_err::read(writer.path()).unwrap();
        let bytes = |at: usize| u8::from_str_radix(&expected[2 * at..2 * at + 2], 16).unwrap();
        assert_eq!(found, (0..expected.len() / 2).map(bytes).collect::<Vec<_>>());
    }

    #[test]
    fn a_resumed_file_equals_an_uninterrupted_one() {
        let (whole, cut) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let whole = write_run(whole.path(), 1..=300);
        let path = write_run(cut.path(), 1..=200);
        let torn = fs_err::metadata(&path).unwrap().len() - 5;
        OpenOptions::new().write(true).open(&path).unwrap().set_len(torn).unwrap();
        assert_eq!(EventWriter::latest_in(cut.path()).unwrap(), Some(path.clone()));
        let mut writer = EventWriter::resume(&path, 150).unwrap();
        for step in 151..=300 {
            writer.scalar("train/loss", step, 1.0 / step as f32, 1_700_000_000.5 + step as f64).unwrap();
            writer.scalar("train/lr", step, 6e-4, 1_700_000_000.5 + step as f64).unwrap();
        }
        drop(writer);
        assert_eq!(fs_err::read(path).unwrap(), fs_err::read(whole).unwrap());
    }

    #[test]
    fn a_torn_last_record_is_dropped_at_every_length() {
        let dir = tempfile::tempdir().unwrap();
        let bytes = fs_err::read(write_run(dir.path(), 1..=2)).unwrap();
        let path = Path::new("events");
        let first = record_at(path, &bytes, 0).unwrap().unwrap().1;
        let second = record_at(path, &bytes, first).unwrap().unwrap().1;
        for length in first..second {
            assert_eq!(length_up_to(path, &bytes[..length], 9).unwrap(), first);
        }
        assert_eq!(length_up_to(path, &bytes, 0).unwrap(), first);
        assert_eq!(length_up_to(path, &bytes, 9).unwrap(), bytes.len());
    }

    #[test]
    fn damaged_and_foreign_files_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = write_run(dir.path(), 1..=2);
        let mut bytes = fs_err::read(&path).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs_err::write(&path, &bytes).unwrap();
        let error = EventWriter::resume(&path, 2).unwrap_err();
        assert!(matches!(error, EventFileError::Corrupt { .. }) && error.hint().is_some(), "{error}");
        fs_err::write(&path, b"short").unwrap();
        assert!(matches!(EventWriter::resume(&path, 2), Err(EventFileError::NotAnEventFile { .. })));
        assert!(matches!(EventWriter::create(dir.path(), 1_700_000_000.9), Err(EventFileError::Io(_))));
    }
}
