//! The train stage on the tiny golden target and a cache made here: what a draft vocabulary holds and covers, what checkpoints
//! bring back, what is refused; experts and a window, trained and then decoded with.
#![expect(clippy::disallowed_methods, clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod common;

use std::path::{Path, PathBuf};
use std::sync::Mutex;

use candle_core::{DType, Device};
use deepspec_datasets::target_cache::{CacheMeta, Plan, Reader, Sample, StorageMode, Writer};
use deepspec_models::config::{DraftConfig, TargetConfig};
use deepspec_models::draft::DraftVocabulary;
use deepspec_models::linear::Precision as Packing;
use deepspec_models::speculate::{CounterRng, DSparkProposer, NoProposer, Proposer, SamplingParams, Stream};
use deepspec_models::target::Target;
use deepspec_models::weights::Weights;
use deepspec_stages::drafter::{describe, load_drafter};
use deepspec_stages::engine::{Engine, Finished, Request};
use deepspec_stages::model_source::TextSide;
use deepspec_stages::progress::{Context, Event, Interrupt, Reporter};
use deepspec_stages::recipe::{Precision, Recipe};
use deepspec_stages::run_dir::{Provenance, RunDir};
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
    let folder = std::env::var("DEEPSPEC_GOLDEN").unwrap_or_else(|_| "../models/tests/golden".into());
    let path = PathBuf::from(folder).join("target");
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
    let meta = CacheMeta {
        target: model.name.clone(),
        target_fingerprint: model.fingerprint.clone(),
        layer_ids: vec![0, 2, 4],
        hidden_size: HIDDEN,
        vocab_size: VOCAB,
        dtype: "f32".into(),
        tokenizer_hash: model.text.tokenizer().hash().to_owned(),
        template_hash: "t".into(),
        data_hash: format!("d{first}"),
        mask_token_id: Some(319),
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
        let (features, last_hidden) = (rows(0, 3 * HIDDEN), rows(1, HIDDEN));
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
            Event::Note(text) => self.notes.lock().unwrap().push(text.to_owned()),
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
}

impl Bench {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap(), model: model(), first: 40 }
    }

    fn cache(&self, run: &str) -> PathBuf {
        self.folder.path().join(run).join("cache")
    }

    fn recipe(overrides: &[&str]) -> Recipe {
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
        Recipe::open("quickstart", &all).unwrap()
    }

    /// Trains in the named folder, which gets a cache unless it has one; the user stops after some steps.
    fn train(&self, run: &str, overrides: &[&str], stop_after: Option<u64>) -> (Result<TrainOutcome>, Vec<String>) {
        self.train_recipe(run, &Self::recipe(overrides), stop_after)
    }

    fn train_recipe(&self, run: &str, recipe: &Recipe, stop_after: Option<u64>) -> (Result<TrainOutcome>, Vec<String>) {
        let interrupt = Interrupt::new();
        let log = Log { notes: Mutex::default(), stop: stop_after.map(|limit| (limit, &interrupt)) };
        let provenance =
            Provenance { version: "test".into(), git_commit: None, started: "now".into(), machine: "here".into() };
        let run_dir = RunDir::create_or_open(self.folder.path().join(run), recipe, &provenance).unwrap();
        if !self.cache(run).exists() {
            write_cache(&self.cache(run), &self.model, self.first);
        }
        let context = Context { reporter: &log, interrupt: &interrupt };
        let outcome = train::run(recipe, &run_dir, &self.model, context);
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
    assert!(text.contains("tensor `d2t` has shape [30], expected [320]"), "{text}");
    bench.first = 40;
    bench.train("same", &["draft.vocab_size=30", &from], None).0.unwrap();
}

#[test]
fn sizes_that_do_not_fit_the_target_are_refused() {
    let bench = Bench::new();
    let text = bench.train("small", &["draft.vocab_size=1"], None).0.unwrap_err().to_string();
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

/// The recipe of the production shape, of which only what the tiny target and cache ask for is changed.
fn production_recipe() -> Recipe {
    let overrides = [
        "target.precision=f32",
        "draft.target_layer_ids=[0, 2, 4]",
        "draft.mask_token_id=319",
        "draft.markov_rank=8",
        "draft.num_experts=8",
        "draft.moe_intermediate_size=16",
        "draft.precision=f32",
        "train.steps=6",
        "train.batch_size=4",
        "train.micro_batch_size=2",
        "train.num_anchors=4",
        "train.checkpoint_every=2",
        "train.log_every=1",
    ];
    Recipe::open("dspark/qwen3_8b_moe", &overrides.map(str::to_owned)).unwrap()
}

#[test]
fn the_production_shape_trains_resumes_and_decodes_losslessly() {
    let (bench, recipe) = (Bench::new(), production_recipe());
    let whole = bench.train_recipe("whole", &recipe, None).0.unwrap();
    assert!(matches!(bench.train_recipe("stopped", &recipe, Some(3)).0, Err(Error::Interrupted { .. })));
    let (resumed, notes) = bench.train_recipe("stopped", &recipe, None);
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
    let line = describe(drafter.config());
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
        };
        [150, 3, 60].into_iter().enumerate().map(|(id, len)| request(id, len)).collect()
    };
    let decode = |proposer: Box<dyn Proposer + '_>| -> Vec<Finished> {
        let mut finished = Engine::new(target, proposer, 2, 340).unwrap().run(requests(), |_| Ok(())).unwrap();
        finished.sort_by_key(|done| done.request.id);
        finished
    };
    let plain = decode(Box::new(NoProposer));
    let drafted = decode(Box::new(DSparkProposer::new(&drafter, target.lm_head(), 2, 340).unwrap()));
    for (plain, drafted) in plain.iter().zip(&drafted) {
        assert_eq!(plain.output.len(), 190);
        assert_eq!(plain.output, drafted.output, "request {}", plain.request.id);
        assert!(drafted.rounds.iter().any(|round| round.proposed == 5), "blocks of five are proposed");
    }
}
