//! The train stage on the tiny golden target and a cache made here: what the map of a draft vocabulary holds and covers, what
//! checkpoints bring back, acceptance measured on the way, a cache that several runs share, what is refused.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod common;

use std::path::{Path, PathBuf};
use std::sync::Mutex;

use candle_core::{DType, Device};
use deepspec_datasets::target_cache::{CacheMeta, Plan, Reader, Sample, StorageMode, Writer};
use deepspec_engine::TextSide;
use deepspec_engine::progress::{Context, Event, Interrupt, Reporter};
use deepspec_engine::{Engine, Finished, Request, RequestOptions};
use deepspec_models::config::{DraftConfig, TargetConfig};
use deepspec_models::draft::DraftVocabulary;
use deepspec_models::linear::Precision as Packing;
use deepspec_models::speculate::{CounterRng, DraftRequest, NoProposer, Proposer, SamplingParams, Stream};
use deepspec_models::target::{NewTokens, Target};
use deepspec_models::weights::Weights;
use deepspec_stages::drafter::{Drafter, describe, load_drafter};
use deepspec_stages::eval::metrics::{Acceptance, Round};
use deepspec_stages::recipe::{Precision, Recipe};
use deepspec_stages::run_dir::{Provenance, RunDir, read_journal};
use deepspec_stages::target_model::TargetModel;
use deepspec_stages::train::{self, TrainOutcome};
use deepspec_stages::{Error, Result};
use half::bf16;
use serde_json::{Value, json};
use tempfile::TempDir;

use common::byte_renderer;

const HIDDEN: usize = 64;
const VOCAB: u32 = 320;
const TEMPLATE: &str = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n\
                        {% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

fn model() -> TargetModel {
    let path = PathBuf::from("../models/tests/golden/target");
    let config = TargetConfig::open(&path).unwrap();
    let weights = Weights::from_folder(&path, DType::F32, &Device::Cpu).unwrap();
    let fingerprint = weights.fingerprint(&config);
    let target = Target::load(config, &weights, Packing::F32).unwrap();
    let renderer = byte_renderer(TEMPLATE, &["<|im_start|>", "<|im_end|>"], "<|im_end|>", &[]);
    let text = TextSide { renderer, bos: None, pad: None };
    TargetModel { name: "tiny".into(), path, target, text, fingerprint }
}

/// Sample `index`: 24 tokens from a few; the first four are not supervised. The last sample has tokens of its own.
fn tokens(index: u64, first: u32) -> Vec<u32> {
    let rng = CounterRng::new(9, Stream::Init, index);
    let own = if index == 19 { 100 } else { 0 };
    (0..24).map(|i| if i < 4 { 200 + i as u32 } else { first + own + (rng.uniform_f64(i) * 12.0) as u32 }).collect()
}

fn write_cache(folder: &Path, model: &TargetModel, first: u32) {
    write_cache_of(folder, model, first, &[0, 2, 4]);
}

/// A cache of some of the layers 0, 2 and 4, with the columns that a cache of all three has.
fn write_cache_of(folder: &Path, model: &TargetModel, first: u32, layer_ids: &[i32]) {
    let meta = CacheMeta {
        target: model.name.clone(),
        target_fingerprint: model.fingerprint.clone(),
        layer_ids: layer_ids.to_vec(),
        hidden_size: HIDDEN,
        vocab_size: VOCAB,
        dtype: "f32".into(),
        tokenizer_hash: model.text.tokenizer().hash().to_owned(),
        template_hash: "t".into(),
        data_hash: format!("d{first}"),
        mask_token_id: None,
        recipe: json!({}),
        loss_on: "all".into(),
        max_length: 64,
        storage: StorageMode::Bf16,
    };
    let mut writer = Writer::create_or_resume(folder, meta, Plan { samples: 20, samples_per_shard: 8 }).unwrap();
    for sample_id in 0..20 {
        let input_ids = tokens(sample_id, first);
        let mask: Vec<u8> = (0..input_ids.len()).map(|i| u8::from(i >= 4)).collect();
        let rng = CounterRng::new(1, Stream::Init, sample_id);
        let rows = |seed: u64, width: usize| -> Vec<bf16> {
            let at = |i| bf16::from_f64(rng.normal(seed << 32 | i as u64));
            (0..input_ids.len() * width).map(at).collect()
        };
        let (all, last_hidden) = (rows(0, 3 * HIDDEN), rows(1, HIDDEN));
        let layer = |row: usize, id: i32| &all[(3 * row + id as usize / 2) * HIDDEN..][..HIDDEN];
        let features: Vec<bf16> = (0..input_ids.len())
            .flat_map(|row| layer_ids.iter().flat_map(move |&id| layer(row, id).to_vec()))
            .collect();
        let (source_id, domain) = ("row", "");
        let loss_mask = &mask;
        writer
            .append(&Sample {
                sample_id,
                source_id,
                domain,
                input_ids: &input_ids,
                loss_mask,
                features: &features,
                last_hidden: &last_hidden,
            })
            .unwrap();
    }
    writer.finish().unwrap();
}

/// Keeps notes; asks for a stop after a number of steps.
struct Log<'a> {
    notes: Mutex<Vec<String>>,
    stop: Option<(u64, &'a Interrupt)>,
}

impl Reporter for Log<'_> {
    fn event(&self, event: Event<'_>) {
        match event {
            Event::Note(text) | Event::Warning(text) | Event::Line(text) => {
                self.notes.lock().unwrap().push(text.to_owned());
            }
            Event::Advanced { done, .. } => {
                if let Some((_, interrupt)) = self.stop.filter(|(limit, _)| done >= *limit) {
                    interrupt.set();
                }
            }
            _ => {}
        }
    }
}

