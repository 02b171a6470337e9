//! `eval --calibrate` on the tiny golden target and drafter: what it fits, holds out, writes, resumes and refuses, and that
//! calibrated confidences change no token.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod common;
#[path = "common/tiny.rs"]
mod tiny;

use std::path::{Path, PathBuf};
use std::sync::Mutex;

use candle_core::{DType, Device};
use deepspec_datasets::renderer::Renderer;
use deepspec_engine::progress::{Context, Event, Interrupt, Reporter};
use deepspec_models::config::DraftConfig;
use deepspec_models::draft::{DSpark, ParameterSource};
use deepspec_models::linear::Precision;
use deepspec_models::speculate::Temperatures;
use deepspec_models::target::Target;
use deepspec_models::weights::Weights;
use deepspec_stages::calibration::{self, CALIBRATION_FILE, CalibrationTable};
use deepspec_stages::drafter::Drafter;
use deepspec_stages::eval::decode::Sample;
use deepspec_stages::eval::metrics::{self, Round};
use deepspec_stages::eval::{self, EvalOutcome};
use deepspec_stages::recipe::Recipe;
use deepspec_stages::run_dir::{Provenance, read_journal};
use deepspec_stages::{Error, Result};

use common::byte_renderer;
use tiny::{golden, target};

const TEMPLATE: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
                        {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

fn drafter(has_confidence: bool) -> Drafter {
    let folder = golden("decode/dspark_vanilla");
    let mut config = DraftConfig::from_folder(&folder).unwrap();
    config.enable_confidence_head = has_confidence;
    config.confidence_head_with_markov &= has_confidence;
    let weights = Weights::from_folder(&folder, DType::F32, &Device::Cpu).unwrap();
    let embed = weights.get("embed_tokens.weight", &[config.body.vocab_size, config.body.hidden_size]).unwrap();
    Drafter::Block(DSpark::new(config, embed, ParameterSource::Frozen(&weights, Precision::F32)).unwrap())
}

/// Keeps notes and warnings; asks for a stop after a number of answers.
struct Log<'a> {
    texts: Mutex<Vec<String>>,
    stop: Option<(u64, &'a Interrupt)>,
}

impl Reporter for Log<'_> {
    fn event(&self, event: Event<'_>) {
        match event {
            Event::Note(text) | Event::Warning(text) => self.texts.lock().unwrap().push(text.to_owned()),
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
    folder: tempfile::TempDir,
    target: Target,
    renderer: Renderer,
}

impl Bench {
    /// Two sets, of 10 and 6 prompts.
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        for (name, count) in [("digits", 10), ("words", 6)] {
            let row = |i: u32| format!("{{\"turns\": [\"{name} {}, go on\"]}}\n", i * 37 % 101);
            let rows: String = (0..count).map(row).collect();
            fs_err::write(folder.path().join(name).with_extension("jsonl"), rows).unwrap();
        }
        fs_err::create_dir(folder.path().join("checkpoint")).unwrap();
        let renderer = byte_renderer(TEMPLATE, &["<|im_start|>", "<|im_end|>"], "<|im_end|>", &[]);
        Self { folder, target: target(), renderer }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn run(
        &self,
        out: &Path,
        overrides: &[&str],
        evaluate: impl FnOnce(&Self, &Recipe, &Path, &Provenance, Context<'_>) -> Result<EvalOutcome>,
        stop_after: Option<u64>,
    ) -> (Result<EvalOutcome>, Vec<String>) {
        let interrupt = Interrupt::new();
        let log = Log { texts: Mutex::default(), stop: stop_after.map(|limit| (limit, &interrupt)) };
        let provenance =
            Provenance { version: "test".into(), git_commit: None, started: "now".into(), machine: "here".into() };
        let set = |name: &str| self.path(name).display().to_string();
        let prompts = format!("eval.prompts=[{:?}, {:?}]", set("digits.jsonl"), set("words.jsonl"));
        let fixed = [
            &prompts,
            "eval.limit=none",
            "eval.max_new_tokens=24",
            "eval.temperatures=[0.0, 0.8]",
            "eval.proposers=[\"plain\", \"draft\", \"hybrid\"]",
        ];
        let overrides: Vec<String> = fixed.into_iter().chain(overrides.iter().copied()).map(str::to_owned).collect();
        let recipe = Recipe::open("quickstart", &overrides).unwrap();
        let outcome = evaluate(self, &recipe, out, &provenance, Context { reporter: &log, interrupt: &interrupt });
        (outcome, log.texts.into_inner().unwrap())
    }

    fn calibrate(
        &self,
        out: &str,
        overrides: &[&str],
        drafter: Drafter,
        stop: Option<u64>,
    ) -> (Result<EvalOutcome>, Vec<String>) {
        let calibrate = |bench: &Self, recipe: &Recipe, out: &Path, provenance: &Provenance, ctx: Context<'_>| {
            let checkpoint = bench.path("checkpoint");
            eval::run_calibrated(recipe, out, &bench.target, drafter, &checkpoint, &bench.renderer, provenance, ctx)
        };
        self.run(&self.path(out), overrides, calibrate, stop)
    }

    /// Evaluates with the calibration beside the checkpoint.
    fn evaluate(&self, out: &str, overrides: &[&str]) -> (Result<EvalOutcome>, Vec<String>) {
        let evaluate = |bench: &Self, recipe: &Recipe, out: &Path, provenance: &Provenance, ctx: Context<'_>| {
            let drafter = calibration::attach(drafter(true), &bench.path("checkpoint"), ctx)?;
            eval::run(recipe, out, &bench.target, Some(&drafter), &bench.renderer, provenance, ctx)
        };
        self.run(&self.path(out), overrides, evaluate, None)
    }
}

#[test]
fn a_calibration_is_fitted_stored_and_reported_on_other_prompts() {
    let bench = Bench::new();
    let (outcome, notes) = bench.calibrate("out", &[], drafter(true), None);
    let outcome = outcome.unwrap();

    // Prompts 3 and 7 of ten, and 3 of six, are held out; the others are evaluated.
    let found = outcome.calibration.as_ref().unwrap();
    assert_eq!((found.fitted_on, found.reported_on), (3, 13));
    let sets: Vec<_> = outcome.sets.iter().map(|set| (set.name.as_str(), set.prompts, set.calibration)).collect();
    assert_eq!(sets, [("digits", 8, 2), ("words", 5, 1)]);
    assert_eq!(outcome.temperatures[0].all.prompts, 13);
    assert!(
        found.table.dataset.contains("every 4th prompt (2 of `digits`, 1 of `words`; seed"),
        "{}",
        found.table.dataset
    );
    assert!(notes.iter().any(|note| note.starts_with("calibration: mean ECE ")), "{notes:?}");

    let stored = CalibrationTable::load(&bench.path("checkpoint"), 5).unwrap().unwrap();
    assert_eq!(stored, found.table);
    assert_eq!((stored.temperatures.len(), stored.ece_before.len(), stored.ece_after.len()), (5, 5, 5));

    // The table's errors are those of the calibration metrics on the same blocks.
    let samples: Vec<Sample> = read_journal(bench.path("out/calibration.jsonl")).unwrap();
    assert_eq!(samples.len(), 2 * 16, "every prompt at both temperatures");
    let share = samples.iter().filter(|sample| sample.prompt % 4 == 3);
    let mut rounds: Vec<Round> = share.flat_map(|sample| sample.rounds.clone()).collect();
    assert!(rounds.iter().all(|round| round.drafted == 0 || round.proposed > 0), "blocks are verified whole");
    let errors = |rounds: &[Round]| -> Vec<f64> {
        let report = metrics::calibration(rounds.iter().filter(|round| !round.confidence_logits.is_empty()));
        report.unwrap().unwrap().positions.iter().map(|position| position.ece.unwrap()).collect()
    };
    let close = |left: &[f64], right: &[f64]| left.iter().zip(right).all(|(l, r)| (l - r).abs() < 1e-12);
    assert!(close(&errors(&rounds), &stored.ece_before), "{:?} {:?}", errors(&rounds), stored.ece_before);
    let temperatures = Temperatures::new(stored.temperatures.clone(), 5).unwrap();
    for round in &mut rounds {
        temperatures.scale(&mut round.confidence_logits);
    }
    assert!(close(&errors(&rounds), &stored.ece_after), "{:?} {:?}", errors(&rounds), stored.ece_after);
    assert!(stored.ece_after[0] <= stored.ece_before[0]);

    // Calibrated confidences choose other lengths, but no other token.
    assert_eq!((outcome.lossless, outcome.compared), (Some(true), 26));
    let info = outcome.drafter.as_ref().unwrap();
    assert_eq!(info.temperatures.as_ref(), Some(&stored.temperatures));
    assert!(info.parameters > 10_000);

    let read: EvalOutcome = serde_json::from_slice(&fs_err::read(bench.path("out/results.json")).unwrap()).unwrap();
    assert_eq!(read.calibration, outcome.calibration);
    let readme = fs_err::read_to_string(bench.path("out/README.md")).unwrap();
    for part in ["## Calibration", "| position | scaling |", "reliability_before.svg", "2 more for calibration", "→"]
    {
        assert!(readme.contains(part), "{part} in\n{readme}");
    }
    let html = fs_err::read_to_string(bench.path("out/report.html")).unwrap();
    assert!(html.contains("Reliability before calibration") && html.contains("Reliability after calibration"));
    for file in ["reliability_before.svg", "reliability_after.svg"] {
        let svg = fs_err::read_to_string(bench.path("out").join(file)).unwrap();
        assert!(
            svg.starts_with("<svg xmlns=") && svg.trim_end().ends_with("</svg>") && svg.matches("<svg").count() == 1
        );
        assert!(svg.contains("up to 5") && svg.contains("<circle") && !svg.contains("NaN"), "{svg}");
    }
}

#[test]
fn a_stored_calibration_is_used_and_loses_nothing() {
    let bench = Bench::new();
    bench.calibrate("out", &[], drafter(true), None).0.unwrap();
    for overrides in [&[][..], &["eval.adaptive=false", "eval.confidence_threshold=0.4"]] {
        let (outcome, notes) = bench.evaluate("again", overrides);
        let outcome = outcome.unwrap();
        assert!(notes.iter().any(|note| note.starts_with("confidences are calibrated: temperatures [")), "{notes:?}");
        assert_eq!((outcome.lossless, outcome.compared), (Some(true), 32), "all 16 prompts and two proposers");
        assert!(outcome.calibration.is_none() && outcome.drafter.unwrap().temperatures.is_some());
    }
    let readme = fs_err::read_to_string(bench.path("again/README.md")).unwrap();
    assert!(readme.contains("make the calibration look better than it is"), "{readme}");

    // Another table is another evaluation: its answers do not mix with these.
    let scaled = |temperature: f32| {
        let table = CalibrationTable {
            temperatures: vec![temperature; 5],
            dataset: String::new(),
            num_samples: 0,
            ece_before: Vec::new(),
            ece_after: Vec::new(),
        };
        table.save(&bench.path("checkpoint")).unwrap();
        let (outcome, _) = bench.evaluate("scaled", &["eval.adaptive=false", "eval.confidence_threshold=0.4"]);
        let outcome = outcome.unwrap();
        assert_eq!(outcome.lossless, Some(true));
        (outcome.identity, outcome.temperatures[0].all.proposers[1].acceptance.proposed)
    };
    let (flat, sharp) = (scaled(100.0), scaled(0.01));
    assert_ne!(flat.0, sharp.0);
    // Confidences near one half pass a threshold of 0.4, extreme ones do not.
    assert!(flat.1 > sharp.1, "{flat:?} {sharp:?}");
}

#[test]
fn an_interrupted_calibration_goes_on_to_the_same_table() {
    let (whole, parts) = (Bench::new(), Bench::new());
    whole.calibrate("out", &[], drafter(true), None).0.unwrap();
    let stopped = parts.calibrate("out", &[], drafter(true), Some(9)).0;
    assert!(matches!(stopped, Err(Error::Interrupted { .. })), "{stopped:?}");
    assert!(!parts.path("checkpoint").join(CALIBRATION_FILE).exists());
    let (outcome, notes) = parts.calibrate("out", &[], drafter(true), None);
    outcome.unwrap();
    assert!(notes.iter().any(|note| note.contains("9 answers are taken from the journal")), "{notes:?}");
    let table = |bench: &Bench| fs_err::read_to_string(bench.path("checkpoint").join(CALIBRATION_FILE)).unwrap();
    assert_eq!(table(&whole), table(&parts));
}

#[test]
fn what_cannot_be_calibrated_is_refused_or_said() {
    let bench = Bench::new();
    let refuse = |overrides: &[&str], drafter: Drafter| {
        bench.calibrate("refused", overrides, drafter, None).0.unwrap_err().to_string()
    };
    assert!(refuse(&["eval.proposers=[\"plain\"]"], drafter(true)).contains("wants `draft` or `hybrid`"));
    let text = refuse(&["eval.limit=3"], drafter(true));
    assert!(text.contains("no set has the 4 prompts"), "{text}");
    let text = refuse(&["eval.max_new_tokens=2", "eval.temperatures=[0.0]"], drafter(true));
    assert!(text.contains("cannot calibrate block position 1: 0 verified blocks reach it, at least 20"), "{text}");
    // Without a confidence head the same prompts are held out.
    let (outcome, notes) = bench.calibrate("none", &["eval.temperatures=[0.0]"], drafter(false), None);
    let outcome = outcome.unwrap();
    assert!(notes.iter().any(|note| note.contains("nothing to calibrate; 3 prompts are held out")), "{notes:?}");
    assert_eq!((outcome.temperatures[0].all.prompts, outcome.calibration), (13, None));
    assert!(!bench.path("checkpoint").join(CALIBRATION_FILE).exists());
    let five = Temperatures::new(vec![1.0; 5], 5).unwrap();
    let error = drafter(false).with_calibration(five).unwrap_err().to_string();
    assert!(error.contains("has 5 entries, expected 0"), "{error}");
}
