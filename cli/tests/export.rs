//! `deepspec export`, and `deepspec inspect` of what it writes, from outside.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

#[path = "inspect/fixtures.rs"]
#[expect(dead_code, reason = "shared with the tests of `inspect`, which use all of it")]
mod fixtures;

use std::path::Path;
use std::process::Output;

use fixtures::{drafter_tensors, write_cache, write_drafter, write_pruned_drafter};
use serde_json::{Value, json};

fn deepspec(arguments: &[&str]) -> Output {
    let mut command = std::process::Command::new(assert_cmd::cargo::cargo_bin!("deepspec"));
    command.args(["--threads", "1"]).args(arguments).output().unwrap()
}

fn words(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

fn export(to: &str, draft: &Path, out: &Path, more: &[&str]) -> Output {
    let (draft, out) = (draft.to_str().unwrap(), out.to_str().unwrap());
    deepspec(&[&["export", "--to", to, "--draft", draft, "--out", out], more].concat())
}

fn inspect(path: &Path, options: &[&str], code: i32) -> Value {
    let output = deepspec(&[&["inspect", path.to_str().unwrap(), "--json"], options].concat());
    assert_eq!(output.status.code(), Some(code), "{}", words(&output));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn exported_drafters_are_told_by_inspect() {
    let folder = tempfile::tempdir().unwrap();
    let draft = folder.path().join("draft");
    write_drafter(&draft, &drafter_tensors());
    for (to, layout) in [("speculators", "speculators"), ("sglang", "sglang"), ("specforge", "specforge")] {
        let out = folder.path().join(to);
        let output = export(to, &draft, &out, &[]);
        assert_eq!(output.status.code(), Some(0), "{}", words(&output));
        let report = inspect(&out, &[], 0);
        let facts = &report["drafter"];
        assert_eq!((&report["kind"], &facts["layout"]), (&json!("drafter"), &json!(layout)));
        assert_eq!(facts["block_rule"], "anchor-first blocks");
        assert_eq!((&facts["markov_head"], &facts["draft_vocabulary"]), (&json!("vanilla"), &json!("32 of 32 tokens")));
        assert!(facts["left_to_the_target"].as_array().unwrap().contains(&json!("embed_tokens.weight")));
        let ids: Vec<_> = report["target_layers"].as_array().unwrap().iter().map(|row| row["ids"].clone()).collect();
        assert_eq!(ids, [json!([-1, 2]), json!([0, 3]), json!([0, 3]), json!([-1, 2])]);
    }
    // The drafter has no embedding of its own, so the reference's layout needs the target.
    let output = export("deepspec", &draft, &folder.path().join("d"), &[]);
    assert_eq!(output.status.code(), Some(1));
    assert!(words(&output).contains("does not store `embed_tokens.weight`"), "{}", words(&output));
    let output = export("zlab", &draft, &folder.path().join("z"), &[]);
    assert!(
        words(&output).contains("cannot hold this drafter") && words(&output).contains("hint:"),
        "{}",
        words(&output)
    );
    assert!(!folder.path().join("d").exists() && !folder.path().join("z").exists());
}

#[test]
fn faults_of_foreign_checkpoints_are_problems() {
    let folder = tempfile::tempdir().unwrap();
    let (draft, out) = (folder.path().join("draft"), folder.path().join("out"));
    write_pruned_drafter(&draft, [0, 2, 2, 28], None);
    assert_eq!(export("speculators", &draft, &out, &[]).status.code(), Some(0));
    assert_eq!(inspect(&out, &[], 0)["drafter"]["draft_vocabulary"], "4 of 32 tokens");
    write_pruned_drafter(&draft, [0, 2, 1, 28], None);
    let output = export("speculators", &draft, &out, &[]);
    assert!(words(&output).contains("entry 2 of tensor `d2t`"), "{}", words(&output));
    let config = out.join("config.json");
    let mut json: Value = serde_json::from_slice(&fs_err::read(&config).unwrap()).unwrap();
    json["mask_token_id"] = json!(99);
    fs_err::write(&config, json.to_string()).unwrap();
    let report = inspect(&out, &[], 1);
    assert!(report["problems"][0]["message"].as_str().unwrap().contains("mask_token_id"), "{report}");
}

#[test]
fn options_that_do_not_apply_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let refused = |arguments: &[&str], part: &str| {
        let output = deepspec(&[&["export", "--out", out.to_str().unwrap()], arguments].concat());
        assert_eq!(output.status.code(), Some(1));
        assert!(words(&output).contains(part), "{}", words(&output));
        assert!(!out.exists());
    };
    refused(&["--to", "sglang"], "not a drafter to export");
    refused(&["--to", "cache-v2"], "not a target cache to export");
    refused(&["--to", "sglang", "--run", &path("none")], "there is no such folder");
    refused(&["--to", "sglang", "--cache", &path("x"), "--draft", &path("y")], "`--cache` is for");
    refused(&["--to", "cache-v2", "--draft", &path("y")], "`--draft` is for drafters");
    refused(&["--to", "gguf2", "--draft", &path("y")], "gguf2");
    // Without hidden states there is nothing to export.
    write_cache(&folder.path().join("cache"), "hash");
    refused(&["--to", "cache-v2", "--cache", &path("cache")], "stores no hidden states");
}

#[test]
fn caches_of_version_2_are_shown_and_checked() {
    let cache = Path::new("../datasets/tests/golden/cache_v2/cache");
    let report = inspect(cache, &["--check", "--sample", "1"], 0);
    let facts = &report["cache"];
    assert_eq!((&report["kind"], &facts["version"], &facts["samples"]), (&json!("target_cache"), &json!(2), &json!(5)));
    assert_eq!((&facts["tokens"], &facts["target"]), (&json!(44), &json!("tiny-target")));
    assert_eq!((&report["check"]["sound"], &report["sample"]["tokens"]), (&json!(true), &json!(6)));
    assert_eq!(report["shards"][0], json!({ "name": "shard-00000.bin", "samples": 3, "bytes": 14504 }));

    let folder = tempfile::tempdir().unwrap();
    for name in ["manifest.json", "samples.idx", "shard-00000.bin", "shard-00001.bin"] {
        fs_err::write(folder.path().join(name), fs_err::read(cache.join(name)).unwrap()).unwrap();
    }
    fs_err::write(folder.path().join("shard-00001.bin"), b"short").unwrap();
    let report = inspect(folder.path(), &[], 1);
    assert!(report["problems"][0]["message"].as_str().unwrap().contains("shard-00001.bin"), "{report}");
}

#[test]
fn costs_of_passes_go_to_the_published_forms_and_back() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let table = json!({"sample_batch_tokens": [1, 4], "sample_steps_per_sec": [100.0, 50.0], "max_batch_tokens": 4});
    fs_err::write(path("given"), table.to_string()).unwrap();
    for (to, from, out) in [("sps-additive", "given", "sum"), ("sps-table", "sum", "table")] {
        let output = deepspec(&["export", "--to", to, "--costs", &path(from), "--out", &path(out)]);
        assert_eq!(output.status.code(), Some(0), "{}", words(&output));
    }
    let read = |name: &str| -> Value { serde_json::from_slice(&fs_err::read(path(name)).unwrap()).unwrap() };
    assert_eq!(read("sum")["m_probes"], json!([1, 3, 4]));
    assert_eq!(
        (&read("table")["sample_batch_tokens"], &read("table")["max_batch_tokens"]),
        (&json!([1, 3, 4]), &json!(4))
    );
    let rates: Vec<f64> = serde_json::from_value(read("table")["sample_steps_per_sec"].clone()).unwrap();
    assert!(rates.iter().zip([100.0, 100.0, 50.0]).all(|(rate, expected): (&f64, f64)| (rate - expected).abs() < 1e-9));

    let refused = deepspec(&["export", "--to", "sps-table", "--out", &path("none")]);
    assert_eq!(refused.status.code(), Some(1), "{}", words(&refused));
    assert!(words(&refused).contains("--costs") && !folder.path().join("none").exists());
}
