//! The prepare stage end to end, with a tiny target and a vocabulary of bytes: what is supervised, what is refused, and that
//! no interruption and no batch size shows in its files.
#![expect(clippy::disallowed_methods, reason = "tests read the environment to find golden and shared data")]
#![expect(clippy::unwrap_used, reason = "a failed step fails the test; clippy knows only `#[test]` functions as tests")]

mod common;
#[path = "common/tiny.rs"]
mod tiny;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::DType;
use deepspec_datasets::conversation::{Message, Role};
use deepspec_datasets::renderer::Renderer;
use deepspec_datasets::target_cache::{CacheError, Reader, check};
use deepspec_engine::progress::{Context, Event, Interrupt, Reporter};
use deepspec_models::target::{NewTokens, Target};
use deepspec_stages::prepare::{self, Answer, End, Finish, PrepareOutcome};
use deepspec_stages::recipe::Recipe;
use deepspec_stages::run_dir::{Provenance, RunDir, read_journal};
use deepspec_stages::{Error, Fault, Result};
use half::bf16;
use serde_json::Value;
use tempfile::TempDir;

use common::byte_renderer;
use tiny::target;

const FINGERPRINT: &str = "0123456789abcdef";
const TEMPLATE: &str = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n\
                        {% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
const LAYERS: [i32; 3] = [1, 3, 4];

/// One token per byte and three control tokens; 40 rare bytes end an answer as well, so that some answers end early.
fn renderer() -> Renderer {
    let stop_ids: Vec<u32> = (0xd8..=0xff).collect();
    byte_renderer(TEMPLATE, &["<|endoftext|>", "<|im_start|>", "<|im_end|>"], "<|endoftext|>", &stop_ids)
}

const ROWS: &str = r#"{"prompt": "Hi", "id": "first", "domain": "chat"}
{"messages":[{"role":"system","content":"Be brief."},{"role":"user","content":"One?"},{"role":"assistant","content":"Yes."},{"role":"user","content":"Two?"},{"role":"assistant","content":"No."}]}
{"messages": []}

{"turns": ["a", "b", "c"]}
{"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": "y"}]}
not json
{"prompt": "0123456789012345678901234567890123456789012345678901234567890123456789012345678901234567890123456789"}
{"prompt": "Hi"}
{"prompt": "<|im_end|> is text"}
"#;

/// A recipe for the tiny target over rows in a file of its own.
struct Case {
    folder: TempDir,
    recipe: Recipe,
}

impl Case {
    fn new(rows: &str, overrides: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let data = folder.path().join("data.jsonl");
        fs_err::write(&data, rows).unwrap();
        let recipe = Self::recipe(&data, overrides);
        Self { folder, recipe }
    }

    fn recipe(data: &Path, overrides: &[&str]) -> Recipe {
        let settings = [
            "draft.target_layer_ids=[1, 3, 4]",
            "draft.mask_token_id=319",
            "prepare.temperature=1.0",
            "prepare.max_new_tokens=12",
            "prepare.max_length=96",
            "prepare.batch_size=3",
            "prepare.samples_per_shard=3",
            "data.loss_on=all",
        ];
        let mut all: Vec<String> = settings.iter().chain(overrides).map(|text| (*text).to_owned()).collect();
        all.insert(0, format!("data.prompts={}", data.display()));
        Recipe::open("quickstart", &all).unwrap()
    }

    fn run(&self, name: &str, world: &World) -> Result<PrepareOutcome> {
        self.run_until(name, world, usize::MAX)
    }

    /// Runs in the named folder; the user interrupts at event `stop_at`.
    fn run_until(&self, name: &str, world: &World, stop_at: usize) -> Result<PrepareOutcome> {
        let run = self.open(name);
        let user = User::new(stop_at);
        prepare::run(&self.recipe, &run, &world.target, &world.renderer, FINGERPRINT, user.context())
    }

