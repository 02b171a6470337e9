//! Each key of a recipe missing, misspelled and of every other type: refused by name or a documented default, never a panic.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use deepspec_stages::recipe::Recipe;
use toml::{Table, Value};

/// Keys of which a recipe may say nothing: optional ones, and one of two.
const OPTIONAL: [&str; 20] = [
    "data.limit",
    "draft.sample_from_anchor",
    "draft.ttt_length",
    "draft.vocab_size",
    "draft.sliding_window",
    "draft.num_experts",
    "draft.experts_per_token",
    "draft.moe_intermediate_size",
    "draft.shared_expert",
    "init.from",
    "train.load_balance",
    "train.router_z",
    "train.step_loss_decay",
    "train.ema",
    "train.acceptance_every",
    "train.acceptance_prompts",
    "eval.limit",
    "eval.adaptive",
    "eval.calibration",
    "train.epochs",
];

/// Values of each type of TOML, and numbers at the edges.
fn others() -> Vec<Value> {
    vec![
        Value::Boolean(true),
        Value::Integer(-1),
        Value::Integer(0),
        Value::Integer(i64::MAX),
        Value::Float(f64::NAN),
        Value::Float(f64::INFINITY),
        Value::Float(-0.5),
        Value::String(String::new()),
        Value::String("x".into()),
        Value::Array(Vec::new()),
        Value::Array(vec![Value::Array(vec![Value::Integer(1)])]),
        Value::Table(Table::from_iter([("x".to_owned(), Value::Integer(1))])),
    ]
}

fn tables() -> Vec<Table> {
    // One for each algorithm, and one with experts: together they have every key.
    let names = ["quickstart", "dspark/qwen3_8b_moe", "dflash/smollm2_135m", "eagle3/smollm2_135m"];
    names.into_iter().map(|name| Recipe::built_in_text(name).unwrap().parse().unwrap()).collect()
}

/// Section and name of each key, those of the first phase with the phase as section.
fn keys(table: &Table) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for (section, value) in table {
        for (name, value) in value.as_table().unwrap() {
            found.push((section.clone(), name.clone()));
            if let Some(phase) = value.as_array().and_then(|list| list.first()).and_then(Value::as_table) {
                found.extend(phase.keys().map(|key| (format!("{section}.{name}"), key.clone())));
            }
        }
    }
    found
}

fn fields<'t>(table: &'t mut Table, section: &str) -> &'t mut Table {
    match section.split_once('.') {
        None => table[section].as_table_mut().unwrap(),
        Some((section, list)) => table[section][list].as_array_mut().unwrap()[0].as_table_mut().unwrap(),
    }
}

fn read(table: &Table) -> Result<Recipe, String> {
    let text = toml::to_string(table).unwrap();
    Recipe::from_toml(&text, "`mine.toml`").map_err(|error| {
        let words = error.to_string();
        assert!(words.starts_with("recipe `mine.toml`: "), "{words}");
        assert!(!words.contains("Some(") && !words.contains("Value") && !words.ends_with('.'), "{words}");
        words
    })
}

#[test]
fn a_missing_key_is_named_unless_it_is_optional() {
    for table in tables() {
        for (section, name) in keys(&table) {
            let mut changed = table.clone();
            fields(&mut changed, &section).remove(&name);
            let key = format!("{section}.{name}");
            match read(&changed) {
                Ok(_) => assert!(OPTIONAL.contains(&key.as_str()), "`{key}` was missed by nobody"),
                Err(words) => assert!(words.contains(&name), "{key}: {words}"),
            }
        }
        for section in table.keys() {
            let mut changed = table.clone();
            changed.remove(section);
            assert!(read(&changed).unwrap_err().contains(section.as_str()));
        }
    }
}

#[test]
fn an_unknown_key_is_named_with_the_nearest_one() {
    for table in tables() {
        for (section, name) in keys(&table) {
            let mut changed = table.clone();
            let misspelled = format!("{name}z");
            let value = fields(&mut changed, &section).remove(&name).unwrap();
            fields(&mut changed, &section).insert(misspelled.clone(), value);
            let words = read(&changed).unwrap_err();
            assert!(words.contains(&format!("`{misspelled}`")), "{section}.{name}: {words}");
            assert!(words.contains(&format!("{section}.{name}`")), "{section}.{name}: {words}");
        }
    }
}

#[test]
fn a_value_of_another_type_or_out_of_range_is_named_or_means_what_it_says() {
    let mut refused = 0;
    for table in tables() {
        for (section, name) in keys(&table) {
            for value in others() {
                let mut changed = table.clone();
                fields(&mut changed, &section).insert(name.clone(), value.clone());
                match read(&changed) {
                    // What is taken comes back from TOML as it went in.
                    Ok(recipe) => assert_eq!(read(&recipe.to_toml().unwrap().parse().unwrap()).unwrap(), recipe),
                    Err(words) => {
                        refused += 1;
                        let shows_line = words.lines().any(|line| line.contains('|'));
                        let is_named = words.contains(&name) || words.contains(&section) || shows_line;
                        assert!(is_named, "{section}.{name} = {value}: {words}");
                    }
                }
            }
        }
    }
    assert!(refused > 1500, "{refused}");
}