struct Bench {
    folder: TempDir,
    model: TargetModel,
    /// Where the tokens of new caches start.
    first: u32,
    /// The built-in recipe that runs start from.
    recipe: &'static str,
}

impl Bench {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap(), model: model(), first: 40, recipe: "quickstart" }
    }

    fn cache(&self, run: &str) -> PathBuf {
        self.folder.path().join(run).join("cache")
    }

    fn recipe(&self, overrides: &[&str]) -> Recipe {
        let fixed = [
            "draft.vocab_size=none",
            "draft.target_layer_ids=[0, 2, 4]",
            "draft.mask_token_id=319",
            "draft.markov_rank=8",
            "init.markov=random",
            "init.layers=random",
            "train.steps=6",
            "train.batch_size=4",
            "train.micro_batch_size=2",
            "train.num_anchors=4",
            "train.checkpoint_every=2",
            "train.log_every=1",
        ];
        let all: Vec<String> = fixed.iter().chain(overrides).map(|text| (*text).to_owned()).collect();
        Recipe::open(self.recipe, &all).unwrap()
    }

    /// Trains in the named folder, which gets a cache unless it has one; the user stops after some steps.
    fn train(&self, run: &str, overrides: &[&str], stop_after: Option<u64>) -> (Result<TrainOutcome>, Vec<String>) {
        if !self.cache(run).exists() {
            write_cache(&self.cache(run), &self.model, self.first);
        }
        self.train_on(run, overrides, stop_after, None)
    }

    /// Trains in the named folder on the cache that it has, or on that of another run.
    fn train_on(
        &self,
        run: &str,
        overrides: &[&str],
        stop_after: Option<u64>,
        other: Option<&str>,
    ) -> (Result<TrainOutcome>, Vec<String>) {
        let interrupt = Interrupt::new();
        let log = Log { notes: Mutex::default(), stop: stop_after.map(|limit| (limit, &interrupt)) };
        let provenance =
            Provenance { version: "test".into(), git_commit: None, started: "now".into(), machine: "here".into() };
        let recipe = self.recipe(overrides);
        let folder = self.folder.path().join(run);
        if !folder.join("recipe.toml").exists() {
            fs_err::create_dir_all(&folder).unwrap();
            fs_err::write(folder.join("recipe.toml"), recipe.to_toml().unwrap()).unwrap();
        }
        let run_dir = RunDir::create_or_open(folder, &recipe, &provenance).unwrap();
        let context = Context { reporter: &log, interrupt: &interrupt };
        let shared = other.map_or(Ok(()), |other| run_dir.share_cache(&self.cache(other)));
        let outcome = shared.and_then(|()| train::run(&recipe, &run_dir, &self.model, context));
        (outcome, log.notes.into_inner().unwrap())
    }
}

fn saved_vocabulary(checkpoint: &Path) -> Option<DraftVocabulary> {
    let config = DraftConfig::from_folder(checkpoint).unwrap();
    DraftVocabulary::read(&Weights::from_folder(checkpoint, DType::F32, &Device::Cpu).unwrap(), &config).unwrap()
}

