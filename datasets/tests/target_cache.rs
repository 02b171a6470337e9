//! The target cache through its public interface: round trips, resume, damage, and the promises on size and alignment.

#![expect(clippy::unwrap_used, reason = "a failed step fails the test; clippy knows only `#[test]` functions as tests")]

use std::collections::BTreeMap;
use std::path::Path;

use deepspec_datasets::target_cache::format::{MANIFEST_FILE, PROGRESS_FILE, VERSION, shard_name};
use deepspec_datasets::target_cache::{
    CacheError, CacheMeta, Expected, Manifest, Plan, Reader, Sample, StorageMode, Writer, available_bytes, check,
    check_space, estimate_bytes,
};
use half::bf16;
use proptest::prelude::*;

const VOCAB: u32 = 1000;

fn meta(layers: usize, hidden_size: usize, storage: StorageMode) -> CacheMeta {
    CacheMeta {
        target: "SmolLM2-135M".to_owned(),
        target_fingerprint: "f00d".to_owned(),
        layer_ids: (-1..layers as i32 - 1).collect(),
        hidden_size,
        vocab_size: VOCAB,
        dtype: "f32".to_owned(),
        tokenizer_hash: "cafe".to_owned(),
        template_hash: "beef".to_owned(),
        data_hash: "d1ce".to_owned(),
        mask_token_id: Some(999),
        recipe: serde_json::json!({ "seed": 1, "data": { "path": "train.jsonl", "limit": 32 } }),
        loss_on: "all".to_owned(),
        max_length: 4096,
        storage,
    }
}

/// Any sign and mantissa, an exponent below that of 2, and not zero.
fn small(bits: u32) -> bf16 {
    bf16::from_bits(bits as u16 & 0xbfff | 1)
}

/// A sample that owns its columns.
#[derive(Debug, Clone, PartialEq)]
struct Owned {
    source_id: String,
    domain: String,
    input_ids: Vec<u32>,
    loss_mask: Vec<u8>,
    features: Vec<bf16>,
    last_hidden: Vec<bf16>,
}

impl Owned {
    /// Columns filled from a small counter, so that no two samples are alike; numbers of all kinds below 2 but zero.
    fn new(seed: u64, tokens: usize, meta: &CacheMeta) -> Self {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut next = move || {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            (state >> 33) as u32
        };
        let width = if meta.storage == StorageMode::None { 0 } else { meta.hidden_size };
        Self {
            source_id: format!("row-{seed}"),
            domain: "maths — ∑".to_owned(),
            input_ids: (0..tokens).map(|_| next() % (VOCAB - 1)).collect(),
            loss_mask: (0..tokens).map(|token| u8::from(2 * token + 2 > tokens)).collect(),
            features: (0..tokens * width * meta.layer_ids.len()).map(|_| small(next())).collect(),
            last_hidden: (0..tokens * width).map(|_| small(next())).collect(),
        }
    }

    fn sample(&self, sample_id: u64) -> Sample<'_> {
        Sample {
            sample_id,
            source_id: &self.source_id,
            domain: &self.domain,
            input_ids: &self.input_ids,
            loss_mask: &self.loss_mask,
            features: &self.features,
            last_hidden: &self.last_hidden,
        }
    }

    /// Bit for bit, since 0 and -0 are equal.
    fn assert_same(&self, sample_id: u64, found: &Sample<'_>) {
        assert_eq!(found.sample_id, sample_id);
        assert_eq!(found.source_id, self.source_id);
        assert_eq!(found.domain, self.domain);
        assert_eq!(found.input_ids, self.input_ids);
        assert_eq!(found.loss_mask, self.loss_mask);
        assert_eq!(bits(found.features), bits(&self.features));
        assert_eq!(bits(found.last_hidden), bits(&self.last_hidden));
    }
}

fn bits(numbers: &[bf16]) -> Vec<u16> {
    numbers.iter().map(|number| number.to_bits()).collect()
}

fn data(samples: u64, meta: &CacheMeta) -> Vec<Owned> {
    (0..samples).map(|index| Owned::new(index, 1 + (index as usize * 5) % 7, meta)).collect()
}

