//! Everything the program writes has the mode that the process's umask gives to new files and folders.
#![cfg(unix)]
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod tiny_model;

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::json;
use tiny_model::model_folder;

/// Runs the program with arguments under a umask.
fn deepspec(umask: &str, home: &Path, arguments: &[String]) {
    let mut command = Command::new("sh");
    command.arg("-c").arg(format!("umask {umask}; exec \"$@\"")).arg("sh").arg(env!("CARGO_BIN_EXE_deepspec"));
    let output = command.args(arguments).env("DEEPSPEC_CACHE", home).output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// All files and folders below one.
fn all(folder: &Path) -> Vec<PathBuf> {
    let mut found = vec![folder.to_path_buf()];
    let mut next = 0;
    while next < found.len() {
        if found[next].is_dir() {
            let entries = fs_err::read_dir(&found[next]).unwrap().map(|entry| entry.unwrap().path());
            found.extend(entries.collect::<Vec<_>>());
        }
        next += 1;
    }
    found
}

#[test]
fn files_of_a_run_of_exports_and_of_caches_follow_the_umask() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    let model = model_folder(root);
    let prompts = root.join("prompts.jsonl");
    let row = |i: u32| json!({ "id": i, "messages": [{ "role": "user", "content": format!("word {i} {}", i * 7) }] });
    let rows: Vec<String> = (0..6).map(|i| row(i).to_string()).collect();
    fs_err::write(&prompts, rows.join("\n") + "\n{\"broken\n").unwrap();
    let settings = [
        format!("target.model={}", model.display()),
        format!("data.prompts={}", prompts.display()),
        "prepare.max_new_tokens=24".into(),
        "prepare.max_length=96".into(),
        "prepare.samples_per_shard=2".into(),
        "draft.target_layer_ids=[0,2,4]".into(),
        "draft.mask_token_id=6".into(),
        "draft.markov_rank=8".into(),
        "draft.vocab_size=256".into(),
        "train.steps=4".into(),
        "train.batch_size=2".into(),
        "train.micro_batch_size=2".into(),
        "train.num_anchors=4".into(),
        "train.checkpoint_every=2".into(),
        "train.ema=0.9".into(),
        "eval.limit=3".into(),
        "eval.max_new_tokens=12".into(),
    ];
    for (umask, file_mode, folder_mode) in [("027", 0o640, 0o750), ("002", 0o664, 0o775), ("077", 0o600, 0o700)] {
        let (run, home) = (root.join(format!("run-{umask}")), root.join(format!("home-{umask}")));
        for stage in ["prepare", "train", "eval"] {
            let mut arguments: Vec<String> =
                ["--threads", "1", stage, "--recipe", "quickstart", "--run"].map(str::to_owned).into();
            arguments.push(run.display().to_string());
            arguments.extend(settings.iter().flat_map(|setting| ["--set".to_owned(), setting.clone()]));
            deepspec(umask, &home, &arguments);
        }
        let (draft, out) = (run.join("checkpoints/step-000004"), run.join("exported"));
        let export = ["export", "--to", "deepspec", "--draft", draft.to_str().unwrap(), "--out", out.to_str().unwrap()];
        deepspec(umask, &home, &export.map(str::to_owned));
        let (cache, v2) = (run.join("cache"), run.join("cache-v2"));
        let export = ["export", "--to", "cache-v2", "--cache", cache.to_str().unwrap(), "--out", v2.to_str().unwrap()];
        deepspec(umask, &home, &export.map(str::to_owned));
        let written: Vec<PathBuf> =
            all(&run).into_iter().chain(all(&home).into_iter().filter(|path| path.exists())).collect();
        for kind in [
            "model.safetensors",
            "training_state",
            "manifest.json",
            "results.json",
            "recipe.toml",
            "metrics.jsonl",
            ".arrow",
        ] {
            assert!(written.iter().any(|path| path.to_string_lossy().contains(kind)), "no {kind}");
        }
        for path in written {
            let expected = if path.is_dir() { folder_mode } else { file_mode };
            let mode = fs_err::metadata(&path).unwrap().permissions().mode() & 0o777;
            assert_eq!(mode, expected, "{} has mode {mode:o} under umask {umask}", path.display());
        }
    }
}
