//! Tests of the run folder, its lock and its journals.

use serde_json::{Value, json};

use super::{Journal, Provenance, RunDir, read_journal, write_atomic};
use crate::error::Error;
use crate::recipe::Recipe;

fn recipe(overrides: &[&str]) -> Recipe {
    let overrides: Vec<String> = overrides.iter().map(|text| (*text).to_owned()).collect();
    Recipe::open("quickstart", &overrides).unwrap()
}

fn provenance(started: &str) -> Provenance {
    Provenance {
        version: "0.1.0".into(),
        git_commit: Some("abc".into()),
        started: started.into(),
        machine: "2 cores".into(),
    }
}

fn open(path: &std::path::Path, overrides: &[&str]) -> Result<RunDir, Error> {
    RunDir::create_or_open(path, &recipe(overrides), &provenance("now"))
}

#[test]
fn recipe_and_provenance_are_on_disk_before_anything_else() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("runs/a");
    let run = open(&path, &["train.seed=7"]).unwrap();
    assert_eq!(RunDir::saved_recipe(&path).unwrap(), recipe(&["train.seed=7"]));
    let record: Value = serde_json::from_slice(&fs_err::read(run.provenance()).unwrap()).unwrap();
    assert_eq!(record["seeds"]["train"], 7);
    assert_eq!(record["run"], serde_json::to_value(provenance("now")).unwrap());
    drop(run);
    RunDir::create_or_open(&path, &recipe(&["train.seed=7"]), &provenance("later")).unwrap();
    let again: Value = serde_json::from_slice(&fs_err::read(path.join("provenance.json")).unwrap()).unwrap();
    assert_eq!(again, record);
}

#[test]
fn a_second_opening_is_refused_while_the_first_lives() {
    let folder = tempfile::tempdir().unwrap();
    let run = open(folder.path(), &[]).unwrap();
    let error = open(folder.path(), &[]).unwrap_err();
    let owner = format!("in use by another process (process {})", std::process::id());
    assert!(error.to_string().contains(&owner), "{error}");
    assert!(error.hint().is_some());
    drop(run);
    open(folder.path(), &[]).unwrap();
}

#[test]
fn a_differing_recipe_is_refused_naming_every_key_with_both_values() {
    let folder = tempfile::tempdir().unwrap();
    let run = open(folder.path(), &[]).unwrap();
    fs_err::create_dir(run.checkpoints()).unwrap();
    fs_err::write(run.checkpoints().join("step"), "x").unwrap();
    drop(run);
    let before = fs_err::read(folder.path().join("recipe.toml")).unwrap();
    let error = open(
        folder.path(),
        &["train.lr=3e-4", "draft.block_size=4", "data.limit=none", "eval.limit=3", "train.log_every=9"],
    )
    .unwrap_err();
    let text = error.to_string();
    let saved = recipe(&[]);
    let (lr, block, limit) = (saved.train.lr, saved.draft.block_size, saved.data.limit.unwrap());
    assert!(text.contains(&format!("`train.lr` was {lr}, is now 0.0003")), "{text}");
    assert!(text.contains(&format!("`draft.block_size` was {block}, is now 4")), "{text}");
    assert!(text.contains(&format!("`data.limit` was {limit}, is now none")), "{text}");
    assert!(!text.contains("eval.limit") && !text.contains("log_every"), "{text}");
    assert_eq!(fs_err::read(folder.path().join("recipe.toml")).unwrap(), before);
    let hint = error.hint().unwrap();
    assert!(hint.contains("recipe.toml"), "{hint}");
}

#[test]
fn changes_of_free_keys_are_saved_and_listed() {
    let folder = tempfile::tempdir().unwrap();
    let run = open(folder.path(), &[]).unwrap();
    assert!(run.changes().is_empty());
    fs_err::write(run.metrics(), "{}\n").unwrap();
    drop(run);
    let run = open(folder.path(), &["eval.limit=3", "train.keep_checkpoints=9"]).unwrap();
    let changes: Vec<String> = run.changes().iter().map(ToString::to_string).collect();
    let limit = recipe(&[]).eval.limit.unwrap();
    assert_eq!(
        changes,
        [format!("`eval.limit` was {limit}, is now 3"), "`train.keep_checkpoints` was 2, is now 9".to_owned()]
    );
    assert_eq!(RunDir::saved_recipe(folder.path()).unwrap(), recipe(&["eval.limit=3", "train.keep_checkpoints=9"]));
}

