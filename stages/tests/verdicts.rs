//! What an evaluation says about speed and identity, from answers whose times and rounds are made up: every way of getting no
//! verdict, and that terminal, Markdown, page and JSON agree.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod common;
#[path = "common/tiny.rs"]
mod tiny;

use deepspec_engine::progress::{Context, Event, Interrupt, Reporter};
use deepspec_models::target::Target;
use deepspec_stages::eval::decode::Sample;
use deepspec_stages::eval::metrics::Round;
use deepspec_stages::eval::verdict::Verdict;
use deepspec_stages::eval::{self, EvalOutcome};
use deepspec_stages::recipe::{Proposer, Recipe};
use deepspec_stages::run_dir::{Provenance, read_journal};
use serde_json::{Value, json};

const TEMPLATE: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
                        {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
/// Tokens of every answer; the first comes from the prompt.
const TOKENS: usize = 21;
/// Seconds of every answer of plain decoding.
const PLAIN_S: f64 = 2.0;

struct Silent;

impl Reporter for Silent {
    fn event(&self, _: Event<'_>) {}
}

struct Bench {
    folder: tempfile::TempDir,
    target: Target,
}

/// How the lookup does on a prompt, beside plain decoding.
#[derive(Clone, Copy)]
struct Made {
    /// Times as fast.
    speedup: f64,
    /// Tokens accepted in each round, none or one.
    accepted: usize,
    /// Seconds of a plain pass just before.
    pass_s: f64,
}

impl Bench {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap(), target: tiny::target() }
    }

    fn run(&self, prompts: usize) -> EvalOutcome {
        let rows: Vec<String> =
            (0..prompts).map(|i| format!("{{\"prompt\": \"Number {i} & <b>more</b>\"}}\n")).collect();
        let file = self.folder.path().join("prompts.jsonl");
        fs_err::write(&file, rows.concat()).unwrap();
        let overrides = [
            format!("eval.prompts=[{:?}]", file.to_str().unwrap()),
            "eval.limit=none".into(),
            format!("eval.max_new_tokens={TOKENS}"),
            "eval.temperatures=[0.0]".into(),
            "eval.adaptive=false".into(),
            "eval.proposers=[\"plain\", \"ngram\"]".into(),
        ];
        let recipe = Recipe::open("quickstart", &overrides).unwrap();
        let renderer = common::byte_renderer(TEMPLATE, &["<|im_start|>", "<|im_end|>"], "<|im_end|>", &[]);
        let provenance =
            Provenance { version: "0".into(), git_commit: None, started: "now".into(), machine: "here".into() };
        let context = Context { reporter: &Silent, interrupt: &Interrupt::new() };
        eval::run(&recipe, self.folder.path(), &self.target, None, &renderer, &provenance, context).unwrap()
    }

    /// An evaluation whose times and rounds are as `made` says per prompt.
    fn with(&self, prompts: usize, made: impl Fn(usize) -> Made) -> EvalOutcome {
        self.run(prompts);
        let journal = self.folder.path().join("journal.jsonl");
        let mut samples: Vec<Sample> = read_journal(&journal).unwrap();
        for sample in &mut samples {
            let Made { speedup, accepted, pass_s } = made(sample.prompt);
            let is_plain = sample.proposer == Proposer::Plain;
            assert_eq!(sample.output.len(), TOKENS);
            sample.timing.wall_s = if is_plain { PLAIN_S } else { PLAIN_S / speedup };
            sample.timing.pieces.clear();
            sample.timing.pass_s = Some(pass_s);
            if !is_plain {
                let round = Round {
                    drafted: 1,
                    proposed: 1,
                    accepted,
                    committed: 1 + accepted,
                    is_fallback: false,
                    confidence_logits: Vec::new(),
                };
                sample.rounds = vec![round; (TOKENS - 1) / (1 + accepted)];
            }
        }
        let lines: Vec<String> = samples.iter().map(|sample| json!(sample).to_string() + "\n").collect();
        fs_err::write(&journal, lines.concat()).unwrap();
        self.run(prompts)
    }

    /// Checks that all outputs have the verdict and the sentence about speed, and the sentence about identity.
    fn check(&self, outcome: &EvalOutcome, verdict: Verdict, speed: &str, identity: &str) {
        let found = &outcome.temperatures[0].all.proposers[1];
        assert_eq!(found.verdict, Some(verdict));
        let headline = outcome.headline();
        assert_eq!(headline.len(), 2);
        assert!(headline[0].contains(speed), "{speed} in {headline:?}");
        assert!(headline[1].contains(identity), "{identity} in {headline:?}");

        let read = |name: &str| fs_err::read_to_string(self.folder.path().join(name)).unwrap();
        let (markdown, page) = (read("README.md"), read("report.html"));
        let escaped = |text: &str| text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
        for sentence in &headline {
            assert!(markdown.contains(&format!("- {sentence}\n")), "{sentence} in\n{markdown}");
            assert!(page.contains(&format!("<li>{}</li>", escaped(sentence))), "{sentence}");
        }
        // The terminal prints these tables and the sentences.
        let tables = outcome.tables();
        let row = &tables[0].rows[1];
        assert_eq!(row.last().unwrap(), &verdict.short());
        assert!(markdown.contains(&format!("| {} |", row.join(" | "))), "{row:?} in\n{markdown}");
        assert!(page.contains(&format!("<td>{}</td>", escaped(&verdict.short()))));
        assert!(page.contains(&format!("verdict: {}", escaped(&verdict.short()))));
        let counts = &tables[2].rows[0];
        assert!(markdown.contains(&format!("| {} |", counts.join(" | "))), "{counts:?} in\n{markdown}");

        let json: Value = serde_json::from_str(&read("results.json")).unwrap();
        let stored = &json["temperatures"][0]["all"]["proposers"][1];
        assert_eq!(stored["verdict"], json!(verdict));
        assert_eq!(serde_json::from_value::<EvalOutcome>(json.clone()).unwrap().headline(), headline);
        let same = match counts[1].as_str() {
            "yes" => json!(true),
            "not shown" => Value::Null,
            other => panic!("identical: {other}"),
        };
        assert_eq!((&stored["identical_to_plain"], &json["lossless"]), (&same, &same));
        assert_eq!(stored["comparison"]["tokens"].to_string(), counts[4]);
        assert_eq!(stored["comparison"]["accepted"].to_string(), counts[5]);
    }
}

