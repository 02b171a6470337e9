//! Version 3: each column damaged in one sample, and what reader, check and resume say of it.

use deepspec_datasets::target_cache::format::{MANIFEST_FILE, PROGRESS_FILE, shard_name};
use deepspec_datasets::target_cache::{CacheError, Plan, Reader, Writer, check};
use half::bf16;
use tempfile::TempDir;

use super::{Columns, HIDDEN, LAYERS, SAMPLES, cache, change, meta, place};

/// The damaged sample: the second of the second shard.
const SAMPLE: u64 = 3;

/// The bytes of a column of the damaged sample.
fn column(name: &str) -> Vec<u8> {
    let Columns { source_id, input_ids, loss_mask, features, last_hidden } = Columns::new(SAMPLE);
    match name {
        "source_id" => source_id.into_bytes(),
        "input_ids" => bytemuck::cast_slice(&input_ids).to_vec(),
        // All samples have one mask, so it is found by its place: behind the ids and its own offsets.
        "loss_mask" => loss_mask,
        "features" => bytemuck::cast_slice(&features).to_vec(),
        _ => bytemuck::cast_slice(&last_hidden).to_vec(),
    }
}

/// A cache with the column of one sample changed.
fn damaged(name: &str, damage: impl FnOnce(&mut [u8])) -> TempDir {
    let dir = cache();
    change(&dir.path().join(shard_name(1)), |bytes| {
        let at = match name {
            "loss_mask" => place(bytes, &column("input_ids")) + 128,
            _ => place(bytes, &column(name)),
        };
        let len = column(name).len();
        assert_eq!(bytes[at..at + len], column(name));
        damage(&mut bytes[at..at + len]);
    });
    dir
}

/// Every way to read the damaged sample names shard and sample; the others are as they were.
fn assert_refused(dir: &TempDir, parts: &[&str]) {
    let shard = shard_name(1);
    let says = |error: &CacheError, way: &str| {
        let text = error.to_string();
        for part in [&["sample 3", &shard], parts].concat() {
            assert!(text.contains(part), "{way}: no `{part}` in: {text}");
        }
        assert!(error.hint().unwrap().contains("delete that shard"), "{way}: {error}");
    };
    let reader = Reader::open(dir.path()).unwrap();
    says(&reader.sample(SAMPLE).unwrap_err(), "first read");
    says(&reader.sample(SAMPLE).unwrap_err(), "second read");
    says(&reader.verify_sample(SAMPLE).unwrap_err(), "verified read");
    for other in (0..SAMPLES).filter(|other| *other != SAMPLE) {
        assert_eq!(reader.sample(other).unwrap(), Columns::new(other).sample(other));
    }
    let report = check(dir.path()).unwrap();
    says(report.problems.iter().find(|problem| problem.to_string().contains("sample")).unwrap(), "check");
    // A writer that finds the shard but not in its list reads it before it goes on.
    fs_err::remove_file(dir.path().join(MANIFEST_FILE)).unwrap();
    assert!(!dir.path().join(PROGRESS_FILE).exists());
    let plan = Plan { samples: SAMPLES, samples_per_shard: 2 };
    says(&Writer::create_or_resume(dir.path(), meta(), plan).unwrap_err(), "resume");
}

#[test]
fn a_flipped_bit_in_any_column_is_refused_when_the_sample_is_first_read() {
    for name in ["source_id", "input_ids", "loss_mask", "features", "last_hidden"] {
        for bit in [0, 5] {
            let dir = damaged(name, |bytes| bytes[1] ^= 1 << bit);
            assert_refused(&dir, &[]);
        }
    }
}

#[test]
fn a_row_of_zeros_is_refused_with_column_row_and_layer() {
    let row = 2 * HIDDEN;
    for (layer, id) in [(1, 2), (2, 5)] {
        let at = (4 * LAYERS.len() + layer) * row;
        let dir = damaged("features", |bytes| bytes[at..at + row].fill(0));
        assert_refused(&dir, &["`features`", "only zeros", "row 4", &format!("layer {id}")]);
    }
    // Minus zero is zero too.
    let minus = (-bf16::ZERO).to_le_bytes();
    let dir = damaged("last_hidden", |bytes| bytes[5 * row..6 * row].as_chunks_mut::<2>().0.fill(minus));
    assert_refused(&dir, &["`last_hidden`", "only zeros", "row 5"]);
    // The embedding may have rows of zeros; here the checksum tells.
    let dir = damaged("features", |bytes| bytes[..row].fill(0));
    assert_refused(&dir, &["crc32c"]);
}

