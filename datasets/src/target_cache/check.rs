//! Reads a whole target cache once and reports everything that is wrong with it. Called by `inspect`.

use std::path::Path;

use super::error::CacheError;
use super::format::ShardEntry;
use super::reader::Reader;
use super::shard::Shard;

/// Outcome of [`check`].
#[derive(Debug, Default)]
pub struct Report {
    /// Samples that were read without a fault.
    pub samples: u64,
    /// Their tokens.
    pub tokens: u64,
    /// Their tokens whose loss mask is 1.
    pub supervised_tokens: u64,
    /// Size of all shards that could be opened.
    pub bytes: u64,
    /// Every fault found, in the order of the files.
    pub problems: Vec<CacheError>,
}

impl Report {
    /// Whether no fault was found.
    pub fn is_sound(&self) -> bool {
        self.problems.is_empty()
    }
}

/// Checks the cache in `dir`: for each shard its size, checksum and counts, for each sample its lengths, token ids,
/// mask values and checksum.
///
/// # Errors
/// Those of [`Reader::open`] that concern the manifest. Faults of shards and samples go to the report.
pub fn check(dir: &Path) -> Result<Report, CacheError> {
    let reader = Reader::open_manifest(dir)?;
    let mut report = Report::default();
    for (index, entry) in reader.manifest().shards.iter().enumerate() {
        let first = index as u64 * reader.manifest().samples_per_shard;
        match reader.shard(index) {
            Ok(shard) => check_shard(&reader, shard, entry, first, &mut report),
            Err(problem) => report.problems.push(problem),
        }
    }
    Ok(report)
}

fn check_shard(reader: &Reader, shard: &Shard, entry: &ShardEntry, first: u64, report: &mut Report) {
    report.bytes += shard.bytes();
    let crc32c = shard.crc32c();
    if crc32c != entry.crc32c {
        report.problems.push(CacheError::Checksum {
            path: shard.path().to_owned(),
            what: "file".to_owned(),
            found: crc32c,
            expected: entry.crc32c,
        });
    }
    let (mut samples, mut tokens, mut supervised_tokens) = (0, 0, 0);
    for index in first..first + entry.samples {
        match reader.verify_sample(index) {
            Ok(sample) => {
                samples += 1;
                tokens += sample.input_ids.len() as u64;
                supervised_tokens += sample.supervised_tokens();
            }
            Err(problem) => report.problems.push(problem),
        }
    }
    let counts = [
        ("bytes", shard.bytes(), entry.bytes),
        ("samples that can be read", samples, entry.samples),
        ("tokens", tokens, entry.tokens),
        ("supervised tokens", supervised_tokens, entry.supervised_tokens),
    ];
    for (what, found, expected) in counts {
        if found != expected {
            let reason = format!("it has {found} {what}, expected {expected}");
            report.problems.push(CacheError::Shard { path: shard.path().to_owned(), reason });
        }
    }
    report.samples += samples;
    report.tokens += tokens;
    report.supervised_tokens += supervised_tokens;
}
