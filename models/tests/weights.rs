//! Bringing weights in: configs, GGUF and safetensors files, checkpoints; strictness and hostile input.

#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests; a skipped test says so")]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Tensor};
use deepspec_models::checkpoint;
use deepspec_models::config::{DraftConfig, Family, MarkovHeadType, RopeScaling, TargetConfig};
use deepspec_models::error::{Error, Result};
use deepspec_models::gguf::{Gguf, Value as GgufValue};
use deepspec_models::weights::{INDEX_FILE, SINGLE_FILE, Weights};
use proptest::prelude::*;
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

// ---- GGUF ----

#[test]
fn gguf_and_safetensors_give_the_same_config_and_weights() {
    for family in [Family::Llama, Family::Qwen3] {
        let (config, tensors, bytes) = tiny_gguf_bytes(family);
        let folder = TempDir::new().unwrap();
        let path = write_bytes(&folder, &bytes);
        let from_gguf = TargetConfig::open(&path).unwrap();
        assert_eq!(from_gguf, config);
        let weights = Weights::open(&path, DType::F32, &CPU).unwrap();
        assert_same(&load_all(&weights, &config).unwrap(), &tensors);

        let hf = folder.path().join("hf");
        write_model(&hf, &tiny_config(family), &tensors);
        let weights = Weights::open(&hf, DType::F32, &CPU).unwrap();
        assert_same(&load_all(&weights, &TargetConfig::open(&hf).unwrap()).unwrap(), &tensors);
    }
}

#[test]
fn gguf_vocabulary_and_typed_metadata() {
    let (_, _, bytes) = tiny_gguf_bytes(Family::Llama);
    let folder = TempDir::new().unwrap();
    let gguf = Gguf::open(write_bytes(&folder, &bytes)).unwrap();
    let vocabulary = gguf.vocabulary().unwrap();
    assert_eq!((vocabulary.model.as_str(), vocabulary.pre.as_deref()), ("gpt2", Some("smollm")));
    assert_eq!(vocabulary.tokens[8], "Ġ");
    assert_eq!(vocabulary.merges, ["a b"]);
    assert_eq!(
        (vocabulary.bos, vocabulary.eos, vocabulary.pad, vocabulary.add_bos),
        (Some(1), Some(2), None, Some(false))
    );
    assert_eq!(vocabulary.chat_template.as_deref(), Some("{{ messages }}"));
    assert_eq!(gguf.f64("llama.attention.layer_norm_rms_epsilon").unwrap(), Some(1e-5));
    assert_eq!(gguf.metadata("llama.block_count"), Some(&GgufValue::Unsigned(2)));
    let error = gguf.u32("general.architecture").unwrap_err().to_string();
    assert!(error.contains("general.architecture") && error.contains("\"llama\""), "{error}");
}

#[test]
fn gguf_reads_each_quantised_type() {
    let values: Vec<f32> = (0..512).map(|i| ((i * 37 % 101) as f32 - 50.0) / 25.0).collect();
    let source = Tensor::from_vec(values, (2, 256), &CPU).unwrap();
    for (id, dtype, tolerance) in [
        (0, GgmlDType::F32, 0.0),
        (1, GgmlDType::F16, 1e-3),
        (30, GgmlDType::BF16, 1e-2),
        (2, GgmlDType::Q4_0, 0.26),
        (3, GgmlDType::Q4_1, 0.15),
        (6, GgmlDType::Q5_0, 0.13),
        (7, GgmlDType::Q5_1, 0.1),
        (8, GgmlDType::Q8_0, 0.02),
        (10, GgmlDType::Q2K, 0.9),
        (11, GgmlDType::Q3K, 0.5),
        (12, GgmlDType::Q4K, 0.2),
        (13, GgmlDType::Q5K, 0.1),
        (14, GgmlDType::Q6K, 0.1),
    ] {
        let quantised = QTensor::quantize(&source, dtype).unwrap();
        let mut writer = GgufWriter::default();
        writer.tensor("x", &[2, 256], id, &quantised.data().unwrap());
        let folder = TempDir::new().unwrap();
        let gguf = Gguf::open(write_bytes(&folder, &writer.bytes())).unwrap();
        let found = gguf.tensor_f32("x").unwrap();
        assert_eq!(found.dims(), [2, 256]);
        assert_eq!(flat(&found), flat(&quantised.dequantize(&CPU).unwrap()), "{dtype:?}");
        let worst = flat(&found).iter().zip(flat(&source)).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(worst <= tolerance, "{dtype:?}: {worst}");
    }
}