    fn open(&self, name: &str) -> RunDir {
        let provenance =
            Provenance { version: "test".into(), git_commit: None, started: "now".into(), machine: "here".into() };
        RunDir::create_or_open(self.folder.path().join(name), &self.recipe, &provenance).unwrap()
    }

    fn answers(&self, name: &str) -> Vec<Answer> {
        read_journal(self.folder.path().join(name).join("answers.jsonl")).unwrap()
    }

    fn cache(&self, name: &str) -> Reader {
        let dir = self.folder.path().join(name).join("cache");
        let report = check(&dir).unwrap();
        assert!(report.is_sound(), "{:?}", report.problems);
        Reader::open(&dir).unwrap()
    }

    /// All result files of a run by name.
    fn files(&self, name: &str) -> BTreeMap<String, Vec<u8>> {
        let root = self.folder.path().join(name);
        let mut files = BTreeMap::new();
        for part in ["", "cache"] {
            for entry in fs_err::read_dir(root.join(part)).unwrap() {
                let path = entry.unwrap().path();
                let file = path.file_name().unwrap().to_string_lossy().into_owned();
                if path.is_file() && !file.ends_with("lock") && !["recipe.toml", "provenance.json"].contains(&&*file) {
                    files.insert(format!("{part}/{file}"), fs_err::read(path).unwrap());
                }
            }
        }
        files
    }
}

struct World {
    target: Target,
    renderer: Renderer,
}

impl World {
    fn new() -> Self {
        Self { target: target(), renderer: renderer() }
    }
}

/// Counts events and interrupts at one of them.
struct User {
    stop_at: usize,
    events: AtomicUsize,
    advanced: AtomicUsize,
    interrupt: Interrupt,
}

impl User {
    fn new(stop_at: usize) -> Self {
        Self { stop_at, events: AtomicUsize::new(0), advanced: AtomicUsize::new(0), interrupt: Interrupt::new() }
    }

    fn context(&self) -> Context<'_> {
        Context { reporter: self, interrupt: &self.interrupt }
    }
}

impl Reporter for User {
    fn event(&self, event: Event<'_>) {
        if matches!(event, Event::Advanced { .. }) {
            self.advanced.fetch_add(1, Ordering::SeqCst);
        }
        if self.events.fetch_add(1, Ordering::SeqCst) + 1 >= self.stop_at {
            self.interrupt.set();
        }
    }
}

