//! Files as they are in the wild, where they are at hand.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use candle_core::DType;
use deepspec_models::checkpoint;
use deepspec_models::config::{DraftConfig, Family, MarkovHeadType, TargetConfig};
use deepspec_models::gguf::Gguf;
use deepspec_models::weights::Weights;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::{CPU, Named, flat, golden, load_all, parse_draft, path_from_env};

fn json(path: &Path) -> Value {
    serde_json::from_slice(&fs_err::read(path).unwrap()).unwrap()
}

/// Two values of a configuration file.
fn of(file: &Value, names: [&str; 2]) -> Value {
    json!(names.map(|name| &file[name]))
}

#[test]
fn golden_target_loads_whole() {
    let Some(folder) = golden("target") else { return };
    let config = TargetConfig::open(&folder).unwrap();
    let file = json(&folder.join("config.json"));
    assert_eq!(config.family.model_type(), file["model_type"]);
    assert_eq!(json!([config.hidden_size, config.num_hidden_layers]), of(&file, ["hidden_size", "num_hidden_layers"]));
    assert_eq!(json!([config.head_dim, config.vocab_size]), of(&file, ["head_dim", "vocab_size"]));
    assert_eq!(Some(config.rms_norm_eps), file["rms_norm_eps"].as_f64());
    assert_eq!(Some(config.rope.theta), file["rope_parameters"]["rope_theta"].as_f64());
    // Either file has a number or a list.
    let generation = json(&folder.join("generation_config.json"));
    let ids = [&file, &generation].map(|file| &file["eos_token_id"]);
    let ids = ids.into_iter().flat_map(|ids| ids.as_array().cloned().unwrap_or_else(|| vec![ids.clone()]));
    let expected: BTreeSet<u64> = ids.map(|id| id.as_u64().unwrap()).collect();
    assert!(config.stop_ids.iter().map(|&id| u64::from(id)).eq(expected), "{:?}", config.stop_ids);
    load_all(&Weights::open(&folder, DType::F32, &CPU).unwrap(), &config).unwrap();
}

#[test]
fn golden_drafters_parse_and_round_trip() {
    for (name, head, confidence) in [
        ("dspark_vanilla", Some(MarkovHeadType::Vanilla), true),
        ("dspark_gated", Some(MarkovHeadType::Gated), true),
        ("dspark_rnn", Some(MarkovHeadType::Rnn), true),
        ("dspark_vanilla_noconf", Some(MarkovHeadType::Vanilla), false),
        ("dflash", None, false),
    ] {
        let Some(folder) = golden(name) else { continue };
        let config = DraftConfig::from_folder(&folder).unwrap();
        assert_eq!((config.markov_head_type, config.enable_confidence_head), (head, confidence));
        let file = json(&folder.join("config.json"));
        assert_eq!(json!([config.block_size, config.num_anchors]), of(&file, ["block_size", "num_anchors"]));
        assert_eq!(
            json!([config.mask_token_id, config.target_layer_ids]),
            of(&file, ["mask_token_id", "target_layer_ids"])
        );
        assert!(config.sample_from_anchor && config.body.qk_norm);
        assert_eq!(parse_draft(&config.to_json()).unwrap(), config);

        let (_, weights) = checkpoint::load(&folder, DType::F32, &CPU).unwrap();
        let hidden = file["hidden_size"].as_u64().unwrap() as usize;
        assert_eq!(weights.shape("fc.weight").unwrap(), [hidden, config.target_layer_ids.len() * hidden]);
        let names: Vec<String> = weights.names().map(String::from).collect();
        let tensors: Named = names
            .into_iter()
            .map(|name| {
                let shape = weights.shape(&name).unwrap().to_vec();
                let tensor = weights.get(&name, &shape).unwrap();
                (name, tensor)
            })
            .collect();
        weights.finish().unwrap();
        let copy = TempDir::new().unwrap();
        checkpoint::save(copy.path().join("c"), &config.to_json(), &tensors).unwrap();
        let again = Weights::open(copy.path().join("c"), DType::F32, &CPU).unwrap();
        assert_eq!(again.fingerprint(&config.body), weights.fingerprint(&config.body));
    }
}

#[test]
fn smollm2_gguf_loads_whole() {
    let Some(path) = path_from_env("DEEPSPEC_SMOLLM2_GGUF") else {
        println!("skipped: DEEPSPEC_SMOLLM2_GGUF is not set");
        return;
    };
    let gguf = Arc::new(Gguf::open(&path).unwrap());
    let config = TargetConfig::from_gguf(&gguf).unwrap();
    assert_eq!((config.family, config.hidden_size, config.intermediate_size), (Family::Llama, 576, 1536));
    assert_eq!((config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads), (30, 9, 3));
    assert_eq!((config.vocab_size, config.head_dim, config.max_position_embeddings), (49152, 64, 8192));
    assert_eq!((config.rope.theta, config.rms_norm_eps), (100000.0, 1e-5));
    assert!(config.tie_word_embeddings && !config.attention_bias && !config.qk_norm);
    assert!(config.stop_ids.contains(&2));
    let vocabulary = gguf.vocabulary().unwrap();
    assert_eq!(vocabulary.tokens.len(), 49152);
    assert_eq!(vocabulary.tokens[1], "<|im_start|>");
    assert!(vocabulary.merges.len() > 40000 && vocabulary.chat_template.unwrap().contains("im_start"));
    let weights = Weights::from_gguf(gguf, DType::F32, &CPU).unwrap();
    let tensors = load_all(&weights, &config).unwrap();
    assert!(tensors.iter().all(|(_, tensor)| flat(tensor).iter().all(|value| value.is_finite())));
    assert_eq!(weights.fingerprint(&config), weights.fingerprint(&TargetConfig::open(&path).unwrap()));
}
