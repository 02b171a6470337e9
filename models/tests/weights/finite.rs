//! Weights that are not finite: refused by file, tensor, kind, place and count, in every tensor and every kind of file.

use std::sync::Arc;

use candle_core::{DType, Tensor};
use deepspec_models::checkpoint;
use deepspec_models::config::{Family, TargetConfig};
use deepspec_models::error::Error;
use deepspec_models::linear::Precision;
use deepspec_models::target::Target;
use deepspec_models::weights::{INDEX_FILE, SINGLE_FILE, Weights};
use serde_json::json;
use tempfile::TempDir;

use super::{
    CPU, GgufWriter, Named, flat, gguf_name, parse, tiny_config, tiny_gguf, tiny_tensors, write_bytes, write_model,
};

const POISONS: [f32; 3] = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];

/// The tensors with `value` at a place of one of them.
fn with_value(tensors: &Named, at: usize, place: usize, value: f32) -> Named {
    let mut changed = tensors.clone();
    let mut values = flat(&changed[at].1);
    values[place] = value;
    changed[at].1 = Tensor::from_vec(values, changed[at].1.dims(), &CPU).unwrap();
    changed
}

/// What an error says of values that are not finite: file name, tensor, numbers of NaN and infinities, first index.
fn facts(error: Error) -> (String, String, usize, usize, Vec<usize>) {
    assert!(error.hint().is_some_and(|hint| hint.contains("earlier checkpoint")));
    match error {
        Error::WeightsNotFinite { path, tensor, nan, infinite, first } => {
            (path.file_name().unwrap().to_string_lossy().into_owned(), tensor, nan, infinite, first)
        }
        other => panic!("{other}"),
    }
}

fn kinds(value: f32) -> (usize, usize) {
    if value.is_nan() { (1, 0) } else { (0, 1) }
}

/// Row and column of a place.
fn index(place: usize, shape: &[usize]) -> Vec<usize> {
    match shape {
        [_, columns] => vec![place / columns, place % columns],
        _ => vec![place],
    }
}

#[test]
fn one_value_that_is_not_finite_in_any_tensor_of_a_target_is_refused_by_name() {
    let folder = TempDir::new().unwrap();
    for family in [Family::Llama, Family::Qwen3] {
        let config = parse(&tiny_config(family)).unwrap();
        let tensors = tiny_tensors(&config);
        for at in 0..tensors.len() {
            for (i, value) in POISONS.into_iter().enumerate() {
                let (name, shape) = (tensors[at].0.clone(), tensors[at].1.dims());
                let place = (at * 13 + i * 7) % tensors[at].1.elem_count();
                write_model(&folder.path().join("m"), &tiny_config(family), &with_value(&tensors, at, place, value));
                let weights = Weights::open(folder.path().join("m"), DType::F32, &CPU).unwrap();
                let error = Target::load(config.clone(), &weights, Precision::F32).unwrap_err();
                let (nan, infinite) = kinds(value);
                assert_eq!(facts(error), (SINGLE_FILE.into(), name.clone(), nan, infinite, index(place, shape)));
                assert!(weights.check_finite(&name).is_err());
            }
        }
    }
}

#[test]
fn stored_halves_are_checked_as_they_are_stored() {
    let folder = TempDir::new().unwrap();
    let config = parse(&tiny_config(Family::Qwen3)).unwrap();
    let tensors = tiny_tensors(&config);
    for dtype in [DType::F16, DType::BF16] {
        for value in POISONS {
            let mut changed = with_value(&tensors, 5, 11, value);
            for (_, tensor) in &mut changed {
                *tensor = tensor.to_dtype(dtype).unwrap();
            }
            write_model(&folder.path().join("m"), &tiny_config(Family::Qwen3), &changed);
            let weights = Weights::open(folder.path().join("m"), DType::F32, &CPU).unwrap();
            let (_, tensor, nan, infinite, first) =
                facts(Target::load(config.clone(), &weights, Precision::Q8).unwrap_err());
            assert_eq!((tensor, (nan, infinite)), (tensors[5].0.clone(), kinds(value)));
            assert_eq!(first, index(11, tensors[5].1.dims()));
        }
    }
}