#[test]
fn rows_become_answers_become_samples() {
    let (world, case) = (World::new(), Case::new(ROWS, &["prepare.samples_per_prompt=8"]));
    let outcome = case.run("run", &world).unwrap();
    let answers = case.answers("run");
    assert_eq!(outcome.rows_read, 9);
    assert_eq!(answers.len(), 6 * 8);
    assert_eq!(outcome.repaired.get("user turns joined"), Some(&1));
    assert_eq!(outcome.rejected.get("no user turn"), Some(&1));
    assert_eq!(outcome.rejected.get("not JSON"), Some(&1));
    assert_eq!(outcome.rejected.get("prompt too long"), Some(&1));
    let unanswered = answers.iter().filter(|answer| answer.turns.is_empty()).count();
    assert_eq!(outcome.rejected.values().sum::<u64>() as usize, 3 + unanswered);
    let ends = |end: End| answers.iter().filter(|answer| answer.end == end).count();
    assert!(ends(End::Complete) > 0 && ends(End::Cut) > 0 && ends(End::Empty) > 0, "the case has no variety");

    let rejects: Vec<Value> = read_journal(case.folder.path().join("run/rejects.jsonl")).unwrap();
    let lines: Vec<u64> = rejects.iter().map(|reject| reject["line"].as_u64().unwrap()).collect();
    assert!(lines.is_sorted() && [3, 7, 8].iter().all(|line| lines.contains(line)), "{lines:?}");
    assert_eq!(rejects.len(), 3 + unanswered);
    assert!(rejects[0]["file"].as_str().unwrap().ends_with("data.jsonl"));
    assert_eq!(rejects[0]["reason"], "no user turn");

    let cache = case.cache("run");
    let used: Vec<&Answer> = answers.iter().filter(|answer| !answer.turns.is_empty()).collect();
    assert_eq!(cache.len() as usize, used.len());
    assert_eq!(outcome.samples as usize, used.len());
    assert_eq!(cache.meta().layer_ids, LAYERS);
    let mut cut = 0;
    for (index, answer) in used.iter().enumerate() {
        let sample = cache.verify_sample(index as u64).unwrap();
        let last = answer.turns.last().unwrap();
        let is_cut = last.finish_reason == Finish::Length;
        cut += u64::from(is_cut);
        assert_eq!(sample.source_id, if answer.id.is_empty() { &answer.key } else { &answer.id });
        assert_eq!(sample.domain, answer.domain.as_deref().unwrap_or_default());
        // The answer, all of it supervised, and the end token that a cut answer is given, not supervised.
        let end = sample.input_ids.len() - usize::from(is_cut);
        assert_eq!(sample.input_ids[end - last.ids.len()..end], last.ids);
        assert!(sample.loss_mask[end - last.ids.len()..end].iter().all(|&mask| mask == 1));
        if is_cut {
            assert_eq!(sample.input_ids[end], world.renderer.end_of_turn());
            assert_eq!(sample.loss_mask[end], 0);
        }
    }
    assert_eq!(outcome.cut_answers, cut);
    let turns = |answer: &Answer| match answer.line {
        2 => 2,
        5 => 3,
        _ => 1,
    };
    let shortened = used.iter().filter(|answer| answer.turns.len() < turns(answer)).count();
    assert!(shortened > 0 && outcome.shortened.values().sum::<u64>() as usize == shortened, "{:?}", outcome.shortened);
    assert_eq!(outcome.tokens, cache.manifest().tokens);
    assert!(outcome.supervised_percent() > 0.0 && outcome.supervised_percent() < 100.0);
    assert!(outcome.summary().iter().any(|(what, _)| what == "rejected: empty answer"));
}

#[test]
fn tokens_before_the_first_supervised_one_are_the_serving_prompt() {
    let (world, case) = (World::new(), Case::new("{\"turns\": [\"a\", \"b\"]}\n", &["prepare.samples_per_prompt=24"]));
    case.run("run", &world).unwrap();
    let (answers, cache) = (case.answers("run"), case.cache("run"));
    let prompt = world.renderer.render_prompt(&[Message::new(Role::User, "a")], None).unwrap();
    assert!(answers.iter().any(|answer| answer.turns != answers[0].turns), "all samples of a prompt are the same");
    let mut two_turns = 0;
    for (index, answer) in answers.iter().filter(|answer| !answer.turns.is_empty()).enumerate() {
        let sample = cache.sample(index as u64).unwrap();
        let first = sample.loss_mask.iter().position(|&mask| mask == 1).unwrap();
        assert_eq!(sample.input_ids[..first], prompt);
        if let [one, two] = &answer.turns[..] {
            // The prompt of the second turn holds the target's own first answer.
            two_turns += 1;
            let messages = [
                Message::new(Role::User, "a"),
                Message::new(Role::Assistant, &*one.text),
                Message::new(Role::User, "b"),
            ];
            let prompt = world.renderer.render_prompt(&messages, None).unwrap();
            assert_eq!(sample.input_ids[..prompt.len()], prompt);
            assert_eq!(sample.input_ids[prompt.len()..prompt.len() + two.ids.len()], two.ids);
        }
    }
    assert!(two_turns > 0, "no conversation of two turns came about");
}