fn plan(samples: &[Owned], samples_per_shard: u64) -> Plan {
    Plan { samples: samples.len() as u64, samples_per_shard }
}

fn append_rest(writer: &mut Writer, samples: &[Owned]) -> Result<(), CacheError> {
    while (writer.next_sample() as usize) < samples.len() {
        let next = writer.next_sample();
        writer.append(&samples[next as usize].sample(next))?;
    }
    Ok(())
}

fn write(dir: &Path, meta: &CacheMeta, samples: &[Owned], samples_per_shard: u64) -> Manifest {
    let mut writer = Writer::create_or_resume(dir, meta.clone(), plan(samples, samples_per_shard)).unwrap();
    append_rest(&mut writer, samples).unwrap();
    writer.finish().unwrap()
}

/// All files of a cache but the lock, which holds a process id.
fn files(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let names = fs_err::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name != "lock").map(|name| (name.clone(), fs_err::read(dir.join(&name)).unwrap())).collect()
}

#[test]
fn what_is_written_is_read_back() {
    for storage in [StorageMode::Bf16, StorageMode::None] {
        let dir = tempfile::tempdir().unwrap();
        let meta = meta(2, 4, storage);
        let samples = data(8, &meta);
        assert_eq!(samples[0].input_ids.len(), 1, "the first sample is to have one token");
        let manifest = write(dir.path(), &meta, &samples, 3);

        let reader = Reader::open(dir.path()).unwrap();
        assert_eq!((reader.len(), reader.meta()), (8, &meta));
        assert_eq!(reader.manifest(), &manifest);
        assert_eq!(manifest.shards.iter().map(|shard| shard.samples).collect::<Vec<_>>(), [3, 3, 2]);
        assert_eq!(manifest.tokens, samples.iter().map(|sample| sample.input_ids.len() as u64).sum::<u64>());
        for (index, owned) in (0..).zip(&samples) {
            owned.assert_same(index, &reader.sample(index).unwrap());
            owned.assert_same(index, &reader.verify_sample(index).unwrap());
        }
        assert!(matches!(reader.sample(8), Err(CacheError::NoSuchSample { sample: 8, samples: 8, .. })));

        let report = check(dir.path()).unwrap();
        assert!(report.is_sound(), "{:?}", report.problems);
        assert_eq!((report.samples, report.tokens), (8, manifest.tokens));
        assert_eq!(report.supervised_tokens, manifest.supervised_tokens);
        assert_eq!(report.bytes, manifest.shards.iter().map(|shard| shard.bytes).sum::<u64>());
    }
}

fn cases(cases: u32) -> ProptestConfig {
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(cases(48))]

    #[test]
    fn any_shape_survives_the_round_trip(
        lengths in prop::collection::vec(1_usize..40, 1..6),
        layers in 1_usize..4,
        hidden_size in 1_usize..9,
        samples_per_shard in 1_u64..5,
        texts in (".{0,80}", ".{0,80}"),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let meta = meta(layers, hidden_size, StorageMode::Bf16);
        let samples: Vec<_> = (0..)
            .zip(lengths)
            .map(|(seed, tokens)| Owned {
                source_id: texts.0.clone(),
                domain: texts.1.clone(),
                ..Owned::new(seed, tokens, &meta)
            })
            .collect();
        write(dir.path(), &meta, &samples, samples_per_shard);
        let reader = Reader::open(dir.path()).unwrap();
        for (index, owned) in (0..).zip(&samples) {
            owned.assert_same(index, &reader.verify_sample(index).unwrap());
        }
    }
}

#[test]
fn shards_are_plain_arrow_files() {
    let dir = tempfile::tempdir().unwrap();
    let meta = meta(2, 4, StorageMode::Bf16);
    let samples = data(3, &meta);
    write(dir.path(), &meta, &samples, 3);

    let file = fs_err::File::open(dir.path().join(shard_name(0))).unwrap();
    let reader = arrow_ipc::reader::FileReader::try_new(file, None).unwrap();
    assert!(reader.schema().metadata()["deepspec.target_cache"].contains("SmolLM2-135M"));
    let batches: Vec<_> = reader.map(|batch| batch.unwrap()).collect();
    assert_eq!(batches.len(), 3);
    for (owned, batch) in samples.iter().zip(&batches) {
        use arrow_array::cast::AsArray;
        let ids = batch.column_by_name("input_ids").unwrap().as_list::<i64>().value(0);
        assert_eq!(ids.as_primitive::<arrow_array::types::UInt32Type>().values(), &owned.input_ids[..]);
        let features = batch.column_by_name("features").unwrap().as_list::<i64>().value(0);
        assert_eq!(features.len(), owned.input_ids.len() * 2 * 4);
    }
}

