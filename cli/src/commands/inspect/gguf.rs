//! GGUF files: metadata, tensors, tokenizer, and whether they make a target that can be loaded.

use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Device};
use deepspec_models::config::TargetConfig;
use deepspec_models::gguf::{Gguf, TensorInfo, Value as Entry};
use deepspec_models::weights::Weights;
use serde_json::{Value, json};

use super::expected::Expected;
use super::report::Report;
use super::{model, text_side};

/// Longest list of metadata that is shown whole.
const LIST_SHOWN: usize = 16;

/// Reports on the file.
pub(super) fn inspect(path: &Path) -> anyhow::Result<Report> {
    let gguf = Arc::new(Gguf::open(path)?);
    let mut report = Report::new("gguf");
    if let Some(config) = report.ok(TargetConfig::from_gguf(&gguf)) {
        let weights = report.ok(Weights::from_gguf(Arc::clone(&gguf), DType::F32, &Device::Cpu));
        report.facts("target", model::target_facts(path, &config, weights.as_ref()));
        if let Some(weights) = weights {
            model::add_tensor_problems(&mut report, &weights, &Expected::of_target(&config));
            // The others are listed below.
            let is_read = |name: &str| weights.has_readable_type(name);
            model::add_values_problems(&mut report, &weights, is_read);
        }
    }
    add_tokenizer(&mut report, &gguf);
    let rows = gguf.all_metadata().iter().map(|(key, entry)| vec![json!(key), to_json(entry)]);
    report.table("metadata", &["key", "value"], rows.collect());
    add_tensors(&mut report, &gguf);
    Ok(report)
}

fn add_tokenizer(report: &mut Report, gguf: &Gguf) {
    let Some(vocabulary) = report.ok(gguf.vocabulary()) else { return };
    let mut facts = json!({
        "model": vocabulary.model,
        "pre": vocabulary.pre,
        "tokens": vocabulary.tokens.len(),
        "merges": vocabulary.merges.len(),
        "bos": vocabulary.bos,
        "eos": vocabulary.eos,
        "eot": vocabulary.eot,
        "pad": vocabulary.pad,
        "add_bos": vocabulary.add_bos,
        "has_chat_template": vocabulary.chat_template.is_some(),
    });
    if let Some(tokenizer) = report.ok(text_side::from_vocabulary(vocabulary))
        && let (Value::Object(facts), Value::Object(more)) = (&mut facts, text_side::facts(&tokenizer))
    {
        facts.extend(more);
    }
    report.facts("tokenizer", facts);
}

fn add_tensors(report: &mut Report, gguf: &Gguf) {
    let infos = || gguf.tensor_names().filter_map(|name| Some((name, gguf.tensor_info(name)?)));
    let bytes = |name: &str| gguf.tensor_bytes(name).map_or(0, <[u8]>::len);
    report.facts(
        "weights",
        json!({
            "tensors": infos().count(),
            "parameters": infos().map(|(_, info)| info.shape.iter().product::<usize>()).sum::<usize>(),
            "total_bytes": infos().map(|(name, _)| bytes(name)).sum::<usize>(),
        }),
    );
    let rows =
        infos().map(|(name, info)| vec![json!(name), json!(info.shape), json!(type_name(info)), json!(bytes(name))]);
    report.table("tensors", &["name", "shape", "type", "bytes"], rows.collect());
    for (name, info) in infos().filter(|(_, info)| info.dtype.is_none()) {
        report.problem(anyhow::anyhow!("tensor `{name}` has GGML type {}, which is not read", info.type_id));
    }
}

fn type_name(info: &TensorInfo) -> String {
    info.dtype.map_or_else(|| format!("type {}", info.type_id), |dtype| format!("{dtype:?}"))
}

/// Metadata as JSON; long lists by their length and first values, floats as the shortest decimal that they stand for.
fn to_json(entry: &Entry) -> Value {
    match entry {
        Entry::Unsigned(v) => json!(v),
        Entry::Signed(v) => json!(v),
        Entry::Bool(v) => json!(v),
        Entry::String(v) => json!(v),
        Entry::F32(v) => v.to_string().parse().map_or_else(|_| json!(v.to_string()), float),
        Entry::F64(v) => float(*v),
        Entry::Array(list) if list.len() <= LIST_SHOWN => list.iter().map(to_json).collect(),
        Entry::Array(list) => {
            let first: Value = list[..LIST_SHOWN / 4].iter().map(to_json).collect();
            json!({ "length": list.len(), "first": first })
        }
    }
}

/// A number of JSON, or the word for one that JSON does not have.
fn float(value: f64) -> Value {
    if value.is_finite() { json!(value) } else { json!(value.to_string()) }
}