#[test]
fn hidden_states_are_those_of_the_target_alone() {
    let (world, case) = (World::new(), Case::new(ROWS, &[]));
    case.run("run", &world).unwrap();
    let cache = case.cache("run");
    let rounded = |rows: &candle_core::Tensor| -> Vec<bf16> {
        rows.to_dtype(DType::BF16).unwrap().flatten_all().unwrap().to_vec1().unwrap()
    };
    for index in 0..cache.len() {
        let sample = cache.sample(index).unwrap();
        let mut positions = world.target.new_cache(1, 96).unwrap();
        let batch = [NewTokens { slot: 0, tokens: sample.input_ids }];
        let rows = world.target.forward(&mut positions, &batch, &LAYERS).unwrap();
        assert_eq!(sample.features, rounded(&rows.features.unwrap()));
        assert_eq!(sample.last_hidden, rounded(&rows.hidden));
    }
}

#[test]
fn an_interruption_at_any_point_leaves_no_trace() {
    let (world, case) = (World::new(), Case::new(ROWS, &["prepare.max_new_tokens=6", "prepare.samples_per_shard=2"]));
    case.run("whole", &world).unwrap();
    let whole = case.files("whole");
    assert!(whole.len() >= 6, "{:?}", whole.keys());
    let mut interrupted = 0;
    for stop_at in 1.. {
        let name = format!("run-{stop_at}");
        match case.run_until(&name, &world, stop_at) {
            Ok(_) => break,
            Err(error) => assert_eq!(error.fault(), Fault::Interrupted, "{error}"),
        }
        interrupted += 1;
        // A line that was being written when the process died.
        let answers = case.folder.path().join(&name).join("answers.jsonl");
        if answers.is_file() && stop_at % 2 == 0 {
            let mut torn = fs_err::read(&answers).unwrap();
            torn.extend_from_slice(b"{\"key\": \"12");
            fs_err::write(&answers, torn).unwrap();
        }
        case.run(&name, &world).unwrap();
        assert!(case.files(&name) == whole, "interrupted at event {stop_at}");
        fs_err::remove_dir_all(case.folder.path().join(&name)).unwrap();
    }
    assert!(interrupted > 10, "only {interrupted} points");
}

#[test]
fn a_finished_run_is_left_alone() {
    let (world, case) = (World::new(), Case::new(ROWS, &[]));
    let first = case.run("run", &world).unwrap();
    let files = case.files("run");
    let run = case.open("run");
    let user = User::new(usize::MAX);
    let again = prepare::run(&case.recipe, &run, &world.target, &world.renderer, FINGERPRINT, user.context()).unwrap();
    assert_eq!(user.advanced.load(Ordering::SeqCst), 0, "work was redone");
    assert_eq!(again.new_tokens, 0);
    let same = PrepareOutcome { new_tokens: first.new_tokens, seconds: first.seconds, ..again };
    assert_eq!(same, first);
    assert!(case.files("run") == files);
}

#[test]
fn batch_size_changes_nothing() {
    let world = World::new();
    let mut case = Case::new(ROWS, &["prepare.batch_size=1", "prepare.samples_per_prompt=2"]);
    case.run("one", &world).unwrap();
    case.recipe.prepare.batch_size = 7;
    case.run("seven", &world).unwrap();
    assert!(case.files("one") == case.files("seven"));
}

