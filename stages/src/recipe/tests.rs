//! Tests of reading, overriding, checking and writing recipes.

use std::collections::BTreeSet;

use super::built_in::BUILT_IN;
use super::keys::KEYS;
use super::{LossOn, Precision, PromptSource, Recipe, SharedExpert, TargetLayers, auto_layers};

fn quickstart() -> Recipe {
    Recipe::built_in("quickstart").unwrap().unwrap()
}

fn quickstart_with(from: &str, to: &str) -> String {
    let text = Recipe::built_in_text("quickstart").unwrap();
    assert!(text.contains(from), "{from}");
    text.replacen(from, to, 1)
}

#[test]
fn every_recipe_parses_validates_and_comes_back_from_toml() {
    assert!(Recipe::built_in_names().count() >= 5);
    for name in Recipe::built_in_names() {
        let recipe = Recipe::built_in(name).unwrap().unwrap();
        let again: Recipe = recipe.to_toml().unwrap().parse().unwrap();
        assert_eq!(again, recipe, "{name}");
    }
    assert!(Recipe::built_in("nothing").is_none());
}

#[test]
fn the_table_of_recipes_names_every_file_and_every_file_is_built_in() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../recipes");
    let readme = fs_err::read_to_string(format!("{folder}/README.md")).unwrap();
    let table =
        readme.lines().skip_while(|line| !line.starts_with("| recipe |")).take_while(|line| line.starts_with('|'));
    let rows: BTreeSet<&str> =
        table.filter_map(|line| line.strip_prefix("| `")?.split_once('`')).map(|(name, _)| name).collect();
    let mut files = BTreeSet::new();
    for sub in ["", "dspark/", "dflash/", "eagle3/"] {
        let Ok(entries) = fs_err::read_dir(format!("{folder}/{sub}")) else { continue };
        for entry in entries {
            let name = entry.unwrap().file_name().into_string().unwrap();
            files.extend(name.strip_suffix(".toml").map(|stem| format!("{sub}{stem}")));
        }
    }
    let built_in: BTreeSet<&str> = BUILT_IN.iter().map(|(name, _)| *name).collect();
    assert_eq!(files.iter().map(String::as_str).collect::<BTreeSet<_>>(), built_in);
    assert_eq!(rows, built_in);
}

#[test]
fn the_list_of_keys_is_that_of_the_fields() {
    let mut recipe = quickstart();
    recipe.data.limit = Some(1);
    recipe.draft.vocab_size = Some(1);
    recipe.draft.sliding_window = Some(1);
    recipe.draft.num_experts = Some(1);
    recipe.draft.experts_per_token = Some(1);
    recipe.draft.moe_intermediate_size = Some(1);
    recipe.draft.shared_expert = Some(SharedExpert::Width(1));
    recipe.train.load_balance = Some(1.0);
    recipe.train.router_z = Some(1.0);
    recipe.draft.ttt_length = Some(1);
    recipe.train.step_loss_decay = Some(1.0);
    recipe.init.from = Some("x".into());
    recipe.train.epochs = Some(1.0);
    recipe.train.steps = Some(1);
    recipe.train.ema = Some(0.9);
    recipe.train.acceptance_every = Some(1);
    recipe.eval.limit = Some(1);
    let mut found: BTreeSet<String> =
        recipe.entries().unwrap().into_keys().map(|key| key.replace("phases.0", "phases")).collect();
    found.retain(|key| !key.starts_with("train.phases.1"));
    found.insert("train.phases".into());
    assert_eq!(found, KEYS.iter().map(|key| (*key).to_owned()).collect());
}

#[test]
fn a_misspelled_key_is_shown_with_its_line_and_the_nearest_key() {
    let text = quickstart_with("warmup_ratio", "warmup_ration");
    let line = text.lines().position(|line| line.starts_with("warmup_ration")).unwrap() + 1;
    let error = Recipe::from_toml(&text, "`my.toml`").unwrap_err().to_string();
    assert!(error.starts_with("recipe `my.toml`: TOML parse error at line "), "{error}");
    assert!(error.contains(&format!("line {line}, column 1")), "{error}");
    assert!(error.contains("| ^^^^^^^^^^^^^\n"), "{error}");
    assert!(error.contains("no key `train.warmup_ration`; nearest: `train.warmup_ratio`"), "{error}");
}

