//! Each key of both manifests missing, unknown and of every other type: refused with the file's name, and never a panic.

use std::path::Path;

use deepspec_datasets::target_cache::v2;
use deepspec_datasets::target_cache::{CacheError, Reader, check};
use serde_json::{Value, json};

use super::{Columns, HIDDEN, LAYERS, SAMPLES, cache};

/// Dotted places of all keys below a value; elements of lists by number.
fn pointers(value: &Value, prefix: &str, found: &mut Vec<String>) {
    let children: Vec<(String, &Value)> = match value {
        Value::Object(map) => map.iter().map(|(key, value)| (key.clone(), value)).collect(),
        Value::Array(list) => list.iter().enumerate().map(|(index, value)| (index.to_string(), value)).collect(),
        _ => return,
    };
    for (key, child) in children {
        let pointer = format!("{prefix}/{key}");
        pointers(child, &pointer, found);
        found.push(pointer);
    }
}

/// Values of each type of JSON, and numbers at the edges.
fn others() -> [Value; 11] {
    [
        json!(null),
        json!(true),
        json!(-1),
        json!(1.5),
        json!(u64::MAX),
        json!(1e300),
        json!(""),
        json!("x"),
        json!([]),
        json!([[1]]),
        json!({ "x": 1 }),
    ]
}

fn remove(manifest: &mut Value, pointer: &str) {
    let (parent, key) = pointer.rsplit_once('/').unwrap();
    match manifest.pointer_mut(parent).unwrap() {
        Value::Object(map) => drop(map.remove(key)),
        Value::Array(list) => drop(list.remove(key.parse().unwrap())),
        _ => unreachable!("keys are in objects and lists"),
    }
}

/// Opens the cache with each key changed. `may_be` says which changes are no fault.
fn try_all(path: &Path, may_be: impl Fn(&str, Option<&Value>) -> bool, open: impl Fn() -> Result<(), CacheError>) {
    let good: Value = serde_json::from_slice(&fs_err::read(path).unwrap()).unwrap();
    let mut keys = Vec::new();
    pointers(&good, "", &mut keys);
    assert!(keys.len() > 20, "{keys:?}");
    let mut tried = 0;
    let mut judge = |changed: &Value, pointer: &str, value: Option<&Value>| {
        fs_err::write(path, serde_json::to_vec(changed).unwrap()).unwrap();
        tried += 1;
        match open() {
            Ok(()) => assert!(may_be(pointer, value), "{pointer} as {value:?} was taken"),
            Err(error) => {
                let text = error.to_string();
                assert!(
                    text.contains("manifest.json") || text.contains("shard-") || text.contains("samples.idx"),
                    "{pointer}: {text}"
                );
                assert!(error.hint().is_some(), "{pointer}: {text}");
                assert!(!text.contains("Some(") && !text.contains("\\\""), "{pointer}: {text}");
            }
        }
    };
    for pointer in &keys {
        let mut changed = good.clone();
        remove(&mut changed, pointer);
        judge(&changed, pointer, None);
        for value in others() {
            let mut changed = good.clone();
            let slot = changed.pointer_mut(pointer).unwrap();
            if *slot == value {
                continue;
            }
            *slot = value.clone();
            judge(&changed, pointer, Some(&value));
        }
    }
    assert!(tried > 200);
    fs_err::write(path, serde_json::to_vec(&good).unwrap()).unwrap();
    open().unwrap();
}

#[test]
fn each_key_of_a_version_3_manifest_missing_or_of_another_type_is_refused_or_means_nothing_to_the_reader() {
    let dir = cache();
    // Texts are not interpreted, but the shards repeat the description, so any change of it is refused when they are opened.
    let is_taken = |_: &str, _: Option<&Value>| false;
    try_all(&dir.path().join("manifest.json"), is_taken, || {
        let reader = Reader::open(dir.path())?;
        (0..reader.len()).try_for_each(|index| reader.sample(index).map(drop))?;
        // What only the check compares: counts and checksums of shards.
        check(dir.path())?.problems.into_iter().next().map_or(Ok(()), Err)
    });
}

#[test]
fn each_key_of_a_version_2_manifest_missing_or_of_another_type_is_refused_unless_it_is_a_text_for_people() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("v2");
    let mut writer = v2::Writer::create(&dir, v2::Manifest::new("t", &LAYERS, HIDDEN, 64), 600).unwrap();
    for sample in 0..SAMPLES {
        writer.append(&Columns::new(sample).sample(sample)).unwrap();
    }
    writer.finish().unwrap();
    let for_people = ["/chat_template", "/exp_name", "/git_sha", "/project_name", "/target_model_name_or_path"];
    let is_taken = |pointer: &str, value: Option<&Value>| match value {
        Some(Value::String(_)) => for_people.contains(&pointer),
        Some(Value::Array(list)) => pointer == "/source_jsonl_paths" && list.is_empty(),
        // A longest length and a filter that were larger or smaller lose nothing.
        Some(number) => matches!(pointer, "/max_length" | "/min_loss_tokens") && number.as_u64().is_some(),
        None => false,
    };
    try_all(&dir.join("manifest.json"), is_taken, || {
        let reader = v2::Reader::open(&dir)?;
        (0..reader.len()).try_for_each(|index| reader.sample(index).map(drop))
    });
}

#[test]
fn an_unknown_key_is_named() {
    let dir = cache();
    let path = dir.path().join("manifest.json");
    let good: Value = serde_json::from_slice(&fs_err::read(&path).unwrap()).unwrap();
    for parent in ["", "/meta", "/shards/0"] {
        let mut changed = good.clone();
        changed.pointer_mut(parent).unwrap()["lenght"] = json!(1);
        fs_err::write(&path, serde_json::to_vec(&changed).unwrap()).unwrap();
        let text = Reader::open(dir.path()).unwrap_err().to_string();
        assert!(text.contains("unknown field `lenght`") && text.contains("manifest.json"), "{text}");
    }
}
