//! Strict loading: tensors at fault are named, shards, checkpoints.

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use deepspec_models::checkpoint;
use deepspec_models::config::{Family, TargetConfig};
use deepspec_models::error::Error;
use deepspec_models::linear::Precision;
use deepspec_models::target::Target;
use deepspec_models::weights::{INDEX_FILE, SINGLE_FILE, Weights};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::{
    CPU, Named, assert_same, flat, gguf_name, golden, load_all, parse, tiny_config, tiny_gguf, tiny_tensors,
    write_bytes, write_model,
};

#[test]
fn four_bit_precision_needs_weights_in_four_bits() {
    let Some(path) = golden("target") else { return };
    let config = TargetConfig::from_folder(&path).unwrap();
    let weights = Weights::open(&path, DType::F32, &CPU).unwrap();
    let layers = 4 * config.num_hidden_layers + 1;
    let error = Target::load(config, &weights, Precision::Q4).unwrap_err();
    assert!(matches!(&error, Error::NoFourBits { layers: found, .. } if *found == layers), "{error}");
    assert!(error.hint().is_some_and(|hint| hint.contains("q8")));
}

#[test]
fn each_dropped_renamed_or_reshaped_tensor_is_named() {
    for family in [Family::Llama, Family::Qwen3] {
        let json = tiny_config(family);
        let config = parse(&json).unwrap();
        let tensors = tiny_tensors(&config);
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("m");
        let load = |tensors: &Named| {
            write_model(&path, &json, tensors);
            load_all(&Weights::open(&path, DType::F32, &CPU).unwrap(), &config)
        };
        load(&tensors).unwrap();
        for index in 0..tensors.len() {
            let name = &tensors[index].0;
            let mut dropped = tensors.clone();
            dropped.remove(index);
            let error = load(&dropped).unwrap_err();
            assert!(matches!(&error, Error::TensorMissing { tensor, .. } if tensor == name), "{error}");

            let mut renamed = tensors.clone();
            renamed[index].0 = format!("{name}.old");
            let error = load(&renamed).unwrap_err();
            assert!(matches!(&error, Error::TensorMissing { tensor, .. } if tensor == name), "{error}");

            let mut added = tensors.clone();
            added.push((format!("{name}.old"), tensors[index].1.clone()));
            let error = load(&added).unwrap_err();
            assert!(error.to_string().contains(&format!("`{name}.old`")), "{error}");

            let mut reshaped = tensors.clone();
            reshaped[index].1 = tensors[index].1.unsqueeze(0).unwrap();
            let error = load(&reshaped).unwrap_err();
            assert!(matches!(&error, Error::TensorShape { tensor, .. } if tensor == name), "{error}");
            let dims = tensors[index].1.dims();
            assert!(error.to_string().contains(&format!("expected {dims:?}")), "{error}");
        }
    }
}

#[test]
fn each_dropped_or_renamed_gguf_tensor_is_named() {
    let config = parse(&tiny_config(Family::Llama)).unwrap();
    let tensors = tiny_tensors(&config);
    let folder = TempDir::new().unwrap();
    let load = |tensors: &Named| {
        let path = write_bytes(&folder, &tiny_gguf(&config, tensors).bytes());
        Weights::open(&path, DType::F32, &CPU).and_then(|weights| load_all(&weights, &config))
    };
    for (index, (name, _)) in tensors.iter().enumerate() {
        let mut dropped = tensors.clone();
        dropped.remove(index);
        let error = load(&dropped).unwrap_err().to_string();
        assert!(error.contains(name) || error.contains(&gguf_name(name)), "{error}");

        let mut added = tensors.clone();
        added.push((format!("{name}.extra"), tensors[index].1.clone()));
        let error = load(&added).unwrap_err().to_string();
        assert!(error.contains(&gguf_name(&format!("{name}.extra"))), "{error}");
    }
}

#[test]
fn all_unused_tensors_are_named_and_derived_buffers_are_not() {
    let folder = TempDir::new().unwrap();
    let tensor = Tensor::zeros(2, DType::F32, &CPU).unwrap();
    let names = ["used", "extra.b", "extra.a", "tied", "model.layers.0.self_attn.rotary_emb.inv_freq"];
    let tensors: Named = names.map(|name| (name.to_string(), tensor.clone())).into();
    write_model(&folder.path().join("m"), &json!({}), &tensors);
    let weights = Weights::open(folder.path().join("m"), DType::F32, &CPU).unwrap();
    weights.get("used", &[2]).unwrap();
    assert!(weights.skip("tied") && !weights.skip("absent"));
    let Err(Error::TensorsUnused { tensors, .. }) = weights.finish() else { panic!("two tensors are unused") };
    assert_eq!(tensors, ["extra.a", "extra.b"]);
}