#[test]
fn the_map_is_that_of_the_supervised_tokens_and_its_coverage_is_told() {
    let bench = Bench::new();
    let (outcome, notes) = bench.train("run", &["draft.vocab_size=9"], None);
    let outcome = outcome.unwrap();

    let cache = Reader::open(&bench.cache("run")).unwrap();
    let mut counts = vec![0_u64; VOCAB as usize];
    let mut others = counts.clone();
    for index in 0..cache.len() {
        for &token in &tokens(index, 40)[4..] {
            counts[token as usize] += 1;
            others[token as usize] += u64::from(index < 19);
        }
    }
    // Its own ends of text are in, though they never occur; prompts, ids 200 and up, do not count.
    let ends = bench.model.target.config().stop_ids.clone();
    assert_eq!(ends, [2, 5]);
    let expected = DraftVocabulary::most_frequent(&counts, &ends, 9).unwrap();
    assert!(expected.tokens().iter().all(|token| ends.contains(token) || (40..152).contains(token)));
    let saved = saved_vocabulary(&outcome.checkpoint).unwrap();
    assert_eq!(saved, expected);
    let share = |counts: &[u64], map: &DraftVocabulary| {
        map.tokens().iter().map(|&token| counts[token as usize]).sum::<u64>() as f64 / counts.iter().sum::<u64>() as f64
    };
    let coverage = outcome.coverage.unwrap();
    assert_eq!((coverage.tokens, coverage.target_tokens), (9, 320));
    assert_eq!(coverage.training, share(&counts, &expected));
    assert!(coverage.training > 0.4 && coverage.training < 0.9, "{coverage}");
    // The last sample, 2 % of twenty rounded up, shares no token with the others.
    let unseen: Vec<u64> = counts.iter().zip(&others).map(|(all, others)| all - others).collect();
    let without = DraftVocabulary::most_frequent(&others, &ends, 9).unwrap();
    assert_eq!((coverage.held_out, share(&unseen, &without)), (Some(0.0), 0.0));
    let note = notes.iter().find(|note| note.starts_with("draft vocabulary: 9 of 320 tokens cover ")).unwrap();
    assert!(note.ends_with("% of the data, 0.00 % of samples that were not counted"), "{note}");

    let drafter = load_drafter(&outcome.checkpoint, bench.model.target.config(), Precision::F32).unwrap();
    let Drafter::Block(drafter) = drafter else { panic!("a block drafter") };
    assert_eq!(drafter.vocabulary(), Some(&expected));
    let config: Value = serde_json::from_slice(&fs_err::read(outcome.checkpoint.join("config.json")).unwrap()).unwrap();
    assert_eq!((&config["draft_vocab_size"], &config["vocab_size"]), (&json!(9), &json!(320)));
}

#[test]
fn an_interrupted_run_goes_on_with_its_map_to_the_same_bytes() {
    let bench = Bench::new();
    let settings = ["draft.vocab_size=30"];
    let whole = bench.train("whole", &settings, None).0.unwrap();
    let stopped = bench.train("stopped", &settings, Some(3)).0.unwrap_err();
    assert!(matches!(stopped, Error::Interrupted { .. }), "{stopped}");
    let resumed = bench.train("stopped", &settings, None).0.unwrap();
    assert_eq!((resumed.resumed_from, resumed.steps), (3, 6));
    for file in ["model.safetensors", "config.json", "training_state/model.safetensors"] {
        let read = |outcome: &TrainOutcome| fs_err::read(outcome.checkpoint.join(file)).unwrap();
        assert!(read(&whole) == read(&resumed), "{file} differs");
    }
    // One more call finds nothing to do.
    assert_eq!(bench.train("stopped", &settings, None).0.unwrap().resumed_from, 6);
}

#[test]
fn a_resume_refuses_another_map() {
    let mut bench = Bench::new();
    let settings = ["draft.vocab_size=30"];
    bench.train("run", &settings, Some(3)).0.unwrap_err();
    fs_err::remove_dir_all(bench.cache("run")).unwrap();
    write_cache(&bench.cache("run"), &bench.model, 41);
    let error = bench.train("run", &settings, None).0.unwrap_err();
    let text = error.to_string();
    assert!(text.contains("draft vocabulary") && text.contains("step-000003"), "{text}");
    assert!(error.hint().unwrap().contains("another run folder"));
    // So does a start from a checkpoint of another map, or of none.
    let checkpoint = bench.folder.path().join("run/checkpoints/step-000003");
    let from = format!("init.from={}", checkpoint.display());
    bench.first = 60;
    let text = bench.train("other", &["draft.vocab_size=30", &from], None).0.unwrap_err().to_string();
    assert!(text.contains("draft vocabulary"), "{text}");
    let text = bench.train("full", &[&from], None).0.unwrap_err().to_string();
    assert!(text.contains("draft vocabulary differs: 30 tokens in the checkpoint, all tokens in the recipe"), "{text}");
    bench.first = 40;
    bench.train("same", &["draft.vocab_size=30", &from], None).0.unwrap();
}

