//! Eagle3 through all stages on the tiny golden target: prompts become a cache, the cache a drafter, the drafter a report; an
//! interrupted training run ends in the same bytes.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod common;

use std::path::{Path, PathBuf};

use candle_core::{DType, Device};
use deepspec_engine::TextSide;
use deepspec_engine::progress::{Context, Event, Interrupt, Reporter};
use deepspec_models::config::{DrafterConfig, TargetConfig};
use deepspec_models::linear::Precision as Packing;
use deepspec_models::target::Target;
use deepspec_models::weights::Weights;
use deepspec_stages::drafter::{describe, load_drafter};
use deepspec_stages::recipe::{Precision, Recipe};
use deepspec_stages::run_dir::{Provenance, RunDir, read_journal};
use deepspec_stages::target_model::TargetModel;
use deepspec_stages::train::{self, TrainOutcome};
use deepspec_stages::{Error, Result, eval, prepare};
use serde_json::Value;
use tempfile::TempDir;

use common::byte_renderer;

const TEMPLATE: &str = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n\
                        {% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
const STEPS: usize = 3;

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

/// Asks for a stop after a number of training steps.
struct User<'a> {
    stop: Option<(u64, &'a Interrupt)>,
}

impl Reporter for User<'_> {
    fn event(&self, event: Event<'_>) {
        if let (Event::Advanced { done, .. }, Some((limit, interrupt))) = (event, self.stop)
            && done >= limit
        {
            interrupt.set();
        }
    }
}

struct Bench {
    folder: TempDir,
    model: TargetModel,
    overrides: Vec<String>,
}