#[test]
fn gguf_of_an_unread_type_opens_and_names_the_tensor_when_asked() {
    let mut writer = GgufWriter::default();
    writer.tensor("odd", &[256], 16, &[0; 66]);
    let folder = TempDir::new().unwrap();
    let gguf = Gguf::open(write_bytes(&folder, &writer.bytes())).unwrap();
    let error = gguf.tensor_f32("odd").unwrap_err();
    assert!(matches!(&error, Error::TensorDtype { tensor, .. } if tensor == "odd"), "{error}");
}

#[test]
fn gguf_truncated_anywhere_is_an_error() {
    let (_, _, bytes) = tiny_gguf_bytes(Family::Llama);
    let folder = TempDir::new().unwrap();
    // The last tensor's padding may be missing without loss.
    for len in 0..bytes.len() - 31 {
        let path = write_bytes(&folder, &bytes[..len]);
        let error = Gguf::open(&path).expect_err("a truncated file must not open");
        assert!(matches!(error, Error::Corrupt { .. }), "{len}: {error}");
    }
}

#[test]
fn gguf_with_flipped_bits_never_panics() {
    let (_, _, bytes) = tiny_gguf_bytes(Family::Llama);
    let folder = TempDir::new().unwrap();
    let path = write_bytes(&folder, &bytes);
    read_whole_gguf(&path).unwrap();
    let directory = bytes.windows(4).rposition(|window| window == b"down").unwrap() + 64;
    let mut refused = 0;
    for byte in 0..directory {
        for bit in 0..8 {
            let mut bytes = bytes.clone();
            bytes[byte] ^= 1 << bit;
            refused += usize::from(read_whole_gguf(&write_bytes(&folder, &bytes)).is_err());
        }
    }
    assert!(refused > directory * 8 / 3, "only {refused} of {} flips were noticed", directory * 8);
}

#[test]
fn gguf_refuses_lying_lengths_before_allocating() {
    let header = |tensors: u64, values: u64| {
        let mut bytes = b"GGUF\x03\0\0\0".to_vec();
        bytes.extend(tensors.to_le_bytes());
        bytes.extend(values.to_le_bytes());
        bytes
    };
    let one_value = |kind: u32, value: &[u8]| {
        let mut bytes = header(0, 1);
        put_string(&mut bytes, "some.key");
        bytes.extend(kind.to_le_bytes());
        bytes.extend(value);
        bytes.resize(bytes.len() + 64, 0);
        bytes
    };
    let array = |kind: u32, len: u64| [kind.to_le_bytes().as_slice(), &len.to_le_bytes()].concat();
    let nested = [array(9, 1), array(9, 1), array(9, 1), array(9, 1), array(9, 1)].concat();
    let tensor = |dims: &[u64], offset: u64| {
        let mut bytes = header(1, 0);
        put_string(&mut bytes, "t");
        bytes.extend((dims.len() as u32).to_le_bytes());
        bytes.extend(dims.iter().flat_map(|dim| dim.to_le_bytes()));
        bytes.extend(0u32.to_le_bytes());
        bytes.extend(offset.to_le_bytes());
        bytes.resize(bytes.len() + 64, 0);
        bytes
    };
    let mut twice = GgufWriter::default();
    twice.u32("k", 1).u32("k", 2);
    let mut same = GgufWriter::default();
    same.tensor("t", &[1], 0, &[0; 4]).tensor("t", &[1], 0, &[0; 4]);
    let cases = [
        ("magic", b"GGML\x03\0\0\0".to_vec(), "GGML"),
        ("version", b"GGUF\x09\0\0\0".to_vec(), "found 9"),
        ("big endian", b"GGUF\0\0\0\x03".to_vec(), "big endian"),
        ("tensor count", header(u64::MAX, 0), "tensor count"),
        ("metadata count", header(0, 1 << 60), "metadata count"),
        ("string", one_value(8, &u64::MAX.to_le_bytes()), "some.key"),
        ("array", one_value(9, &array(4, 1 << 62)), "some.key"),
        ("array of strings", one_value(9, &array(8, 9)), "some.key"),
        ("nesting", one_value(9, &nested), "nested"),
        ("boolean", one_value(7, &[2]), "boolean"),
        ("kind", one_value(13, &[]), "value type"),
        ("overflow", tensor(&[1 << 40, 1 << 40], 0), "overflow"),
        ("zero", tensor(&[0], 0), "none to be 0"),
        ("too many dimensions", tensor(&[1; 5], 0), "5 dimensions"),
        ("outside", tensor(&[1 << 20], 0), "the file has"),
        ("offset", tensor(&[1], u64::MAX - 31), "the file has"),
        ("unaligned", tensor(&[1], 4), "multiple of 32"),
        ("key twice", twice.bytes(), "twice"),
        ("tensor twice", same.bytes(), "twice"),
    ];
    let folder = TempDir::new().unwrap();
    for (case, bytes, part) in cases {
        let error = Gguf::open(write_bytes(&folder, &bytes)).expect_err(case);
        assert!(matches!(error, Error::Corrupt { .. }), "{case}: {error}");
        let message = error.to_string();
        assert!(message.contains(part) && message.contains("model.gguf"), "{case}: {message}");
    }
}