#[test]
fn unknown_sections_and_keys_of_phases_are_named() {
    let error = quickstart_with("[draft]", "[drafter]").parse::<Recipe>().unwrap_err().to_string();
    assert!(error.contains("no key `drafter`; nearest: `draft`"), "{error}");
    let error = quickstart_with("\ntv = 0.0", "\ntvd = 0.0").parse::<Recipe>().unwrap_err().to_string();
    assert!(error.contains("no key `train.phases.tvd`; nearest: `train.phases.tv`"), "{error}");
}

#[test]
fn missing_and_mistyped_keys_are_named() {
    let error = quickstart_with("block_size = 3", "").parse::<Recipe>().unwrap_err().to_string();
    assert!(error.contains("missing field `block_size`"), "{error}");
    let error = quickstart_with("block_size = 3", "block_size = \"five\"").parse::<Recipe>().unwrap_err().to_string();
    assert!(
        error.contains("block_size = \"five\"\n") && error.contains("^^^^^^") && error.contains("expected usize"),
        "{error}"
    );
    let error = quickstart_with("[1, 8, 15, 22, 28]", "\"all\"").parse::<Recipe>().unwrap_err().to_string();
    assert!(error.contains("\"auto\" or a list of layer numbers"), "{error}");
}

#[test]
fn four_bits_are_for_targets_alone() {
    let mut recipe = quickstart();
    recipe.apply_set("target.precision=q4").unwrap();
    recipe.validate().unwrap();
    assert_eq!(recipe.target.precision.of_drafter(), Precision::Q8);
    recipe.apply_set("draft.precision=q4").unwrap();
    let error = recipe.validate().unwrap_err().to_string();
    assert!(error.contains("draft.precision") && error.contains("f32, bf16 or q8"), "{error}");
}

#[test]
fn a_draft_vocabulary_smaller_than_the_rank_of_the_markov_head_is_refused() {
    let mut recipe = quickstart();
    for (size, rank, fits) in [(64, 64, true), (63, 64, false), (1, 2, false), (8, 8, true), (8, 9, false)] {
        recipe.apply_set(&format!("draft.vocab_size={size}")).unwrap();
        recipe.apply_set(&format!("draft.markov_rank={rank}")).unwrap();
        let checked = recipe.validate().map_err(|error| error.to_string());
        let names = |text: &String| {
            text.contains(&format!("`draft.vocab_size` is {size}"))
                && text.contains(&format!("`draft.markov_rank` ({rank})"))
        };
        assert_eq!(checked.is_ok(), fits, "{checked:?}");
        assert!(checked.as_ref().err().is_none_or(names), "{checked:?}");
    }
}

#[test]
fn overrides_take_toml_bare_text_and_none() {
    let mut recipe = quickstart();
    for assignment in [
        "train.lr=3e-4",
        "train.weight_decay = 1",
        "target.model=Qwen/Qwen3-4B",
        "target.precision=bf16",
        "data.prompts=my prompts.jsonl",
        "data.loss_on=\"all\"",
        "data.limit=none",
        "draft.vocab_size=8192",
        "draft.target_layer_ids=[-1, 3]",
        "eval.temperatures=[0, 1]",
        "train.phases.1.until = 0.25",
        "train.phases.1.until = 1",
        "eval.prompts=[\"built-in\", \"a.jsonl\"]",
        "train.phases=[{until=1, ce=1, tv=0, kl=0, kl_temperature=1, confidence=1}]",
    ] {
        recipe.apply_set(assignment).unwrap();
    }
    recipe.validate().unwrap();
    assert_eq!(recipe.train.lr, 3e-4);
    assert_eq!(recipe.train.weight_decay, 1.0);
    assert_eq!(recipe.target.model, "Qwen/Qwen3-4B");
    assert_eq!(recipe.target.precision, Precision::Bf16);
    assert_eq!(recipe.data.prompts, PromptSource::File("my prompts.jsonl".into()));
    assert_eq!(recipe.data.loss_on, LossOn::All);
    assert_eq!(recipe.data.limit, None);
    assert_eq!(recipe.draft.vocab_size, Some(8192));
    recipe.apply_set("draft.vocab_size=none").unwrap();
    assert_eq!(recipe.draft.vocab_size, None);
    assert_eq!(recipe.draft.target_layer_ids, TargetLayers::Ids(vec![-1, 3]));
    assert_eq!(recipe.eval.temperatures, [0.0, 1.0]);
    assert_eq!(recipe.eval.prompts, [PromptSource::BuiltIn, PromptSource::File("a.jsonl".into())]);
    assert_eq!(recipe.train.phases.len(), 1);
}