#[test]
fn samples_are_slices_of_the_map() {
    let dir = tempfile::tempdir().unwrap();
    let meta = meta(3, 5, StorageMode::Bf16);
    let samples = data(6, &meta);
    write(dir.path(), &meta, &samples, 6);
    let reader = Reader::open(dir.path()).unwrap();
    let size = reader.manifest().shards[0].bytes as usize;

    let first = reader.sample(0).unwrap();
    let mut places = Vec::new();
    for index in 0..6 {
        let sample = reader.sample(index).unwrap();
        let columns = [
            sample.input_ids.as_ptr() as usize,
            sample.loss_mask.as_ptr() as usize,
            sample.features.as_ptr() as usize,
            sample.last_hidden.as_ptr() as usize,
        ];
        assert!(columns.iter().all(|place| place % 64 == 0), "{columns:x?}");
        assert_eq!(reader.sample(index).unwrap().features.as_ptr(), sample.features.as_ptr());
        places.extend(columns);
    }
    assert!(places.is_sorted(), "columns lie in the order of the file");
    let span = places[places.len() - 1] - first.input_ids.as_ptr() as usize;
    assert!(span < size, "all columns lie inside one map of {size} bytes, but span {span}");
}

#[test]
fn a_run_killed_at_any_sample_resumes_to_the_same_bytes() {
    let meta = meta(2, 3, StorageMode::Bf16);
    let samples = data(8, &meta);
    let whole = tempfile::tempdir().unwrap();
    write(whole.path(), &meta, &samples, 3);
    let expected = files(whole.path());
    assert_eq!(
        expected.keys().collect::<Vec<_>>(),
        ["manifest.json", "shard-00000.arrow", "shard-00001.arrow", "shard-00002.arrow"]
    );

    for stop in 0..=samples.len() {
        let dir = tempfile::tempdir().unwrap();
        let mut writer = Writer::create_or_resume(dir.path(), meta.clone(), plan(&samples, 3)).unwrap();
        for (index, owned) in (0..).zip(&samples[..stop]) {
            writer.append(&owned.sample(index)).unwrap();
        }
        drop(writer);
        assert!(matches!(Reader::open(dir.path()), Err(CacheError::Unfinished { samples: 8, .. })));

        let mut writer = Writer::create_or_resume(dir.path(), meta.clone(), plan(&samples, 3)).unwrap();
        let kept = if stop == samples.len() { stop } else { stop / 3 * 3 };
        assert_eq!(writer.next_sample(), kept as u64, "stopped at {stop}");
        append_rest(&mut writer, &samples).unwrap();
        writer.finish().unwrap();
        assert!(files(dir.path()) == expected, "stopped at {stop}");
    }
}

#[test]
fn a_kill_between_two_file_operations_loses_nothing() {
    let meta = meta(2, 3, StorageMode::Bf16);
    let samples = data(8, &meta);
    let whole = tempfile::tempdir().unwrap();
    write(whole.path(), &meta, &samples, 3);
    let expected = files(whole.path());
    type Damage = fn(&Path);
    let damage: [(&str, Damage); 5] = [
        ("torn temporary files", |dir| {
            fs_err::write(dir.join("shard-00002.arrow.tmp"), b"ARROW1\0\0torn").unwrap();
            fs_err::write(dir.join("progress.json.tmp"), b"{").unwrap();
        }),
        ("a shard that is not listed yet", |dir| {
            let path = dir.join(PROGRESS_FILE);
            let mut progress: Manifest = serde_json::from_slice(&fs_err::read(&path).unwrap()).unwrap();
            let shard = progress.shards.pop().unwrap();
            progress.tokens -= shard.tokens;
            progress.supervised_tokens -= shard.supervised_tokens;
            fs_err::write(&path, serde_json::to_vec(&progress).unwrap()).unwrap();
        }),
        ("no list at all", |dir| fs_err::remove_file(dir.join(PROGRESS_FILE)).unwrap()),
        ("a missing last shard", |dir| fs_err::remove_file(dir.join(shard_name(1))).unwrap()),
        ("a missing first shard", |dir| fs_err::remove_file(dir.join(shard_name(0))).unwrap()),
    ];
    for (what, damage) in damage {
        let dir = tempfile::tempdir().unwrap();
        let mut writer = Writer::create_or_resume(dir.path(), meta.clone(), plan(&samples, 3)).unwrap();
        for (index, owned) in (0..).zip(&samples[..7]) {
            writer.append(&owned.sample(index)).unwrap();
        }
        drop(writer);
        damage(dir.path());
        write(dir.path(), &meta, &samples, 3);
        assert!(files(dir.path()) == expected, "{what}");
    }
}

