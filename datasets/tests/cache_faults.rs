//! Damage of every kind in every column and file of a target cache, of both versions: each is refused by name, none panics and none
//! passes for data.

#![expect(clippy::unwrap_used, reason = "a failed step fails the test; clippy knows only `#[test]` functions as tests")]

#[path = "cache_faults/manifests.rs"]
mod manifests;
#[path = "cache_faults/version2.rs"]
mod version2;
#[path = "cache_faults/version3.rs"]
mod version3;

use std::path::Path;

use deepspec_datasets::target_cache::{CacheMeta, Plan, Sample, StorageMode, Writer};
use half::bf16;
use tempfile::TempDir;

const LAYERS: [i32; 3] = [-1, 2, 5];
const HIDDEN: usize = 4;
const TOKENS: usize = 6;
const SAMPLES: u64 = 5;

fn meta() -> CacheMeta {
    CacheMeta {
        target: "t".to_owned(),
        target_fingerprint: "f".to_owned(),
        layer_ids: LAYERS.to_vec(),
        hidden_size: HIDDEN,
        vocab_size: 1000,
        dtype: "f32".to_owned(),
        tokenizer_hash: "k".to_owned(),
        template_hash: "p".to_owned(),
        data_hash: "d".to_owned(),
        mask_token_id: Some(999),
        recipe: serde_json::json!({ "seed": 1 }),
        loss_on: "all".to_owned(),
        max_length: 64,
        storage: StorageMode::Bf16,
    }
}

/// Columns of a sample whose every number is found again by its bytes.
struct Columns {
    source_id: String,
    input_ids: Vec<u32>,
    loss_mask: Vec<u8>,
    features: Vec<bf16>,
    last_hidden: Vec<bf16>,
}

impl Columns {
    fn new(sample: u64) -> Self {
        let number = |column: u64, at: usize| bf16::from_f32(1.0 + (column * 31 + sample * 7 + at as u64 % 97) as f32);
        Self {
            source_id: format!("row {sample}"),
            input_ids: (0..TOKENS as u32).map(|at| 300 + 40 * sample as u32 + at).collect(),
            loss_mask: vec![0, 0, 1, 1, 1, 1],
            features: (0..TOKENS * HIDDEN * LAYERS.len()).map(|at| number(1, at)).collect(),
            last_hidden: (0..TOKENS * HIDDEN).map(|at| number(5, at)).collect(),
        }
    }

    fn sample(&self, sample_id: u64) -> Sample<'_> {
        Sample {
            sample_id,
            source_id: &self.source_id,
            domain: "maths",
            input_ids: &self.input_ids,
            loss_mask: &self.loss_mask,
            features: &self.features,
            last_hidden: &self.last_hidden,
        }
    }
}

/// A sound cache of version 3: five samples, two to a shard.
fn cache() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let mut writer =
        Writer::create_or_resume(dir.path(), meta(), Plan { samples: SAMPLES, samples_per_shard: 2 }).unwrap();
    for sample in 0..SAMPLES {
        writer.append(&Columns::new(sample).sample(sample)).unwrap();
    }
    writer.finish().unwrap();
    dir
}

/// Changes the bytes of a file.
fn change(path: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = fs_err::read(path).unwrap();
    change(&mut bytes);
    fs_err::write(path, bytes).unwrap();
}

/// Where some bytes lie in a file; they must be there once.
fn place(bytes: &[u8], wanted: &[u8]) -> usize {
    let places: Vec<usize> =
        bytes.windows(wanted.len()).enumerate().filter(|(_, at)| *at == wanted).map(|(at, _)| at).collect();
    assert_eq!(places.len(), 1, "the bytes are to be there once");
    places[0]
}
