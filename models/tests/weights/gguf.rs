//! GGUF files: what is read, what is refused, and hostile bytes.

use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Tensor};
use deepspec_models::config::{Family, TargetConfig};
use deepspec_models::error::Error;
use deepspec_models::gguf::{Gguf, Value as GgufValue};
use deepspec_models::weights::{SINGLE_FILE, Weights};
use proptest::prelude::*;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::{
    CPU, GgufWriter, assert_same, flat, load_all, parse, put_string, read_whole_gguf, tiny_config, tiny_gguf,
    tiny_gguf_bytes, tiny_tensors, write_bytes, write_model,
};

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
    assert!(error.contains("general.architecture") && error.contains("`llama`"), "{error}");
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
        writer.tensor("blk.0.ffn_up.weight", &[2, 256], id, &quantised.data().unwrap());
        let folder = TempDir::new().unwrap();
        let gguf = Gguf::open(write_bytes(&folder, &writer.bytes())).unwrap();
        assert_eq!(gguf.is_four_bit(), [GgmlDType::Q4_0, GgmlDType::Q4_1, GgmlDType::Q4K].contains(&dtype));
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
    let cases: [(&str, Change); 9] = [
        ("llama.logit_scale", |w| w.f32("llama.logit_scale", 0.5)),
        ("llama.attention.scale", |w| w.f32("llama.attention.scale", 0.25)),
        ("llama.attention.causal", |w| w.raw("llama.attention.causal", 7, &[0])),
        ("llama.final_logit_softcapping", |w| w.f32("llama.final_logit_softcapping", 30.0)),
        ("llama.expert_count", |w| w.u32("llama.expert_count", 8)),
        ("llama.attention.sliding_window", |w| w.u32("llama.attention.sliding_window", 128)),
        ("longrope", |w| w.string("llama.rope.scaling.type", "longrope")),
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