#[test]
fn keys_of_other_algorithms_are_refused() {
    let mut eagle3 = Recipe::built_in("eagle3/smollm2_135m").unwrap().unwrap();
    for (assignment, expected) in [
        ("draft.ttt_length=none", "`draft.ttt_length` is absent, allowed: a value, for `eagle3`"),
        ("draft.ttt_length=4", "`draft.block_size` is 5, allowed: `draft.ttt_length` (4) for `eagle3`"),
        ("draft.ttt_length=65", "`draft.ttt_length` is 65, allowed: 1 to 64"),
        ("train.step_loss_decay=none", "`train.step_loss_decay` is absent"),
        ("train.step_loss_decay=1.1", "`train.step_loss_decay` is 1.1, allowed: above 0, at most 1"),
        ("draft.num_layers=2", "`draft.num_layers` is 2, allowed: 1 for `eagle3`"),
        ("draft.markov_rank=8", "`draft.markov_rank` is 8, allowed: 0 for `eagle3`"),
        ("draft.confidence_head=true", "`draft.confidence_head` is true, allowed: false for `eagle3`"),
        ("draft.sliding_window=8", "`draft.sliding_window` is given"),
        ("draft.sample_from_anchor=false", "`draft.sample_from_anchor` is false"),
        ("train.num_anchors=4", "`train.num_anchors` is 4, allowed: 0 for `eagle3`"),
        ("train.loss_decay_gamma=4.0", "`train.loss_decay_gamma` is 4, allowed: 0 for `eagle3`"),
        ("train.phases.0.ce=0.1", "`train.phases` is a list with other terms"),
        ("draft.algorithm=dflash", "`draft.ttt_length` is given, allowed: no such key but for `eagle3`"),
    ] {
        let before = eagle3.clone();
        eagle3.apply_set(assignment).unwrap();
        let text = eagle3.validate().unwrap_err().to_string();
        assert!(text.contains(expected), "{assignment}: {text}");
        eagle3 = before;
    }
    eagle3.validate().unwrap();
}

#[test]
fn setting_steps_or_epochs_takes_the_other_out() {
    let mut recipe = quickstart();
    recipe.apply_set("train.epochs=2.5").unwrap();
    assert_eq!((recipe.train.epochs, recipe.train.steps), (Some(2.5), None));
    recipe.apply_set("train.steps=7").unwrap();
    assert_eq!((recipe.train.epochs, recipe.train.steps), (None, Some(7)));
    recipe.apply_set("train.steps=none").unwrap();
    assert!(recipe.validate().unwrap_err().to_string().contains("absent, as is `train.steps`"));
}

