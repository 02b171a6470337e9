//! Drafters and target caches in the formats of others, from the stages' side: exports that load and train again, caches that come
//! back from version 2, vocabulary maps and layer choice.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod common;

use std::path::{Path, PathBuf};

use candle_core::{DType, Device};
use deepspec_datasets::target_cache::{Reader, v2};
use deepspec_engine::TextSide;
use deepspec_engine::progress::{Context, Event, Interrupt, Reporter};
use deepspec_models::config::{DraftConfig, TargetConfig};
use deepspec_models::formats::{Canonical, Format, PROFILE_FILE};
use deepspec_models::linear::Precision as Packing;
use deepspec_models::target::Target;
use deepspec_models::weights::Weights;
use deepspec_stages::drafter::load_drafter_for;
use deepspec_stages::export::{self, CacheExport, DrafterExport};
use deepspec_stages::prepare;
use deepspec_stages::recipe::{AUTO_LAYER_COUNT, Precision, Recipe, TargetLayers, auto_layers};
use deepspec_stages::run_dir::{Provenance, RunDir};
use deepspec_stages::target_model::TargetModel;
use deepspec_stages::train;
use deepspec_stages::{Error, Result};
use serde_json::{Value, json};
use tempfile::TempDir;

use common::byte_renderer;

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

fn model() -> TargetModel {
    let path = PathBuf::from("../models/tests/golden/target");
    let config = TargetConfig::open(&path).unwrap();
    let weights = Weights::from_folder(&path, DType::F32, &Device::Cpu).unwrap();
    let fingerprint = weights.fingerprint(&config);
    let target = Target::load(config, &weights, Packing::F32).unwrap();
    let renderer = byte_renderer(TEMPLATE, &["<|endoftext|>", "<|im_start|>", "<|im_end|>"], "<|endoftext|>", &[]);
    let text = TextSide { renderer, bos: None, pad: None };
    TargetModel { name: "tiny".into(), path, target, text, fingerprint }
}

struct Bench {
    folder: TempDir,
    model: TargetModel,
}