#[test]
fn numbers_that_cannot_be_computed_with_are_refused_with_their_place() {
    let cases = [
        bf16::INFINITY,
        bf16::NEG_INFINITY,
        bf16::NAN,
        bf16::from_f32(1.7e38),
        bf16::from_f32(-1e30),
        bf16::from_f32(1.01e12),
    ];
    for value in cases {
        let put = |at: usize| move |bytes: &mut [u8]| bytes[2 * at..2 * at + 2].copy_from_slice(&value.to_le_bytes());
        let dir = damaged("features", put((3 * LAYERS.len() + 2) * HIDDEN + 1));
        assert_refused(&dir, &["`features`", &value.to_string(), "number 1", "row 3", "layer 5", "1e12"]);
        let dir = damaged("last_hidden", put(2 * HIDDEN));
        assert_refused(&dir, &["`last_hidden`", &value.to_string(), "number 0", "row 2"]);
    }
}

#[test]
fn the_writer_takes_no_row_that_the_reader_would_refuse() {
    let dir = tempfile::tempdir().unwrap();
    let mut writer = Writer::create_or_resume(dir.path(), meta(), Plan { samples: 1, samples_per_shard: 1 }).unwrap();
    let refused = [bf16::INFINITY, bf16::NAN, bf16::from_f32(2e12)];
    for value in refused {
        let mut bad = Columns::new(0);
        bad.features[7] = value;
        let error = writer.append(&bad.sample(0)).unwrap_err();
        assert!(error.to_string().contains("sample 0: `features` has"), "{error}");
        assert!(error.hint().unwrap().contains("target.precision"), "{error}");
        let mut bad = Columns::new(0);
        bad.last_hidden[3] = value;
        assert!(writer.append(&bad.sample(0)).unwrap_err().to_string().contains("`last_hidden`"));
    }
    let mut good = Columns::new(0);
    good.features[7] = bf16::from_f32(-9.9e11);
    good.features[..HIDDEN].fill(bf16::ZERO);
    writer.append(&good.sample(0)).unwrap();
    writer.finish().unwrap();
    assert!(check(dir.path()).unwrap().is_sound());
}

#[test]
fn a_shard_cut_short_and_lengths_that_lie_are_refused_by_the_shards_name() {
    let shard = shard_name(1);
    for cut in [1, 64, 700] {
        let dir = cache();
        change(&dir.path().join(&shard), |bytes| bytes.truncate(bytes.len() - cut));
        let error = Reader::open(dir.path()).unwrap_err().to_string();
        assert!(error.contains(&shard), "{error}");
        assert!(check(dir.path()).unwrap().problems.iter().any(|problem| problem.to_string().contains(&shard)));
    }
    // The offsets of each list, and so its length: eight bytes after the start of the column's offsets.
    for (name, len) in [("input_ids", 6_u64), ("features", 72), ("last_hidden", 24)] {
        for lie in [len - 1, len + 1, 0, 1 << 40, u64::MAX] {
            let dir = cache();
            change(&dir.path().join(&shard), |bytes| {
                // Offsets lie in the unit of 64 bytes before the values.
                let at = place(bytes, &column(name)) - 64 + 8;
                assert_eq!(bytes[at..at + 8], len.to_le_bytes());
                bytes[at..at + 8].copy_from_slice(&lie.to_le_bytes());
            });
            let reader = Reader::open(dir.path()).unwrap();
            let text = reader.sample(SAMPLE).unwrap_err().to_string();
            assert!(text.contains(&shard), "{name} {lie}: {text}");
            assert!(reader.tokens(2).is_ok());
            assert!(!check(dir.path()).unwrap().is_sound());
        }
    }
}

#[test]
fn tokens_are_read_without_the_rows() {
    let dir = damaged("features", |bytes| bytes.fill(0xff));
    let reader = Reader::open(dir.path()).unwrap();
    let good = Columns::new(SAMPLE);
    assert_eq!(reader.tokens(SAMPLE).unwrap(), (&good.input_ids[..], &good.loss_mask[..]));
    assert!(reader.sample(SAMPLE).is_err(), "reading tokens is no check of the sample");
    let dir = damaged("loss_mask", |bytes| bytes[2] = 2);
    let text = Reader::open(dir.path()).unwrap().tokens(SAMPLE).unwrap_err().to_string();
    assert!(text.contains("sample 3 in ") && text.contains("`loss_mask` is 2 at position 2"), "{text}");
}