#[test]
fn overrides_that_are_not_understood_change_nothing_and_say_why() {
    let mut recipe = quickstart();
    for (assignment, expected) in [
        ("train.lrr=1", "there is no key `train.lrr` to set; nearest: `train.lr`"),
        ("lr=1", "nearest: `train.lr`"),
        ("block_sise=5", "nearest: `draft.block_size`"),
        ("drafts.block_size=5", "nearest: `draft.block_size`"),
        ("train.phases.0.cee=1", "nearest: `train.phases.ce`"),
        ("train.phases.2.ce=1", "there is no `train.phases.2`; phases are numbered from 0"),
        ("train.phases.ce=1", "there is no `train.phases`; phases are numbered"),
        ("train.phases.0=1", "nearest: `train.phases`"),
        ("train.lr", "expected `key=value`"),
        ("train.lr=fast", "invalid type: string \"fast\", expected f64"),
        ("train.lr=none", "expected f64"),
        ("train.seed=-1", "-1"),
        ("draft.algorithm=eagle", "unknown variant `eagle`"),
    ] {
        let error = recipe.apply_set(assignment).unwrap_err().to_string();
        assert!(
            error.starts_with(&format!("recipe override `--set {assignment}`: ")) && error.contains(expected),
            "{error}"
        );
    }
    assert_eq!(recipe, quickstart());
}

#[test]
fn values_out_of_range_are_named_with_what_is_allowed() {
    for (assignment, expected) in [
        ("train.lr=0", "`train.lr` is 0, allowed: a number above 0"),
        ("train.lr=nan", "`train.lr` is NaN"),
        ("train.micro_batch_size=3", "`train.micro_batch_size` is 3, allowed: a divisor of `train.batch_size` (8)"),
        ("train.micro_batch_size=0", "`train.micro_batch_size` is 0"),
        ("train.warmup_ratio=1", "`train.warmup_ratio` is 1, allowed: at least 0, below 1"),
        ("train.loss_decay_gamma=-1", "`train.loss_decay_gamma` is -1"),
        ("train.phases=[]", "`train.phases` is a list with `until` [], allowed: at least one phase"),
        ("prepare.top_p=0", "`prepare.top_p` is 0, allowed: above 0, at most 1"),
        ("prepare.samples_per_prompt=2", "`prepare.samples_per_prompt` is 2, allowed: 1 where"),
        ("prepare.max_length=128", "`prepare.max_length` is 128, allowed: more than `prepare.max_new_tokens` (128)"),
        ("prepare.regenerate=false", "have no answers"),
        ("data.max_bad_ratio=1.5", "`data.max_bad_ratio` is 1.5, allowed: 0 to 1"),
        ("draft.vocab_size=0", "`draft.vocab_size` is 0, allowed: at least 1, or no such key"),
        ("draft.num_experts=4", "`draft.experts_per_token` is absent, allowed: that `draft.num_experts`"),
        (
            "draft.shared_expert=true",
            "`draft.shared_expert` is given, allowed: no such key without `draft.num_experts`",
        ),
        ("train.router_z=0.1", "`train.router_z` is given, allowed: no such key without `draft.num_experts`"),
        ("draft.block_size=0", "`draft.block_size` is 0, allowed: 1 to 256"),
        ("draft.target_layer_ids=[3, 3]", "`draft.target_layer_ids` is [3, 3], allowed: at least one id, each once"),
        ("draft.target_layer_ids=[-2]", "from -1 (embedding)"),
        ("draft.algorithm=dflash", "`draft.markov_rank` is 64, allowed: 0 for `dflash`"),
        ("draft.markov_rank=0", "`draft.confidence_head_with_markov` is true, allowed: false without"),
        ("draft.confidence_head=false", "`train.phases.1.confidence` is 1, allowed: 0 without `draft.confidence_head`"),
        ("eval.temperatures=[]", "`eval.temperatures` is []"),
        ("eval.proposers=[\"plain\", \"plain\"]", "each once"),
        ("eval.confidence_threshold=1", "`eval.confidence_threshold` is 1"),
        ("eval.prompts=[]", "`eval.prompts` is empty"),
        ("target.model=\"\"", "`target.model` is empty"),
    ] {
        let error = Recipe::open("quickstart", &[assignment.to_owned()]).unwrap_err().to_string();
        assert!(error.contains(expected), "{assignment}: {error}");
    }
}