#[test]
fn the_message_tells_file_tensor_kinds_counts_and_place() {
    let folder = TempDir::new().unwrap();
    let config = parse(&tiny_config(Family::Llama)).unwrap();
    let mut tensors = tiny_tensors(&config);
    for (place, value) in [(17, f32::INFINITY), (20, f32::NAN), (21, f32::NAN)] {
        tensors = with_value(&tensors, 0, place, value);
    }
    write_model(&folder.path().join("m"), &tiny_config(Family::Llama), &tensors);
    let weights = Weights::open(folder.path().join("m"), DType::F32, &CPU).unwrap();
    let message = Target::load(config, &weights, Precision::F32).unwrap_err().to_string();
    for part in [
        "model.safetensors`",
        "`model.embed_tokens.weight`",
        "NaN and infinity (2 and 1 of its values)",
        "row 2, column 1",
    ] {
        assert!(message.contains(part), "{part}: {message}");
    }
}

#[test]
fn the_shard_that_holds_the_value_is_named() {
    let folder = TempDir::new().unwrap();
    let config = parse(&tiny_config(Family::Qwen3)).unwrap();
    let tensors = with_value(&tiny_tensors(&config), 5, 2, f32::NAN);
    let mut map = serde_json::Map::new();
    for (number, part) in [&tensors[..4], &tensors[4..]].into_iter().enumerate() {
        let file = format!("part-{number}.safetensors");
        map.extend(part.iter().map(|(name, _)| (name.clone(), json!(file))));
        checkpoint::write_tensors(&folder.path().join(&file), part).unwrap();
    }
    checkpoint::write_json(&folder.path().join(INDEX_FILE), &json!({ "weight_map": map })).unwrap();
    let weights = Weights::from_folder(folder.path(), DType::F32, &CPU).unwrap();
    let (file, tensor, ..) = facts(Target::load(config, &weights, Precision::F32).unwrap_err());
    assert_eq!((file.as_str(), tensor), ("part-1.safetensors", tensors[5].0.clone()));
}

#[test]
fn one_value_that_is_not_finite_in_any_tensor_of_a_gguf_file_is_refused_by_its_name_there() {
    let folder = TempDir::new().unwrap();
    for family in [Family::Llama, Family::Qwen3] {
        let config = parse(&tiny_config(family)).unwrap();
        let tensors = tiny_tensors(&config);
        for at in 0..tensors.len() {
            for value in [f32::NAN, f32::NEG_INFINITY] {
                // The first value stays where it is when heads are interleaved.
                let path = write_bytes(&folder, &tiny_gguf(&config, &with_value(&tensors, at, 0, value)).bytes());
                let weights = Weights::open(&path, DType::F32, &CPU).unwrap();
                let (nan, infinite) = kinds(value);
                let first = vec![0; tensors[at].1.rank()];
                let expected = ("model.gguf".into(), gguf_name(&tensors[at].0), nan, infinite, first);
                assert_eq!(facts(Target::load(config.clone(), &weights, Precision::F32).unwrap_err()), expected);
            }
        }
    }
}

/// A matrix of four rows of 32 values as blocks of the quantised types: number of the type, bytes of a block, and where in it the
/// half-precision scale and minimum stand.
const BLOCKS: [(u32, usize, &[usize]); 5] =
    [(2, 18, &[0]), (3, 20, &[0, 2]), (6, 22, &[0]), (7, 24, &[0, 2]), (8, 34, &[0])];

#[test]
fn scales_and_minima_of_quantised_blocks_that_are_not_finite_are_refused() {
    let folder = TempDir::new().unwrap();
    let config = parse(&tiny_config(Family::Qwen3)).unwrap();
    for (type_id, bytes, places) in BLOCKS {
        for &place in places {
            for (half, is_nan) in [(0x7e00_u16, true), (0x7c00, false), (0xfc00, false)] {
                let mut data = vec![0x55_u8; 4 * bytes];
                for block in data.chunks_exact_mut(bytes) {
                    for &place in places {
                        block[place..place + 2].copy_from_slice(&0x3c00_u16.to_le_bytes());
                    }
                }
                let mut writer = tiny_gguf(&config, &tiny_tensors(&config));
                writer.tensor("blk.9.ffn_up.weight", &[4, 32], type_id, &data);
                let whole = Weights::open(write_bytes(&folder, &writer.bytes()), DType::F32, &CPU).unwrap();
                whole.get("model.layers.9.mlp.up_proj.weight", &[4, 32]).unwrap();

                data[2 * bytes + place..2 * bytes + place + 2].copy_from_slice(&half.to_le_bytes());
                let mut writer: GgufWriter = tiny_gguf(&config, &tiny_tensors(&config));
                writer.tensor("blk.9.ffn_up.weight", &[4, 32], type_id, &data);
                let damaged = Weights::open(write_bytes(&folder, &writer.bytes()), DType::F32, &CPU).unwrap();
                let error = damaged.get("model.layers.9.mlp.up_proj.weight", &[4, 32]).unwrap_err();
                let (_, tensor, nan, infinite, first) = facts(error);
                assert_eq!((tensor.as_str(), first[0]), ("blk.9.ffn_up.weight", 2), "type {type_id}");
                assert_eq!((nan + infinite, nan == 32), (32, is_nan), "type {type_id}");
            }
        }
    }
}