impl Bench {
    fn new() -> Self {
        let bench = Self { folder: tempfile::tempdir().unwrap(), model: model() };
        let rows: Vec<String> = (0..6).map(|i| format!("{{\"prompt\": \"Say {i} and more\"}}\n")).collect();
        fs_err::write(bench.at("data.jsonl"), rows.concat()).unwrap();
        bench
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn recipe(&self, overrides: &[&str]) -> Recipe {
        let fixed = [
            "draft.vocab_size=none",
            "draft.target_layer_ids=[1, 3, 4]",
            "draft.mask_token_id=319",
            "draft.markov_rank=8",
            "draft.qk_norm=true",
            "init.markov=random",
            "init.layers=random",
            "prepare.max_new_tokens=12",
            "prepare.max_length=96",
            "prepare.samples_per_shard=4",
            "train.steps=4",
            "train.batch_size=2",
            "train.micro_batch_size=2",
            "train.num_anchors=4",
            "train.checkpoint_every=2",
            "train.log_every=1",
        ];
        let mut all: Vec<String> = fixed.iter().chain(overrides).map(|text| (*text).to_owned()).collect();
        all.insert(0, format!("data.prompts={}", self.at("data.jsonl").display()));
        Recipe::open("quickstart", &all).unwrap()
    }

    fn run(&self, name: &str, recipe: &Recipe) -> Result<RunDir> {
        let provenance =
            Provenance { version: "test".into(), git_commit: None, started: "now".into(), machine: "here".into() };
        RunDir::create_or_open(self.at(name), recipe, &provenance)
    }

    fn prepare(&self, name: &str) {
        let recipe = self.recipe(&[]);
        let run = self.run(name, &recipe).unwrap();
        let TargetModel { target, text, fingerprint, .. } = &self.model;
        prepare::run(&recipe, &run, target, &text.renderer, fingerprint, context()).unwrap();
    }

    fn import(&self, name: &str, from: &Path, overrides: &[&str]) -> Result<()> {
        let recipe = self.recipe(overrides);
        let run = self.run(name, &recipe).unwrap();
        let TargetModel { target, text, fingerprint, .. } = &self.model;
        prepare::import(&recipe, &run, target, &text.renderer, fingerprint, from, context()).map(|_| ())
    }

    fn train(&self, name: &str, overrides: &[&str]) -> Result<PathBuf> {
        let recipe = self.recipe(overrides);
        let run = self.run(name, &recipe)?;
        Ok(train::run(&recipe, &run, &self.model, context())?.checkpoint)
    }

    fn export_cache(&self, run: &str, out: &str) -> Result<v2::Manifest> {
        let export = CacheExport { cache: self.at(run).join("cache"), out: self.at(out), max_shard_bytes: 40_000 };
        export::cache(&export, context())
    }
}

fn export(draft: &Path, format: Format, out: &Path) -> DrafterExport {
    let (target, target_name, results) = (None, Some("org/tiny".into()), None);
    DrafterExport { draft: draft.into(), format, out: out.into(), target, target_name, results }
}

#[test]
fn a_cache_comes_back_from_version_2_and_trains() {
    let bench = Bench::new();
    bench.prepare("run");
    let manifest = bench.export_cache("run", "v2").unwrap();
    assert!(manifest.num_shards > 1 && manifest.target_layer_ids == [1, 3, 4]);
    assert!(v2::check(&bench.at("v2")).unwrap().is_sound());
    bench.import("again", &bench.at("v2"), &[]).unwrap();
    let (ours, theirs) =
        (Reader::open(&bench.at("run/cache")).unwrap(), Reader::open(&bench.at("again/cache")).unwrap());
    assert_eq!((ours.len(), &ours.meta().data_hash), (theirs.len(), &theirs.meta().data_hash));
    for index in 0..ours.len() {
        let (a, b) = (ours.verify_sample(index).unwrap(), theirs.verify_sample(index).unwrap());
        assert_eq!((a.input_ids, a.loss_mask), (b.input_ids, b.loss_mask));
        assert_eq!((a.features, a.last_hidden), (b.features, b.last_hidden));
    }
    // A drafter trained on either is the same.
    let (first, second) = (bench.train("run", &[]).unwrap(), bench.train("again", &[]).unwrap());
    let weights = |checkpoint: &Path| fs_err::read(checkpoint.join("model.safetensors")).unwrap();
    assert!(weights(&first) == weights(&second));
    // Once more changes nothing; over files nothing is written.
    let manifest = fs_err::read(bench.at("again/cache/manifest.json")).unwrap();
    bench.import("again", &bench.at("v2"), &[]).unwrap();
    assert_eq!(fs_err::read(bench.at("again/cache/manifest.json")).unwrap(), manifest);
    assert!(bench.export_cache("run", "v2").unwrap_err().to_string().contains("not an empty folder"));
}

#[test]
fn a_cache_of_another_target_or_other_layers_is_refused() {
    let bench = Bench::new();
    bench.prepare("run");
    bench.export_cache("run", "v2").unwrap();
    let text = bench.import("layers", &bench.at("v2"), &["draft.target_layer_ids=[0, 3, 4]"]).unwrap_err().to_string();
    assert!(text.contains("target_layer_ids") && text.contains("[1, 3, 4]") && text.contains("[0, 3, 4]"), "{text}");
    // The manifest claims another order of layers than the rows have.
    let path = bench.at("v2/manifest.json");
    let mut manifest: Value = serde_json::from_slice(&fs_err::read(&path).unwrap()).unwrap();
    manifest["target_layer_ids"] = json!([3, 1, 4]);
    fs_err::write(&path, manifest.to_string()).unwrap();
    let error = bench.import("order", &bench.at("v2"), &["draft.target_layer_ids=[3, 1, 4]"]).unwrap_err();
    let is_target = |error: &Error| matches!(error, Error::Mismatch { what, .. } if what == "target");
    assert!(is_target(&error), "{error}");
    assert!(!bench.at("order/cache").exists());
}

#[test]
fn exports_load_as_drafters_and_start_training() {
    let bench = Bench::new();
    bench.prepare("run");
    let checkpoint = bench.train("run", &[]).unwrap();
    let parameters = |dir: &Path| {
        let canonical = Canonical::open(dir, None, DType::F32, &Device::Cpu).unwrap();
        let shape = canonical.weights.shape("fc.weight").unwrap().to_vec();
        canonical.weights.get("fc.weight", &shape).unwrap().to_vec2::<f32>().unwrap()
    };
    for format in [Format::Deepspec, Format::Speculators, Format::Sglang, Format::Specforge] {
        let out = bench.at(format.name());
        let done = export::drafter(&export(&checkpoint, format, &out), context()).unwrap();
        assert_eq!((done.from, done.layer_ids), (Format::Deepspec, format.layer_ids().write(&[1, 3, 4])));
        // SpecForge's layout borrows embedding and head.
        let drafter = load_drafter_for(&out, &bench.model, Precision::F32).unwrap();
        let own = DraftConfig::from_folder(&checkpoint).unwrap();
        assert_eq!(drafter.config().to_json(), own.to_json(), "{format:?}");
        assert_eq!(parameters(&out), parameters(&checkpoint));
        let run = format!("from-{}", format.name());
        bench.prepare(&run);
        bench.train(&run, &[&format!("init.from={}", out.display())]).unwrap();
        // A second export replaces the first.
        export::drafter(&export(&checkpoint, format, &out), context()).unwrap();
    }
    let text = export::drafter(&export(&checkpoint, Format::Zlab, &bench.at("z")), context()).unwrap_err().to_string();
    assert!(text.contains("format `zlab` cannot hold this drafter"), "{text}");
    let run = bench.at("run");
    let text = export::drafter(&export(&checkpoint, Format::Deepspec, &run), context()).unwrap_err().to_string();
    assert!(text.contains("no file of an export") && run.join("recipe.toml").is_file(), "{text}");
}

#[test]
fn a_profile_says_what_was_measured() {
    let bench = Bench::new();
    bench.prepare("run");
    let checkpoint = bench.train("run", &[]).unwrap();
    let mut results: Value =
        serde_json::from_slice(&fs_err::read("../results/2026-11-30_quickstart/results.json").unwrap()).unwrap();
    let path = bench.at("results.json");
    fs_err::write(&path, results.to_string()).unwrap();
    let out = bench.at("out");
    let with_results = DrafterExport { results: Some(path.clone()), ..export(&checkpoint, Format::Speculators, &out) };
    let text = export::drafter(&with_results, context()).unwrap_err().to_string();
    assert!(text.contains("[1, 8, 15, 22, 28]") && text.contains("[1, 3, 4]"), "{text}");
    results["drafter"]["target_layer_ids"] = json!([1, 3, 4]);
    fs_err::write(&path, results.to_string()).unwrap();
    export::drafter(&with_results, context()).unwrap();
    let profile: Value = serde_json::from_slice(&fs_err::read(out.join(PROFILE_FILE)).unwrap()).unwrap();
    let of_draft = |group: &Value| {
        let all = group["proposers"].as_array().unwrap();
        all.iter().find(|found| found["proposer"] == "draft").unwrap()["acceptance"].clone()
    };
    let (measured, expected) = (&profile["measured"][0], of_draft(&results["temperatures"][0]["all"]));
    assert_eq!((&profile["k"], &measured["acceptance_length"]), (&json!(3), &expected["tau"]));
    assert_eq!(measured["positions"], expected["positions"]);
    assert_eq!(measured["data"][0]["set"], json!("built-in"));
    assert_eq!(measured["data"][0]["prompts"], json!(24));
}

/// A map of a reduced vocabulary that was built in a run folder is not used once the recipe wants all tokens.
#[test]
fn a_full_vocabulary_after_a_reduced_one_is_full() {
    let bench = Bench::new();
    bench.prepare("run");
    let small = bench.recipe(&["draft.vocab_size=9"]);
    let run = bench.run("run", &small).unwrap();
    drop(train::Training::set_up(&small, &run, &bench.model, context()).unwrap());
    drop(run);
    let checkpoint = bench.train("run", &[]).unwrap();
    let drafter = load_drafter_for(&checkpoint, &bench.model, Precision::F32).unwrap();
    assert_eq!(drafter.config().draft_vocab_size(), None);
    // With checkpoints in the folder the other way round is refused instead.
    let text = bench.train("run", &["draft.vocab_size=9"]).unwrap_err().to_string();
    assert!(text.contains("draft.vocab_size"), "{text}");
}

/// The automatic choice of feature layers for shallow targets is distinct and in range.
#[test]
fn automatic_layers_are_distinct_and_in_range() {
    for layers in [3, 5, 7] {
        let mut ids = TargetLayers::Auto.resolve(layers).unwrap();
        assert_eq!(ids.len(), AUTO_LAYER_COUNT.min(layers));
        assert!(ids.iter().all(|id| (-1..=layers as i32 - 2).contains(id)), "{layers}: {ids:?}");
        ids.dedup();
        assert_eq!(ids.len(), AUTO_LAYER_COUNT.min(layers), "{layers}: {ids:?}");
        assert!(ids.is_sorted() && auto_layers(layers + 1, layers).is_err());
    }
}