#[test]
fn answers_in_the_data_are_used_as_they_are() {
    let rows = r#"{"messages":[{"role":"user","content":"Q"},{"role":"assistant","content":"A"},{"role":"user","content":"R"},{"role":"assistant","content":"B"}]}
{"prompt": "no answer"}
{"prompt": "Q", "completion": "0123456789012345678901234567890123456789012345678901234567890123456789012345678901234567890123456789"}
{"prompt": "0123456789012345678901234567890123456789012345678901234567890123456789012345678901234567890123456789", "completion": "lost"}
{"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}, {"role": "user", "content": "open"}]}
"#;
    let (world, case) = (World::new(), Case::new(rows, &["prepare.regenerate=false"]));
    let user = User::new(usize::MAX);
    let plan = prepare::plan(&case.recipe, world.target.config(), &world.renderer, user.context()).unwrap();
    let outcome = case.run("run", &world).unwrap();
    assert_eq!((outcome.rows_read, outcome.samples, outcome.cut_answers), (5, 3, 1));
    assert_eq!(outcome.rejected, BTreeMap::from([("no answer", 1), ("answer cut away", 1)]));
    assert_eq!(outcome.repaired, BTreeMap::from([("open turns dropped", 1)]));
    assert_eq!((plan.samples, plan.tokens_at_most), (outcome.samples, outcome.tokens));
    assert!(!case.folder.path().join("run/answers.jsonl").exists());
    let cache = case.cache("run");
    let tokenizer = world.renderer.tokenizer();
    let supervised = |index: u64| {
        let sample = cache.sample(index).unwrap();
        let kept = sample.input_ids.iter().zip(sample.loss_mask).filter(|(_, mask)| **mask == 1);
        tokenizer.decode(&kept.map(|(id, _)| *id).collect::<Vec<_>>(), false)
    };
    assert_eq!(supervised(0), "A<|im_end|>B<|im_end|>");
    assert_eq!(supervised(2), "A<|im_end|>");
    // Cut at the limit, with no end token taught.
    assert_eq!(cache.sample(1).unwrap().input_ids.len(), 96);
    assert!(supervised(1).starts_with("01234") && !supervised(1).contains("<|im_end|>"));
}

#[test]
fn limit_counts_usable_rows_and_bad_rows_have_a_ratio() {
    let world = World::new();
    let case = Case::new(ROWS, &["data.limit=3"]);
    let outcome = case.run("run", &world).unwrap();
    assert_eq!((outcome.rows_read, case.answers("run").len()), (4, 3));

    let error = Case::new(ROWS, &["data.max_bad_ratio=0.3"]).run("run", &world).unwrap_err().to_string();
    assert!(error.contains("3 of 9 rows") && error.contains("line 3: no user turn"), "{error}");
    Case::new(ROWS, &["data.max_bad_ratio=0.34"]).run("run", &world).unwrap();

    let error = Case::new("{\"messages\": []}\n7\n", &[]).run("run", &world).unwrap_err();
    assert!(error.to_string().contains("2 rows refused, the first at line 1: no user turn"), "{error}");
    assert!(error.hint().is_some());
}

#[test]
fn the_plan_bounds_what_a_run_makes() {
    let world = World::new();
    for overrides in
        [&["prepare.samples_per_prompt=2"][..], &["prepare.max_new_tokens=40", "prepare.samples_per_shard=1"]]
    {
        let case = Case::new(ROWS, overrides);
        let user = User::new(usize::MAX);
        let plan = prepare::plan(&case.recipe, world.target.config(), &world.renderer, user.context()).unwrap();
        let outcome = case.run("run", &world).unwrap();
        assert_eq!(plan.rows_read, outcome.rows_read);
        assert_eq!(plan.rejects.len(), 3);
        assert_eq!(plan.prompts, 6);
        assert!(plan.samples >= outcome.samples && plan.tokens_at_most >= outcome.tokens, "{plan:?} {outcome:?}");
        assert!(plan.bytes_at_most >= outcome.bytes, "{} < {}", plan.bytes_at_most, outcome.bytes);
        assert!(plan.summary().iter().any(|(what, count)| what == "rejected: not JSON" && count == "1"));
    }
}

#[test]
fn invisible_characters_are_removed_where_asked() {
    let rows = "{\"prompt\": \"H\u{200b}i\"}\n{\"prompt\": \"\u{200b}\"}\n";
    let (world, case) = (World::new(), Case::new(rows, &["data.strip_invisible=true"]));
    let outcome = case.run("run", &world).unwrap();
    assert_eq!(outcome.repaired, BTreeMap::from([("zero-width spaces removed", 1)]));
    assert_eq!(outcome.rejected, BTreeMap::from([("empty content", 1)]));
    let prompt = world.renderer.render_prompt(&[Message::new(Role::User, "Hi")], None).unwrap();
    assert_eq!(case.cache("run").sample(0).unwrap().input_ids[..prompt.len()], prompt);
}

#[test]
fn words_and_emoji_are_trained_on_as_they_are_written_whether_or_not_characters_are_removed() {
    let texts = [
        "\u{645}\u{6cc}\u{200c}\u{62e}\u{648}\u{627}\u{647}\u{645}",
        "\u{1f468}\u{200d}\u{1f469}\u{200d}\u{1f467}",
        "\u{1f3f4}\u{e0067}\u{e0062}\u{e0073}\u{e0063}\u{e0074}\u{e007f}",
    ];
    let rows = texts.map(|text| format!("{{\"prompt\": \"{text}\"}}\n")).concat();
    let world = World::new();
    for strip in ["data.strip_invisible=true", "data.strip_invisible=false"] {
        let case = Case::new(&rows, &[strip]);
        let outcome = case.run("run", &world).unwrap();
        assert!(outcome.repaired.is_empty(), "{:?}", outcome.repaired);
        let cache = case.cache("run");
        for (index, text) in (0..).zip(texts) {
            let prompt = world.renderer.render_prompt(&[Message::new(Role::User, text)], None).unwrap();
            assert_eq!(cache.sample(index).unwrap().input_ids[..prompt.len()], prompt);
        }
    }
}

const LATER_SYSTEM: &str = concat!(
    r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, "#,
    r#"{"role": "system", "content": "s"}, {"role": "user", "content": "c"}, "#,
    r#"{"role": "system", "content": "t"}, {"role": "assistant", "content": "d"}]}"#,
    "\n",
    r#"{"prompt": "x", "completion": "y"}"#,
    "\n",
);

#[test]
fn a_later_system_message_is_rendered_where_it_stands() {
    let world = World::new();
    let decoded =
        |reader: &Reader, index: u64| world.renderer.tokenizer().decode(reader.sample(index).unwrap().input_ids, false);
    let case = Case::new(LATER_SYSTEM, &["prepare.regenerate=false", "prepare.max_length=256"]);
    case.run("own", &world).unwrap();
    let text = decoded(&case.cache("own"), 0);
    let turns = "a<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nc<|im_end|>\n\
                 <|im_start|>system\nt<|im_end|>\n<|im_start|>assistant\nd<|im_end|>";
    assert!(text.contains(turns), "{text}");

    // Answers of the target stand where those of the row did: before one system message, after the other.
    let case = Case::new(LATER_SYSTEM, &["prepare.max_length=256", "prepare.samples_per_prompt=24"]);
    case.run("anew", &world).unwrap();
    let cache = case.cache("anew");
    let used: Vec<Answer> = case.answers("anew").into_iter().filter(|answer| !answer.turns.is_empty()).collect();
    let (index, answer) = used.iter().enumerate().find(|(_, answer)| answer.turns.len() == 2).unwrap();
    let [one, two] = &answer.turns[..] else { panic!("two turns") };
    let messages = [
        Message::new(Role::User, "a"),
        Message::new(Role::Assistant, &*one.text),
        Message::new(Role::System, "s"),
        Message::new(Role::User, "c"),
        Message::new(Role::System, "t"),
    ];
    let prompt = world.renderer.render_prompt(&messages, None).unwrap();
    let ids = cache.sample(index as u64).unwrap().input_ids;
    assert_eq!(ids[..prompt.len()], prompt);
    assert_eq!(ids[prompt.len()..prompt.len() + two.ids.len()], two.ids);
}

#[test]
fn a_template_that_refuses_a_conversation_is_counted_with_its_own_words() {
    let template = format!(
        "{{% for m in messages %}}{{% if m.role == 'system' and not loop.first %}}{{{{ raise_exception('system comes first') }}}}\
         {{% endif %}}{{% endfor %}}{TEMPLATE}"
    );
    let controls = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];
    let world = World { renderer: byte_renderer(&template, &controls, "<|endoftext|>", &[]), ..World::new() };
    let case = Case::new(LATER_SYSTEM, &["prepare.regenerate=false"]);
    let outcome = case.run("run", &world).unwrap();
    assert_eq!(outcome.rejected, BTreeMap::from([("refused by the chat template", 1)]));
    let rejects: Vec<Value> = read_journal(case.folder.path().join("run/rejects.jsonl")).unwrap();
    assert!(rejects[0]["reason"].as_str().unwrap().ends_with("system comes first"), "{rejects:?}");
}