impl Bench {
    /// Prepares the cache that all runs have copies of.
    fn new(overrides: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let prompts = folder.path().join("prompts.jsonl");
        let rows: Vec<String> = (0..10).map(|i| format!(r#"{{"prompt": "{}"}}"#, "ab c".repeat(i % 4 + 1))).collect();
        fs_err::write(&prompts, rows.join("\n")).unwrap();
        let fixed =
            [format!("data.prompts={}", prompts.display()), format!("eval.prompts=[{:?}]", prompts.to_str().unwrap())];
        let rest = [
            "prepare.temperature=1.0",
            "prepare.max_new_tokens=20",
            "prepare.max_length=80",
            "draft.target_layer_ids=[0, 2, 4]",
            "draft.mask_token_id=319",
            "draft.vocab_size=none",
            "draft.qk_norm=true",
            "draft.precision=f32",
            "draft.block_size=3",
            "draft.ttt_length=3",
            "train.steps=6",
            "train.batch_size=4",
            "train.micro_batch_size=2",
            "train.checkpoint_every=2",
            "train.log_every=2",
            "eval.limit=3",
            "eval.max_new_tokens=24",
            "eval.temperatures=[0.0, 1.0]",
            "eval.adaptive=false",
        ];
        let overrides = fixed.into_iter().chain(rest.iter().chain(overrides).map(|text| (*text).to_owned())).collect();
        let bench = Self { folder, model: model(), overrides };
        let (recipe, run) = bench.open("prepared");
        let user = User { stop: None };
        let context = Context { reporter: &user, interrupt: &Interrupt::new() };
        let Bench { model, .. } = &bench;
        prepare::run(&recipe, &run, &model.target, &model.text.renderer, &model.fingerprint, context).unwrap();
        bench
    }

    fn open(&self, name: &str) -> (Recipe, RunDir) {
        let recipe = Recipe::open("eagle3/smollm2_135m", &self.overrides).unwrap();
        let run = RunDir::create_or_open(self.folder.path().join(name), &recipe, &provenance()).unwrap();
        (recipe, run)
    }

    /// Trains in the named folder; the user stops after some steps.
    fn train(&self, name: &str, stop_after: Option<u64>) -> Result<TrainOutcome> {
        let (recipe, run) = self.open(name);
        if !run.cache().exists() {
            copy(&self.folder.path().join("prepared/cache"), &run.cache());
        }
        let interrupt = Interrupt::new();
        let user = User { stop: stop_after.map(|limit| (limit, &interrupt)) };
        train::run(&recipe, &run, &self.model, Context { reporter: &user, interrupt: &interrupt })
    }
}

fn provenance() -> Provenance {
    Provenance { version: "test".into(), git_commit: None, started: "now".into(), machine: "here".into() }
}

fn copy(from: &Path, to: &Path) {
    fs_err::create_dir_all(to).unwrap();
    for entry in fs_err::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        fs_err::copy(&path, to.join(path.file_name().unwrap())).unwrap();
    }
}

#[test]
fn eagle3_from_prompts_to_a_lossless_report() {
    for (overrides, tokens) in [(&[][..], "320"), (&["draft.vocab_size=90"][..], "90 of 320")] {
        let bench = Bench::new(overrides);
        let outcome = bench.train("run", None).unwrap();
        assert_eq!(outcome.coverage.is_some(), tokens != "320");
        let drafter = load_drafter(&outcome.checkpoint, bench.model.target.config(), Precision::F32).unwrap();
        let line = describe(&drafter.config());
        assert!(line.contains("Eagle3, 3 steps") && line.contains(&format!("vocabulary {tokens}")), "{line}");

        // The lines of the log hold what the algorithm measures, and losses fall.
        let (recipe, run) = bench.open("run");
        let lines: Vec<Value> = read_journal(run.metrics()).unwrap();
        assert_eq!(lines.len(), 3);
        for name in ["loss", "tau_probabilistic", "tau_greedy", "covered", "lr", "grad_norm", "tokens_per_s", "mfu"] {
            assert!(lines.iter().all(|line| line[name].as_f64().is_some_and(f64::is_finite)), "{name}");
        }
        for step in 0..STEPS {
            for name in ["ploss_", "accuracy@", "accept_rate@", "valid_tokens@"] {
                assert!(lines.iter().all(|line| line[format!("{name}{step}")].is_number()), "{name}{step}");
            }
        }
        assert!(lines[0][format!("ploss_{STEPS}")].is_null());
        assert!(lines[2]["loss"].as_f64() < lines[0]["loss"].as_f64(), "{} … {}", lines[0], lines[2]);
        assert_eq!(lines[0]["covered"].as_f64() < Some(1.0), tokens != "320");
        assert!(fs_err::read_dir(run.tensorboard()).unwrap().next().is_some());

        let user = User { stop: None };
        let context = Context { reporter: &user, interrupt: &Interrupt::new() };
        let renderer = &bench.model.text.renderer;
        let target = &bench.model.target;
        let report = eval::run(&recipe, &run.eval(), target, Some(&drafter), renderer, &provenance(), context).unwrap();
        // A drafter of three steps may accept nothing; then equal answers show nothing.
        assert_ne!(report.lossless, Some(false));
        assert_eq!((report.comparison.answers, report.comparison.different), (9, 0));
        let info = report.drafter.unwrap();
        assert_eq!((info.name.as_str(), info.block_size, info.layers), ("eagle3", STEPS, 1));
        for result in &report.temperatures {
            let found = result.all.proposers.iter().find(|found| found.name == "eagle3").unwrap();
            assert!(found.acceptance.rounds > 0, "at {}", result.temperature);
        }
    }
}

#[test]
fn an_interrupted_run_goes_on_to_the_same_bytes() {
    let bench = Bench::new(&["draft.vocab_size=90"]);
    let whole = bench.train("whole", None).unwrap();
    let stopped = bench.train("stopped", Some(3)).unwrap_err();
    assert!(matches!(stopped, Error::Interrupted { .. }), "{stopped}");
    let resumed = bench.train("stopped", None).unwrap();
    assert_eq!((resumed.resumed_from, resumed.steps), (3, 6));
    for file in ["model.safetensors", "config.json", "training_state/model.safetensors"] {
        let read = |outcome: &TrainOutcome| fs_err::read(outcome.checkpoint.join(file)).unwrap();
        assert!(read(&whole) == read(&resumed), "{file} differs");
    }
    let timed = ["tokens_per_s", "step_ms", "mfu"];
    let metrics = |name: &str| -> Vec<Value> {
        let mut lines: Vec<Value> = read_journal(bench.open(name).1.metrics()).unwrap();
        for line in &mut lines {
            for key in timed {
                line[key] = Value::Null;
            }
        }
        lines
    };
    assert_eq!(metrics("whole"), metrics("stopped"));
}

#[test]
fn starts_and_checkpoints_of_other_kinds_are_told_apart() {
    let bench = Bench::new(&[]);
    let outcome = bench.train("run", None).unwrap();
    assert!(matches!(DrafterConfig::from_folder(&outcome.checkpoint).unwrap(), DrafterConfig::Eagle3(_)));
    // A tensor that is missing or of another drafter is named.
    let weights = |change: &dyn Fn(&mut std::collections::HashMap<String, candle_core::Tensor>)| {
        let copy_of = bench.folder.path().join("changed");
        copy(&outcome.checkpoint.join("training_state"), &copy_of.join("training_state"));
        fs_err::copy(outcome.checkpoint.join("config.json"), copy_of.join("config.json")).unwrap();
        let mut tensors =
            candle_core::safetensors::load(outcome.checkpoint.join("model.safetensors"), &Device::Cpu).unwrap();
        change(&mut tensors);
        candle_core::safetensors::save(&tensors, copy_of.join("model.safetensors")).unwrap();
        load_drafter(&copy_of, bench.model.target.config(), Precision::F32).unwrap_err().to_string()
    };
    let name = "layers.0.hidden_norm.weight";
    let text = weights(&|tensors| drop(tensors.remove(name)));
    assert!(text.contains(name), "{text}");
    let text = weights(&|tensors| {
        let norm = tensors[name].clone();
        tensors.insert("hidden_norm.weight".into(), norm);
    });
    assert!(text.contains("`hidden_norm.weight`"), "{text}");
    // Another start gives other weights; both train.
    let mut random = Bench::new(&["init.layers=random"]);
    random.overrides.push(format!("init.from={}", outcome.checkpoint.display()));
    let on = random.train("on", None).unwrap();
    assert!(on.metrics[0].1 < outcome.metrics[0].1, "{:?} after {:?}", on.metrics[0], outcome.metrics[0]);
    // A start from a drafter of another kind is refused as such.
    random.overrides.push("init.from=../models/tests/golden/decode/dflash".into());
    let text = random.train("other", None).unwrap_err().to_string();
    assert!(text.contains("kind of drafter") && text.contains("Eagle3 in the recipe"), "{text}");
}
