//! `kill -9` in the middle of `prepare` and of `train`: what the resumed run leaves equals what an uninterrupted one does.
//!
//! The target is the tiny golden one with a byte-level tokenizer made here, so the whole program runs in seconds.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod tiny_model;

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tiny_model::model_folder;

/// Longest wait for a stage to get somewhere.
const PATIENCE: Duration = Duration::from_secs(120);

/// A stage of the program on the tiny model.
fn stage(name: &str, model: &Path, prompts: &Path, run: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_deepspec"));
    command.arg(name).args(["--recipe", "quickstart", "--run"]).arg(run);
    let settings = [
        format!("target.model={}", model.display()),
        format!("data.prompts={}", prompts.display()),
        "prepare.max_new_tokens=40".into(),
        "prepare.max_length=128".into(),
        "prepare.batch_size=3".into(),
        "prepare.samples_per_shard=2".into(),
        "draft.target_layer_ids=[0,2,4]".into(),
        "draft.mask_token_id=6".into(),
        "draft.markov_rank=8".into(),
        "draft.vocab_size=256".into(),
        "train.steps=63".into(),
        "train.batch_size=4".into(),
        "train.micro_batch_size=2".into(),
        "train.num_anchors=8".into(),
        "train.checkpoint_every=7".into(),
        "train.log_every=5".into(),
    ];
    for setting in settings {
        command.arg("--set").arg(setting);
    }
    command.stdout(Stdio::null());
    command
}

/// Runs to the end and returns what it said.
fn complete(mut command: Command) -> String {
    let output = command.stderr(Stdio::piped()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");
    said
}

/// Starts the stage, kills it some moments after `reached` holds, and lets it finish. Returns what the second run said.
fn kill_and_resume(what: &str, moment: Duration, reached: impl Fn() -> bool, command: impl Fn() -> Command) -> String {
    let mut child = command().stderr(Stdio::null()).spawn().unwrap();
    let begun = Instant::now();
    while !reached() {
        assert!(child.try_wait().unwrap().is_none(), "{what}: it ended before it could be killed");
        assert!(begun.elapsed() < PATIENCE, "{what}: it never got there");
        std::thread::sleep(Duration::from_millis(1));
    }
    std::thread::sleep(moment);
    assert!(child.try_wait().unwrap().is_none(), "{what}: it ended before it was killed");
    child.kill().unwrap();
    child.wait().unwrap();
    complete(command())
}

/// Files below a folder by relative path, but for locks and the provenance with its time.
fn files(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(next) = folders.pop() {
        for entry in fs_err::read_dir(&next).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else {
                let name = path.strip_prefix(folder).unwrap().to_string_lossy().into_owned();
                if !name.ends_with("lock") && name != "provenance.json" && !name.starts_with("tensorboard") {
                    found.push((name, fs_err::read(&path).unwrap()));
                }
            }
        }
    }
    found.sort();
    found
}

/// Metrics without the times in them.
fn without_times(name: &str, bytes: Vec<u8>) -> Vec<u8> {
    if !name.ends_with("metrics.jsonl") && !name.ends_with("train.jsonl") {
        return bytes;
    }
    let text = String::from_utf8(bytes).unwrap();
    let mut lines = String::new();
    for line in text.lines() {
        let mut record: Value = serde_json::from_str(line).unwrap();
        let fields = record.as_object_mut().unwrap();
        for key in ["tokens_per_s", "step_ms", "mfu"] {
            fields.remove(key);
        }
        lines.push_str(&format!("{record}\n"));
    }
    lines.into_bytes()
}

fn assert_same(expected: &Path, found: &Path, what: &str) {
    let names = |list: &[(String, Vec<u8>)]| list.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
    let (expected, found) = (files(expected), files(found));
    assert_eq!(names(&expected), names(&found), "{what}: files");
    for ((name, a), (_, b)) in expected.into_iter().zip(found) {
        assert!(without_times(&name, a) == without_times(&name, b), "{what}: `{name}` differs");
    }
}

fn copy(from: &Path, to: &Path) {
    fs_err::create_dir_all(to).unwrap();
    for entry in fs_err::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let target = to.join(path.file_name().unwrap());
        if path.is_dir() {
            copy(&path, &target);
        } else {
            fs_err::copy(&path, target).unwrap();
        }
    }
}

#[test]
fn killed_prepare_and_train_end_as_if_nothing_had_happened() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    let model = model_folder(root);
    let prompts = root.join("prompts.jsonl");
    let mut rows = String::new();
    for i in 0..18 {
        let messages = json!([{ "role": "user", "content": format!("word {i} {}", i * 7) }]);
        rows.push_str(&format!("{}\n", json!({ "id": i, "messages": messages })));
    }
    fs_err::write(&prompts, rows + "{\"broken\n").unwrap();

    // Answers in the journal, and whether a shard of the cache is there.
    let whole = root.join("whole");
    complete(stage("prepare", &model, &prompts, &whole));
    for (i, (answers, shard)) in [(1, false), (5, false), (11, false), (18, false), (18, true)].into_iter().enumerate()
    {
        let run = root.join(format!("prepare-{i}"));
        let reached = || {
            let journal = fs_err::read_to_string(run.join("answers.jsonl")).unwrap_or_default();
            journal.lines().count() >= answers && (!shard || run.join("cache/shard-00000.arrow").is_file())
        };
        let what = format!("prepare killed at {answers} answers, shard: {shard}");
        let moment = Duration::from_micros(700 * i as u64);
        kill_and_resume(&what, moment, reached, || stage("prepare", &model, &prompts, &run));
        assert_same(&whole, &run, &what);
    }

    let trained = root.join("trained");
    copy(&whole, &trained);
    complete(stage("train", &model, &prompts, &trained));
    for (i, step) in [7, 14, 21, 35, 49].into_iter().enumerate() {
        let run = root.join(format!("train-{i}"));
        copy(&whole, &run);
        let reached = || run.join(format!("checkpoints/step-{step:06}")).is_dir();
        let what = format!("train killed after step {step}");
        let moment = Duration::from_millis(3 * i as u64);
        let said = kill_and_resume(&what, moment, reached, || stage("train", &model, &prompts, &run));
        assert!(said.contains("going on from step"), "{what}: {said}");
        assert_same(&trained, &run, &what);
    }
}
