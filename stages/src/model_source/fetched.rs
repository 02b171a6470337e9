//! Whether a fetched model is still the one that was fetched. A record holds its size, time of change, a hash of samples and the
//! hash of the whole; each start compares all but the last, which takes no time to speak of. The record of a package lies
//! beside the file, those of the Hub's files in this program's own cache. [`check_fetched`] reads everything.

use std::fmt::Display;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::fail;
use super::pypi::hex;
use crate::error::{Error, Result};
use crate::run_dir::write_atomic;

/// Extension of the record.
const EXTENSION: &str = "gguf.sha256";
/// Parts of the file that are hashed at each start, the first and the last among them, and bytes of each.
const SAMPLES: u64 = 64;
const SAMPLE_BYTES: u64 = 64 << 10;

/// What a fetched file was when it had been checked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Record {
    /// Hash of the whole file, as 64 hex digits.
    sha256: String,
    bytes: u64,
    /// Nanoseconds since 1970; `None` where the system does not tell.
    modified_ns: Option<u64>,
    /// Hash of the samples.
    sample: String,
}

/// What a whole file has to be.
#[derive(Debug, Clone, Copy)]
pub(super) struct Expected<'a> {
    pub(super) sha256: &'a str,
    pub(super) bytes: u64,
}

/// Writes the record of a package's file that has just been checked as a whole.
pub(super) fn record(path: &Path, sha256: &str) -> Result<()> {
    record_at(&path.with_extension(EXTENSION), path, sha256)
}

fn record_at(marker: &Path, path: &Path, sha256: &str) -> Result<()> {
    let record = Record { sha256: sha256.into(), bytes: 0, modified_ns: None, sample: sample(path)? };
    let (bytes, modified_ns) = size_and_time(path)?;
    let text = serde_json::to_string(&Record { bytes, modified_ns, ..record }).map_err(std::io::Error::from)?;
    write_atomic(marker, format!("{text}\n").as_bytes())
}

/// Whether a package's model is there that was fetched and checked before.
///
/// # Errors
/// It is there, but it is not what it was: it was damaged or replaced.
pub(super) fn is_kept(model: &str, path: &Path, expected: Expected<'_>) -> Result<bool> {
    is_kept_with(&path.with_extension(EXTENSION), model, path, expected)
}

/// Compares the large files of a snapshot in the Hub's cache, which are called by their hashes, with their records in the
/// folder `records`. A file without a record is read whole once.
///
/// # Errors
/// One of them is not what was fetched, or cannot be read.
pub(super) fn check_snapshot(model: &str, snapshot: &Path, records: &Path) -> Result<()> {
    for (link, sha256) in files_called_by_hash(snapshot)? {
        let path = fs_err::canonicalize(&link)?;
        let (marker, bytes) = (records.join(format!("{sha256}.json")), fs_err::metadata(&path)?.len());
        if is_kept_with(&marker, model, &path, Expected { sha256: &sha256, bytes })? {
            continue;
        }
        let found = whole(&path)?;
        if found != sha256 {
            return Err(changed(model, &path, format!("has SHA-256 {found}, {sha256} was fetched")));
        }
        // A folder that cannot be written costs the same again next time.
        let _ = fs_err::create_dir_all(records).map_err(Error::from).and_then(|()| record_at(&marker, &path, &sha256));
    }
    Ok(())
}

/// The entries of a snapshot that lead to files which are called by their SHA-256, sorted by path.
fn files_called_by_hash(snapshot: &Path) -> Result<Vec<(PathBuf, String)>> {
    let mut files = Vec::new();
    for entry in fs_err::read_dir(snapshot)? {
        let path = entry?.path();
        let Ok(blob) = fs_err::read_link(&path) else { continue };
        let name = blob.file_name().unwrap_or_default().to_string_lossy();
        if is_sha256(&name) {
            files.push((path, name.into_owned()));
        }
    }
    files.sort();
    Ok(files)
}

fn is_kept_with(marker: &Path, model: &str, path: &Path, expected: Expected<'_>) -> Result<bool> {
    let Ok(text) = fs_err::read_to_string(marker) else { return Ok(false) };
    if !path.is_file() {
        return Ok(false);
    }
    let record: Option<Record> = serde_json::from_str(&text).ok();
    // Earlier versions noted hash and size alone.
    let is_old = text == format!("{} {}\n", expected.sha256, expected.bytes);
    if !is_old && record.as_ref().is_none_or(|record| record.sha256 != expected.sha256) {
        return Ok(false);
    }
    let (bytes, modified_ns) = size_and_time(path)?;
    if bytes != expected.bytes {
        return Err(changed(model, path, format!("has {bytes} bytes, {} were fetched", expected.bytes)));
    }
    if let Some(record) = record.filter(|record| record.modified_ns.is_some() && record.modified_ns == modified_ns) {
        let is_same = sample(path)? == record.sample;
        return if is_same { Ok(true) } else { Err(changed(model, path, "has other content than what was fetched")) };
    }
    // Copied, or touched: only the whole file tells.
    let found = whole(path)?;
    if found != expected.sha256 {
        return Err(changed(model, path, format!("has SHA-256 {found}, {} was fetched", expected.sha256)));
    }
    // A folder that cannot be written costs the same again next time.
    let _ = record_at(marker, path, expected.sha256);
    Ok(true)
}