#[test]
fn stored_half_types_convert_and_other_types_are_refused() {
    let folder = TempDir::new().unwrap();
    let source = Tensor::new(&[1.5f32, -2.25, 3.0e-3], &CPU).unwrap();
    let tensors: Named = [DType::F32, DType::F16, DType::BF16]
        .map(|dtype| (format!("{dtype:?}"), source.to_dtype(dtype).unwrap()))
        .into();
    write_model(&folder.path().join("m"), &json!({}), &tensors);
    for wanted in [DType::F32, DType::BF16] {
        let weights = Weights::open(folder.path().join("m"), wanted, &CPU).unwrap();
        for (name, stored) in &tensors {
            let found = weights.get(name, &[3]).unwrap();
            assert_eq!(found.dtype(), wanted);
            assert_eq!(flat(&found), flat(&stored.to_dtype(wanted).unwrap()), "{name}");
        }
    }

    let ids = Tensor::new(&[1i64, 2], &CPU).unwrap();
    let doubles = Tensor::new(&[1f64, 2.0], &CPU).unwrap();
    let error = checkpoint::save(folder.path().join("doubles"), &json!({}), &[("fc", doubles)]).unwrap_err();
    assert!(matches!(&error, Error::TensorDtype { tensor, .. } if tensor == "fc"), "{error}");
    safetensors::serialize_to_file([("d2t", &ids)], None, &folder.path().join("m").join(SINGLE_FILE)).unwrap();
    let error = Weights::open(folder.path().join("m"), DType::F32, &CPU).unwrap().get("d2t", &[2]).unwrap_err();
    assert!(matches!(&error, Error::TensorDtype { tensor, .. } if tensor == "d2t"), "{error}");
}

#[test]
fn whole_numbers_are_read_as_stored() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join(SINGLE_FILE);
    let (long, short) = (Tensor::new(&[i64::MIN, 7], &CPU).unwrap(), Tensor::new(&[-3i32, 7], &CPU).unwrap());
    safetensors::serialize_to_file([("i64", &long), ("i32", &short)], None, &path).unwrap();
    let weights = Weights::open(folder.path(), DType::F32, &CPU).unwrap();
    assert_eq!(weights.integers("i64", &[2]).unwrap(), [i64::MIN, 7]);
    assert!(weights.finish().unwrap_err().to_string().contains("`i32`"));
    assert_eq!(weights.integers("i32", &[2]).unwrap(), [-3, 7]);
    weights.finish().unwrap();
    assert!(matches!(weights.integers("i64", &[3]), Err(Error::TensorShape { .. })));
    assert!(matches!(weights.integers("u8", &[3]), Err(Error::TensorMissing { .. })));

    checkpoint::save(folder.path().join("c"), &json!({}), &[("flags", Tensor::new(&[1u8, 0], &CPU).unwrap())]).unwrap();
    let weights = Weights::open(folder.path().join("c"), DType::F32, &CPU).unwrap();
    assert_eq!(weights.integers("flags", &[2]).unwrap(), [1, 0]);
    assert!(matches!(weights.get("flags", &[2]), Err(Error::TensorDtype { .. })));
}

// ---- shards ----

fn write_shards(folder: &Path, tensors: &Named, shards: usize) -> Value {
    fs_err::create_dir_all(folder).unwrap();
    let mut map = serde_json::Map::new();
    for shard in 0..shards {
        let file = format!("model-{:05}-of-{shards:05}.safetensors", shard + 1);
        let part: Named = tensors.iter().skip(shard).step_by(shards).cloned().collect();
        map.extend(part.iter().map(|(name, _)| (name.clone(), json!(file))));
        checkpoint::write_tensors(&folder.join(&file), &part).unwrap();
    }
    json!({"metadata": {}, "weight_map": map})
}

#[test]
fn shards_load_as_one_and_the_fingerprint_ignores_them() {
    let json = tiny_config(Family::Qwen3);
    let config = parse(&json).unwrap();
    let mut tensors = tiny_tensors(&config);
    let folder = TempDir::new().unwrap();
    let (single, sharded) = (folder.path().join("single"), folder.path().join("sharded"));
    write_model(&single, &json, &tensors);
    checkpoint::write_json(&sharded.join(INDEX_FILE), &write_shards(&sharded, &tensors, 3)).unwrap();
    let single_weights = Weights::open(&single, DType::F32, &CPU).unwrap();
    let weights = Weights::open(&sharded, DType::F32, &CPU).unwrap();
    assert_same(&load_all(&weights, &config).unwrap(), &tensors);
    let fingerprint = single_weights.fingerprint(&config);
    assert_eq!(fingerprint.len(), 16);
    assert_eq!(weights.fingerprint(&config), fingerprint);

    let other_config = TargetConfig { rms_norm_eps: 1e-6, ..config.clone() };
    assert_ne!(weights.fingerprint(&other_config), fingerprint);
    tensors[3].1 = (&tensors[3].1 + 1.0).unwrap();
    write_model(&single, &json, &tensors);
    assert_ne!(Weights::open(&single, DType::F32, &CPU).unwrap().fingerprint(&config), fingerprint);
}

