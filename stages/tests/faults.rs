//! Models with one fault each, through the engine: the largest value in one tensor, and every key of every config changed. A faulty
//! drafter never changes a word of plain decoding; a faulty target gives the same tokens with and without a drafter or ends with an
//! error that says so; nothing panics.
#![expect(clippy::unwrap_used, reason = "tests fail as tests do")]

#[path = "common/requests.rs"]
mod requests;
#[path = "../../cli/tests/tiny_model/mod.rs"]
mod tiny_model;

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use deepspec_engine::{Engine, Request};
use deepspec_models::checkpoint;
use deepspec_models::config::TargetConfig;
use deepspec_models::linear::Precision as Packing;
use deepspec_models::speculate::{NoProposer, SpeculateError};
use deepspec_models::target::Target;
use deepspec_models::weights::Weights;
use deepspec_stages::drafter::{Drafter, load_drafter};
use deepspec_stages::error::{Error, Result};
use deepspec_stages::model_source::{ResolvedModel, load_text_side};
use deepspec_stages::recipe::Precision;
use requests::request;
use serde_json::{Value, json};
use tempfile::TempDir;

/// Finite, and more than any sum of it with itself can hold.
const HUGE: f32 = 3e38;
/// The largest value of half the width.
const LARGEST_BF16: f32 = f32::from_bits(0x7f7f_0000);

type Tensors = HashMap<String, Tensor>;

/// A model in Hugging Face layout, to be changed.
#[derive(Clone)]
struct Files {
    config: Value,
    tensors: Tensors,
}

fn golden(part: &str) -> PathBuf {
    Path::new("../models/tests/golden").join(part)
}

impl Files {
    fn read(folder: &Path) -> Self {
        let config = serde_json::from_slice(&fs_err::read(folder.join("config.json")).unwrap()).unwrap();
        let tensors = candle_core::safetensors::load(folder.join("model.safetensors"), &Device::Cpu).unwrap();
        Self { config, tensors }
    }

    fn write(&self, folder: &Path) {
        let tensors: Vec<(&String, Tensor)> =
            self.tensors.iter().map(|(name, tensor)| (name, tensor.clone())).collect();
        checkpoint::save(folder, &self.config, &tensors).unwrap();
    }

    fn names(&self) -> Vec<String> {
        let mut names: Vec<String> =
            self.tensors.keys().filter(|name| !["d2t", "t2d"].contains(&name.as_str())).cloned().collect();
        names.sort();
        names
    }