#[test]
fn gguf_tensors_must_not_overlap() {
    let mut writer = GgufWriter::default();
    writer.tensor("first", &[16], 0, &[0; 64]).tensor("second", &[16], 0, &[0; 64]);
    let mut bytes = writer.bytes();
    let offset = bytes.windows(6).position(|window| window == b"second").unwrap() + 6 + 4 + 8 + 4;
    assert_eq!(bytes[offset], 64);
    bytes[offset] = 32;
    let folder = TempDir::new().unwrap();
    let error = Gguf::open(write_bytes(&folder, &bytes)).unwrap_err().to_string();
    assert!(error.contains("overlaps") && error.contains("first"), "{error}");
}

#[test]
fn gguf_refuses_what_is_not_implemented_by_name() {
    let config = parse(&tiny_config(Family::Llama)).unwrap();
    let tensors = tiny_tensors(&config);
    let folder = TempDir::new().unwrap();
    type Change = fn(&mut GgufWriter) -> &mut GgufWriter;
    let cases: [(&str, Change); 5] = [
        ("llama.expert_count", |w| w.u32("llama.expert_count", 8)),
        ("llama.attention.sliding_window", |w| w.u32("llama.attention.sliding_window", 128)),
        ("yarn", |w| w.string("llama.rope.scaling.type", "yarn")),
        ("split.count", |w| w.raw("split.count", 2, &[3, 0])),
        ("rope_freqs.weight", |w| w.tensor("rope_freqs.weight", &[3], 0, &[0; 12])),
    ];
    for (name, change) in cases {
        let mut writer = tiny_gguf(&config, &tensors);
        change(&mut writer);
        let error = TargetConfig::open(write_bytes(&folder, &writer.bytes())).unwrap_err().to_string();
        assert!(error.contains(name), "{error}");
    }
    let mut writer = GgufWriter::default();
    writer.string("general.architecture", "mamba");
    let error = TargetConfig::open(write_bytes(&folder, &writer.bytes())).unwrap_err().to_string();
    assert!(error.contains("`mamba`"), "{error}");
}

