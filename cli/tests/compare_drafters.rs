//! `scripts/compare_drafters` from end to end on the tiny golden target: what it trains, measures, writes and skips.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod tiny_model;

use std::path::Path;
use std::process::Command;

use deepspec_stages::recipe::Recipe;
use serde_json::{Value, json};
use tiny_model::model_folder;

/// Writes a recipe of the tiny target.
fn recipe(root: &Path, algorithm: &str, changes: &[&str]) {
    let settings = [
        "data.max_bad_ratio=1.0",
        "prepare.max_new_tokens=40",
        "prepare.max_length=128",
        "prepare.batch_size=3",
        "draft.mask_token_id=6",
        "draft.vocab_size=none",
        "init.markov=random",
        "train.batch_size=2",
        "train.micro_batch_size=2",
        "train.num_anchors=8",
        "eval.max_new_tokens=24",
    ];
    let overrides: Vec<String> = settings.iter().chain(changes).map(|text| (*text).to_owned()).collect();
    let folder = root.join("recipes").join(algorithm);
    fs_err::create_dir_all(&folder).unwrap();
    let recipe = Recipe::open("quickstart", &overrides).unwrap();
    fs_err::write(folder.join("tiny.toml"), recipe.to_toml().unwrap()).unwrap();
}

fn prompts(path: &Path, word: &str, count: usize) {
    let row = |i: usize| json!({ "id": i, "messages": [{ "role": "user", "content": format!("{word} {}", i * 7) }] });
    let turns = |i: usize| json!({ "turns": [format!("{word} {}", i * 7)] });
    let is_training = word == "train";
    let rows: Vec<String> = (0..count).map(|i| if is_training { row(i) } else { turns(i) }.to_string()).collect();
    fs_err::write(path, rows.join("\n") + "\n").unwrap();
}