const NOT_SHOWN: &str = "of which 0 accepted drafts";

#[test]
fn a_proposer_that_accepts_nothing_is_neither_faster_nor_shown_identical() {
    let bench = Bench::new();
    // Two per cent faster on every prompt, as lucky timings may be.
    let made = |i: usize| Made { speedup: 1.02 + 0.001 * (i % 3) as f64, accepted: 0, pass_s: 0.1 };
    let outcome = bench.with(12, made);
    bench.check(&outcome, Verdict::AboveTau { tau: 1.0 }, "no verdict on its speed: a speedup above tau", NOT_SHOWN);
    assert!(outcome.headline()[1].starts_with("not shown that speculation changes nothing: the 12 answers"));
    assert!(outcome.headline()[0].contains("(1.00 tokens a round) is noise"), "{:?}", outcome.headline());
}

#[test]
fn a_speedup_that_the_accepted_tokens_cannot_explain_is_noise() {
    let bench = Bench::new();
    let made = |i: usize| Made { speedup: 2.4 + 0.01 * (i % 5) as f64, accepted: 1, pass_s: 0.1 };
    let outcome = bench.with(12, made);
    let identity = "all 12 answers compared at temperature 0 equal those of plain decoding, token for token: 252 tokens, of which \
                    120 accepted drafts";
    bench.check(&outcome, Verdict::AboveTau { tau: 2.0 }, "no verdict on its speed", identity);
}

#[test]
fn seven_prompts_are_too_few() {
    let bench = Bench::new();
    let made = |i: usize| Made { speedup: 1.5 + 0.01 * i as f64, accepted: 1, pass_s: 0.1 };
    let outcome = bench.with(7, made);
    let speed = "no verdict on its speed: at least 8 prompts are needed, there are 7";
    bench.check(&outcome, Verdict::FewPrompts { prompts: 7 }, speed, "of which 70 accepted drafts");
    let outcome = bench.with(8, made);
    bench.check(&outcome, Verdict::Faster, "`ngram` is faster than plain decoding: 1.5", "of which 80 accepted drafts");
}

#[test]
fn a_machine_that_slows_down_within_the_run_gives_no_verdict() {
    let bench = Bench::new();
    let made = |i: usize| Made { speedup: 1.5, accepted: 1, pass_s: if i < 6 { 0.1 } else { 0.125 } };
    let outcome = bench.with(12, made);
    let Some(Verdict::Drift { drift }) = outcome.temperatures[0].all.proposers[1].verdict else {
        panic!("{:?}", outcome.temperatures[0].all.proposers[1].verdict)
    };
    assert!((drift - 0.25).abs() < 1e-9);
    let speed = "no verdict on its speed: plain passes drifted by 25.0 % within the run";
    bench.check(&outcome, Verdict::Drift { drift }, speed, "of which 120 accepted drafts");
}

#[test]
fn an_interval_that_holds_one_is_no_finding() {
    let bench = Bench::new();
    let made = |i: usize| Made { speedup: if i.is_multiple_of(2) { 1.5 } else { 0.75 }, accepted: 1, pass_s: 0.1 };
    let outcome = bench.with(12, made);
    bench.check(
        &outcome,
        Verdict::NoDifference,
        "shows no clear difference to plain decoding: 1.00 times",
        "120 accepted",
    );
    let slower = |i: usize| Made { speedup: 0.8 + 0.001 * i as f64, accepted: 1, pass_s: 0.1 };
    let outcome = bench.with(12, slower);
    bench.check(&outcome, Verdict::Slower, "`ngram` is slower than plain decoding: 0.80", "120 accepted");
}