#[test]
fn gguf_llama3_divisors_are_recognised() {
    let mut json = tiny_config(Family::Llama);
    json["head_dim"] = json!(64);
    json["rope_theta"] = json!(500000.0);
    json["rope_scaling"] = json!({"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192});
    let config = parse(&json).unwrap();
    let plain = parse(&{
        json["rope_scaling"] = Value::Null;
        json
    })
    .unwrap();
    let scaled = config.rope.inverse_frequencies(64);
    let divisors = plain.rope.inverse_frequencies(64).into_iter().zip(&scaled).map(|(plain, scaled)| plain / scaled);
    let data: Vec<u8> = divisors.flat_map(f32::to_le_bytes).collect();
    let mut writer = tiny_gguf(&plain, &tiny_tensors(&plain));
    writer.tensor("rope_freqs.weight", &[32], 0, &data);
    let folder = TempDir::new().unwrap();
    let path = write_bytes(&folder, &writer.bytes());
    assert_eq!(TargetConfig::open(&path).unwrap(), config);
    load_all(&Weights::open(&path, DType::F32, &CPU).unwrap(), &config).unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn gguf_of_random_bytes_never_panics(version in 2u8..4, tail in proptest::collection::vec(any::<u8>(), 0..256)) {
        let folder = TempDir::new().unwrap();
        let bytes = [b"GGUF".as_slice(), &[version, 0, 0, 0], &tail].concat();
        let _ = read_whole_gguf(&write_bytes(&folder, &bytes));
    }

    #[test]
    fn gguf_with_an_overwritten_stretch_never_panics(at in 0.0..1.0f64, patch in proptest::collection::vec(any::<u8>(), 1..24)) {
        let (_, _, mut bytes) = tiny_gguf_bytes(Family::Qwen3);
        let at = (at * (bytes.len() - patch.len()) as f64) as usize;
        bytes[at..at + patch.len()].copy_from_slice(&patch);
        let folder = TempDir::new().unwrap();
        let _ = read_whole_gguf(&write_bytes(&folder, &bytes));
    }

    #[test]
    fn safetensors_with_an_overwritten_stretch_never_panics(at in 0usize..600, patch in proptest::collection::vec(any::<u8>(), 1..24)) {
        let folder = TempDir::new().unwrap();
        let config = parse(&tiny_config(Family::Qwen3)).unwrap();
        write_model(&folder.path().join("m"), &tiny_config(Family::Qwen3), &tiny_tensors(&config));
        let file = folder.path().join("m").join(SINGLE_FILE);
        let mut bytes = fs_err::read(&file).unwrap();
        bytes[at..at + patch.len()].copy_from_slice(&patch);
        fs_err::write(&file, bytes).unwrap();
        let _ = Weights::open(folder.path().join("m"), DType::F32, &CPU).and_then(|weights| load_all(&weights, &config));
    }
}

// ---- strict loading ----

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

// ---- configs ----

#[test]
fn rope_is_read_in_old_and_new_spelling() {
    let rope = |change: Value| {
        let mut json = tiny_config(Family::Llama);
        json.as_object_mut().unwrap().remove("rope_theta");
        json["head_dim"] = json!(16);
        json.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        parse(&json).map(|config| config.rope)
    };
    assert_eq!(rope(json!({})).unwrap().theta, 10000.0);
    assert_eq!(rope(json!({"rope_theta": 5e5})).unwrap().theta, 5e5);
    let nested = rope(
        json!({"rope_parameters": {"rope_theta": 1000000, "rope_type": "default", "partial_rotary_factor": 0.25}}),
    );
    let nested = nested.unwrap();
    assert_eq!((nested.theta, nested.rotary_dim(16)), (1e6, 4));
    assert_eq!(nested.inverse_frequencies(16), [1.0, 1e-3]);
    assert_eq!(rope(json!({"rope_theta": 1e6, "partial_rotary_factor": 0.25})).unwrap(), nested);
    let linear = rope(json!({"rope_scaling": {"type": "linear", "factor": 4.0}})).unwrap();
    assert_eq!(linear.scaling, RopeScaling::Linear { factor: 4.0 });
    assert_eq!(linear.inverse_frequencies(16)[0], 0.25);

    for (change, part) in [
        (json!({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}), "rope_theta"),
        (json!({"rope_scaling": {"type": "yarn", "factor": 4.0}}), "yarn"),
        (json!({"rope_parameters": {"rope_type": "default", "mrope_section": [1]}}), "mrope_section"),
        (json!({"rope_scaling": {"type": "linear"}}), "rope_scaling.factor"),
        (json!({"rope_theta": -1.0}), "rope_theta"),
        (json!({"partial_rotary_factor": 0.2}), "partial_rotary_factor"),
        (json!({"partial_rotary_factor": 1.5}), "partial_rotary_factor"),
        (json!({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}), "full_attention"),
    ] {
        let error = rope(change).unwrap_err().to_string();
        assert!(error.contains(part), "{part}: {error}");
    }
}

#[test]
fn llama3_frequencies_follow_the_published_rule() {
    let mut json = tiny_config(Family::Llama);
    json["head_dim"] = json!(128);
    json["rope_theta"] = json!(500000.0);
    json["rope_scaling"] = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192});
    let found = parse(&json).unwrap().rope.inverse_frequencies(128);
    for (pair, found) in found.into_iter().enumerate() {
        let frequency = 500000f64.powf(-(pair as f64) / 64.0);
        let wavelength = std::f64::consts::TAU / frequency;
        let expected = if wavelength < 8192.0 / 4.0 {
            frequency
        } else if wavelength > 8192.0 {
            frequency / 8.0
        } else {
            let smooth = (8192.0 / wavelength - 1.0) / 3.0;
            (1.0 - smooth) * frequency / 8.0 + smooth * frequency
        };
        assert!((f64::from(found) / expected - 1.0).abs() < 1e-6, "{pair}: {found} {expected}");
    }
}