#[test]
fn keys_bind_from_when_their_stage_has_written() {
    for (written, overrides, refused) in [
        ("", "target.precision=bf16", false),
        ("", "train.lr=1", false),
        ("answers.jsonl", "prepare.seed=9", true),
        ("answers.jsonl", "draft.target_layer_ids=auto", false),
        ("answers.jsonl", "train.lr=1", false),
        ("cache/manifest.json", "draft.target_layer_ids=auto", true),
        ("cache/manifest.json", "data.strip_invisible=true", true),
        ("cache/manifest.json", "draft.block_size=4", false),
        ("metrics.jsonl", "draft.block_size=4", true),
        ("metrics.jsonl", "init.markov=random", true),
        ("metrics.jsonl", "target.precision=bf16", true),
        ("metrics.jsonl", "prepare.batch_size=1", false),
    ] {
        let folder = tempfile::tempdir().unwrap();
        drop(open(folder.path(), &[]).unwrap());
        if !written.is_empty() {
            let path = folder.path().join(written);
            fs_err::create_dir_all(path.parent().unwrap()).unwrap();
            fs_err::write(path, "{}\n").unwrap();
        }
        assert_eq!(open(folder.path(), &[overrides]).is_err(), refused, "{written:?} {overrides}");
    }
}

#[test]
fn a_folder_with_other_things_is_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    fs_err::write(folder.path().join("thesis.tex"), "x").unwrap();
    let error = open(folder.path(), &[]).unwrap_err().to_string();
    assert!(error.contains("not a run folder: it has files, but no `recipe.toml`"), "{error}");
    assert_eq!(fs_err::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn a_crash_before_the_recipe_was_saved_does_not_block_the_folder() {
    let folder = tempfile::tempdir().unwrap();
    fs_err::write(folder.path().join("run.lock"), "process 1\n").unwrap();
    fs_err::write(folder.path().join(".recipe.toml.1-0.tmp"), "[target]").unwrap();
    open(folder.path(), &[]).unwrap();
}

#[test]
fn atomic_writing_replaces_and_leaves_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.json");
    write_atomic(&path, b"one").unwrap();
    write_atomic(&path, b"two").unwrap();
    assert_eq!(fs_err::read(&path).unwrap(), b"two");
    fs_err::create_dir(folder.path().join("taken")).unwrap();
    assert!(write_atomic(folder.path().join("taken"), b"three").is_err());
    assert_eq!(fs_err::read_dir(folder.path()).unwrap().count(), 2);
}

#[test]
fn journals_drop_a_torn_last_line_and_go_on() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("j.jsonl");
    assert_eq!(read_journal::<Value>(&path).unwrap(), Vec::<Value>::new());
    let mut journal = Journal::open(&path, 2).unwrap();
    let long = "x".repeat(200_000);
    for record in [json!({"n": 1}), json!({"n": 2, "text": long})] {
        journal.append(&record).unwrap();
    }
    drop(journal);
    let whole = fs_err::read(&path).unwrap();
    fs_err::write(&path, [&whole[..], br#"{"n": 3, "te"#].concat()).unwrap();
    assert_eq!(read_journal::<Value>(&path).unwrap().len(), 2);
    let mut journal = Journal::open(&path, 0).unwrap();
    assert_eq!(journal.dropped_bytes(), 12);
    journal.append(&json!({"n": 4})).unwrap();
    journal.sync().unwrap();
    let numbers: Vec<u64> = read_journal::<Value>(&path).unwrap().iter().map(|v| v["n"].as_u64().unwrap()).collect();
    assert_eq!(numbers, [1, 2, 4]);
}

#[test]
fn a_journal_of_one_torn_line_becomes_empty() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("j.jsonl");
    fs_err::write(&path, "x".repeat(150_000)).unwrap();
    assert_eq!(Journal::open(&path, 1).unwrap().dropped_bytes(), 150_000);
    assert_eq!(fs_err::metadata(&path).unwrap().len(), 0);
}

#[test]
fn a_damaged_line_inside_a_journal_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("j.jsonl");
    fs_err::write(&path, "1\n{\n3\n").unwrap();
    let error = read_journal::<Value>(&path).unwrap_err().to_string();
    assert!(error.contains("j.jsonl`, line 2: "), "{error}");
}