#[test]
fn a_head_that_repeats_the_embedding_is_checked_though_it_is_not_used() {
    let folder = TempDir::new().unwrap();
    let mut json = tiny_config(Family::Llama);
    json["tie_word_embeddings"] = json!(true);
    let config: TargetConfig = parse(&json).unwrap();
    let mut tensors = tiny_tensors(&config);
    let head = Tensor::full(f32::NAN, (config.vocab_size, config.hidden_size), &CPU).unwrap();
    tensors.push(("lm_head.weight".into(), head));
    write_model(&folder.path().join("m"), &json, &tensors);
    let weights = Arc::new(Weights::open(folder.path().join("m"), DType::F32, &CPU).unwrap());
    let (_, tensor, nan, ..) = facts(Target::load(config, &weights, Precision::F32).unwrap_err());
    assert_eq!((tensor.as_str(), nan), ("lm_head.weight", 80));
}

#[test]
fn the_largest_values_of_each_type_load() {
    let folder = TempDir::new().unwrap();
    let config = parse(&tiny_config(Family::Llama)).unwrap();
    let tensors = tiny_tensors(&config);
    for (dtype, largest) in [(DType::F32, f32::MAX), (DType::BF16, f32::from_bits(0x7f7f_0000)), (DType::F16, 65504.0)]
    {
        for at in 0..tensors.len() {
            let mut changed = with_value(&tensors, at, 1, largest);
            changed[at].1 = changed[at].1.to_dtype(dtype).unwrap();
            write_model(&folder.path().join("m"), &tiny_config(Family::Llama), &changed);
            let weights = Weights::open(folder.path().join("m"), DType::F32, &CPU).unwrap();
            Target::load(config.clone(), &weights, Precision::F32).unwrap();
        }
    }
}

#[test]
#[cfg(unix)]
fn weights_get_the_mode_of_any_new_file_and_keep_that_of_the_file_they_replace() {
    use std::os::unix::fs::PermissionsExt;
    let mode = |path: &std::path::Path| fs_err::metadata(path).unwrap().permissions().mode() & 0o777;
    let folder = TempDir::new().unwrap();
    let (plain, file) = (folder.path().join("plain"), folder.path().join("w.safetensors"));
    fs_err::write(&plain, "").unwrap();
    let tensors = tiny_tensors(&parse(&tiny_config(Family::Llama)).unwrap());
    checkpoint::write_tensors(&file, &tensors).unwrap();
    assert_eq!(mode(&file), mode(&plain));
    fs_err::set_permissions(&file, std::fs::Permissions::from_mode(0o640)).unwrap();
    checkpoint::write_tensors(&file, &tensors).unwrap();
    assert_eq!(mode(&file), 0o640);
    // What is copied from other weights, as exports are.
    let copy = folder.path().join("copy.safetensors");
    write_model(&folder.path().join("m"), &tiny_config(Family::Llama), &tensors);
    let weights = Weights::open(folder.path().join("m"), DType::F32, &CPU).unwrap();
    weights.write(&copy, &[("x".into(), tensors[0].0.clone())]).unwrap();
    for file in [&copy, &folder.path().join("m/model.safetensors"), &folder.path().join("m/config.json")] {
        assert_eq!(mode(file), mode(&plain), "{}", file.display());
    }
}

#[test]
fn poisoned_weights_are_not_exported() {
    let folder = TempDir::new().unwrap();
    let tensors = with_value(&tiny_tensors(&parse(&tiny_config(Family::Llama)).unwrap()), 0, 9, f32::NAN);
    write_model(&folder.path().join("m"), &tiny_config(Family::Llama), &tensors);
    let weights = Weights::open(folder.path().join("m"), DType::F32, &CPU).unwrap();
    let copy = folder.path().join("copy.safetensors");
    let error = weights.write(&copy, &[("x".into(), tensors[0].0.clone())]).unwrap_err();
    assert_eq!(facts(error).1, "model.embed_tokens.weight");
    assert!(!copy.exists());
}
