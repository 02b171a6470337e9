//! Small files of every kind that `inspect` reads: a target cache, checkpoints, a tokenizer folder.

use std::fmt::Write as _;
use std::path::Path;

use deepspec_datasets::target_cache::{CacheMeta, Plan, Sample, StorageMode, Writer};
use serde_json::{Map, Value, json};

/// Ids of the tokenizer below: one per byte, then the two control tokens.
pub(crate) const IM_START: u32 = 256;
pub(crate) const IM_END: u32 = 257;
const VOCAB_SIZE: u32 = 260;

/// A tensor of a checkpoint: name and shape.
pub(crate) type Tensor = (String, Vec<usize>);

/// A target folder without weights: a byte-level tokenizer and a chat template.
pub(crate) fn write_text_side(dir: &Path) {
    let mut next = 0xff;
    let vocab: Map<String, Value> = (0..=255_u8)
        .map(|byte| {
            let is_itself = matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
            next += u32::from(!is_itself);
            let spelling = if is_itself { char::from(byte) } else { char::from_u32(next).unwrap() };
            (spelling.to_string(), json!(byte))
        })
        .collect();
    let control = |id, text| {
        json!({ "id": id, "content": text, "special": true, "normalized": false, "single_word": false,
        "lstrip": false, "rstrip": false })
    };
    let byte_level = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true });
    let tokenizer = json!({
        "version": "1.0",
        "added_tokens": [control(IM_START, "<|im_start|>"), control(IM_END, "<|im_end|>")],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": { "type": "BPE", "vocab": vocab, "merges": [] },
    });
    let template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
                    {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
    fs_err::create_dir_all(dir).unwrap();
    fs_err::write(dir.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    fs_err::write(dir.join("chat_template.jinja"), template).unwrap();
    fs_err::write(dir.join("config.json"), target_config().to_string()).unwrap();
}

fn target_config() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8, "intermediate_size": 16,
        "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 64, "rope_theta": 10000.0, "eos_token_id": IM_END, "tie_word_embeddings": true,
    })
}

/// A cache of two samples: `<|im_start|>hi` is the prompt, `yo<|im_end|>` is supervised.
pub(crate) fn write_cache(dir: &Path, tokenizer_hash: &str) {
    let meta = CacheMeta {
        target: "tiny".into(),
        target_fingerprint: "f00d".into(),
        layer_ids: vec![-1, 2],
        hidden_size: 8,
        vocab_size: VOCAB_SIZE,
        dtype: "f32".into(),
        tokenizer_hash: tokenizer_hash.into(),
        template_hash: "beef".into(),
        data_hash: "d1ce".into(),
        mask_token_id: Some(259),
        recipe: json!({ "seed": 1 }),
        loss_on: "all".into(),
        max_length: 64,
        storage: StorageMode::None,
    };
    let input_ids = [IM_START, b'h'.into(), b'i'.into(), b'y'.into(), b'o'.into(), IM_END];
    let mut writer = Writer::create_or_resume(dir, meta, Plan { samples: 2, samples_per_shard: 1 }).unwrap();
    for sample_id in 0..2 {
        let sample = Sample {
            sample_id,
            source_id: "row",
            domain: "",
            input_ids: &input_ids,
            loss_mask: &[0, 0, 0, 1, 1, 1],
            features: &[],
            last_hidden: &[],
        };
        writer.append(&sample).unwrap();
    }
    writer.finish().unwrap();
}

/// The tensors that the drafter of [`write_drafter`] has to have.
pub(crate) fn drafter_tensors() -> Vec<Tensor> {
    let tensors: [(&str, &[usize]); 17] = [
        ("fc.weight", &[8, 16]),
        ("hidden_norm.weight", &[8]),
        ("norm.weight", &[8]),
        ("layers.0.input_layernorm.weight", &[8]),
        ("layers.0.post_attention_layernorm.weight", &[8]),
        ("layers.0.self_attn.q_proj.weight", &[8, 8]),
        ("layers.0.self_attn.k_proj.weight", &[4, 8]),
        ("layers.0.self_attn.v_proj.weight", &[4, 8]),
        ("layers.0.self_attn.o_proj.weight", &[8, 8]),
        ("layers.0.self_attn.q_norm.weight", &[4]),
        ("layers.0.self_attn.k_norm.weight", &[4]),
        ("layers.0.mlp.gate_proj.weight", &[16, 8]),
        ("layers.0.mlp.up_proj.weight", &[16, 8]),
        ("layers.0.mlp.down_proj.weight", &[8, 16]),
        ("markov_head.markov_w1.weight", &[32, 2]),
        ("markov_head.markov_w2.weight", &[32, 2]),
        ("lm_head.weight", &[32, 8]),
    ];
    tensors.into_iter().map(|(name, shape)| (name.to_owned(), shape.to_vec())).collect()
}

