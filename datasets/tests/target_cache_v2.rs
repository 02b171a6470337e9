//! The reference's target cache: its own files read, checked, written again byte for byte, and damaged in every way.
//!
//! `DEEPSPEC_GOLDEN` names another folder of the same layout.
#![expect(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    reason = "tests read the environment to find golden data and fail as tests do"
)]

use std::path::{Path, PathBuf};

use deepspec_datasets::target_cache::v2::format::{RECORD_BYTES, Record};
use deepspec_datasets::target_cache::v2::{Manifest, Reader, Writer, check, is_v2};
use deepspec_datasets::target_cache::{CacheError, Sample};
use half::bf16;
use safetensors::SafeTensors;
use serde_json::{Value, json};
use tempfile::TempDir;

fn golden(part: &str) -> PathBuf {
    let root = std::env::var("DEEPSPEC_GOLDEN").map_or_else(|_| PathBuf::from("tests/golden"), PathBuf::from);
    root.join("cache_v2").join(part)
}

fn expected() -> Value {
    serde_json::from_slice(&fs_err::read(golden("expected.json")).unwrap()).unwrap()
}

/// Sizes of the shards in their order.
fn shard_bytes(reader: &Reader) -> Vec<u64> {
    reader.manifest().shards.iter().map(|shard| reader.shard_bytes(shard.shard_id).unwrap()).collect()
}

/// A copy of the project's own cache of the reference, whose sizes the tests know, to be damaged.
fn copy() -> TempDir {
    let folder = TempDir::new().unwrap();
    for entry in fs_err::read_dir("tests/golden/cache_v2/cache").unwrap() {
        let path = entry.unwrap().path();
        fs_err::write(folder.path().join(path.file_name().unwrap()), fs_err::read(&path).unwrap()).unwrap();
    }
    folder
}

#[test]
fn golden_index_and_manifest_are_those_of_the_reference() {
    let (reader, expected) = (Reader::open(&golden("cache")).unwrap(), expected());
    assert!(is_v2(&golden("cache")) && !is_v2(&golden("")));
    let manifest = reader.manifest();
    let file: Value = serde_json::from_slice(&fs_err::read(golden("cache/manifest.json")).unwrap()).unwrap();
    assert_eq!(
        (json!(manifest.hidden_size), json!(manifest.target_layer_ids), json!(manifest.max_length)),
        (file["hidden_size"].clone(), file["target_layer_ids"].clone(), file["max_length"].clone())
    );
    assert_eq!(json!(manifest.num_shards), expected["num_shards"]);
    let records: Vec<Value> = reader
        .records()
        .iter()
        .map(|record| {
            let [ids, attention, loss, features, last] = record.offsets;
            json!({
                "sample_id": record.sample_id, "shard_id": record.shard_id, "seq_len": record.seq_len, "input_ids_offset": ids,
                "attention_mask_offset": attention, "loss_mask_offset": loss, "target_hidden_states_offset": features,
                "target_last_hidden_states_offset": last,
            })
        })
        .collect();
    assert_eq!(json!(records), expected["records"]);
    assert_eq!(json!(shard_bytes(&reader)), expected["shard_sizes"]);
}