#[test]
fn index_and_shards_must_agree() {
    let config = parse(&tiny_config(Family::Qwen3)).unwrap();
    let tensors = tiny_tensors(&config);
    let folder = TempDir::new().unwrap();
    let good = write_shards(folder.path(), &tensors, 2);
    let open = |index: &Value| {
        checkpoint::write_json(&folder.path().join(INDEX_FILE), index).unwrap();
        Weights::open(folder.path(), DType::F32, &CPU)
    };
    open(&good).unwrap();
    let cases: [(&str, Value); 5] = [
        ("lm_head.weight", json!("model-00001-of-00002.safetensors")),
        ("ghost.weight", json!("model-00001-of-00002.safetensors")),
        ("weight_map.escape", json!("../model.safetensors")),
        ("weight_map.number", json!(3)),
        ("absent.safetensors", json!("absent.safetensors")),
    ];
    for (name, file) in cases {
        let mut index = good.clone();
        let listed = index["weight_map"]["lm_head.weight"].clone();
        let file = if listed == file { json!("model-00002-of-00002.safetensors") } else { file };
        index["weight_map"][name.trim_start_matches("weight_map.")] = file;
        let error = open(&index).unwrap_err().to_string();
        assert!(error.contains(name), "{name}: {error}");
    }
    let mut index = good.clone();
    index["weight_map"].as_object_mut().unwrap().remove("model.norm.weight");
    let error = open(&index).unwrap_err().to_string();
    assert!(error.contains("model.norm.weight"), "{error}");
}

// ---- checkpoints ----

#[test]
fn checkpoint_round_trips_and_is_replaced_whole() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("runs").join("step_10");
    let first: Named = vec![("fc.weight".into(), Tensor::new(&[[1f32, 2.0], [3.0, 4.0]], &CPU).unwrap().t().unwrap())];
    checkpoint::save(&path, &json!({"step": 1}), &first).unwrap();
    let bytes = fs_err::read(path.join(SINGLE_FILE)).unwrap();
    checkpoint::save(&path, &json!({"step": 1}), &first).unwrap();
    assert_eq!(fs_err::read(path.join(SINGLE_FILE)).unwrap(), bytes);

    let read = || {
        let (config, weights) = checkpoint::load(&path, DType::F32, &CPU).unwrap();
        let tensor = weights.get("fc.weight", &[2, 2]).unwrap();
        weights.finish().unwrap();
        (config["step"].as_u64().unwrap(), flat(&tensor))
    };
    assert_eq!(read(), (1, vec![1.0, 3.0, 2.0, 4.0]));

    // A save that fails leaves the old checkpoint and nothing else.
    let failed = checkpoint::replace_folder(&path, |fresh| {
        checkpoint::write_json(&fresh.join("config.json"), &json!({"step": 2}))?;
        checkpoint::write_tensors(&fresh.join(SINGLE_FILE), &[("ids", Tensor::new(&[1u32], &CPU)?)])
    });
    assert!(failed.is_err());
    assert_eq!(read().0, 1);
    let names: Vec<_> =
        fs_err::read_dir(path.parent().unwrap()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["step_10"]);

    // A crash between the two renames: the old one is found, and the next save tidies up.
    let aside = path.with_file_name(".step_10.previous");
    fs_err::rename(&path, &aside).unwrap();
    assert_eq!(read().0, 1);
    checkpoint::save(&path, &json!({"step": 3}), &first).unwrap();
    assert_eq!(read().0, 3);
    assert!(!aside.exists());
    assert!(checkpoint::load(folder.path().join("none"), DType::F32, &CPU).is_err());
    let twice: Named = vec![first[0].clone(), first[0].clone()];
    assert!(checkpoint::save(&path, &json!({}), &twice).unwrap_err().to_string().contains("fc.weight"));
}

#[test]
fn a_checkpoint_in_memory_is_read_as_one_on_the_disk() {
    let folder = tempfile::tempdir().unwrap();
    let tensors = [
        ("a.weight", Tensor::arange(0f32, 6.0, &Device::Cpu).unwrap().reshape((2, 3)).unwrap()),
        ("d2t", Tensor::new(&[3i64, 5], &Device::Cpu).unwrap()),
        ("t2d", Tensor::new(&[1u8, 0, 1], &Device::Cpu).unwrap()),
    ];
    checkpoint::write_tensors(&folder.path().join("model.safetensors"), &tensors).unwrap();
    let on_disk = Weights::from_folder(folder.path(), DType::F32, &Device::Cpu).unwrap();
    let in_memory = checkpoint::in_memory("unsaved", &tensors).unwrap();
    for weights in [&on_disk, &in_memory] {
        let rows: Vec<Vec<f32>> = weights.get("a.weight", &[2, 3]).unwrap().to_vec2().unwrap();
        assert_eq!(rows, [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]);
        assert_eq!(weights.integers("d2t", &[2]).unwrap(), [3, 5]);
        assert_eq!(weights.integers("t2d", &[3]).unwrap(), [1, 0, 1]);
        weights.finish().unwrap();
    }
    let error = in_memory.get("b.weight", &[1]).unwrap_err().to_string();
    assert!(error.contains("unsaved") && error.contains("b.weight"), "{error}");
    assert!(Weights::from_bytes("cut", vec![9; 7], DType::F32, &Device::Cpu).is_err());
}
