//! Bringing weights in: configs, GGUF and safetensors files, checkpoints; strictness and hostile input. Here: a tiny model in both
//! formats.

#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests; a skipped test says so")]

mod configs;
mod finite;
mod gguf;
mod loading;
mod real_files;
mod rope;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use deepspec_models::checkpoint;
use deepspec_models::config::{DraftConfig, Family, TargetConfig};
use deepspec_models::error::Result;
use deepspec_models::gguf::Gguf;
use deepspec_models::weights::Weights;
use serde_json::{Value, json};
use tempfile::TempDir;

const CPU: Device = Device::Cpu;

#[expect(clippy::disallowed_methods, reason = "tests find their data through the environment")]
fn path_from_env(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).map(PathBuf::from)
}

fn golden(folder: &str) -> Option<PathBuf> {
    let root = path_from_env("DEEPSPEC_GOLDEN").unwrap_or_else(|| "tests/golden".into());
    let path = root.join(folder);
    if !path.is_dir() {
        println!("skipped: no golden data at {}", path.display());
        return None;
    }
    Some(path)
}

// ---- a tiny model in both formats ----

type Named = Vec<(String, Tensor)>;

fn tiny_config(family: Family) -> Value {
    let (architecture, model_type) = match family {
        Family::Llama => ("LlamaForCausalLM", "llama"),
        Family::Qwen3 => ("Qwen3ForCausalLM", "qwen3"),
    };
    json!({
        "architectures": [architecture], "model_type": model_type, "hidden_act": "silu", "hidden_size": 8,
        "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 6,
        "vocab_size": 10, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": false,
        "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
    })
}

fn parse(json: &Value) -> Result<TargetConfig> {
    TargetConfig::from_json(Path::new("config.json"), json)
}

/// Names and shapes that the config implies.
fn expected_tensors(config: &TargetConfig) -> Vec<(String, Vec<usize>)> {
    let (hidden, inner) = (config.hidden_size, config.intermediate_size);
    let (q, kv) = (config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim);
    let mut list = vec![
        ("model.embed_tokens.weight".to_string(), vec![config.vocab_size, hidden]),
        ("model.norm.weight".to_string(), vec![hidden]),
    ];
    if !config.tie_word_embeddings {
        list.push(("lm_head.weight".to_string(), vec![config.vocab_size, hidden]));
    }
    for layer in 0..config.num_hidden_layers {
        let mut put =
            |name: &str, shape: &[usize]| list.push((format!("model.layers.{layer}.{name}.weight"), shape.into()));
        put("input_layernorm", &[hidden]);
        put("post_attention_layernorm", &[hidden]);
        put("self_attn.q_proj", &[q, hidden]);
        put("self_attn.k_proj", &[kv, hidden]);
        put("self_attn.v_proj", &[kv, hidden]);
        put("self_attn.o_proj", &[hidden, q]);
        put("mlp.gate_proj", &[inner, hidden]);
        put("mlp.up_proj", &[inner, hidden]);
        put("mlp.down_proj", &[hidden, inner]);
        if config.qk_norm {
            put("self_attn.q_norm", &[config.head_dim]);
            put("self_attn.k_norm", &[config.head_dim]);
        }
    }
    list
}

fn tiny_tensors(config: &TargetConfig) -> Named {
    let mut next = 0.0;
    let mut tensors = Vec::new();
    for (name, shape) in expected_tensors(config) {
        let count: usize = shape.iter().product();
        let values: Vec<f32> = (0..count).map(|i| next + i as f32 / 64.0).collect();
        next += 1.0;
        tensors.push((name, Tensor::from_vec(values, shape, &CPU).unwrap()));
    }
    tensors
}

fn load_all(weights: &Weights, config: &TargetConfig) -> Result<Named> {
    let tensors = expected_tensors(config).into_iter().map(|(name, shape)| {
        let tensor = weights.get(&name, &shape)?;
        Ok((name, tensor))
    });
    let tensors = tensors.collect::<Result<Vec<_>>>()?;
    weights.finish()?;
    Ok(tensors)
}