fn changed(model: &str, path: &Path, problem: impl Display) -> Error {
    // A folder of the Hub's cache holds files of others, too.
    let is_of_hub = path.file_name().is_some_and(|name| is_sha256(&name.to_string_lossy()));
    let what = if is_of_hub { path } else { path.parent().unwrap_or(path) };
    let hint = format!("delete `{}` and run the command again, which fetches the model again", what.display());
    Error::ModelSource { model: model.into(), problem: format!("`{}` {problem}", path.display()), hint: Some(hint) }
}

fn size_and_time(path: &Path) -> Result<(u64, Option<u64>)> {
    let metadata = fs_err::metadata(path)?;
    let since = metadata.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    Ok((metadata.len(), since.and_then(|since| since.as_nanos().try_into().ok())))
}

/// Hash of parts that are spread over a file.
fn sample(path: &Path) -> Result<String> {
    let mut file = fs_err::File::open(path)?;
    let last = fs_err::metadata(path)?.len().saturating_sub(SAMPLE_BYTES);
    let mut hash = Sha256::new();
    let mut part = Vec::new();
    for number in 0..SAMPLES {
        file.seek(SeekFrom::Start(last / (SAMPLES - 1) * number + last % (SAMPLES - 1) * number / (SAMPLES - 1)))?;
        part.clear();
        Read::by_ref(&mut file).take(SAMPLE_BYTES).read_to_end(&mut part)?;
        hash.update(&part);
    }
    Ok(hex(&hash.finalize()))
}

/// Hash of a whole file.
fn whole(path: &Path) -> Result<String> {
    let mut file = fs_err::File::open(path)?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(hex(&hash.finalize())),
            read => hash.update(&buffer[..read]),
        }
    }
}

/// What a check of a fetched model found.
#[derive(Debug)]
pub struct FetchedCheck {
    /// Files that were read whole.
    pub files: usize,
    /// Bytes of them.
    pub bytes: u64,
    /// Those that are not what was fetched.
    pub problems: Vec<Error>,
}

/// The model file in the folder of a fetched package.
pub fn fetched_model_in(folder: &Path) -> Option<PathBuf> {
    let entries = fs_err::read_dir(folder).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
    let has_record = |path: &PathBuf| {
        path.extension().is_some_and(|extension| extension == "gguf") && path.with_extension(EXTENSION).is_file()
    };
    let models: Vec<PathBuf> = entries.filter(has_record).collect();
    <[PathBuf; 1]>::try_from(models).ok().map(|[model]| model)
}

/// Reads a fetched model from end to end and compares it with what was fetched: a GGUF file with its record, or a snapshot in
/// the Hub's cache, whose large files are called by their hashes. `None` for a model of which no such thing is known.
///
/// # Errors
/// A file cannot be read.
pub fn check_fetched(path: &Path) -> Result<Option<FetchedCheck>> {
    let mut expected: Vec<(PathBuf, String)> = Vec::new();
    if path.is_file() {
        let Ok(text) = fs_err::read_to_string(path.with_extension(EXTENSION)) else { return Ok(None) };
        let of_record = serde_json::from_str::<Record>(&text).ok().map(|record| record.sha256);
        let sha256 = of_record.or_else(|| text.split(' ').next().map(Into::into)).filter(|text| is_sha256(text));
        let Some(sha256) = sha256 else { return Ok(None) };
        expected.push((path.into(), sha256));
    } else {
        expected = files_called_by_hash(path)?;
    }
    if expected.is_empty() {
        return Ok(None);
    }
    let mut check = FetchedCheck { files: expected.len(), bytes: 0, problems: Vec::new() };
    for (path, sha256) in expected {
        check.bytes += fs_err::metadata(&path)?.len();
        let found = whole(&path)?;
        if found != sha256 {
            let model = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let real = fs_err::canonicalize(&path)?;
            let problem = format!("`{}` has SHA-256 {found}, {sha256} was fetched", real.display());
            let hint = format!("delete `{}` and fetch the model again", real.display());
            check.problems.push(fail(&model, problem, &hint));
        }
    }
    Ok(Some(check))
}

fn is_sha256(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}