#[test]
fn bad_target_configs_name_field_and_value() {
    for (field, value, parts) in [
        ("num_key_value_heads", json!(3), ["num_key_value_heads", "3"]),
        ("hidden_size", json!(0), ["hidden_size", "0"]),
        ("hidden_size", json!("8"), ["hidden_size", "\"8\""]),
        ("hidden_size", Value::Null, ["hidden_size", "lacks"]),
        ("hidden_size", json!(1u64 << 40), ["hidden_size", "1099511627776"]),
        ("head_dim", json!(5), ["head_dim", "5"]),
        ("hidden_act", json!("gelu"), ["hidden_act", "gelu"]),
        ("architectures", json!(["MixtralForCausalLM"]), ["architecture", "MixtralForCausalLM"]),
        ("architectures", json!([]), ["model_type", "mixtral"]),
        ("eos_token_id", json!([2, 10]), ["eos_token_id", "10"]),
        ("eos_token_id", json!(-2), ["eos_token_id", "-2"]),
        ("rms_norm_eps", json!(0), ["rms_norm_eps", "0"]),
        ("tie_word_embeddings", json!(1), ["tie_word_embeddings", "1"]),
        ("use_sliding_window", json!(true), ["use_sliding_window", "full attention"]),
        ("layer_types", json!(["full_attention", "sliding_attention"]), ["layer_types", "sliding_attention"]),
        ("quantization_config", json!({"bits": 4}), ["quantization_config", "f16"]),
    ] {
        let mut json = tiny_config(Family::Qwen3);
        json["sliding_window"] = json!(16);
        if field == "architectures" {
            json["model_type"] = json!("mixtral");
        }
        json[field] = value;
        let error = parse(&json).unwrap_err();
        let message = error.to_string();
        assert!(parts.iter().all(|part| message.contains(part)), "{field}: {message}");
        assert!(message.contains("config.json") && error.hint().is_some(), "{message}");
    }
    assert!(parse(&json!([1])).unwrap_err().to_string().contains("a list"));
    // The window is configured but not in use.
    let mut json = tiny_config(Family::Qwen3);
    json.as_object_mut().unwrap().extend(
        json!({"sliding_window": 16, "use_sliding_window": true, "max_window_layers": 2}).as_object().unwrap().clone(),
    );
    parse(&json).unwrap();
}