#[test]
fn calls_in_the_text_of_answers_are_trained_on_with_their_replies() {
    let rows = r#"{"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "<tool_call>\n{}\n</tool_call>"}, {"from": "tool", "value": "r"}, {"from": "gpt", "value": "a"}]}
"#;
    let (world, case) = (World::new(), Case::new(rows, &["prepare.regenerate=false", "prepare.max_length=256"]));
    let outcome = case.run("run", &world).unwrap();
    assert!(outcome.rejected.is_empty() && outcome.repaired.is_empty());
    let text = world.renderer.tokenizer().decode(case.cache("run").sample(0).unwrap().input_ids, false);
    assert!(text.contains("<tool_call>\n{}\n</tool_call><|im_end|>\n<|im_start|>tool\nr<|im_end|>"), "{text}");
}

/// What the disk of a test has free; each test that changes it has one of its own.
#[expect(clippy::unnecessary_wraps, reason = "of the type of what asks a real disk")]
mod disks {
    use std::path::Path;
    use std::sync::atomic::{AtomicU64, Ordering};

    use deepspec_datasets::target_cache::CacheError;

    pub(crate) static SHRINKING: AtomicU64 = AtomicU64::new(u64::MAX);
    pub(crate) static CALLS: AtomicU64 = AtomicU64::new(0);