/// Training goes on from weights, moments and, where they are an average, the trained weights: a value of any that is not finite is
/// refused by name, as it is in a checkpoint that a run starts from.
#[test]
fn a_checkpoint_with_values_that_are_not_finite_is_no_start_and_no_resume() {
    let bench = Bench::new();
    let settings = ["train.ema=0.5"];
    bench.train("run", &settings, Some(3)).0.unwrap_err();
    let folder = bench.folder.path().join("run/checkpoints/step-000003");
    for file in ["model.safetensors", "training_state/model.safetensors"] {
        let path = folder.join(file);
        let good = fs_err::read(&path).unwrap();
        let tensors = candle_core::safetensors::load(&path, &Device::Cpu).unwrap();
        let mut names: Vec<&String> =
            tensors.keys().filter(|name| name.contains("fc") || name.contains("norm")).collect();
        names.sort();
        assert!(names.len() >= 4);
        for (number, name) in names.into_iter().enumerate() {
            let mut bad = tensors.clone();
            let mut values: Vec<f32> = bad[name].flatten_all().unwrap().to_vec1().unwrap();
            values[number] = if number % 2 == 0 { f32::NAN } else { f32::INFINITY };
            let tensor = candle_core::Tensor::from_vec(values, tensors[name].dims(), &Device::Cpu).unwrap();
            bad.insert(name.clone(), tensor);
            candle_core::safetensors::save(&bad, &path).unwrap();
            let text = bench.train("run", &settings, None).0.unwrap_err().to_string();
            assert!(text.contains(&format!("tensor `{name}` holds")) && text.contains(file), "{text}");
            if file == "model.safetensors" {
                let from = format!("init.from={}", folder.display());
                let text = bench.train(&format!("from-{number}"), &[&from], None).0.unwrap_err().to_string();
                assert!(text.contains(&format!("tensor `{name}` holds")), "{text}");
            }
        }
        fs_err::write(&path, good).unwrap();
    }
    bench.train("run", &settings, None).0.unwrap();
}

#[test]
fn a_start_of_another_meaning_is_refused_with_everything_that_differs() {
    let bench = Bench::new();
    let checkpoint = bench.train("run", &[], None).0.unwrap().checkpoint;
    let config = DraftConfig::from_folder(&checkpoint).unwrap();
    let mut other = config.clone();
    other.target_layer_ids.reverse();
    (other.mask_token_id, other.sliding_window, other.body.rope.theta) = (config.mask_token_id - 1, Some(40), 1234.0);
    deepspec_models::checkpoint::write_json(&checkpoint.join("config.json"), &other.to_json()).unwrap();
    let error = bench.train("other", &[&format!("init.from={}", checkpoint.display())], None).0.unwrap_err();
    let text = error.to_string();
    let Error::OtherStart { differences, .. } = error else { panic!("{text}") };
    assert_eq!(differences.len(), 4, "{text}");
    for part in [
        format!(
            "target_layer_ids differs: {:?} in the checkpoint, {:?} in",
            other.target_layer_ids, config.target_layer_ids
        ),
        format!("mask_token_id differs: {} in the checkpoint, {} in", other.mask_token_id, config.mask_token_id),
        "sliding_window differs: 40 in the checkpoint, none in".into(),
        "rope differs: theta 1234".into(),
    ] {
        assert!(text.contains(&part), "{part}: {text}");
    }
}

#[test]
fn sizes_that_do_not_fit_the_target_are_refused() {
    let bench = Bench::new();
    let text = bench.train("small", &["draft.vocab_size=1", "draft.markov_rank=1"], None).0.unwrap_err().to_string();
    assert!(text.contains("`draft.vocab_size` is 1, allowed: at least 2, the tokens [2, 5] that end a text"), "{text}");
    let text = bench.train("large", &["draft.vocab_size=321"], None).0.unwrap_err().to_string();
    assert!(text.contains("draft_vocab_size") && text.contains("321"), "{text}");
}