    /// The same with one value of a tensor replaced; `wide` says whether the tensor is stored in full width.
    fn with(&self, name: &str, place: usize, wide: bool) -> Self {
        let mut changed = self.clone();
        let tensor = &self.tensors[name];
        let mut values: Vec<f32> = tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap();
        let place = place % values.len();
        values[place] = if wide { HUGE } else { LARGEST_BF16 };
        let dtype = if wide { DType::F32 } else { DType::BF16 };
        let tensor = Tensor::from_vec(values, tensor.dims(), &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
        changed.tensors.insert(name.into(), tensor);
        changed
    }
}

/// The golden target, and the same as a Llama model without norms of queries and keys.
fn targets() -> [(&'static str, Files); 2] {
    let qwen3 = Files::read(&golden("target"));
    let mut llama = qwen3.clone();
    llama.tensors.retain(|name, _| !name.contains("q_norm") && !name.contains("k_norm"));
    (llama.config["architectures"], llama.config["model_type"]) = (json!(["LlamaForCausalLM"]), json!("llama"));
    [("qwen3", qwen3), ("llama", llama)]
}

/// Drafters of every kind for the golden target; one has a draft vocabulary.
fn drafters() -> Vec<(&'static str, Files)> {
    let mut all: Vec<(&'static str, Files)> =
        ["decode/dspark_vanilla", "dspark_gated", "decode/dspark_rnn", "decode/dflash", "decode/eagle3"]
            .into_iter()
            .map(|name| (name, Files::read(&golden(name))))
            .collect();
    let mut small = all[0].1.clone();
    let tokens: Vec<u32> = (0..40).map(|token| 8 * token).collect();
    let ids = Tensor::new(tokens.as_slice(), &Device::Cpu).unwrap();
    for name in ["lm_head.weight", "markov_head.markov_w2.weight"] {
        let rows = small.tensors[name].index_select(&ids, 0).unwrap();
        small.tensors.insert(name.into(), rows);
    }
    let offsets: Vec<i64> = (0..).zip(&tokens).map(|(draft, &token)| i64::from(token) - draft).collect();
    small.tensors.insert("d2t".into(), Tensor::new(offsets, &Device::Cpu).unwrap());
    small.config["draft_vocab_size"] = json!(tokens.len());
    all.push(("with a draft vocabulary", small));
    all
}

fn load_target(folder: &Path) -> Result<Target> {
    let config = TargetConfig::from_folder(folder)?;
    Ok(Target::load(config, &Weights::from_folder(folder, DType::F32, &Device::Cpu)?, Packing::F32)?)
}

fn requests(count: u64) -> Vec<Request> {
    (0..count)
        .map(|i| request(i, (0..4 + i as u32).map(|j| (i as u32 * 37 + j * 11 + 9) % 320).collect(), 12))
        .collect()
}

/// Tokens of all requests, or the error that decoding ended with.
fn decode(target: &Target, drafter: Option<&Drafter>, count: u64) -> Result<Vec<Vec<u32>>> {
    let slots = count as usize;
    let proposer = match drafter {
        Some(drafter) => drafter.proposer(target, slots, 32)?,
        None => Box::new(NoProposer),
    };
    let mut done = Engine::new(target, proposer, slots, 32)?.run(requests(count), |_| Ok(()))?;
    done.sort_by_key(|done| done.request.id);
    Ok(done.into_iter().map(|done| done.output).collect())
}

#[test]
fn a_drafter_with_the_largest_value_in_any_tensor_loads_and_changes_no_token() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("drafter");
    let target = load_target(&golden("target")).unwrap();
    let plain = decode(&target, None, 3).unwrap();
    for (kind, files) in drafters() {
        files.write(&path);
        let drafter = load_drafter(&path, target.config(), Precision::F32).unwrap();
        assert_eq!(decode(&target, Some(&drafter), 3).unwrap(), plain, "{kind}");
        for (number, name) in files.names().iter().enumerate() {
            files.with(name, 5 * number + 1, number % 2 == 0).write(&path);
            let drafter = load_drafter(&path, target.config(), Precision::F32).unwrap();
            assert_eq!(decode(&target, Some(&drafter), 3).unwrap(), plain, "{kind}: {name}");
        }
    }
}

/// Whether an error says that there were no finite logits.
fn is_not_finite(error: &Error) -> bool {
    use SpeculateError::{InfiniteMaximum, NanLogit};
    matches!(error, Error::Model(deepspec_models::Error::Speculate(NanLogit { .. } | InfiniteMaximum { .. })))
}

#[test]
fn a_target_with_the_largest_value_in_any_tensor_decodes_alike_or_says_that_its_logits_are_not_finite() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("target");
    let mut refused = 0;
    for (family, files) in targets() {
        for (number, name) in files.names().iter().enumerate() {
            files.with(name, 3 * number, number % 2 == 1).write(&path);
            let target = load_target(&path).unwrap();
            let drafter = load_drafter(&golden("decode/dspark_vanilla"), target.config(), Precision::F32).unwrap();
            match (decode(&target, None, 1), decode(&target, Some(&drafter), 1)) {
                (Ok(plain), Ok(drafted)) => assert_eq!(plain, drafted, "{family}: {name}"),
                (Err(plain), Err(drafted)) => {
                    assert!(is_not_finite(&plain) && is_not_finite(&drafted), "{family} {name}: {plain}; {drafted}");
                    refused += 1;
                }
                (plain, drafted) => panic!("{family} {name}: {plain:?} against {drafted:?}"),
            }
        }
    }
    assert!(refused > 0);
}

// ---- configurations ----

/// Another JSON value than the one given, of other types and of the same; `None` is the key's absence.
fn others(value: &Value) -> Vec<Option<Value>> {
    let mut others = vec![
        Value::Null,
        json!("nonsense"),
        json!([]),
        json!({ "a": 1 }),
        json!(-1),
        json!(0),
        json!(1.5),
        json!(true),
    ];
    match value {
        Value::Number(number) => {
            others.extend(number.as_u64().into_iter().flat_map(|number| [json!(number + 1), json!(2 * number)]));
            others.extend(number.as_f64().map(|number| json!(number * 1.5)));
        }
        Value::Bool(flag) => others.push(json!(!flag)),
        Value::Array(list) => others.push(list.iter().rev().cloned().collect()),
        Value::String(_) | Value::Null | Value::Object(_) => {}
    }
    others.into_iter().map(Some).chain([None]).collect()
}

fn with_key(config: &Value, key: &str, value: Option<Value>) -> Value {
    let mut config = config.clone();
    match value {
        Some(value) => config[key] = value,
        None => drop(config.as_object_mut().unwrap().remove(key)),
    }
    config
}

fn keys(config: &Value) -> Vec<String> {
    config.as_object().unwrap().keys().cloned().collect()
}

#[test]
fn no_key_of_a_drafters_config_changes_a_token() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("drafter");
    let target = load_target(&golden("target")).unwrap();
    let plain = decode(&target, None, 1).unwrap();
    let (mut loaded, mut refused) = (0, 0);
    for (kind, files) in drafters() {
        files.write(&path);
        for key in keys(&files.config) {
            for value in others(&files.config[&key]) {
                let config = with_key(&files.config, &key, value.clone());
                checkpoint::write_json(&path.join("config.json"), &config).unwrap();
                match load_drafter(&path, target.config(), Precision::F32) {
                    Ok(drafter) => {
                        assert_eq!(decode(&target, Some(&drafter), 1).unwrap(), plain, "{kind} {key} {value:?}");
                        loaded += 1;
                    }
                    Err(error) => {
                        assert!(error.to_string().len() > 20, "{kind} {key} {value:?}: {error}");
                        refused += 1;
                    }
                }
            }
        }
    }
    assert!(loaded > 300 && refused > 500, "{loaded} loaded, {refused} refused");
}