#[test]
fn drafters_are_trained_on_one_cache_and_compared_on_the_same_prompts() {
    if !Command::new("python3").args(["-c", "import tomllib"]).status().is_ok_and(|status| status.success()) {
        println!("skipped: no python3 of at least 3.11");
        return;
    }
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    let model = format!("target.model={}", model_folder(root).display());
    recipe(root, "dspark", &[&model, "draft.markov_rank=8", "draft.target_layer_ids=[0, 2, 4]"]);
    let bare = [
        &model,
        "draft.algorithm=dflash",
        "draft.markov_rank=0",
        "draft.confidence_head=false",
        "draft.confidence_head_with_markov=false",
        "draft.target_layer_ids=[1, 4]",
        "train.phases=[{ until = 1.0, ce = 1.0, tv = 0.0, kl = 0.0, kl_temperature = 1.0, confidence = 0.0 }]",
    ];
    recipe(root, "dflash", &bare);
    prompts(&root.join("train.jsonl"), "train", 12);
    prompts(&root.join("first.jsonl"), "first", 8);
    prompts(&root.join("second.jsonl"), "second", 8);

    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/compare_drafters");
    let run = |algorithms: &[&str], minutes: &str| {
        let mut command = Command::new("python3");
        command.arg("-B").arg(&script).current_dir(root).arg("--recipes");
        command.args(algorithms.iter().map(|name| format!("recipes/{name}/tiny.toml")));
        command.args([
            "--prompts",
            "train.jsonl",
            "--eval",
            "first.jsonl",
            "second.jsonl",
            "--minutes",
            minutes,
            "--timing-steps",
            "12",
            "--measurements",
            "3",
        ]);
        command.args(["--work", "work", "--out", "out", "--deepspec", env!("CARGO_BIN_EXE_deepspec")]);
        let output = command.output().unwrap();
        (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (succeeded, said) = run(&["dspark", "dflash"], "0.005");
    assert!(succeeded, "{said}");

    let results: Value = serde_json::from_slice(&fs_err::read(root.join("out/results.json")).unwrap()).unwrap();
    assert_eq!(results["cache"]["layers"], json!([0, 1, 2, 4]));
    assert_eq!(results["cache"]["samples"], json!(12));
    let drafters = results["drafters"].as_array().unwrap();
    let [dspark, dflash] = &drafters[..] else { panic!("two drafters") };
    assert_eq!((&dspark["algorithm"], &dflash["algorithm"]), (&json!("dspark"), &json!("dflash")));
    for drafter in drafters {
        let step_ms = drafter["timing"]["step_ms"].as_f64().unwrap();
        let steps = drafter["steps"].as_u64().unwrap();
        assert_eq!(steps, (0.3e3 / step_ms).round().max(1.0) as u64, "{}", drafter["timing"]);
        assert_eq!(drafter["sequences"], json!(2 * steps));
        assert!(drafter["minutes"].as_f64().unwrap() > 0.0);
        let curve = drafter["curve"].as_array().unwrap();
        assert!(curve.len() >= 3 && curve.iter().all(|point| point["tau"].as_f64().unwrap() >= 1.0), "{curve:?}");
        for evaluation in ["whole", "adaptive"] {
            let found = &drafter[evaluation];
            // A drafter of so few steps may accept nothing; then equal answers show nothing.
            assert_ne!(found["lossless"], json!(false), "{evaluation}");
            assert_eq!((&found["comparison"]["answers"], &found["comparison"]["different"]), (&json!(36), &json!(0)));
            let sets: Vec<_> = found["sets"].as_array().unwrap().iter().map(|set| &set["prompts"]).collect();
            assert_eq!(sets, [6, 6], "two of eight are for calibration");
            assert_eq!(found["temperatures"].as_array().unwrap().len(), 2);
        }
        assert_eq!(drafter["whole"]["prompt_ids_sha256"], dspark["whole"]["prompt_ids_sha256"]);
        assert_eq!(drafter["whole"]["recipe"]["eval"]["adaptive"], json!(false));
    }
    assert_eq!(dspark["whole"]["calibration"]["table"]["temperatures"].as_array().unwrap().len(), 3);
    assert!(dflash["whole"]["calibration"].is_null());

    let readme = fs_err::read_to_string(root.join("out/README.md")).unwrap();
    for part in
        ["# dspark, dflash on", "| first | 6 |", "no confidence head", "At temperature 1 the tau", "[0, 1, 2, 4]"]
    {
        assert!(readme.contains(part), "{part} in\n{readme}");
    }
    for plot in ["tau_minutes", "tau_sequences", "conditional_t0", "conditional_t1", "tau_sets_t0", "tau_sets_t1"] {
        let svg = fs_err::read_to_string(root.join("out").join(plot).with_extension("svg")).unwrap();
        assert!(svg.starts_with("<svg xmlns=") && svg.ends_with("</svg>\n") && !svg.contains("nan"), "{plot}: {svg}");
        assert!(readme.contains(&format!("{plot}.svg")) && svg.contains("dflash"), "{plot}");
    }

    // Everything is there: nothing is run again, and the result is the same.
    let (succeeded, said) = run(&["dspark", "dflash"], "0.005");
    assert!(succeeded && !said.contains('$'), "{said}");
    let again: Value = serde_json::from_slice(&fs_err::read(root.join("out/results.json")).unwrap()).unwrap();
    assert_eq!(again, results);
    let (succeeded, said) = run(&["dspark", "dflash"], "0.01");
    assert!(!succeeded && said.contains("minutes was 0.005, is 0.01") && said.contains("another --work"), "{said}");
    let (succeeded, said) = run(&["dspark"], "0.005");
    assert!(!succeeded && said.contains("recipes was"), "{said}");

    // One more joins those that are done.
    recipe(root, "other", &bare);
    let (succeeded, said) = run(&["dspark", "dflash", "other"], "0.005");
    assert!(succeeded && said.contains("other/tiny.toml") && !said.contains("dflash/tiny.toml"), "{said}");
    let more: Value = serde_json::from_slice(&fs_err::read(root.join("out/results.json")).unwrap()).unwrap();
    let more = more["drafters"].as_array().unwrap();
    assert_eq!((&more[..2], &more[2]["algorithm"]), (&drafters[..], &json!("dflash")));

    choices_are_compared_on_that_cache(root);
}

/// `scripts/compare_choices` on the cache of the comparison.
fn choices_are_compared_on_that_cache(root: &Path) {
    let choice =
        |name: &str, set: &str| format!("[[choice]]\nname = \"{name}\"\nwhat = \"{name}, in words\"\nset = [{set}]\n");
    let choices = [choice("as_it_is", ""), choice("few_anchors", "\"train.num_anchors=2\"")].concat();
    fs_err::write(root.join("choices.toml"), choices).unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/compare_choices");
    let run = || {
        let mut command = Command::new("python3");
        command.arg("-B").arg(&script).arg("choices.toml").current_dir(root);
        command.args(["--recipe", "recipes/dspark/tiny.toml", "--cache", "work/prepared/cache", "--steps", "6"]);
        command.args(["--eval", "first.jsonl", "--eval-limit", "4", "--work", "choices", "--out", "chosen"]);
        let output = command.args(["--deepspec", env!("CARGO_BIN_EXE_deepspec")]).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{said}");
        let results: Value = serde_json::from_slice(&fs_err::read(root.join("chosen/results.json")).unwrap()).unwrap();
        (results, said)
    };
    let (results, _) = run();
    let [first, second] = &results.as_array().unwrap()[..] else { panic!("two choices: {results}") };
    for found in [first, second] {
        assert_ne!(found["lossless"], json!(false));
        let steps: Vec<_> = found["curve"].as_array().unwrap().iter().map(|point| &point["step"]).collect();
        assert_eq!(steps, [2, 4, 6]);
        assert!(found["acceptance"]["tau"].as_f64().unwrap() >= 1.0);
    }
    assert_ne!(first["curve"], second["curve"]);
    let readme = fs_err::read_to_string(root.join("chosen/README.md")).unwrap();
    assert!(readme.contains("tau after 6 steps") && readme.contains("| few_anchors, in words |"), "{readme}");
    let (again, said) = run();
    assert!(again == results && !said.contains('$'), "{said}");
}