#[test]
fn experts_are_checked_together() {
    let recipe = |assignment: &str| Recipe::open("dspark/qwen3_8b_moe", &[assignment.to_owned()]);
    for (assignment, expected) in [
        ("draft.experts_per_token=129", "`draft.experts_per_token` is 129, allowed: at most `draft.num_experts` (128)"),
        ("draft.experts_per_token=0", "`draft.experts_per_token` is 0, allowed: at least 1"),
        ("draft.num_experts=none", "`draft.num_experts` is absent"),
        ("draft.shared_expert=0", "`draft.shared_expert` is 0, allowed: true, false or at least 1"),
        ("draft.shared_expert=wide", "expected true, false or a width"),
        ("train.load_balance=-1", "`train.load_balance` is -1"),
    ] {
        let error = recipe(assignment).unwrap_err().to_string();
        assert!(error.contains(expected), "{assignment}: {error}");
    }
    assert_eq!(recipe("draft.shared_expert=256").unwrap().draft.shared_expert, Some(SharedExpert::Width(256)));
    assert_eq!(recipe("draft.shared_expert=true").unwrap().draft.shared_expert, Some(SharedExpert::AsTarget(true)));
}

#[test]
fn heads_and_layouts_are_read_and_anchor_first_is_the_default() {
    let open = |overrides: &[&str]| {
        let overrides: Vec<String> = overrides.iter().map(|text| (*text).to_owned()).collect();
        Recipe::open("quickstart", &overrides)
    };
    let default = open(&[]).unwrap().draft;
    assert!(default.sample_from_anchor && default.markov_head == super::MarkovHead::Vanilla);
    for (name, head) in [("gated", super::MarkovHead::Gated), ("rnn", super::MarkovHead::Rnn)] {
        let recipe = open(&[&format!("draft.markov_head={name}"), "draft.sample_from_anchor=false"]).unwrap();
        assert_eq!((recipe.draft.markov_head, recipe.draft.sample_from_anchor), (head, false));
        assert_eq!(recipe, recipe.to_toml().unwrap().parse().unwrap());
    }
    let error = open(&["draft.sample_from_anchor=false", "draft.block_size=1"]).unwrap_err().to_string();
    assert!(error.contains("`draft.block_size` is 1, allowed: at least 2 with `sample_from_anchor` false"), "{error}");
    assert!(open(&["draft.markov_head=lstm"]).unwrap_err().to_string().contains("lstm"));
}

#[test]
fn phases_must_rise_to_one_weigh_something_and_train_the_confidence_head() {
    let phase = |until: f64, ce: f64, confidence: f64| super::Phase {
        until,
        ce,
        tv: 0.0,
        kl: 0.0,
        kl_temperature: 1.0,
        confidence,
    };
    let with = |phases: Vec<super::Phase>| {
        let mut recipe = quickstart();
        recipe.train.phases = phases;
        recipe.validate().map_err(|error| error.to_string())
    };
    with(vec![phase(0.5, 1.0, 0.0), phase(1.0, 1.0, 1.0)]).unwrap();
    assert!(
        with(vec![phase(0.5, 1.0, 0.0), phase(0.5, 1.0, 0.0), phase(1.0, 1.0, 1.0)]).unwrap_err().contains("rising")
    );
    assert!(with(vec![phase(0.9, 1.0, 1.0)]).unwrap_err().contains("and 1 for the last"));
    assert!(with(vec![phase(1.0, 0.0, 1.0)]).unwrap_err().contains("`train.phases.0.ce` is 0, as are"));
    assert!(with(vec![phase(1.0, 1.0, 0.0)]).unwrap_err().contains("would stay untrained"));
    let mut train = quickstart().train;
    train.phases[0].until = 0.3;
    assert_eq!(train.phase_at(0, 100), Some(&train.phases[0]));
    assert_eq!(train.phase_at(29, 100), Some(&train.phases[0]));
    assert_eq!(train.phase_at(30, 100), Some(&train.phases[1]));
    assert_eq!(train.phase_at(100, 100), Some(&train.phases[1]));
}

#[test]
fn a_name_that_is_neither_file_nor_built_in_gets_the_nearest_one() {
    let error = Recipe::open("quikstart", &[]).unwrap_err().to_string();
    assert!(
        error.contains("recipe `quikstart`: neither a file nor a built-in recipe; nearest: `quickstart`"),
        "{error}"
    );
}