#[test]
fn a_complete_cache_resumes_as_complete_and_lost_shards_are_rebuilt() {
    let dir = tempfile::tempdir().unwrap();
    let meta = meta(2, 3, StorageMode::Bf16);
    let samples = data(7, &meta);
    write(dir.path(), &meta, &samples, 2);
    let expected = files(dir.path());

    let writer = Writer::create_or_resume(dir.path(), meta.clone(), plan(&samples, 2)).unwrap();
    assert_eq!(writer.next_sample(), 7);
    drop(writer);
    assert!(files(dir.path()) == expected, "opening a complete cache changes nothing");

    fs_err::remove_file(dir.path().join(shard_name(1))).unwrap();
    assert!(Reader::open(dir.path()).is_err());
    let mut writer = Writer::create_or_resume(dir.path(), meta.clone(), plan(&samples, 2)).unwrap();
    assert_eq!(writer.next_sample(), 2);
    assert!(matches!(Reader::open(dir.path()), Err(CacheError::Unfinished { done: 2, samples: 7, .. })));
    append_rest(&mut writer, &samples).unwrap();
    writer.finish().unwrap();
    assert!(files(dir.path()) == expected);
}

#[test]
fn recipe_keys_in_another_order_resume_to_the_same_bytes() {
    let mut first = meta(1, 2, StorageMode::Bf16);
    first.recipe = serde_json::from_str(r#"{"lr": 6e-4, "seed": 1}"#).unwrap();
    let mut second = first.clone();
    second.recipe = serde_json::from_str(r#"{"seed": 1, "lr": 6e-4}"#).unwrap();
    let samples = data(4, &first);
    let (whole, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    write(whole.path(), &first, &samples, 2);
    let mut writer = Writer::create_or_resume(dir.path(), first.clone(), plan(&samples, 2)).unwrap();
    writer.append(&samples[0].sample(0)).unwrap();
    drop(writer);
    write(dir.path(), &second, &samples, 2);
    assert!(files(dir.path()) == files(whole.path()));
}

#[test]
fn a_resume_with_other_settings_names_the_field_and_both_values() {
    type Change = fn(&mut CacheMeta, &mut Plan);
    let dir = tempfile::tempdir().unwrap();
    let meta = meta(2, 3, StorageMode::Bf16);
    let samples = data(4, &meta);
    drop(Writer::create_or_resume(dir.path(), meta.clone(), plan(&samples, 2)).unwrap());

    let changes: [(&str, &str, &str, Change); 7] = [
        ("target_fingerprint", "\"f00d\"", "\"0000\"", |meta, _| meta.target_fingerprint = "0000".to_owned()),
        ("layer_ids", "[-1,0]", "[0,1]", |meta, _| meta.layer_ids = vec![0, 1]),
        ("storage", "\"bf16\"", "\"none\"", |meta, _| meta.storage = StorageMode::None),
        ("data_hash", "\"d1ce\"", "\"0000\"", |meta, _| meta.data_hash = "0000".to_owned()),
        ("recipe.data.limit", "32", "33", |meta, _| meta.recipe["data"]["limit"] = 33.into()),
        ("recipe.extra", "\"(absent)\"", "true", |meta, _| meta.recipe["extra"] = true.into()),
        ("samples_per_shard", "2", "3", |_, plan| plan.samples_per_shard = 3),
    ];
    for (field, cache, wanted, change) in changes {
        let (mut meta, mut plan) = (meta.clone(), plan(&samples, 2));
        change(&mut meta, &mut plan);
        let error = Writer::create_or_resume(dir.path(), meta, plan).unwrap_err();
        assert!(error.hint().is_some());
        let CacheError::ResumeMismatch { mismatch, .. } = error else { panic!("{field}: {error}") };
        assert_eq!(
            (mismatch.field.as_str(), mismatch.cache.as_str(), mismatch.wanted.as_str()),
            (field, cache, wanted)
        );
    }
}

#[test]
fn a_reader_that_wants_another_cache_is_told_both_sides_of_everything() {
    let dir = tempfile::tempdir().unwrap();
    let meta = meta(2, 3, StorageMode::Bf16);
    write(dir.path(), &meta, &data(2, &meta), 2);
    let reader = Reader::open(dir.path()).unwrap();
    let right = Expected {
        target: "another name of it",
        target_fingerprint: "f00d",
        layer_ids: &[-1, 0],
        hidden_size: 3,
        tokenizer_hash: "cafe",
    };
    reader.expect_matches(&right).unwrap();
    reader.expect_matches(&Expected { layer_ids: &[0], ..right }).unwrap();
    let wrong =
        Expected { target_fingerprint: "0000", layer_ids: &[0, 1], hidden_size: 4, tokenizer_hash: "0000", ..right };
    let message = reader.expect_matches(&wrong).unwrap_err().to_string();
    for part in ["f00d", "0000", "[-1, 0]", "[0, 1]", "`hidden_size` is 3 in the cache, but 4 is wanted", "cafe"] {
        assert!(message.contains(part), "{part}: {message}");
    }
}

#[test]
fn layers_are_chosen_from_those_of_the_cache_without_copies() {
    let dir = tempfile::tempdir().unwrap();
    let meta = CacheMeta { layer_ids: vec![4, 0, 2, 7], hidden_size: 3, ..meta(2, 3, StorageMode::Bf16) };
    let samples = data(3, &meta);
    write(dir.path(), &meta, &samples, 2);
    let reader = Reader::open(dir.path()).unwrap();
    for wanted in [&[4, 0, 2, 7][..], &[2], &[0, 2], &[7, 4], &[2, 0, 4], &[-1], &[0, 0], &[]] {
        let places: Option<Vec<usize>> =
            wanted.iter().map(|id| meta.layer_ids.iter().position(|stored| stored == id)).collect();
        let Some(places) = places.filter(|_| !wanted.is_empty() && *wanted != [0, 0]) else {
            let error = reader.columns(wanted).unwrap_err().to_string();
            assert!(error.contains("layer_ids") && error.contains("[4, 0, 2, 7]"), "{error}");
            continue;
        };
        let columns = reader.columns(wanted).unwrap();
        for index in 0..3 {
            let features = reader.sample(index).unwrap().features;
            let slices: Vec<&[bf16]> = columns.slices(features).collect();
            assert!(slices.iter().all(|slice| features.as_ptr_range().contains(&slice.as_ptr())));
            let expected: Vec<bf16> = features
                .chunks(12)
                .flat_map(|row| places.iter().flat_map(|place| row[place * 3..place * 3 + 3].to_vec()))
                .collect();
            assert_eq!(bits(&slices.concat()), bits(&expected), "{wanted:?}");
        }
    }
    assert_eq!(
        reader.columns(&[4, 0, 2, 7]).unwrap().slices(reader.sample(0).unwrap().features).count(),
        samples[0].input_ids.len()
    );
}

#[test]
fn two_writers_of_one_folder_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let meta = meta(1, 2, StorageMode::Bf16);
    let samples = data(2, &meta);
    let first = Writer::create_or_resume(dir.path(), meta.clone(), plan(&samples, 2)).unwrap();
    let error = Writer::create_or_resume(dir.path(), meta.clone(), plan(&samples, 2)).unwrap_err();
    let CacheError::Locked { pid, .. } = error else { panic!("{error}") };
    assert_eq!(pid, std::process::id().to_string());
    drop(first);
    Writer::create_or_resume(dir.path(), meta, plan(&samples, 2)).unwrap();
}

#[test]
fn samples_that_break_the_rules_are_refused_and_the_writer_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let mut meta = meta(1, 2, StorageMode::Bf16);
    meta.max_length = 4;
    let good = Owned::new(0, 4, &meta);
    let mut writer =
        Writer::create_or_resume(dir.path(), meta.clone(), Plan { samples: 1, samples_per_shard: 1 }).unwrap();
    type Change<'a> = &'a dyn Fn(&mut Owned);
    let cases: [(&str, Change<'_>); 8] = [
        ("input_ids", &|sample| *sample = Owned::new(0, 0, &meta)),
        ("input_ids", &|sample| *sample = Owned::new(0, 5, &meta)),
        ("input_ids", &|sample| sample.input_ids[1] = VOCAB),
        ("input_ids", &|sample| sample.input_ids[1] = 999),
        ("loss_mask", &|sample| sample.loss_mask.push(0)),
        ("loss_mask", &|sample| sample.loss_mask[0] = 2),
        ("features", &|sample| sample.features.truncate(7)),
        ("last_hidden", &|sample| sample.last_hidden.clear()),
    ];
    for (field, change) in cases {
        let mut bad = good.clone();
        change(&mut bad);
        match writer.append(&bad.sample(0)) {
            Err(CacheError::Sample { sample: 0, field: found, .. }) => assert_eq!(found, field),
            other => panic!("{field}: {other:?}"),
        }
    }
    assert!(matches!(writer.append(&good.sample(1)), Err(CacheError::NoSuchSample { .. })));
    writer.append(&good.sample(0)).unwrap();
    writer.finish().unwrap();
    assert!(check(dir.path()).unwrap().is_sound());
}

#[test]
fn order_completeness_and_supervision_are_enforced() {
    let dir = tempfile::tempdir().unwrap();
    let meta = meta(1, 2, StorageMode::Bf16);
    let mut samples = data(3, &meta);
    let mut writer = Writer::create_or_resume(dir.path(), meta.clone(), plan(&samples, 2)).unwrap();
    let error = writer.append(&samples[1].sample(1)).unwrap_err();
    assert!(matches!(error, CacheError::OutOfOrder { found: 1, expected: 0 }), "{error}");
    writer.append(&samples[0].sample(0)).unwrap();
    assert!(matches!(writer.finish(), Err(CacheError::Unfinished { done: 1, samples: 3, .. })));

    let dir = tempfile::tempdir().unwrap();
    for sample in &mut samples {
        sample.loss_mask.fill(0);
    }
    let mut writer = Writer::create_or_resume(dir.path(), meta, plan(&samples, 2)).unwrap();
    append_rest(&mut writer, &samples).unwrap();
    assert!(matches!(writer.finish(), Err(CacheError::NothingSupervised { samples: 3, .. })));
    assert!(!dir.path().join(MANIFEST_FILE).exists());
}

#[test]
fn a_description_that_cannot_be_met_is_refused_by_field() {
    type Change = fn(&mut CacheMeta, &mut Plan);
    let changes: [(&str, Change); 7] = [
        ("mask_token_id", |meta, _| meta.mask_token_id = Some(VOCAB)),
        ("hidden_size", |meta, _| meta.hidden_size = 0),
        ("layer_ids", |meta, _| meta.layer_ids = vec![-2]),
        ("layer_ids", |meta, _| meta.layer_ids = vec![3, 3]),
        ("layer_ids", |meta, _| meta.layer_ids.clear()),
        ("samples", |_, plan| plan.samples = 0),
        ("samples_per_shard", |_, plan| plan.samples_per_shard = 0),
    ];
    for (expected, change) in changes {
        let dir = tempfile::tempdir().unwrap();
        let (mut meta, mut plan) = (meta(2, 2, StorageMode::Bf16), Plan { samples: 1, samples_per_shard: 1 });
        change(&mut meta, &mut plan);
        match Writer::create_or_resume(dir.path(), meta, plan) {
            Err(CacheError::Meta { field, .. }) => assert_eq!(field, expected),
            other => panic!("{expected}: {other:?}"),
        }
    }
}

#[test]
fn a_flipped_bit_anywhere_in_a_shard_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let meta = meta(1, 2, StorageMode::Bf16);
    let samples = data(2, &meta);
    write(dir.path(), &meta, &samples, 2);
    let path = dir.path().join(shard_name(0));
    let good = fs_err::read(&path).unwrap();
    for at in 0..good.len() {
        for bit in [0, 3, 7] {
            let mut bad = good.clone();
            bad[at] ^= 1 << bit;
            fs_err::write(&path, &bad).unwrap();
            assert!(!check(dir.path()).unwrap().is_sound(), "bit {bit} of byte {at}");
            // What passes its own checksum is what was written, even when the damage lies beside it.
            let reader = Reader::open(dir.path()).unwrap();
            for (index, owned) in (0..).zip(&samples) {
                if let Ok(sample) = reader.verify_sample(index) {
                    owned.assert_same(index, &sample);
                }
            }
        }
    }
}

#[test]
fn garbage_in_a_shard_never_panics_and_never_passes_for_data() {
    let dir = tempfile::tempdir().unwrap();
    let meta = meta(1, 2, StorageMode::Bf16);
    let samples = data(2, &meta);
    write(dir.path(), &meta, &samples, 2);
    let path = dir.path().join(shard_name(0));
    let good = fs_err::read(&path).unwrap();
    let garbage = (
        any::<prop::sample::Index>(),
        prop::collection::vec(prop::sample::select(vec![0, 1, 0x7f, 0x80, 0xff]), 1..24),
    );
    proptest!(cases(2000), |((at, garbage) in garbage)| {
        let mut bad = good.clone();
        let at = at.index(good.len() - garbage.len());
        bad[at..at + garbage.len()].copy_from_slice(&garbage);
        fs_err::write(&path, &bad).unwrap();
        prop_assert_eq!(check(dir.path()).unwrap().is_sound(), bad == good);
        let reader = Reader::open(dir.path()).unwrap();
        for (index, owned) in (0..).zip(&samples) {
            if let Ok(sample) = reader.verify_sample(index) {
                owned.assert_same(index, &sample);
            }
        }
    });
}

#[test]
fn a_shard_cut_anywhere_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let meta = meta(1, 2, StorageMode::Bf16);
    let samples = data(2, &meta);
    write(dir.path(), &meta, &samples, 2);
    let path = dir.path().join(shard_name(0));
    let good = fs_err::read(&path).unwrap();
    for len in (0..good.len()).step_by(7).chain([good.len() - 1]) {
        fs_err::write(&path, &good[..len]).unwrap();
        assert!(matches!(Reader::open(dir.path()), Err(CacheError::Shard { .. })), "cut to {len}");
        assert!(!check(dir.path()).unwrap().is_sound(), "cut to {len}");
        let error = Writer::create_or_resume(dir.path(), meta.clone(), plan(&samples, 2)).unwrap_err();
        assert!(error.hint().unwrap().contains("delete that shard"), "cut to {len}: {error}");
    }
}