/// The drafted tokens are those of plain decoding of the same target, whatever its config says; a drafter that does not fit it is refused.
#[test]
fn no_key_of_a_targets_config_makes_drafting_lossy() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("target");
    for (family, files) in targets() {
        files.write(&path);
        for key in keys(&files.config) {
            for value in others(&files.config[&key]) {
                let config = with_key(&files.config, &key, value.clone());
                checkpoint::write_json(&path.join("config.json"), &config).unwrap();
                let Ok(target) = load_target(&path) else { continue };
                let plain = decode(&target, None, 1);
                let drafter = load_drafter(&golden("decode/dspark_vanilla"), target.config(), Precision::F32);
                let drafted = drafter.and_then(|drafter| decode(&target, Some(&drafter), 1));
                match (plain, drafted) {
                    (Ok(plain), Ok(drafted)) => assert_eq!(plain, drafted, "{family} {key} {value:?}"),
                    (Err(error), _) => assert!(is_not_finite(&error), "{family} {key} {value:?}: {error}"),
                    (Ok(_), Err(error)) => {
                        assert!(matches!(error, Error::Mismatch { .. }), "{family} {key} {value:?}: {error}");
                    }
                }
            }
        }
    }
}

#[test]
fn keys_of_the_text_side_are_refused_by_name_or_read_alike() {
    let folder = TempDir::new().unwrap();
    let path = tiny_model::model_folder(folder.path());
    let model = ResolvedModel { path: path.clone(), name: "tiny".into() };
    let prompt = |text: &str| {
        let side = load_text_side(&model)?;
        let messages =
            [deepspec_datasets::conversation::Message::new(deepspec_datasets::conversation::Role::User, text)];
        Ok::<_, Error>(side.renderer.render_prompt(&messages, None)?)
    };
    let original = prompt("hello").unwrap();
    for file in ["tokenizer_config.json", "generation_config.json"] {
        let config: Value = serde_json::from_slice(&fs_err::read(path.join(file)).unwrap()).unwrap();
        for key in keys(&config) {
            for value in others(&config[&key]) {
                checkpoint::write_json(&path.join(file), &with_key(&config, &key, value.clone())).unwrap();
                match prompt("hello") {
                    // Another template gives another prompt.
                    Ok(_) if key == "chat_template" => {}
                    Ok(read) => assert_eq!(read, original, "{file} {key} {value:?}"),
                    Err(error) => {
                        let text = error.to_string();
                        let is_named = [key.clone(), key.replace('_', " ")].iter().any(|name| text.contains(name));
                        assert!(is_named, "{file} {key} {value:?}: {text}");
                    }
                }
            }
        }
        checkpoint::write_json(&path.join(file), &config).unwrap();
    }
    let mut config: Value = serde_json::from_slice(&fs_err::read(path.join("tokenizer_config.json")).unwrap()).unwrap();
    for key in ["bos_token", "eos_token"] {
        for wrong in [json!(7), json!(["<|im_end|>"]), json!({ "text": "<|im_end|>" })] {
            let right = std::mem::replace(&mut config[key], wrong);
            checkpoint::write_json(&path.join("tokenizer_config.json"), &config).unwrap();
            let text = prompt("hello").unwrap_err().to_string();
            assert!(text.contains(key) && text.contains("tokenizer_config.json"), "{text}");
            config[key] = right;
        }
    }
}