#[test]
fn recipes_open_by_path() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("mine.toml");
    fs_err::write(&path, quickstart_with("block_size = 3", "block_size = 6")).unwrap();
    assert_eq!(Recipe::open(path.to_str().unwrap(), &[]).unwrap().draft.block_size, 6);
}

#[test]
fn automatic_layers_are_distinct_and_in_range() {
    assert_eq!(auto_layers(5, 36).unwrap(), [1, 9, 17, 25, 33]);
    assert_eq!(auto_layers(5, 40).unwrap(), [1, 10, 19, 28, 37]);
    assert_eq!(auto_layers(3, 3).unwrap(), [-1, 0, 1]);
    assert_eq!(auto_layers(5, 5).unwrap(), [-1, 0, 1, 2, 3]);
    assert_eq!(auto_layers(5, 7).unwrap(), [1, 2, 3, 4, 5]);
    for layers in 1..70_usize {
        for count in 1..=layers {
            let ids = auto_layers(count, layers).unwrap();
            assert_eq!(ids.len(), count);
            assert!(ids.is_sorted_by(|a, b| a < b), "{count} of {layers}: {ids:?}");
            assert!(ids[0] >= -1 && ids[count - 1] <= layers as i32 - 2, "{count} of {layers}: {ids:?}");
        }
    }
    assert!(auto_layers(0, 5).is_err() && auto_layers(6, 5).is_err() && auto_layers(1, 0).is_err());
}

#[test]
fn layer_ids_are_checked_against_the_target() {
    assert_eq!(TargetLayers::Auto.resolve(36).unwrap(), [1, 9, 17, 25, 33]);
    assert_eq!(TargetLayers::Auto.resolve(3).unwrap(), [-1, 0, 1]);
    assert_eq!(TargetLayers::Ids(vec![28, -1]).resolve(30).unwrap(), [28, -1]);
    let error = TargetLayers::Ids(vec![29]).resolve(30).unwrap_err().to_string();
    assert!(
        error.contains("`draft.target_layer_ids` is [29]") && error.contains("to 28 in a target of 30 layers"),
        "{error}"
    );
}

#[test]
fn values_are_checked_when_all_changes_are_made() {
    let overrides = ["prepare.regenerate=false".to_owned()];
    let from_file = |recipe: &mut Recipe| recipe.data.prompts = PromptSource::File("mine.jsonl".into());
    // The built-in prompts have no answers; a file that another argument names may.
    let recipe = Recipe::open_with("quickstart", &overrides, from_file).unwrap();
    assert!(!recipe.prepare.regenerate && recipe.data.prompts == PromptSource::File("mine.jsonl".into()));
    let error = Recipe::open("quickstart", &overrides).unwrap_err().to_string();
    assert!(error.contains("`prepare.regenerate` is false") && error.contains("with its overrides"), "{error}");
    // Overrides that need each other, in either order.
    for order in [
        ["prepare.max_length=64", "prepare.max_new_tokens=32"],
        ["prepare.max_new_tokens=500", "prepare.max_length=600"],
    ] {
        Recipe::open("quickstart", &order.map(str::to_owned)).unwrap();
    }
    // So in a file of one's own, and in a saved one.
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("mine.toml");
    fs_err::write(&path, quickstart_with("regenerate = true", "regenerate = false")).unwrap();
    let name = path.to_str().unwrap();
    Recipe::open_with(name, &[], from_file).unwrap();
    let error = Recipe::open(name, &[]).unwrap_err().to_string();
    assert!(error.contains("mine.toml") && error.contains("`prepare.regenerate` is false"), "{error}");
    assert!(quickstart().complete(&overrides, from_file).is_ok() && quickstart().complete(&overrides, |_| {}).is_err());
}

#[test]
fn no_recipe_changes_the_users_text() {
    for name in Recipe::built_in_names() {
        assert!(!Recipe::built_in(name).unwrap().unwrap().data.strip_invisible, "{name}");
    }
}