#[test]
fn golden_samples_are_those_that_the_reference_decodes() {
    let reader = Reader::open(&golden("cache")).unwrap();
    let file = fs_err::read(golden("expected.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&file).unwrap();
    let count = expected()["lens"].as_array().unwrap().len();
    assert_eq!(reader.len(), count as u64);
    for row in 0..count {
        let sample = reader.sample(row as u64).unwrap();
        let bytes = |name: &str| tensors.tensor(&format!("sample{row}.{name}")).unwrap().data().to_vec();
        let ids: Vec<u8> = sample.input_ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        assert_eq!(ids, bytes("input_ids"));
        assert_eq!(sample.loss_mask, bytes("loss_mask"));
        assert_eq!(bytemuck::cast_slice::<bf16, u8>(&sample.features), bytes("target_hidden_states"));
        assert_eq!(bytemuck::cast_slice::<bf16, u8>(&sample.last_hidden), bytes("target_last_hidden_states"));
        assert!(sample.attention_mask.iter().all(|&mask| mask == 1));
        // The values before they were rounded.
        for (values, name) in [(&sample.features, "hidden_states"), (&sample.last_hidden, "last_hidden_states")] {
            let source = bytes(&format!("source_target_{name}_f32"));
            let rounded: Vec<bf16> =
                source.as_chunks().0.iter().map(|bytes| bf16::from_f32(f32::from_le_bytes(*bytes))).collect();
            assert_eq!(&rounded, values, "{name}");
        }
    }
}

#[test]
fn golden_cache_is_written_again_byte_for_byte() {
    let folder = TempDir::new().unwrap();
    let dir = folder.path().join("out");
    let reader = Reader::open(&golden("cache")).unwrap();
    // Each shard fits the reference's own limit and would not with its next sample, and so it is with the size of the largest.
    let limit = shard_bytes(&reader).into_iter().max().unwrap();
    let mut writer = Writer::create(&dir, reader.manifest().clone(), limit).unwrap();
    for row in 0..reader.len() {
        let sample = reader.sample(row).unwrap();
        writer.append(&sample.as_sample(sample.sample_id, "")).unwrap();
        assert!(!dir.exists(), "the cache appears when it is complete");
    }
    assert_eq!(&writer.finish().unwrap(), reader.manifest());
    let names = |dir: &Path| -> Vec<_> {
        let mut names: Vec<_> = fs_err::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    assert_eq!(names(&dir), names(&golden("cache")));
    for name in names(&dir) {
        let (ours, theirs) = (dir.join(&name), golden("cache").join(&name));
        assert_eq!(fs_err::read(ours).unwrap(), fs_err::read(theirs).unwrap(), "{}", name.display());
    }
    let Err(CacheError::Occupied { .. }) = Writer::create(&dir, reader.manifest().clone(), 1) else {
        panic!("a cache was overwritten")
    };
}

#[test]
fn golden_cache_is_sound() {
    let report = check(&golden("cache")).unwrap();
    let lens: u64 = expected()["lens"].as_array().unwrap().iter().map(|len| len.as_u64().unwrap()).sum();
    assert!(report.is_sound(), "{:?}", report.problems);
    let samples = expected()["lens"].as_array().unwrap().len() as u64;
    let bytes: u64 = expected()["shard_sizes"].as_array().unwrap().iter().map(|size| size.as_u64().unwrap()).sum();
    assert_eq!((report.samples, report.tokens, report.bytes), (samples, lens, bytes));
    assert!(report.supervised_tokens > 0);
}

/// Changes the manifest of a copy and opens it.
fn with_manifest(change: impl FnOnce(&mut Value)) -> String {
    let folder = copy();
    let path = folder.path().join("manifest.json");
    let mut manifest: Value = serde_json::from_slice(&fs_err::read(&path).unwrap()).unwrap();
    change(&mut manifest);
    fs_err::write(&path, manifest.to_string()).unwrap();
    Reader::open(folder.path()).map(|_| ()).unwrap_err().to_string()
}

#[test]
fn manifests_that_cannot_be_are_refused_by_field() {
    for (key, value) in [
        ("version", json!(3)),
        ("hidden_dtype", json!("float16")),
        ("token_dtype", json!("int64")),
        ("mask_dtype", json!("bool")),
        ("hidden_size", json!(0)),
        ("hidden_size", json!(u64::MAX / 2)),
        ("index_record_size", json!(48)),
        ("max_length", json!(0)),
        ("num_samples", json!(0)),
        ("num_samples", json!(u64::MAX)),
        ("num_samples", json!(4)),
        ("num_shards", json!(3)),
        ("target_layer_ids", json!([])),
        ("target_layer_ids", json!([-2])),
        ("target_layer_ids", json!([1, 1])),
    ] {
        let message = with_manifest(|manifest| manifest[key] = value.clone());
        let is_index = key == "num_samples" && value != json!(0) || value == json!(u64::MAX / 2);
        assert!(message.contains(if is_index { "samples.idx" } else { key }), "{key} {value}: {message}");
    }
    for name in ["../x.bin", "a/b.bin", "shard-00000.txt"] {
        let message = with_manifest(|manifest| manifest["shards"][0]["file_name"] = json!(name));
        assert!(message.contains("shards.0.file_name") && message.contains(name), "{message}");
    }
    assert!(with_manifest(|manifest| manifest["shards"][1]["shard_id"] = json!(0)).contains("each id once"));
    assert!(
        with_manifest(|manifest| manifest["shards"][1]["shard_id"] = json!(7))
            .contains("shard 1 is not in the manifest")
    );
}

#[test]
fn index_records_that_lead_out_of_a_shard_are_refused() {
    type Change = fn(&mut Record);
    let cases: [(Change, &str); 9] = [
        (|r| r.offsets[0] = u64::MAX, "not inside"),
        (|r| r.offsets[0] = 14_500, "not inside"),
        (|r| r.offsets[3] = 14_504, "not inside"),
        (|r| r.offsets[4] += 1 << 60, "not inside"),
        (|r| r.seq_len = 0, "0 tokens"),
        (|r| r.seq_len = 65, "65 tokens, expected 1 to 64"),
        (|r| r.seq_len = u32::MAX, "tokens, expected 1 to 64"),
        (|r| r.shard_id = 9, "shard 9"),
        (|r| r.sample_id = 0, "sample 0 is listed before"),
    ];
    for (change, part) in cases {
        let folder = copy();
        let path = folder.path().join("samples.idx");
        let mut bytes = fs_err::read(&path).unwrap();
        let slot: &mut [u8; RECORD_BYTES] = (&mut bytes[2 * RECORD_BYTES..3 * RECORD_BYTES]).try_into().unwrap();
        let mut record = Record::from_bytes(slot);
        change(&mut record);
        *slot = record.to_bytes();
        fs_err::write(&path, bytes).unwrap();
        let error = Reader::open(folder.path()).map(|_| ()).unwrap_err();
        assert!(error.to_string().contains("record 2") && error.to_string().contains(part), "{part}: {error}");
        assert!(error.hint().is_some());
    }
}

#[test]
fn truncated_files_and_impossible_values_are_named() {
    for (name, length) in
        [("samples.idx", 279), ("samples.idx", 0), ("shard-00000.bin", 14_503), ("shard-00001.bin", 0)]
    {
        let folder = copy();
        let path = folder.path().join(name);
        fs_err::OpenOptions::new().write(true).open(&path).unwrap().set_len(length).unwrap();
        let message = Reader::open(folder.path()).map(|_| ()).unwrap_err().to_string();
        assert!(message.contains(name), "{name} {length}: {message}");
    }
    let folder = copy();
    fs_err::remove_file(folder.path().join("shard-00001.bin")).unwrap();
    assert!(Reader::open(folder.path()).map(|_| ()).unwrap_err().to_string().contains("shard-00001.bin"));

    // A negative token, a mask of 2 and a feature that is not a number: samples 0, 1 and 2.
    let folder = copy();
    let path = folder.path().join("shard-00000.bin");
    let mut bytes = fs_err::read(&path).unwrap();
    bytes[3] = 0x80;
    bytes[4692] = 2;
    bytes[7848..7850].copy_from_slice(&bf16::NAN.to_le_bytes());
    fs_err::write(&path, bytes).unwrap();
    let report = check(folder.path()).unwrap();
    let problems: Vec<String> = report.problems.iter().map(ToString::to_string).collect();
    assert_eq!(problems.len(), 3, "{problems:?}");
    assert!(problems[0].contains("sample 0") && problems[0].contains("input_ids"), "{problems:?}");
    assert!(problems[1].contains("sample 1") && problems[1].contains("loss_mask"), "{problems:?}");
    assert!(problems[2].contains("sample 2") && problems[2].contains("features"), "{problems:?}");
}

#[test]
fn the_writer_refuses_what_the_format_cannot_hold() {
    let folder = TempDir::new().unwrap();
    let mut writer = Writer::create(&folder.path().join("out"), Manifest::new("t", &[0], 2, 4), 1 << 20).unwrap();
    let (ids, mask, rows) = ([1_u32, 2], [0_u8, 1], vec![bf16::ONE; 4]);
    let good = Sample {
        sample_id: 0,
        source_id: "",
        domain: "",
        input_ids: &ids,
        loss_mask: &mask,
        features: &rows,
        last_hidden: &rows,
    };
    writer.append(&good).unwrap();
    for (bad, part) in [
        (Sample { input_ids: &[], loss_mask: &[], ..good }, "0 tokens"),
        (Sample { input_ids: &[1; 5], ..good }, "5 tokens"),
        (Sample { input_ids: &[1, 1 << 31], ..good }, "2147483648"),
        (Sample { loss_mask: &[1], ..good }, "loss_mask"),
        (Sample { features: &rows[1..], ..good }, "features"),
        (Sample { last_hidden: &[], ..good }, "last_hidden"),
    ] {
        let message = writer.append(&bad).unwrap_err().to_string();
        assert!(message.contains(part), "{part}: {message}");
    }
    writer.finish().unwrap();
    assert_eq!(Reader::open(&folder.path().join("out")).unwrap().len(), 1);
    let empty = Writer::create(&folder.path().join("none"), Manifest::new("t", &[0], 2, 4), 1 << 20).unwrap();
    assert!(empty.finish().unwrap_err().to_string().contains("num_samples"));
    assert!(!Path::new(&folder.path().join("none")).exists());
}