#[test]
fn a_shard_of_another_cache_is_refused() {
    let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let meta = meta(1, 2, StorageMode::Bf16);
    let samples = data(2, &meta);
    write(dir.path(), &meta, &samples, 2);
    write(other.path(), &CacheMeta { tokenizer_hash: "0000".to_owned(), ..meta }, &samples, 2);
    fs_err::copy(other.path().join(shard_name(0)), dir.path().join(shard_name(0))).unwrap();
    let error = Reader::open(dir.path()).unwrap().sample(0).unwrap_err();
    assert!(error.to_string().contains("belongs to another cache"), "{error}");
}

#[test]
fn manifests_that_lie_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let meta = meta(1, 2, StorageMode::Bf16);
    write(dir.path(), &meta, &data(3, &meta), 2);
    let path = dir.path().join(MANIFEST_FILE);
    let good: serde_json::Value = serde_json::from_slice(&fs_err::read(&path).unwrap()).unwrap();
    let cases: [(&str, &str, serde_json::Value); 10] = [
        ("/version", "version 2, expected 3", (VERSION - 1).into()),
        ("/samples", "`shards.1.samples` is 1, expected 2", u64::MAX.into()),
        ("/samples_per_shard", "`samples_per_shard` is 0", 0.into()),
        ("/samples_per_shard", "`shards.0.samples`", u64::MAX.into()),
        ("/tokens", "`tokens` is 1", 1.into()),
        ("/shards/0/name", "`shards.0.name` is `../evil`", "../evil".into()),
        ("/shards/1/samples", "`shards.1.samples` is 2, expected 1", 2.into()),
        ("/shards", "`tokens`", serde_json::json!([])),
        ("/meta/storage", "unknown variant `q9`", "q9".into()),
        ("/meta/hidden_size", "`meta.hidden_size` is 0", 0.into()),
    ];
    for (pointer, expected, value) in cases {
        let mut bad = good.clone();
        *bad.pointer_mut(pointer).unwrap() = value;
        fs_err::write(&path, serde_json::to_vec(&bad).unwrap()).unwrap();
        let error = Reader::open(dir.path()).unwrap_err();
        assert!(error.to_string().contains(expected), "{pointer}: {error}");
        assert!(error.hint().is_some(), "{pointer}");
    }
    for text in ["", "{", "[]", "null", "{\"version\": 3}"] {
        fs_err::write(&path, text).unwrap();
        assert!(matches!(Reader::open(dir.path()), Err(CacheError::ManifestJson { .. })), "{text:?}");
    }
    fs_err::remove_file(&path).unwrap();
    assert!(matches!(Reader::open(dir.path()), Err(CacheError::NotACache { .. })));
}