#[test]
fn the_targets_own_size_is_no_draft_vocabulary() {
    let bench = Bench::new();
    let all = bench.train("all", &["draft.vocab_size=320"], None).0.unwrap();
    let none = bench.train("none", &[], None).0.unwrap();
    assert!(all.coverage.is_none() && saved_vocabulary(&all.checkpoint).is_none());
    for file in ["model.safetensors", "config.json"] {
        let read = |outcome: &TrainOutcome| fs_err::read(outcome.checkpoint.join(file)).unwrap();
        assert!(read(&all) == read(&none), "{file} differs");
    }
    let weights = Weights::from_folder(&none.checkpoint, DType::F32, &Device::Cpu).unwrap();
    assert!(!weights.contains("d2t") && !weights.contains("t2d"));
}

/// Records of the metrics without what the clock decides.
fn timeless_metrics(bench: &Bench, run: &str) -> Vec<Value> {
    let mut records: Vec<Value> = read_journal(bench.folder.path().join(run).join("metrics.jsonl")).unwrap();
    for record in &mut records {
        let fields = record.as_object_mut().unwrap();
        fields.retain(|name, _| !["tokens_per_s", "step_ms", "mfu"].contains(&name.as_str()));
    }
    records
}

#[test]
fn acceptance_is_measured_on_the_way_and_changes_no_weight() {
    let bench = Bench::new();
    let measuring = ["train.log_every=100", "train.acceptance_every=2", "train.acceptance_prompts=3"];
    let (with, notes) = bench.train("with", &measuring, None);
    let without = bench.train("without", &[], None).0.unwrap();
    let read = |outcome: &TrainOutcome, file: &str| fs_err::read(outcome.checkpoint.join(file)).unwrap();
    let with = with.unwrap();
    for file in ["model.safetensors", "config.json", "training_state/model.safetensors"] {
        assert!(read(&with, file) == read(&without, file), "{file} differs");
    }
    let records = timeless_metrics(&bench, "with");
    let steps: Vec<u64> = records.iter().map(|record| record["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, [2, 4, 6], "a measurement is logged even where no line is due");
    assert!(records.iter().all(|r| r["decode_tau"].as_f64().unwrap() >= 1.0 && r["decode_accept@1"].is_number()));
    assert!(timeless_metrics(&bench, "without").iter().all(|record| record.get("decode_tau").is_none()));
    let tau = records[2]["decode_tau"].as_f64().unwrap();
    let is_line =
        |note: &String| note.starts_with("step 00006/") && note.contains(&format!("| decode tau {tau:.2}, accept@1"));
    assert!(notes.iter().any(is_line), "{notes:?}");
    assert!(notes.iter().all(|note| !note.contains("in a row")), "{notes:?}");

    let stopped = bench.train("stopped", &measuring, Some(3)).0.unwrap_err();
    assert!(matches!(stopped, Error::Interrupted { .. }), "{stopped}");
    let resumed = bench.train("stopped", &measuring, None).0.unwrap();
    assert!(read(&resumed, "model.safetensors") == read(&with, "model.safetensors"));
    assert_eq!(timeless_metrics(&bench, "stopped"), records);
}

/// What train-time acceptance asks for a sample: its prompt continued greedily.
fn greedy_request(target: &Target, index: u64, first: u32) -> Request {
    Request {
        id: index,
        prompt: tokens(index, first)[..4].to_vec(),
        sampling: SamplingParams::greedy(),
        seed: 0,
        max_new_tokens: 48,
        stop_ids: target.config().stop_ids.as_slice().into(),
        confidence_threshold: 0.0,
        options: RequestOptions::default(),
    }
}

/// The target writes none of the tokens that this drafter can propose.
#[test]
fn a_drafter_that_is_never_accepted_is_called_out() {
    let mut bench = Bench::new();
    let target = &bench.model.target;
    let mut engine = Engine::new(target, Box::new(NoProposer), 1, 64).unwrap();
    let written = engine.run([greedy_request(target, 0, bench.first)], |_| Ok(())).unwrap().remove(0).output;
    // The drafter knows seven of the twelve most frequent tokens of the data, and those that end a text.
    bench.first =
        (40..180).step_by(12).find(|first| !written.iter().any(|t| (*first..first + 12).contains(t))).unwrap();
    let (outcome, notes) = bench.train("run", &["draft.vocab_size=9", "train.acceptance_every=1"], None);
    outcome.unwrap();
    let records = timeless_metrics(&bench, "run");
    assert!(records.iter().all(|record| record["decode_tau"].as_f64() == Some(1.0)), "{records:?}");
    let warnings: Vec<&String> = notes.iter().filter(|note| note.contains("measurements in a row")).collect();
    assert_eq!(warnings.len(), 2, "after 3 and after 6 measurements: {warnings:?}");
    assert!(
        warnings[0].contains("`sample_from_anchor`") && warnings[0].contains("`draft.target_layer_ids`"),
        "{warnings:?}"
    );
}

/// A drafter that fits its target, hardly moved by training: the measurement finds what decoding with the checkpoint gives.
#[test]
fn measured_acceptance_is_that_of_the_checkpoint() {
    let bench = Bench::new();
    let from = "../models/tests/golden/decode/dspark_vanilla";
    let config = DraftConfig::from_folder(from).unwrap();
    let settings = [
        &format!("init.from={from}"),
        &format!("draft.num_layers={}", config.body.num_hidden_layers),
        &format!("draft.block_size={}", config.block_size),
        &format!("draft.markov_rank={}", config.markov_rank),
        &format!("draft.mask_token_id={}", config.mask_token_id),
        &format!("draft.target_layer_ids={:?}", config.target_layer_ids),
        "draft.qk_norm=true",
        "draft.precision=f32",
        "train.lr=1e-12",
        "train.acceptance_every=6",
    ];
    write_cache_of(&bench.cache("run"), &bench.model, bench.first, &config.target_layer_ids);
    let (outcome, _) = bench.train_on("run", &settings, None, None);
    let outcome = outcome.unwrap();
    let records = timeless_metrics(&bench, "run");
    let found = records.last().unwrap();

    let drafter = load_drafter(&outcome.checkpoint, bench.model.target.config(), Precision::F32).unwrap();
    let target = &bench.model.target;
    let mut engine = Engine::new(target, drafter.proposer(target, 1, 64).unwrap(), 1, 64).unwrap();
    let requests = (12..20).map(|index| greedy_request(target, index, bench.first));
    let finished = engine.run(requests, |_| Ok(())).unwrap();
    let rounds: Vec<Round> = finished.iter().flat_map(|done| &done.rounds).map(Round::from).collect();
    let expected = Acceptance::of(&rounds);
    assert_eq!(found["decode_tau"].as_f64(), expected.tau);
    assert_eq!(found["decode_accept@1"].as_f64(), expected.positions[0].accept_rate);
    assert!(expected.tau.unwrap() > 1.05, "{expected:?}");
}

#[test]
fn checkpoints_hold_the_moving_average_and_a_resume_goes_on_with_both() {
    let bench = Bench::new();
    let averaging = ["train.ema=0.6", "train.checkpoint_every=1", "train.keep_checkpoints=9"];
    let whole = bench.train("whole", &averaging, None).0.unwrap();
    let plain = bench.train("plain", &averaging[1..], None).0.unwrap();
    let tensors = |outcome: &TrainOutcome, step: u64, state: &str, prefix: &str| -> Vec<(String, Vec<f32>)> {
        let folder = outcome.checkpoint.with_file_name(format!("step-{step:06}")).join(state);
        let weights = Weights::from_folder(folder, DType::F32, &Device::Cpu).unwrap();
        let names: Vec<String> = weights.names().map(str::to_owned).collect();
        let is_trained = |name: &str| !name.starts_with("embed_tokens") && !name.starts_with("lm_head");
        let chosen = names.iter().filter_map(|name| Some((name, name.strip_prefix(prefix)?)));
        let read = |(name, short): (&String, &str)| {
            let shape = weights.shape(name).unwrap().to_vec();
            (short.to_owned(), weights.get(name, &shape).unwrap().flatten_all().unwrap().to_vec1().unwrap())
        };
        chosen.filter(|(_, short)| is_trained(short)).map(read).collect()
    };
    // The weights are those of a run without an average; the average is what its definition says.
    let mut average: Option<Vec<(String, Vec<f32>)>> = None;
    for step in 1..=6 {
        let trained = tensors(&whole, step, "training_state", "weights.");
        assert!(trained == tensors(&plain, step, "", ""), "step {step}");
        let saved = tensors(&whole, step, "", "");
        let decay = 0.6_f64.min((1.0 + step as f64) / (10.0 + step as f64));
        if let Some(average) = &average {
            for ((name, saved), ((_, before), (_, trained))) in saved.iter().zip(average.iter().zip(&trained)) {
                for ((&saved, &before), &trained) in saved.iter().zip(before).zip(trained) {
                    let expected = decay * f64::from(before) + (1.0 - decay) * f64::from(trained);
                    assert!((f64::from(saved) - expected).abs() < 1e-6, "step {step}, {name}: {saved}, {expected}");
                }
            }
            assert!(saved != trained);
        }
        average = Some(saved);
    }
    bench.train("stopped", &averaging, Some(3)).0.unwrap_err();
    let resumed = bench.train("stopped", &averaging, None).0.unwrap();
    assert_eq!(resumed.resumed_from, 3);
    for file in ["model.safetensors", "training_state/model.safetensors"] {
        let read = |outcome: &TrainOutcome| fs_err::read(outcome.checkpoint.join(file)).unwrap();
        assert!(read(&whole) == read(&resumed), "{file} differs");
    }
    load_drafter(&whole.checkpoint, bench.model.target.config(), Precision::F32).unwrap();
}

#[test]
fn a_run_trains_on_columns_of_the_cache_of_another() {
    let bench = Bench::new();
    let layers = ["draft.target_layer_ids=[4, 0]"];
    write_cache(&bench.cache("main"), &bench.model, 40);
    write_cache_of(&bench.cache("own"), &bench.model, 40, &[4, 0]);
    let own = bench.train_on("own", &layers, None, None).0.unwrap();
    let stopped = bench.train_on("sharing", &layers, Some(3), Some("main")).0.unwrap_err();
    assert!(matches!(stopped, Error::Interrupted { .. }), "{stopped}");
    // It goes on without being told again.
    let sharing = bench.train_on("sharing", &layers, None, None).0.unwrap();
    assert_eq!(sharing.resumed_from, 3);
    let read = |outcome: &TrainOutcome| fs_err::read(outcome.checkpoint.join("model.safetensors")).unwrap();
    assert!(read(&own) == read(&sharing), "another choice of columns than a cache of these layers has");
    assert!(!bench.cache("sharing").exists());

    let refuse = |run: &str, overrides: &[&str], other: &str| {
        bench.train_on(run, overrides, None, Some(other)).0.unwrap_err().to_string()
    };
    let text = refuse("more", &["draft.target_layer_ids=[0, 1]"], "main");
    assert!(text.contains("layer_ids") && text.contains("[0, 2, 4]") && text.contains("[0, 1]"), "{text}");
    assert!(refuse("own", &layers, "main").contains("has a cache of its own"));
    assert!(refuse("sharing", &layers, "own").contains("it trains on `"));
    assert!(refuse("none", &layers, "absent").contains("absent"));
}

#[test]
fn every_head_and_layout_trains_from_its_start_and_resumes() {
    let bench = Bench::new();
    for (head, start) in [("gated", "bigram"), ("rnn", "bigram"), ("rnn", "random"), ("vanilla", "bigram")] {
        let (head_key, start_key) = (format!("draft.markov_head={head}"), format!("init.markov={start}"));
        let settings = [&*head_key, &*start_key, "draft.sample_from_anchor=false"];
        let whole = bench.train(&format!("{head}-{start}"), &settings, None).0.unwrap();
        let stopped = format!("{head}-{start}-stopped");
        assert!(matches!(bench.train(&stopped, &settings, Some(3)).0, Err(Error::Interrupted { .. })));
        let resumed = bench.train(&stopped, &settings, None).0.unwrap();
        let read = |outcome: &TrainOutcome| fs_err::read(outcome.checkpoint.join("model.safetensors")).unwrap();
        assert!(read(&whole) == read(&resumed), "{head} from {start}");
        let drafter = load_drafter(&whole.checkpoint, bench.model.target.config(), Precision::F32).unwrap();
        let Drafter::Block(drafter) = drafter else { panic!("a block drafter") };
        let config = drafter.config();
        assert_eq!((config.block_size, config.proposals(), config.sample_from_anchor), (3, 2, false));
        assert_eq!(config.markov_head_type.unwrap().name(), head);

        // Weights of another layout are no start.
        let from = format!("init.from={}", whole.checkpoint.display());
        let other = bench.train(&format!("{head}-{start}-other"), &[&*from, &*head_key], None);
        let text = other.0.unwrap_err().to_string();
        assert!(text.contains("block layout differs: 1+N in") && text.contains("anchor-first in the recipe"), "{text}");
    }
}

#[test]
fn the_production_shape_trains_resumes_and_decodes_losslessly() {
    let bench = Bench { recipe: "dspark/qwen3_8b_moe", ..Bench::new() };
    // What the tiny target cannot have.
    let smaller = ["draft.num_experts=8", "draft.moe_intermediate_size=16", "draft.precision=f32"];
    let whole = bench.train("whole", &smaller, None).0.unwrap();
    assert!(matches!(bench.train("stopped", &smaller, Some(3)).0, Err(Error::Interrupted { .. })));
    let (resumed, notes) = bench.train("stopped", &smaller, None);
    let resumed = resumed.unwrap();
    for file in ["model.safetensors", "config.json", "training_state/model.safetensors"] {
        let read = |outcome: &TrainOutcome| fs_err::read(outcome.checkpoint.join(file)).unwrap();
        assert!(read(&whole) == read(&resumed), "{file} differs");
    }
    let metric = |name: &str| whole.metrics.iter().find(|(other, _)| other == name).unwrap().1;
    // 1 for a balanced router; nearly that at a random start.
    assert!((0.9..1.5).contains(&metric("load_balance_loss")), "{}", metric("load_balance_loss"));
    assert!(metric("router_z_loss") > 0.0 && (0.125..=0.5).contains(&metric("busiest_expert_share")));
    let target = &bench.model.target;
    let drafter = load_drafter(&whole.checkpoint, target.config(), Precision::F32).unwrap();
    let line = describe(&drafter.config());
    let experts = "window 128, MLP of 8 experts of width 16, 3 per token, and a shared one of ";
    assert!(line.contains(experts) && notes.contains(&line), "{line}");

    // Long enough for the ring of 160 rows to go round, the first prompt longer than the window.
    let requests = || -> Vec<Request> {
        let prompt = |len: u32| (0..len).map(|i| 40 + i * 7 % 90).collect();
        let request = |id: usize, len| Request {
            id: id as u64,
            prompt: prompt(len),
            sampling: SamplingParams::greedy(),
            seed: 7,
            max_new_tokens: 190,
            stop_ids: Vec::new().into(),
            confidence_threshold: 0.0,
            options: RequestOptions::default(),
        };
        [150, 3, 60].into_iter().enumerate().map(|(id, len)| request(id, len)).collect()
    };
    let decode = |proposer: Box<dyn Proposer + '_>| -> Vec<Finished> {
        let mut finished = Engine::new(target, proposer, 2, 340).unwrap().run(requests(), |_| Ok(())).unwrap();
        finished.sort_by_key(|done| done.request.id);
        finished
    };
    let plain = decode(Box::new(NoProposer));
    let drafted = decode(drafter.proposer(target, 2, 340).unwrap());
    for (plain, drafted) in plain.iter().zip(&drafted) {
        assert_eq!(plain.output.len(), 190);
        assert_eq!(plain.output, drafted.output, "request {}", plain.request.id);
        assert!(drafted.rounds.iter().any(|round| round.proposed == 5), "blocks of five are proposed");
    }

    // A prompt of several chunks, of which the engine keeps the features of the last: what is proposed is what all of them give.
    let prompt: Vec<u32> = (0..480).map(|i| 40 + i * 11 % 97).collect();
    let ask = |prompt: Vec<u32>| Request { prompt, max_new_tokens: 8, ..requests().remove(0) };
    let proposer = drafter.proposer(target, 1, 500).unwrap();
    let done = Engine::new(target, proposer, 1, 500).unwrap().run([ask(prompt.clone())], |_| Ok(())).unwrap().remove(0);
    let mut cache = target.new_cache(1, 500).unwrap();
    let new = NewTokens { slot: 0, tokens: &prompt };
    let features = target.forward(&mut cache, &[new], drafter.target_layer_ids()).unwrap().features.unwrap();
    let mut proposer = drafter.proposer(target, 1, 500).unwrap();
    proposer.observe(&features, &[(0, 480)]).unwrap();
    let tokens = [prompt, done.output[..1].to_vec()].concat();
    let Request { sampling, seed, stop_ids, .. } = ask(tokens.clone());
    let request = DraftRequest {
        slot: 0,
        tokens: &tokens,
        most: 5,
        stop_ids: &stop_ids,
        sampling: &sampling,
        adjustments: None,
        seed,
        round: 0,
    };
    assert_eq!(done.rounds[0].block, proposer.propose(&[request]).unwrap()[0].tokens);
}