fn flat(tensor: &Tensor) -> Vec<f32> {
    tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

fn assert_same(found: &Named, expected: &Named) {
    assert_eq!(found.len(), expected.len());
    for ((name, found), (_, expected)) in found.iter().zip(expected) {
        assert_eq!(found.dims(), expected.dims(), "{name}");
        assert_eq!(flat(found), flat(expected), "{name}");
    }
}

fn write_model(folder: &Path, config: &Value, tensors: &Named) {
    checkpoint::save(folder, config, tensors).unwrap();
}

// ---- GGUF writer ----

#[derive(Default)]
struct GgufWriter {
    metadata: Vec<u8>,
    metadata_count: u64,
    directory: Vec<u8>,
    data: Vec<u8>,
    tensor_count: u64,
}

fn put_string(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

impl GgufWriter {
    fn raw(&mut self, key: &str, kind: u32, value: &[u8]) -> &mut Self {
        put_string(&mut self.metadata, key);
        self.metadata.extend(kind.to_le_bytes());
        self.metadata.extend(value);
        self.metadata_count += 1;
        self
    }

    fn u32(&mut self, key: &str, value: u32) -> &mut Self {
        self.raw(key, 4, &value.to_le_bytes())
    }

    fn f32(&mut self, key: &str, value: f32) -> &mut Self {
        self.raw(key, 6, &value.to_le_bytes())
    }

    fn string(&mut self, key: &str, value: &str) -> &mut Self {
        let mut out = Vec::new();
        put_string(&mut out, value);
        self.raw(key, 8, &out)
    }

    fn strings(&mut self, key: &str, values: &[&str]) -> &mut Self {
        let mut out = 8u32.to_le_bytes().to_vec();
        out.extend((values.len() as u64).to_le_bytes());
        for value in values {
            put_string(&mut out, value);
        }
        self.raw(key, 9, &out)
    }

    fn tensor(&mut self, name: &str, shape: &[usize], type_id: u32, data: &[u8]) -> &mut Self {
        put_string(&mut self.directory, name);
        self.directory.extend((shape.len() as u32).to_le_bytes());
        self.directory.extend(shape.iter().rev().flat_map(|&dim| (dim as u64).to_le_bytes()));
        self.directory.extend(type_id.to_le_bytes());
        self.directory.extend((self.data.len() as u64).to_le_bytes());
        self.data.extend(data);
        self.data.resize(self.data.len().next_multiple_of(32), 0);
        self.tensor_count += 1;
        self
    }

    fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(3u32.to_le_bytes());
        out.extend(self.tensor_count.to_le_bytes());
        out.extend(self.metadata_count.to_le_bytes());
        out.extend(&self.metadata);
        out.extend(&self.directory);
        out.resize(out.len().next_multiple_of(32), 0);
        out.extend(&self.data);
        out
    }
}

fn gguf_name(name: &str) -> String {
    [
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("lm_head", "output"),
        ("model.layers", "blk"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.q_norm", "attn_q_norm"),
        ("self_attn.k_norm", "attn_k_norm"),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
    ]
    .iter()
    .fold(name.to_string(), |name, (from, to)| name.replace(from, to))
}

/// Row r of [head, 2, pair] goes to [head, pair, 2].
fn interleave(values: &[f32], heads: usize, head_dim: usize, columns: usize) -> Vec<f32> {
    let mut out = vec![0.0; values.len()];
    for head in 0..heads {
        for half in 0..2 {
            for pair in 0..head_dim / 2 {
                let from = (head * head_dim + half * head_dim / 2 + pair) * columns;
                let to = (head * head_dim + pair * 2 + half) * columns;
                out[to..to + columns].copy_from_slice(&values[from..from + columns]);
            }
        }
    }
    out
}

fn tiny_gguf(config: &TargetConfig, tensors: &Named) -> GgufWriter {
    let arch = config.family.model_type();
    let mut writer = GgufWriter::default();
    writer.string("general.architecture", arch);
    for (key, value) in [
        ("embedding_length", config.hidden_size),
        ("feed_forward_length", config.intermediate_size),
        ("block_count", config.num_hidden_layers),
        ("context_length", config.max_position_embeddings),
        ("attention.head_count", config.num_attention_heads),
        ("attention.head_count_kv", config.num_key_value_heads),
        ("attention.key_length", config.head_dim),
        ("attention.value_length", config.head_dim),
        ("rope.dimension_count", config.head_dim),
    ] {
        writer.u32(&format!("{arch}.{key}"), value as u32);
    }
    writer.f32(&format!("{arch}.attention.layer_norm_rms_epsilon"), config.rms_norm_eps as f32);
    writer.f32(&format!("{arch}.rope.freq_base"), config.rope.theta as f32);
    writer.string("tokenizer.ggml.model", "gpt2").string("tokenizer.ggml.pre", "smollm");
    writer.strings("tokenizer.ggml.tokens", &["<e>", "<b>", "<s>", "a", "b", "c", "ab", "d", "Ġ", "e"]);
    writer.strings("tokenizer.ggml.merges", &["a b"]);
    writer.u32("tokenizer.ggml.bos_token_id", 1).u32("tokenizer.ggml.eos_token_id", 2);
    writer.raw("tokenizer.ggml.add_bos_token", 7, &[0]);
    writer.string("tokenizer.chat_template", "{{ messages }}");
    for (name, tensor) in tensors {
        let values = flat(tensor);
        let values = match config.family {
            Family::Llama if name.contains("q_proj") => {
                interleave(&values, config.num_attention_heads, config.head_dim, config.hidden_size)
            }
            Family::Llama if name.contains("k_proj") => {
                interleave(&values, config.num_key_value_heads, config.head_dim, config.hidden_size)
            }
            _ => values,
        };
        let data: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        writer.tensor(&gguf_name(name), tensor.dims(), 0, &data);
    }
    writer
}

fn tiny_gguf_bytes(family: Family) -> (TargetConfig, Named, Vec<u8>) {
    let config = parse(&tiny_config(family)).unwrap();
    let tensors = tiny_tensors(&config);
    let bytes = tiny_gguf(&config, &tensors).bytes();
    (config, tensors, bytes)
}

fn write_bytes(folder: &TempDir, bytes: &[u8]) -> PathBuf {
    let path = folder.path().join("model.gguf");
    fs_err::write(&path, bytes).unwrap();
    path
}

/// Everything a reader of a GGUF file does.
fn read_whole_gguf(path: &Path) -> Result<()> {
    let gguf = Arc::new(Gguf::open(path)?);
    gguf.vocabulary()?;
    let config = TargetConfig::from_gguf(&gguf)?;
    let weights = Weights::from_gguf(gguf, DType::F32, &CPU)?;
    weights.fingerprint(&config);
    // A flipped bit in a size may ask for an absurd number of layers; the first missing one ends the loop.
    let layers = config.num_hidden_layers.min(4);
    load_all(&weights, &TargetConfig { num_hidden_layers: layers, ..config }).map(drop)
}

fn parse_draft(json: &Value) -> Result<DraftConfig> {
    DraftConfig::from_json(Path::new("config.json"), json)
}
