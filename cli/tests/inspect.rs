//! The program from outside: exit codes, streams and colours, and what `inspect` says of each kind of path.

#![expect(clippy::unwrap_used, reason = "a failed step fails the test; clippy knows only `#[test]` functions as tests")]

#[path = "inspect/fixtures.rs"]
mod fixtures;

use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};

use deepspec_datasets::tokenizer::Tokenizer;
use serde_json::{Value, json};
use tempfile::TempDir;

use fixtures::{
    drafter_tensors, write_cache, write_conversations, write_drafter, write_drafter_of_experts, write_pruned_drafter,
    write_text_side,
};

fn command() -> std::process::Command {
    let mut command = std::process::Command::new(assert_cmd::cargo::cargo_bin!("deepspec"));
    command.args(["--threads", "1"]).env_remove("NO_COLOR").env_remove("CLICOLOR_FORCE");
    command
}

fn run(arguments: &[&str]) -> Output {
    command().args(arguments).output().unwrap()
}

fn inspect(path: &Path, options: &[&str]) -> Output {
    command().arg("inspect").arg(path).args(options).output().unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// The JSON report on a path, which must end with the exit code given.
fn report(path: &Path, options: &[&str], code: i32) -> Value {
    let output = inspect(path, &[options, &["--json"]].concat());
    assert_eq!(output.status.code(), Some(code), "{}", stderr(&output));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn problems(report: &Value) -> Vec<&str> {
    report["problems"].as_array().unwrap().iter().map(|problem| problem["message"].as_str().unwrap()).collect()
}

/// A new folder, there for as long as its guard.
fn folder() -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().to_owned();
    (dir, path)
}

#[test]
fn help_and_version_are_data_and_succeed() {
    for arguments in [&["--help"][..], &["inspect", "--help"], &["--version"]] {
        let output = run(arguments);
        assert_eq!(output.status.code(), Some(0), "{arguments:?}");
        assert!(!output.stdout.is_empty() && output.stderr.is_empty(), "{arguments:?}");
    }
}

#[test]
fn mistakes_of_the_user_are_1_with_words_on_stderr() {
    let (_guard, dir) = folder();
    let damaged = dir.join("damaged.gguf");
    fs_err::write(&damaged, b"GGUF\x03\0\0\0\xff\xff\xff\xff\xff\xff\xff\xff").unwrap();
    let renamed = dir.join("text.gguf");
    fs_err::write(&renamed, "hello").unwrap();
    let parquet = dir.join("data.parquet");
    fs_err::write(&parquet, b"PAR1rest").unwrap();
    let path = |path: &Path| path.to_str().unwrap().to_owned();
    let cases: [(Vec<String>, &str); 10] = [
        (vec![], "Usage"),
        (vec!["inspect".into(), path(&dir), "--bogus".into()], "--bogus"),
        (vec!["inspect".into(), path(&damaged), "--quiet".into(), "--verbose".into()], "--verbose"),
        (vec!["inspect".into(), path(&dir.join("absent"))], "there is no such file"),
        (vec!["inspect".into(), path(&dir)], "neither `manifest.json`"),
        (vec!["inspect".into(), path(&damaged)], "is corrupt at byte"),
        (vec!["inspect".into(), path(&renamed)], "does not start with `GGUF`"),
        (vec!["inspect".into(), path(&damaged), "--check".into()], "nothing beside it says what was fetched"),
        (vec!["inspect".into(), path(&parquet), "--check".into()], "`--check` is for target caches"),
        (vec!["inspect".into(), path(&parquet)], "Parquet"),
    ];
    for (arguments, expected) in cases {
        let output = run(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
        assert_eq!(output.status.code(), Some(1), "{arguments:?}");
        assert!(output.stdout.is_empty(), "{arguments:?}");
        assert!(stderr(&output).contains(expected), "{arguments:?}: {}", stderr(&output));
    }
    assert!(stderr(&inspect(&damaged, &[])).contains("\nhint: download"));
}

#[test]
fn no_color_wins_and_pipes_have_no_colours() {
    let (_guard, dir) = folder();
    let path = dir.join("rows.jsonl");
    write_conversations(&path, 0);
    let run = |variables: &[&str]| {
        let mut command = command();
        command.arg("inspect").arg(&path).args(["--sample", "0"]);
        command.envs(variables.iter().map(|variable| (variable, "1")));
        stdout(&command.output().unwrap())
    };
    assert!(run(&["CLICOLOR_FORCE"]).contains("\x1b[1m"));
    assert!(!run(&["CLICOLOR_FORCE", "NO_COLOR"]).contains('\x1b'));
    assert!(!run(&[]).contains('\x1b'));
}

#[test]
fn a_reader_that_stops_reading_is_no_error() {
    let (_guard, dir) = folder();
    let path = dir.join("rows.jsonl");
    // More than a pipe holds, so that the program is still writing when its reader goes.
    write_conversations(&path, 20_000);
    let mut child = command().arg("inspect").arg(&path).arg("-v").stdout(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn conversations_are_counted_and_shown_safely() {
    let (_guard, dir) = folder();
    let (path, model) = (dir.join("rows.jsonl"), dir.join("model"));
    write_conversations(&path, 12);
    write_text_side(&model);

    let counted = report(&path, &[], 0);
    assert_eq!(counted["rows"], json!({ "rows": 14, "usable": 2, "rejected": 12, "repaired": 0 }));
    assert_eq!(counted["rejects"], json!([{ "rows": 12, "reason": "not JSON" }]));
    assert_eq!(counted["first_rejects"].as_array().unwrap().len(), 10);
    assert_eq!(report(&path, &["-v"], 0)["first_rejects"].as_array().unwrap().len(), 12);

    let shown = stdout(&inspect(&path, &["--sample", "1"]));
    assert!(shown.contains("a\\u{1b}[2J\\u{202e}b") && !shown.contains(['\x1b', '\u{202e}']), "{shown}");
    let masked = stdout(&inspect(&path, &["--sample", "0", "--model", model.to_str().unwrap()]));
    assert!(masked.contains("<|im_start|>assistant\n⟦yo<|im_end|>⟧\n"), "{masked}");

    let outside = inspect(&path, &["--sample", "14"]);
    assert_eq!(outside.status.code(), Some(1));
    assert!(stderr(&outside).contains("which has 14 rows"), "{}", stderr(&outside));
}

#[test]
fn a_file_without_usable_rows_is_a_problem() {
    let (_guard, dir) = folder();
    let path = dir.join("rows.jsonl");
    fs_err::write(&path, "{\"messages\": []}\n").unwrap();
    let report = report(&path, &[], 1);
    assert!(problems(&report)[0].starts_with("no row of"), "{report}");
}

#[test]
fn invisible_characters_are_counted_and_names_keep_their_digits() {
    let (_guard, dir) = folder();
    let path = dir.join("rows.jsonl");
    let mut rows =
        "{\"prompt\": \"a\u{200b}\u{202e}b\"}\n{\"prompt\": \"\u{1f468}\u{200d}\u{1f469}\"}\n".as_bytes().to_vec();
    rows.extend_from_slice(b"{\"prompt\": \"\xe9\"}\n{\"prompt\": \"x\xe9\"}\n");
    fs_err::write(&path, rows).unwrap();
    let report = report(&path, &[], 0);
    assert_eq!(report["invisible_characters"], json!({ "rows": 1, "bidi_controls": 1, "zero_width_spaces": 1 }));
    assert_eq!(report["rejects"], json!([{ "rows": 2, "reason": "not UTF-8" }]));
}

#[test]
fn a_file_of_which_nothing_can_be_used_says_what_to_do_about_its_rows() {
    let (_guard, dir) = folder();
    let path = dir.join("rows.jsonl");
    for (rows, part) in
        [("{\"chosen\": []}\n", ".chosen"), ("plain words\n", "jq -R"), ("{\"messages\": []}\n", "a user turn")]
    {
        fs_err::write(&path, rows).unwrap();
        let report = report(&path, &[], 1);
        assert!(report["problems"][0]["hint"].as_str().unwrap().contains(part), "{report}");
    }
    fs_err::write(&path, "prompt,response\nHi,Hello\n").unwrap();
    let refused = inspect(&path, &[]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(stderr(&refused).contains("(CSV)") && stderr(&refused).contains("hint: "), "{}", stderr(&refused));
}

#[test]
fn caches_show_their_manifest_and_masked_samples() {
    let (_guard, dir) = folder();
    let (cache, model) = (dir.join("cache"), dir.join("model"));
    write_text_side(&model);
    write_cache(&cache, Tokenizer::from_file(model.join("tokenizer.json")).unwrap().hash());

    let found = report(&cache, &["--check"], 0);
    assert_eq!(found["kind"], "target_cache");
    assert_eq!(found["check"]["sound"], true);
    assert_eq!(found["cache"]["tokens"], 12);
    assert_eq!(found["cache"]["supervised_percent"], json!(50.0));
    assert_eq!(found["recipe"], json!({ "seed": 1 }));
    assert_eq!(found["shards"].as_array().unwrap().len(), 2);

    let ids = stdout(&inspect(&cache, &["--sample", "1"]));
    assert!(ids.contains("256 104 105 ⟦121 111 257 ⟧"), "{ids}");
    let text = inspect(&cache, &["--sample", "1", "--model", model.to_str().unwrap()]);
    assert!(stdout(&text).contains("<|im_start|>hi⟦yo<|im_end|>⟧"), "{}", stdout(&text));
    let mut coloured = command();
    coloured.arg("inspect").arg(&cache).args(["--sample", "1", "--model"]).arg(&model).env("CLICOLOR_FORCE", "1");
    assert!(stdout(&coloured.output().unwrap()).contains("\x1b[32myo<|im_end|>\x1b[39m"));
}

#[test]
fn a_cache_of_another_tokenizer_is_a_problem() {
    let (_guard, dir) = folder();
    let (cache, model) = (dir.join("cache"), dir.join("model"));
    write_text_side(&model);
    write_cache(&cache, "cafe");
    let report = report(&cache, &["--sample", "0", "--model", model.to_str().unwrap()], 1);
    assert!(problems(&report)[0].starts_with("tokenizer differs: the cache was made with `cafe`"), "{report}");
}

#[test]
fn check_finds_a_flipped_bit() {
    let (_guard, cache) = folder();
    write_cache(&cache, "cafe");
    let shard = cache.join("shard-00001.arrow");
    let mut bytes = fs_err::read(&shard).unwrap();
    let at = bytes.windows(4).rposition(|window| window == 257_u32.to_le_bytes()).unwrap();
    bytes[at] ^= 2;
    fs_err::write(&shard, bytes).unwrap();
    assert_eq!(report(&cache, &[], 0)["problems"], json!([]), "only a check reads the shards");
    let report = report(&cache, &["--check"], 1);
    assert_eq!(report["check"]["sound"], false);
    assert!(problems(&report).iter().any(|problem| problem.contains("crc32c")), "{report}");
}

#[test]
fn drafters_show_their_layout_and_layers_in_every_convention() {
    let (_guard, dir) = folder();
    write_drafter(&dir, &drafter_tensors());
    let report = report(&dir, &[], 0);
    assert_eq!(report["kind"], "drafter");
    let facts = &report["drafter"];
    assert_eq!(facts["algorithm"], "DSpark");
    assert_eq!(facts["block_layout"], "anchor first: 5 rows give 5 proposals");
    assert_eq!(facts["markov_head"], "vanilla");
    let ids: Vec<_> = report["target_layers"].as_array().unwrap().iter().map(|row| row["ids"].clone()).collect();
    assert_eq!(ids, [json!([-1, 2]), json!([0, 3]), json!([0, 3]), json!([-1, 2])]);
    assert_eq!(report["weights"]["tensors_per_type"], json!({ "BF16": 17 }));
    let fc = report["tensors"].as_array().unwrap().iter().find(|row| row["name"] == "fc.weight").unwrap();
    assert_eq!(*fc, json!({ "name": "fc.weight", "shape": [8, 16], "type": "BF16" }));
}

/// Overwrites a stored half of a tensor of a safetensors file.
fn poison(file: &Path, tensor: &str, place: usize, half: u16) {
    let mut bytes = fs_err::read(file).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let entries: Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
    let start = entries[tensor]["data_offsets"][0].as_u64().unwrap() as usize;
    let at = 8 + header + start + 2 * place;
    bytes[at..at + 2].copy_from_slice(&half.to_le_bytes());
    fs_err::write(file, bytes).unwrap();
}

#[test]
fn every_tensor_with_values_that_are_not_finite_is_a_problem() {
    let (_guard, dir) = folder();
    write_drafter(&dir, &drafter_tensors());
    let file = dir.join("model.safetensors");
    poison(&file, "fc.weight", 16 * 3 + 5, 0x7fc0);
    poison(&file, "markov_head.markov_w1.weight", 2 * 7, 0xff80);
    poison(&file, "markov_head.markov_w1.weight", 2 * 7 + 1, 0x7f80);
    // The largest value is one.
    poison(&file, "norm.weight", 0, 0x7f7f);
    let report = report(&dir, &[], 1);
    let problems = problems(&report);
    assert_eq!(problems.len(), 2, "{report}");
    assert!(
        problems[0].contains("tensor `fc.weight` holds NaN (1 of its values), the first at row 3, column 5"),
        "{report}"
    );
    let second = "tensor `markov_head.markov_w1.weight` holds infinity (2 of its values), the first at row 7, column 0";
    assert!(problems[1].contains(second) && problems[1].contains("model.safetensors"), "{report}");
    assert_eq!(run(&["inspect", dir.to_str().unwrap()]).status.code(), Some(1));
}

#[test]
fn draft_vocabularies_are_shown_and_checked() {
    let (_guard, dir) = folder();
    write_drafter(&dir, &drafter_tensors());
    assert_eq!(report(&dir, &[], 0)["drafter"]["draft_vocabulary"], "32 of 32 tokens");

    write_pruned_drafter(&dir, [0, 2, 2, 28], None);
    let found = report(&dir, &[], 0);
    assert_eq!(found["drafter"]["draft_vocabulary"], "4 of 32 tokens");
    assert_eq!(found["weights"]["tensors_per_type"], json!({ "BF16": 17, "BOOL": 1, "I64": 1 }));

    for (offsets, skipped, expected) in [
        ([0, 2, 1, 28], None, "entry 2 of tensor `d2t` is 1, which maps draft token 2 to 3, expected a token above"),
        ([0, 2, 2, 29], None, "entry 3 of tensor `d2t` is 29, which maps draft token 3 to 32, expected a token from 0"),
        ([0, 2, 3, 28], None, "entry 4 of tensor `t2d` is 1, expected 0 as `d2t` has it"),
        ([0, 2, 2, 28], Some("d2t"), "tensor `d2t` of shape [4] is missing"),
        ([0, 2, 2, 28], Some("lm_head.weight"), "tensor `lm_head.weight` of shape [4, 8] is missing"),
    ] {
        write_pruned_drafter(&dir, offsets, skipped);
        let report = report(&dir, &[], 1);
        assert!(problems(&report)[0].contains(expected), "{report}");
    }
}

#[test]
fn experts_are_shown_and_checked() {
    let (_guard, dir) = folder();
    write_drafter_of_experts(&dir, None);
    let found = report(&dir, &[], 0);
    assert_eq!(found["drafter"]["experts"], "3 experts of width 4, 2 per token, and a shared one of 16");
    let missing = "layers.0.mlp.experts.2.up_proj.weight";
    write_drafter_of_experts(&dir, Some(missing));
    assert_eq!(problems(&report(&dir, &[], 1)), [format!("tensor `{missing}` of shape [4, 8] is missing")]);
}

#[test]
fn every_fault_of_a_checkpoint_is_listed() {
    let (_guard, dir) = folder();
    let mut tensors = drafter_tensors();
    tensors.retain(|(name, _)| name != "norm.weight");
    tensors[0].1 = vec![8, 24];
    tensors.push(("extra\u{1b}.weight".into(), vec![1]));
    write_drafter(&dir, &tensors);
    assert_eq!(
        problems(&report(&dir, &[], 1)),
        [
            "tensor `norm.weight` of shape [8] is missing",
            "tensor `extra\u{1b}.weight` is none that the configuration asks for",
            "tensor `fc.weight` has shape [8, 24], expected [8, 16]",
        ]
    );
    assert!(!stdout(&inspect(&dir, &[])).contains('\x1b'));
}

#[test]
fn a_damaged_checkpoint_is_a_problem_and_its_config_is_shown() {
    let (_guard, dir) = folder();
    write_drafter(&dir, &drafter_tensors());
    let weights = dir.join("model.safetensors");
    let bytes = fs_err::read(&weights).unwrap();
    fs_err::write(&weights, &bytes[..bytes.len() - 1]).unwrap();
    let report = report(&dir, &[], 1);
    assert_eq!(report["drafter"]["block_size"], 5);
    assert!(problems(&report)[0].starts_with("cannot read safetensors file"), "{report}");
}

/// The folder of shared data; prints that the test is skipped where there is none.
#[expect(clippy::disallowed_methods, reason = "tests find data that is not committed through the environment")]
#[expect(clippy::print_stdout, reason = "a skipped test says so")]
fn shared() -> Option<PathBuf> {
    let path = std::env::var_os("DEEPSPEC_SHARED").map(PathBuf::from);
    if path.is_none() {
        println!("skipped: DEEPSPEC_SHARED is not set");
    }
    path
}

#[test]
fn reference_checkpoints_have_no_problems() {
    let Some(shared) = shared() else { return };
    let drafters = ["dspark_vanilla", "dspark_gated", "dspark_rnn", "dspark_vanilla_noconf", "dflash"];
    for name in drafters {
        let report = report(&shared.join("golden").join(name), &[], 0);
        assert_eq!(report["drafter"]["algorithm"], if name == "dflash" { "DFlash" } else { "DSpark" }, "{name}");
        assert_eq!(report["target_layers"][1]["ids"], json!([1, 3, 5]), "{name}");
    }
    let target = report(&shared.join("golden/target"), &[], 0);
    assert_eq!(target["target"]["family"], "qwen3");
    assert_eq!(target["target"]["stop_ids"], json!([2, 5]));
}

#[test]
fn messy_files_end_with_a_report_or_an_error() {
    let Some(shared) = shared() else { return };
    let mut reports = 0;
    for entry in fs_err::read_dir(shared.join("data/messy")).unwrap() {
        let output = inspect(&entry.unwrap().path(), &["--json", "-v"]);
        let code = output.status.code().unwrap();
        assert!(code == 0 || (code == 1 && stderr(&output).starts_with("error: ")), "{}", stderr(&output));
        assert!(!stdout(&output).contains(['\x1b', '\u{202e}', '\u{200b}']));
        reports += usize::from(code == 0);
    }
    assert!(reports >= 10, "{reports} reports");
}