    pub(crate) fn small(_: &Path) -> Result<u64, CacheError> {
        Ok(10_000)
    }

    /// Has room for ever, up to the call whose number was set.
    pub(crate) fn shrinking(_: &Path) -> Result<u64, CacheError> {
        let call = CALLS.fetch_add(1, Ordering::SeqCst);
        Ok(if call < SHRINKING.load(Ordering::SeqCst) { 1 << 40 } else { 200 })
    }
}

#[test]
fn a_disk_too_small_is_noticed_before_the_first_answer() {
    let (world, case) = (World::new(), Case::new(ROWS, &["prepare.samples_per_prompt=2"]));
    let run = case.open("run");
    let user = User::new(usize::MAX);
    let World { target, renderer } = &world;
    let error = prepare::run_on_disk(&case.recipe, &run, target, renderer, FINGERPRINT, disks::small, user.context());
    let error = error.unwrap_err();
    assert!(matches!(&error, Error::Cache(CacheError::NotEnoughSpace { available: 10_000, .. })), "{error}");
    assert_eq!(user.advanced.load(Ordering::SeqCst), 0, "answers were made");
    let hint = error.hint().unwrap();
    for key in ["data.limit", "prepare.max_new_tokens", "prepare.max_length"] {
        assert!(hint.contains(key), "{hint}");
        let mut recipe = case.recipe.clone();
        recipe.apply_set(&format!("{key}=90")).unwrap();
    }
    drop(run);
    // With room it goes on, and with none left it has nothing more to ask for.
    case.run("run", &world).unwrap();
    let run = case.open("run");
    prepare::run_on_disk(&case.recipe, &run, target, renderer, FINGERPRINT, disks::small, user.context()).unwrap();
}