#[test]
fn stop_ids_merge_both_files() {
    let folder = TempDir::new().unwrap();
    checkpoint::write_json(&folder.path().join("config.json"), &tiny_config(Family::Llama)).unwrap();
    assert_eq!(TargetConfig::open(folder.path()).unwrap().stop_ids, [2]);
    let write = |ids: Value| {
        checkpoint::write_json(&folder.path().join("generation_config.json"), &json!({"eos_token_id": ids})).unwrap();
        TargetConfig::open(folder.path())
    };
    assert_eq!(write(json!(5)).unwrap().stop_ids, [2, 5]);
    assert_eq!(write(json!([7, 2, 3])).unwrap().stop_ids, [2, 3, 7]);
    let error = write(json!([70])).unwrap_err().to_string();
    assert!(error.contains("generation_config.json") && error.contains("70"), "{error}");
    fs_err::write(folder.path().join("config.json"), "{").unwrap();
    assert!(TargetConfig::open(folder.path()).unwrap_err().to_string().contains("config.json"));
}

#[test]
fn target_config_round_trips() {
    let mut json = tiny_config(Family::Llama);
    json["eos_token_id"] = json!([2, 3]);
    json["mlp_bias"] = json!(true);
    json["partial_rotary_factor"] = json!(1.0 / 3.0);
    json["rope_scaling"] = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192});
    for json in [json, tiny_config(Family::Qwen3)] {
        let config = parse(&json).unwrap();
        let text = serde_json::to_string(&config.to_json()).unwrap();
        assert_eq!(parse(&serde_json::from_str(&text).unwrap()).unwrap(), config);
    }
}

fn tiny_draft() -> DraftConfig {
    DraftConfig {
        body: DraftConfig::body_of(&parse(&tiny_config(Family::Llama)).unwrap(), 2),
        num_target_layers: 4,
        block_size: 5,
        draft_vocab_size: None,
        mask_token_id: 6,
        target_layer_ids: vec![-1, 0, 2],
        num_anchors: 64,
        enable_confidence_head: true,
        confidence_head_with_markov: true,
        markov_rank: 4,
        markov_head_type: Some(MarkovHeadType::Gated),
        sample_from_anchor: true,
        sliding_window: None,
        moe: None,
    }
}

fn parse_draft(json: &Value) -> Result<DraftConfig> {
    DraftConfig::from_json(Path::new("config.json"), json)
}

#[test]
fn draft_config_round_trips() {
    let base = tiny_draft();
    let mut no_norm = base.clone();
    no_norm.body.qk_norm = false;
    let dflash = DraftConfig {
        enable_confidence_head: false,
        confidence_head_with_markov: false,
        markov_rank: 0,
        markov_head_type: None,
        sample_from_anchor: false,
        sliding_window: Some(128),
        draft_vocab_size: Some(3),
        ..base.clone()
    };
    assert_eq!((base.draft_vocab(), dflash.draft_vocab()), (10, 3));
    for config in [base.clone(), no_norm, dflash.clone()] {
        let json = config.to_json();
        assert!(json["sample_from_anchor"].is_boolean());
        assert_eq!(json.get("qk_norm").is_some(), !config.body.qk_norm);
        assert_eq!(json["layer_types"].as_array().unwrap().len(), 2);
        assert_eq!(parse_draft(&json).unwrap(), config);
    }
    assert_eq!((base.proposals(), dflash.proposals()), (5, 4));
}

#[test]
fn block_layout_is_told_inferred_or_refused() {
    let mut json = tiny_draft().to_json();
    json.as_object_mut().unwrap().remove("sample_from_anchor");
    assert!(parse_draft(&json).unwrap().sample_from_anchor);
    for (architecture, model_type, from_anchor) in [
        ("DFlashDraftModel", Value::Null, false),
        ("DFlashDraftModel", json!("dflash"), false),
        ("DSparkDraftModel", json!("dspark"), true),
        ("DSparkSpeculator", json!("dspark"), true),
        ("DFlashSpeculator", json!("dflash"), false),
    ] {
        json["architectures"] = json!([architecture]);
        json["speculators_model_type"] = model_type;
        assert_eq!(parse_draft(&json).unwrap().sample_from_anchor, from_anchor, "{architecture}");
    }
    for (architecture, model_type) in
        [("DSparkDraftModel", Value::Null), ("DFlashSpeculator", Value::Null), ("Qwen3DSparkModel", json!("peagle"))]
    {
        json["architectures"] = json!([architecture]);
        json["speculators_model_type"] = model_type;
        let error = parse_draft(&json).unwrap_err();
        assert!(matches!(&error, Error::AmbiguousLayout { .. }) && error.to_string().contains(architecture), "{error}");
        assert!(error.hint().unwrap().contains("sample_from_anchor"));
    }
    json["sample_from_anchor"] = json!(false);
    assert!(!parse_draft(&json).unwrap().sample_from_anchor);
    json["architectures"] = json!(["Qwen3Eagle3Model"]);
    assert!(parse_draft(&json).unwrap_err().to_string().contains("Qwen3Eagle3Model"));
}

