//! Version 2, the reference's, which has no checksums: what values alone can tell, and that nothing panics.

use std::path::{Path, PathBuf};

use deepspec_datasets::target_cache::v2::{Manifest, Reader, Writer, check};
use half::bf16;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::{Columns, HIDDEN, LAYERS, SAMPLES, change, place};

const SAMPLE: u64 = 3;

fn cache() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("v2");
    let mut writer = Writer::create(&dir, Manifest::new("t", &LAYERS, HIDDEN, 64), 600).unwrap();
    for sample in 0..SAMPLES {
        writer.append(&Columns::new(sample).sample(sample)).unwrap();
    }
    assert_eq!(writer.finish().unwrap().num_shards, 3);
    (folder, dir)
}

/// Damages the features or last hidden rows of a sample and reads it in every way.
fn assert_refused(column: &[u8], damage: impl FnOnce(&mut [u8]), parts: &[&str]) {
    let (_folder, dir) = cache();
    let shard = (0..3).map(|id| dir.join(format!("shard-{id:05}.bin")));
    let path = shard.into_iter().find(|path| holds(path, column)).unwrap();
    change(&path, |bytes| {
        let at = place(bytes, column);
        damage(&mut bytes[at..at + column.len()]);
    });
    let error = Reader::open(&dir).unwrap().sample(SAMPLE).unwrap_err();
    let report = check(&dir).unwrap();
    assert_eq!((report.samples, report.problems.len()), (SAMPLES - 1, 1));
    let name = path.file_name().unwrap().to_string_lossy().into_owned();
    for text in [error.to_string(), report.problems[0].to_string()] {
        for part in [&["sample 3", &name], parts].concat() {
            assert!(text.contains(part), "no `{part}` in: {text}");
        }
    }
    assert!(error.hint().unwrap().contains("copy the cache again"));
}

fn holds(path: &Path, column: &[u8]) -> bool {
    fs_err::read(path).unwrap().windows(column.len()).any(|at| at == column)
}

#[test]
fn rows_that_are_no_targets_are_refused_with_their_place() {
    let good = Columns::new(SAMPLE);
    let (features, last_hidden): (&[u8], &[u8]) =
        (bytemuck::cast_slice(&good.features), bytemuck::cast_slice(&good.last_hidden));
    let row = 2 * HIDDEN;
    for value in [bf16::INFINITY, bf16::NAN, bf16::from_f32(1.7e38)] {
        let put = |at: usize| move |bytes: &mut [u8]| bytes[at..at + 2].copy_from_slice(&value.to_le_bytes());
        let layer = 5 * LAYERS.len() + 1;
        assert_refused(features, put(layer * row), &["`features`", &value.to_string(), "row 5", "layer 2"]);
        assert_refused(last_hidden, put(4 * row + 2), &["`last_hidden`", &value.to_string(), "number 1", "row 4"]);
    }
    assert_refused(features, |bytes| bytes[row..2 * row].fill(0), &["`features`", "only zeros", "row 0", "layer 2"]);
    assert_refused(last_hidden, |bytes| bytes[..row].fill(0), &["`last_hidden`", "only zeros", "row 0"]);
}

#[test]
fn tokens_and_masks_that_cannot_be_are_refused_with_their_place() {
    let good = Columns::new(SAMPLE);
    let ids: &[u8] = bytemuck::cast_slice(&good.input_ids);
    assert_refused(ids, |bytes| bytes[7] |= 0x80, &["`input_ids`", "position 1"]);
    let masks = [ids, &[1; 6], &good.loss_mask].concat();
    assert_refused(&masks, |bytes| bytes[26] = 0, &["`attention_mask` is 0 at position 2"]);
    assert_refused(&masks, |bytes| bytes[33] = 7, &["`loss_mask` is 7 at position 3"]);
}

#[test]
fn the_writer_spreads_no_poison() {
    let folder = tempfile::tempdir().unwrap();
    let mut writer = Writer::create(&folder.path().join("v2"), Manifest::new("t", &LAYERS, HIDDEN, 64), 600).unwrap();
    for (at, value) in [(4, bf16::NAN), (0, bf16::INFINITY), (70, bf16::from_f32(-1.7e38))] {
        let mut bad = Columns::new(0);
        bad.features[at] = value;
        let text = writer.append(&bad.sample(0)).unwrap_err().to_string();
        assert!(text.contains("sample 0: `features`"), "{text}");
    }
    let mut bad = Columns::new(0);
    bad.last_hidden[8..12].fill(bf16::ZERO);
    let text = writer.append(&bad.sample(0)).unwrap_err().to_string();
    assert!(text.contains("`last_hidden` has only zeros in row 2"), "{text}");
}

/// Every byte of index and manifest, with some bits flipped: an error or the same data, and no panic.
#[test]
fn flipped_bits_in_index_and_manifest_never_panic() {
    for name in ["samples.idx", "manifest.json"] {
        let (_folder, dir) = cache();
        let path = dir.join(name);
        let good = fs_err::read(&path).unwrap();
        let mut refused = 0;
        for at in 0..good.len() {
            for bit in [0, 4, 7] {
                let mut bad = good.clone();
                bad[at] ^= 1 << bit;
                fs_err::write(&path, &bad).unwrap();
                match Reader::open(&dir) {
                    Ok(reader) => (0..reader.len()).for_each(|row| drop(reader.sample(row))),
                    Err(error) => {
                        refused += 1;
                        assert!(error.to_string().contains(&*dir.to_string_lossy()), "{error}");
                    }
                }
            }
        }
        assert!(refused > good.len() / 2, "{name}: {refused}");
    }
}

#[test]
fn a_manifest_or_index_that_contradicts_the_order_of_the_arrays_is_refused() {
    let manifests: [(&str, Value); 3] =
        [("target_layer_ids", json!([-1, 2])), ("target_layer_ids", json!([2])), ("hidden_size", json!(3))];
    for (key, value) in manifests {
        let (_folder, dir) = cache();
        change(&dir.join("manifest.json"), |bytes| {
            let mut manifest: Value = serde_json::from_slice(bytes).unwrap();
            manifest[key] = value.clone();
            *bytes = manifest.to_string().into_bytes();
        });
        let text = Reader::open(&dir).unwrap_err().to_string();
        assert!(text.contains("samples.idx") && text.contains("record 0"), "{key}: {text}");
    }
    // A sample that says it has fewer tokens than it has.
    let (_folder, dir) = cache();
    change(&dir.join("samples.idx"), |bytes| bytes[2 * 56 + 12] -= 1);
    let text = Reader::open(&dir).unwrap_err().to_string();
    assert!(text.contains("samples.idx") && text.contains("record 2"), "{text}");
}