#[test]
fn a_disk_that_fills_up_stops_the_run_at_an_answer_or_a_shard_and_the_run_goes_on_later() {
    let (world, case) = (World::new(), Case::new(ROWS, &["prepare.samples_per_prompt=8"]));
    case.run("whole", &world).unwrap();
    let whole = case.files("whole");
    let World { target, renderer } = &world;
    let mut stops = Vec::new();
    for calls in 0.. {
        disks::CALLS.store(0, Ordering::SeqCst);
        disks::SHRINKING.store(calls, Ordering::SeqCst);
        let name = format!("run-{calls}");
        let run = case.open(&name);
        let user = User::new(usize::MAX);
        let outcome =
            prepare::run_on_disk(&case.recipe, &run, target, renderer, FINGERPRINT, disks::shrinking, user.context());
        drop(run);
        match outcome {
            Ok(_) => break,
            Err(error) => assert!(matches!(error, Error::Cache(CacheError::NotEnoughSpace { .. })), "{error}"),
        }
        let shards = fs_err::read_dir(case.folder.path().join(&name).join("cache")).map_or(0, |files| {
            files.filter(|file| file.as_ref().unwrap().file_name().to_string_lossy().ends_with(".arrow")).count()
        });
        stops.push((case.answers(&name).len(), shards));
        case.run(&name, &world).unwrap();
        assert!(case.files(&name) == whole, "stopped at look {calls}");
    }
    let all = case.answers("whole").len();
    assert!(stops.iter().any(|(answers, _)| (1..all).contains(answers)), "{stops:?}");
    assert!(stops.iter().any(|(answers, shards)| *answers == all && *shards > 1), "{stops:?}");
}

#[test]
fn a_mask_token_that_cannot_be_one_is_refused_at_once() {
    let world = World::new();
    let refused = |id: u32| {
        let case = Case::new(ROWS, &[&format!("draft.mask_token_id={id}")]);
        let error = case.run("run", &world).unwrap_err();
        assert!(!case.folder.path().join("run/answers.jsonl").exists());
        error.to_string()
    };
    assert!(refused(320).contains("less than 320"));
    assert!(refused(world.renderer.end_of_turn()).contains("does not begin, end or pad"));
    // The byte `?` is in the system prompt's row.
    let error = refused(u32::from(b'?'));
    assert!(error.contains("from line 2") && error.contains("never occurs"), "{error}");
}

#[test]
fn answers_and_cache_of_other_weights_are_refused() {
    let (world, case) = (World::new(), Case::new(ROWS, &[]));
    case.run("run", &world).unwrap();
    let run = case.open("run");
    let user = User::new(usize::MAX);
    let other = |recipe: &Recipe| {
        prepare::run(recipe, &run, &world.target, &world.renderer, "another", user.context()).unwrap_err()
    };
    let error = other(&case.recipe);
    assert!(matches!(error, Error::Mismatch { .. }), "{error}");
    assert!(error.to_string().contains("line 1 of") && error.hint().is_some(), "{error}");
    fs_err::remove_file(run.answers()).unwrap();
    let error = other(&case.recipe);
    assert!(error.to_string().contains("target_fingerprint"), "{error}");

    fs_err::write(run.answers(), "{\"key\": 7}\n").unwrap();
    assert!(other(&case.recipe).to_string().contains("line 1"));
}

#[test]
fn messy_files_give_samples_or_a_clear_error() {
    let Ok(shared) = std::env::var("DEEPSPEC_SHARED") else {
        println!("skipped: DEEPSPEC_SHARED is not set");
        return;
    };
    let world = World::new();
    let mut files = 0;
    for entry in fs_err::read_dir(Path::new(&shared).join("data/messy")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "jsonl") {
            continue;
        }
        files += 1;
        for regenerate in [true, false] {
            let mut case = Case::new("", &[]);
            let overrides =
                [&format!("prepare.regenerate={regenerate}"), "prepare.max_new_tokens=4", "prepare.max_length=512"];
            case.recipe = Case::recipe(&path, &overrides);
            match case.run("run", &world) {
                Ok(outcome) => {
                    assert!(outcome.samples > 0 && outcome.supervised_tokens > 0);
                    assert_eq!(case.cache("run").len(), outcome.samples);
                }
                Err(error) => {
                    assert_eq!(error.fault(), Fault::User, "{}: {error}", path.display());
                    let name = path.file_name().unwrap().to_string_lossy();
                    assert!(error.to_string().contains(&*name) && error.hint().is_some(), "{error}");
                }
            }
        }
    }
    assert!(files > 15, "only {files} files found");
}
