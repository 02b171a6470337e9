//! Target caches with damage of every kind, as the stages meet them: training, import and export name shard, sample and column, and
//! nothing is trained, copied or spread. And what training says when numbers leave their range on the way.
#![expect(clippy::disallowed_methods, clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod common;

use std::path::{Path, PathBuf};

use candle_core::{DType, Device};
use deepspec_datasets::target_cache::format::shard_name;
use deepspec_datasets::target_cache::{CacheMeta, Plan, Reader, Sample, StorageMode, Writer, v2};
use deepspec_engine::TextSide;
use deepspec_engine::progress::{Context, Event, Interrupt, Reporter};
use deepspec_models::config::TargetConfig;
use deepspec_models::linear::Precision as Packing;
use deepspec_models::speculate::{CounterRng, Stream};
use deepspec_models::target::{NewTokens, Target};
use deepspec_models::weights::Weights;
use deepspec_stages::export::{self, CacheExport};
use deepspec_stages::prepare;
use deepspec_stages::recipe::Recipe;
use deepspec_stages::run_dir::{Provenance, RunDir};
use deepspec_stages::target_model::TargetModel;
use deepspec_stages::train;
use deepspec_stages::{Error, Fault, Result};
use half::bf16;
use serde_json::json;
use tempfile::TempDir;

use common::byte_renderer;