#[test]
fn the_estimate_is_within_one_percent() {
    for (storage, per_shard) in [(StorageMode::Bf16, 32), (StorageMode::Bf16, 8), (StorageMode::None, 32)] {
        let dir = tempfile::tempdir().unwrap();
        let meta = meta(5, 256, storage);
        let samples: Vec<_> = (0..32).map(|seed| Owned::new(seed, 128, &meta)).collect();
        let manifest = write(dir.path(), &meta, &samples, per_shard);
        let real = manifest.shards.iter().map(|shard| shard.bytes).sum::<u64>() as f64;
        let estimate = estimate_bytes(32, 32 * 128, 5, 256, storage) as f64;
        let error = (estimate / real - 1.0).abs();
        assert!(error < 0.01, "{storage:?} {per_shard}: estimated {estimate}, really {real}, off by {error}");
    }
}

#[test]
fn space_is_compared_with_what_the_disk_has() {
    let dir = tempfile::tempdir().unwrap();
    let unborn = dir.path().join("not/yet");
    assert!(available_bytes(&unborn).unwrap() > 0);
    check_space(&unborn, 1).unwrap();
    let error = check_space(&unborn, u64::MAX).unwrap_err();
    let CacheError::NotEnoughSpace { needed, available, .. } = error else { panic!("{error}") };
    assert_eq!(needed, u64::MAX);
    let message = error.to_string();
    assert!(message.contains(&needed.to_string()) && message.contains(&available.to_string()), "{message}");
}

/// `/dev/full` answers each write as a full disk does.
#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_a_clean_error_and_the_run_resumes() {
    let meta = meta(2, 3, StorageMode::Bf16);
    let samples = data(4, &meta);
    let (whole, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    write(whole.path(), &meta, &samples, 2);

    let mut writer = Writer::create_or_resume(dir.path(), meta.clone(), plan(&samples, 2)).unwrap();
    writer.append(&samples[0].sample(0)).unwrap();
    writer.append(&samples[1].sample(1)).unwrap();
    let temporary = dir.path().join("shard-00001.arrow.tmp");
    std::os::unix::fs::symlink("/dev/full", &temporary).unwrap();
    let error = append_rest(&mut writer, &samples).unwrap_err();
    assert!(matches!(error, CacheError::DiskFull(_)), "{error}");
    assert!(error.to_string().contains("shard-00001.arrow.tmp"), "{error}");
    assert_eq!(writer.next_sample(), 2);
    assert!(!temporary.is_symlink(), "the space is given back");
    drop(writer);

    write(dir.path(), &meta, &samples, 2);
    assert!(files(dir.path()) == files(whole.path()));
}