/// A DSpark drafter with γ = 5 and feature layers −1 and 2 of a target with four layers.
pub(crate) fn write_drafter(dir: &Path, tensors: &[Tensor]) {
    let zeros = |(name, shape): &Tensor| {
        let bytes = vec![0; 2 * shape.iter().product::<usize>()];
        (name.clone(), "BF16", shape.clone(), bytes)
    };
    write_checkpoint(dir, &drafter_config(), &tensors.iter().map(zeros).collect::<Vec<_>>());
}

/// That drafter with four of its 32 tokens, and flags for the tokens 0, 3, 4 and 31; without the tensor named.
pub(crate) fn write_pruned_drafter(dir: &Path, offsets: [i64; 4], skipped: Option<&str>) {
    let mut config = drafter_config();
    config["draft_vocab_size"] = json!(4);
    let mut tensors = Vec::new();
    for (name, mut shape) in drafter_tensors() {
        if name == "markov_head.markov_w2.weight" || name == "lm_head.weight" {
            shape[0] = 4;
        }
        let bytes = vec![0; 2 * shape.iter().product::<usize>()];
        tensors.push((name, "BF16", shape, bytes));
    }
    let flags = (0..32).map(|token| u8::from([0, 3, 4, 31].contains(&token)));
    tensors.push(("d2t".into(), "I64", vec![4], offsets.iter().flat_map(|offset| offset.to_le_bytes()).collect()));
    tensors.push(("t2d".into(), "BOOL", vec![32], flags.collect()));
    tensors.retain(|(name, ..)| Some(name.as_str()) != skipped);
    write_checkpoint(dir, &config, &tensors);
}

/// That drafter with three experts and a shared one in the place of its MLP, without the tensor named.
pub(crate) fn write_drafter_of_experts(dir: &Path, skipped: Option<&str>) {
    let mut config = drafter_config();
    let fields = json!({
        "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 4, "norm_topk_prob": true,
        "shared_expert_intermediate_size": 16,
    });
    config.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    let mut tensors = vec![("layers.0.mlp.gate.weight".into(), vec![3, 8])];
    for (expert, width) in [("experts.0", 4), ("experts.1", 4), ("experts.2", 4), ("shared_expert", 16)] {
        for (part, shape) in [("gate", [width, 8]), ("up", [width, 8]), ("down", [8, width])] {
            tensors.push((format!("layers.0.mlp.{expert}.{part}_proj.weight"), shape.to_vec()));
        }
    }
    tensors.extend(drafter_tensors().into_iter().filter(|(name, _)| !name.contains(".mlp.")));
    tensors.retain(|(name, _)| Some(name.as_str()) != skipped);
    let zeros = |(name, shape): Tensor| {
        let bytes = vec![0; 2 * shape.iter().product::<usize>()];
        (name, "BF16", shape, bytes)
    };
    write_checkpoint(dir, &config, &tensors.into_iter().map(zeros).collect::<Vec<_>>());
}

fn drafter_config() -> Value {
    json!({
        "architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "hidden_size": 8, "intermediate_size": 16,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "vocab_size": 32,
        "max_position_embeddings": 64, "rope_theta": 10000.0, "eos_token_id": 2, "num_target_layers": 4,
        "block_size": 5, "mask_token_id": 6, "target_layer_ids": [-1, 2], "markov_rank": 2,
        "markov_head_type": "vanilla", "sample_from_anchor": true,
    })
}

/// Writes `config.json` and tensors given as name, type, shape and bytes.
fn write_checkpoint(dir: &Path, config: &Value, tensors: &[(String, &str, Vec<usize>, Vec<u8>)]) {
    fs_err::create_dir_all(dir).unwrap();
    fs_err::write(dir.join("config.json"), config.to_string()).unwrap();
    let mut header = Map::new();
    let mut end = 0;
    for (name, kind, shape, bytes) in tensors {
        let start = end;
        end += bytes.len();
        header.insert(name.clone(), json!({ "dtype": kind, "shape": shape, "data_offsets": [start, end] }));
    }
    let header = Value::Object(header).to_string();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.into_bytes());
    for (.., bytes) in tensors {
        file.extend(bytes);
    }
    fs_err::write(dir.join("model.safetensors"), file).unwrap();
}

/// A conversation file: one good row, one whose content could take over a terminal, and `bad` rows that are no JSON.
pub(crate) fn write_conversations(path: &Path, bad: usize) {
    let messages = |user: &str, answer: &str| json!({ "messages": [{ "role": "user", "content": user }, { "role": "assistant", "content": answer }] });
    let mut rows = format!("{}\n{}\n", messages("hi", "yo"), messages("a\u{1b}[2J\u{202e}b", "ok"));
    for index in 0..bad {
        writeln!(rows, "{{bad {index}").unwrap();
    }
    fs_err::write(path, rows).unwrap();
}