const HIDDEN: usize = 64;
const LAYERS: [i32; 3] = [0, 2, 4];
const TOKENS: usize = 16;
const SAMPLES: u64 = 6;
/// The damaged sample: the first of the second shard.
const SAMPLE: u64 = 3;
const TEMPLATE: &str = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n\
                        {% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

struct Silent;

impl Reporter for Silent {
    fn event(&self, _: Event<'_>) {}
}

static NEVER: Interrupt = Interrupt::new();

fn context() -> Context<'static> {
    Context { reporter: &Silent, interrupt: &NEVER }
}

/// What a sample holds.
struct Columns {
    input_ids: Vec<u32>,
    loss_mask: Vec<u8>,
    features: Vec<bf16>,
    last_hidden: Vec<bf16>,
}

struct Bench {
    folder: TempDir,
    model: TargetModel,
}

impl Bench {
    fn new() -> Self {
        let folder = std::env::var("DEEPSPEC_GOLDEN").unwrap_or_else(|_| "../models/tests/golden".into());
        let path = PathBuf::from(folder).join("target");
        let config = TargetConfig::open(&path).unwrap();
        let weights = Weights::from_folder(&path, DType::F32, &Device::Cpu).unwrap();
        let fingerprint = weights.fingerprint(&config);
        let target = Target::load(config, &weights, Packing::F32).unwrap();
        let renderer = byte_renderer(TEMPLATE, &["<|im_start|>", "<|im_end|>"], "<|im_end|>", &[]);
        let text = TextSide { renderer, bos: None, pad: None };
        let model = TargetModel { name: "tiny".into(), path, target, text, fingerprint };
        Self { folder: tempfile::tempdir().unwrap(), model }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn recipe(overrides: &[&str]) -> Recipe {
        let fixed = [
            "draft.vocab_size=none",
            "draft.target_layer_ids=[0, 2, 4]",
            "draft.mask_token_id=319",
            "draft.markov_rank=8",
            "init.markov=random",
            "init.layers=random",
            "prepare.max_length=64",
            "prepare.max_new_tokens=8",
            "prepare.samples_per_shard=3",
            "train.steps=2",
            "train.batch_size=6",
            "train.micro_batch_size=3",
            "train.num_anchors=4",
            "train.checkpoint_every=1",
            "train.log_every=1",
        ];
        let all: Vec<String> = fixed.iter().chain(overrides).map(|text| (*text).to_owned()).collect();
        Recipe::open("quickstart", &all).unwrap()
    }

    fn run_dir(&self, run: &str, recipe: &Recipe) -> RunDir {
        let provenance =
            Provenance { version: "test".into(), git_commit: None, started: "now".into(), machine: "here".into() };
        let folder = self.at(run);
        if !folder.join("recipe.toml").exists() {
            fs_err::create_dir_all(&folder).unwrap();
            fs_err::write(folder.join("recipe.toml"), recipe.to_toml().unwrap()).unwrap();
        }
        RunDir::create_or_open(folder, recipe, &provenance).unwrap()
    }

    fn train(&self, run: &str, overrides: &[&str]) -> Result<()> {
        let recipe = Self::recipe(overrides);
        let run = self.run_dir(run, &recipe);
        train::run(&recipe, &run, &self.model, context()).map(drop)
    }

    /// What the target computes for some tokens, so that an import takes it for the target's.
    fn columns(&self, sample: u64) -> Columns {
        let rng = CounterRng::new(9, Stream::Init, sample);
        let input_ids: Vec<u32> = (0..TOKENS as u64).map(|at| 40 + (rng.uniform_f64(at) * 60.0) as u32).collect();
        let loss_mask = (0..TOKENS).map(|at| u8::from(at >= 4)).collect();
        let mut cache = self.model.target.new_cache(1, TOKENS).unwrap();
        let new = [NewTokens { slot: 0, tokens: &input_ids }];
        let rows = self.model.target.forward(&mut cache, &new, &LAYERS).unwrap();
        let values = |tensor: &candle_core::Tensor| -> Vec<bf16> {
            tensor.to_dtype(DType::BF16).unwrap().flatten_all().unwrap().to_vec1().unwrap()
        };
        let (features, last_hidden) = (values(&rows.features.unwrap()), values(&rows.hidden));
        Columns { input_ids, loss_mask, features, last_hidden }
    }

    /// A cache in the run folder, of which `change` may change a sample before it is written.
    fn write_cache(&self, run: &str, change: impl Fn(u64, &mut Columns)) {
        let meta = CacheMeta {
            target: self.model.name.clone(),
            target_fingerprint: self.model.fingerprint.clone(),
            layer_ids: LAYERS.to_vec(),
            hidden_size: HIDDEN,
            vocab_size: 320,
            dtype: "f32".into(),
            tokenizer_hash: self.model.text.tokenizer().hash().to_owned(),
            template_hash: "t".into(),
            data_hash: "d".into(),
            mask_token_id: None,
            recipe: json!({}),
            loss_on: "all".into(),
            max_length: 64,
            storage: StorageMode::Bf16,
        };
        let plan = Plan { samples: SAMPLES, samples_per_shard: 3 };
        let mut writer = Writer::create_or_resume(&self.at(run).join("cache"), meta, plan).unwrap();
        for sample_id in 0..SAMPLES {
            let mut columns = self.columns(sample_id);
            change(sample_id, &mut columns);
            writer
                .append(&Sample {
                    sample_id,
                    source_id: &format!("row {sample_id}"),
                    domain: "",
                    input_ids: &columns.input_ids,
                    loss_mask: &columns.loss_mask,
                    features: &columns.features,
                    last_hidden: &columns.last_hidden,
                })
                .unwrap();
        }
        writer.finish().unwrap();
    }

    fn export(&self, run: &str, out: &str) -> Result<v2::Manifest> {
        let export = CacheExport { cache: self.at(run).join("cache"), out: self.at(out), max_shard_bytes: 1 << 30 };
        export::cache(&export, context())
    }

    fn import(&self, run: &str, from: &str) -> Result<()> {
        let recipe = Self::recipe(&[]);
        let run = self.run_dir(run, &recipe);
        let TargetModel { target, text, fingerprint, .. } = &self.model;
        prepare::import(&recipe, &run, target, &text.renderer, fingerprint, &self.at(from), context()).map(drop)
    }
}

/// Changes a column of the damaged sample in a file that holds it once.
fn damage(path: &Path, column: &[u8], change: &dyn Fn(&mut [u8])) {
    let mut bytes = fs_err::read(path).unwrap();
    let places: Vec<usize> = (0..=bytes.len() - column.len()).filter(|&at| bytes[at..].starts_with(column)).collect();
    assert_eq!(places.len(), 1, "the column is to be there once");
    change(&mut bytes[places[0]..places[0] + column.len()]);
    fs_err::write(path, bytes).unwrap();
}

type Change = Box<dyn Fn(&mut [u8])>;

/// Damage of the rows of a column, and what is said of it beside shard, sample and column.
fn rows_damaged(layers: usize) -> Vec<(Change, &'static str)> {
    let row = 2 * HIDDEN;
    let put =
        move |value: bf16| move |bytes: &mut [u8]| bytes[row * layers * 5..][..2].copy_from_slice(&value.to_le_bytes());
    vec![
        (Box::new(move |bytes: &mut [u8]| bytes[row * layers * 5..][..row].fill(0)), "only zeros in row 5"),
        (Box::new(put(bf16::INFINITY)), "has inf at number 0 in row 5"),
        (Box::new(put(bf16::NAN)), "has NaN at number 0 in row 5"),
        (Box::new(put(bf16::from_f32(1.7e38))), "at number 0 in row 5"),
    ]
}

#[test]
fn training_and_export_refuse_a_damaged_sample_by_name_and_write_nothing() {
    let bench = Bench::new();
    bench.write_cache("sound", |_, _| {});
    bench.train("sound", &[]).unwrap();
    let good = bench.columns(SAMPLE);
    let (ids, features): (&[u8], &[u8]) = (bytemuck::cast_slice(&good.input_ids), bytemuck::cast_slice(&good.features));
    let last_hidden: &[u8] = bytemuck::cast_slice(&good.last_hidden);
    let mut cases: Vec<(&[u8], &str, Change, &str)> = Vec::new();
    for (change, words) in rows_damaged(LAYERS.len()) {
        cases.push((features, "`features`", change, words));
    }
    for (change, words) in rows_damaged(1) {
        cases.push((last_hidden, "`last_hidden`", change, words));
    }
    for column in [ids, features, last_hidden] {
        cases.push((column, "", Box::new(|bytes: &mut [u8]| bytes[8] ^= 1), "crc32c"));
    }
    for (index, (column, name, change, words)) in cases.into_iter().enumerate() {
        let run = format!("run-{index}");
        bench.write_cache(&run, |_, _| {});
        damage(&bench.at(&run).join("cache").join(shard_name(1)), column, &*change);
        let out = format!("out-{index}");
        for (way, error) in
            [("train", bench.train(&run, &[]).unwrap_err()), ("export", bench.export(&run, &out).unwrap_err())]
        {
            let text = error.to_string();
            for part in ["sample 3", "shard-00001.arrow", name, words] {
                assert!(text.contains(part), "{way}: no `{part}` in: {text}");
            }
            assert!(error.hint().unwrap().contains("delete that shard"), "{way}: {text}");
            assert_eq!(error.fault(), Fault::User);
        }
        assert!(!bench.at(&out).exists(), "poison was spread");
        let checkpoints = bench.at(&run).join("checkpoints");
        assert!(!checkpoints.exists() || fs_err::read_dir(checkpoints).unwrap().next().is_none());
    }
}

#[test]
fn a_loss_mask_that_was_cleared_leaves_no_sample_out_in_silence() {
    let bench = Bench::new();
    bench.write_cache("run", |_, _| {});
    let ids: Vec<u8> = bytemuck::cast_slice(&bench.columns(SAMPLE).input_ids).to_vec();
    let path = bench.at("run/cache").join(shard_name(1));
    let mut bytes = fs_err::read(&path).unwrap();
    let at = (0..bytes.len()).find(|&at| bytes[at..].starts_with(&ids)).unwrap() + 128;
    assert_eq!(bytes[at..at + TOKENS], bench.columns(SAMPLE).loss_mask);
    bytes[at..at + TOKENS].fill(0);
    fs_err::write(&path, bytes).unwrap();
    let text = bench.train("run", &[]).unwrap_err().to_string();
    assert!(text.contains("sample 3") && text.contains("shard-00001.arrow"), "{text}");
}

#[test]
fn an_import_refuses_rows_that_are_no_targets() {
    let bench = Bench::new();
    bench.write_cache("run", |_, _| {});
    let good = bench.columns(SAMPLE);
    let (features, last_hidden): (&[u8], &[u8]) =
        (bytemuck::cast_slice(&good.features), bytemuck::cast_slice(&good.last_hidden));
    bench.export("run", "sound").unwrap();
    bench.import("taken", "sound").unwrap();
    assert!(Reader::open(&bench.at("taken/cache")).is_ok());
    let of_features = rows_damaged(LAYERS.len()).into_iter().map(|case| (features, "`features`", case));
    let of_hidden = rows_damaged(1).into_iter().map(|case| (last_hidden, "`last_hidden`", case));
    for (index, (column, name, (change, words))) in of_features.chain(of_hidden).enumerate() {
        let from = format!("v2-{index}");
        bench.export("run", &from).unwrap();
        damage(&bench.at(&from).join("shard-00000.bin"), column, &*change);
        let to = format!("import-{index}");
        let error = bench.import(&to, &from).unwrap_err();
        let text = error.to_string();
        for part in ["sample 3", "shard-00000.bin", name, words] {
            assert!(text.contains(part), "no `{part}` in: {text}");
        }
        assert!(error.hint().unwrap().contains("copy the cache again"), "{text}");
        assert!(Reader::open(&bench.at(&to).join("cache")).is_err(), "an import that failed is no cache");
    }
}

#[test]
fn a_loss_that_is_not_finite_is_traced_to_its_sample_and_term() {
    let bench = Bench::new();
    // Numbers just inside the allowed range leave it once they are divided by a temperature near zero.
    bench.write_cache("run", |sample, columns| {
        if sample == SAMPLE {
            columns.last_hidden[6 * HIDDEN..].fill(bf16::from_f32(9e11));
        }
    });
    let cold = ["train.phases.0.kl=1", "train.phases.0.kl_temperature=1e-27"];
    let error = bench.train("run", &cold).unwrap_err();
    assert!(matches!(error, Error::NotFinite { step: 1, .. }), "{error}");
    let text = error.to_string();
    for part in ["not finite at step 1", "`kl`", "sample 3 (row `row 3`)"] {
        assert!(text.contains(part), "no `{part}` in: {text}");
    }
    assert!(error.hint().unwrap().contains("--sample 3"), "{:?}", error.hint());
}

#[test]
fn weights_that_run_away_are_told_from_samples_at_fault() {
    let bench = Bench::new();
    bench.write_cache("run", |_, _| {});
    for (run, overrides) in [
        ("block", &["train.lr=1e36", "train.warmup_ratio=0", "train.steps=6"][..]),
        ("other", &["train.lr=1e30", "train.warmup_ratio=0", "train.steps=6", "draft.markov_head=gated"]),
    ] {
        fs_err::create_dir_all(bench.at(run).join("cache")).unwrap();
        for file in ["manifest.json", "shard-00000.arrow", "shard-00001.arrow"] {
            fs_err::copy(bench.at("run/cache").join(file), bench.at(run).join("cache").join(file)).unwrap();
        }
        let error = bench.train(run, overrides).unwrap_err();
        let Error::NotFinite { step, origin, hint, .. } = &error else { panic!("{error}") };
        assert!(*step > 1 && !origin.is_empty() && hint.contains("train.lr"), "{error}: {hint}");
    }
}