#[test]
fn draft_fields_may_be_nested() {
    let mut json = tiny_draft().to_json();
    let map = json.as_object_mut().unwrap();
    let names = [
        "mask_token_id",
        "target_layer_ids",
        "markov_rank",
        "markov_head_type",
        "enable_confidence_head",
        "block_size",
    ];
    let nested: serde_json::Map<_, _> =
        names.iter().map(|&name| (name.to_string(), map.remove(name).unwrap())).collect();
    map.insert("dflash_config".into(), nested.into());
    assert_eq!(parse_draft(&json).unwrap(), tiny_draft());
    json["dflash_config"]["mask_token_id"] = json!(-7);
    assert!(parse_draft(&json).unwrap_err().to_string().contains("dflash_config.mask_token_id"));
}

#[test]
fn bad_draft_configs_name_field_and_value() {
    for (field, value, part) in [
        ("target_layer_ids", json!([0, 3]), "[0, 3]"),
        ("target_layer_ids", json!([-2]), "[-2]"),
        ("target_layer_ids", json!([1, 1]), "each id once"),
        ("target_layer_ids", json!([]), "at least one"),
        ("target_layer_ids", json!([1u64 << 40]), "1099511627776"),
        ("mask_token_id", json!(10), "vocab_size 10"),
        ("mask_token_id", json!(2), "bos, eos and pad"),
        ("mask_token_id", Value::Null, "lacks"),
        ("draft_vocab_size", json!(11), "1 to vocab_size 10"),
        ("draft_vocab_size", json!(0), "draft_vocab_size"),
        ("draft_vocab_size", json!(true), "draft_vocab_size"),
        ("block_size", json!(0), "0"),
        ("block_size", json!(1000), "1000"),
        ("markov_rank", json!(0), "confidence_head_with_markov"),
        ("markov_head_type", json!("lstm"), "lstm"),
        ("markov_head_type", Value::Null, "markov_head_type"),
        ("confidence_head_with_markov", Value::Null, "confidence_head_with_markov"),
        ("layer_types", json!(["full_attention", "sliding_attention"]), "mixture"),
        ("num_target_layers", json!(1), "target_layer_ids"),
    ] {
        let mut json = tiny_draft().to_json();
        json[field] = value;
        let message = parse_draft(&json).unwrap_err().to_string();
        assert!(message.contains(part), "{field}: {message}");
    }
}

// ---- real files ----

#[test]
fn golden_target_loads_whole() {
    let Some(folder) = golden("target") else { return };
    let config = TargetConfig::open(&folder).unwrap();
    assert_eq!((config.family, config.hidden_size, config.num_hidden_layers), (Family::Qwen3, 64, 6));
    assert_eq!((config.rope.theta, config.rms_norm_eps, config.head_dim), (1e6, 1e-6, 16));
    assert_eq!(config.stop_ids, [2, 5]);
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
        assert_eq!((config.block_size, config.mask_token_id, config.num_anchors), (4, 6, 6));
        assert_eq!(config.target_layer_ids, [0, 2, 4]);
        assert!(config.sample_from_anchor && config.body.qk_norm);
        assert_eq!(parse_draft(&config.to_json()).unwrap(), config);

        let (_, weights) = checkpoint::load(&folder, DType::F32, &CPU).unwrap();
        assert_eq!(weights.shape("fc.weight").unwrap(), [64, 192]);
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
