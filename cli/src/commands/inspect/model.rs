//! Model folders: the effective configuration of a drafter or target, its tensors, and what a strict load would refuse.

use std::collections::BTreeMap;
use std::io::Read as _;
use std::path::Path;

use anyhow::Context as _;
use candle_core::{DType, Device};
use deepspec_datasets::tokenizer::Tokenizer;
use deepspec_models::config::{DraftConfig, MarkovHeadType, TargetConfig};
use deepspec_models::draft::DraftVocabulary;
use deepspec_models::formats::{Format, detect};
use deepspec_models::weights::{SINGLE_FILE, Weights};
use serde_json::{Value, json};

use super::drafter;
use super::expected::Expected;
use super::report::Report;
use super::text_side;
use crate::failure::Refusal;

/// Types of which the loaders make models.
const LOADED_TYPES: [&str; 3] = ["F32", "F16", "BF16"];
/// Tensors of the draft vocabulary, of whole numbers, and the types they may have.
const VOCABULARY: [&str; 2] = ["d2t", "t2d"];
const VOCABULARY_TYPES: [&str; 4] = ["I64", "I32", "U8", "BOOL"];
/// Buffers that some writers store although they follow from the configuration; loaders pass over them.
const DERIVED_BUFFERS: [&str; 2] = ["rotary_emb.inv_freq", "rope_freqs.weight"];
/// Tensors of a drafter that are copies of the target's.
const FROZEN: [&str; 2] = ["embed_tokens.weight", "lm_head.weight"];

/// A configuration that could be read.
enum Config {
    Drafter(DraftConfig),
    Target(TargetConfig),
}

/// Reports on the folder.
pub(super) fn inspect(folder: &Path, target: Option<&Path>) -> anyhow::Result<Report> {
    let path = folder.join("config.json");
    let json = fs_err::read(&path)?;
    let json: Value = serde_json::from_slice(&json).with_context(|| format!("cannot read `{}`", path.display()))?;
    let is_drafter = is_drafter(&json);
    if is_drafter && !is_block_of_reference(folder, &json) {
        return drafter::inspect(folder, target);
    }
    if !is_drafter && target.is_some() {
        let problem = "`--model` is for drafters, but the folder holds a target".into();
        return Err(Refusal { problem, hint: Some("leave `--model` out".into()) }.into());
    }
    let mut report = Report::new(if is_drafter { "drafter" } else { "target" });
    let config = if is_drafter {
        report.ok(DraftConfig::from_json(&path, &json)).map(Config::Drafter)
    } else {
        report.ok(TargetConfig::from_folder(folder)).map(Config::Target)
    };
    let weights = report.ok(Weights::from_folder(folder, DType::F32, &Device::Cpu));
    let types = report.ok(stored_types(folder)).unwrap_or_default();
    match &config {
        Some(Config::Drafter(config)) => {
            let mut facts = drafter_facts(folder, config);
            facts["layout"] = json!(Format::Deepspec.name());
            report.facts("drafter", facts);
            add_layer_ids(&mut report, &config.target_layer_ids);
        }
        Some(Config::Target(config)) => report.facts("target", target_facts(folder, config, weights.as_ref())),
        None => {}
    }
    if let Some(weights) = &weights {
        add_tensors(&mut report, weights, &types);
        let expected = match &config {
            Some(Config::Drafter(config)) => Some(Expected::of_drafter(config)),
            Some(Config::Target(config)) => Some(Expected::of_target(config)),
            None => None,
        };
        if let Some(expected) = expected {
            add_tensor_problems(&mut report, weights, &expected);
        }
        for (name, kind) in &types {
            let is_vocabulary = is_drafter && VOCABULARY.contains(&name.as_str());
            let allowed = if is_vocabulary { &VOCABULARY_TYPES[..] } else { &LOADED_TYPES };
            if !allowed.contains(&kind.as_str()) && !is_derived(name) {
                let expected = allowed.join(", ");
                report.problem(refusal(format!("tensor `{name}` is stored as {kind}, expected one of {expected}")));
            }
        }
        add_values_problems(&mut report, weights, |_| true);
        if let Some(Config::Drafter(config)) = &config
            && report.problem_count() == 0
        {
            report.ok(DraftVocabulary::read(weights, config));
        }
    }
    if folder.join("tokenizer.json").is_file()
        && let Some(tokenizer) = report.ok(Tokenizer::from_file(folder.join("tokenizer.json")))
    {
        report.facts("tokenizer", text_side::facts(&tokenizer));
    }
    Ok(report)
}

/// The feature layers as each format spells them.
pub(super) fn add_layer_ids(report: &mut Report, ids: &[i32]) {
    let next: Vec<i64> = ids.iter().map(|&id| i64::from(id) + 1).collect();
    let (own, next) = (json!(ids), json!(next));
    let row = |formats: &str, ids: &Value, meaning: &str| vec![json!(formats), ids.clone(), json!(meaning)];
    let rows = vec![
        row("target_layer_ids (deepspec, DeepSpec, z-lab)", &own, "output of decoder layer, -1 = embedding"),
        row("aux_hidden_state_layer_ids (speculators, vLLM)", &next, "index in the list of hidden states"),
        row("dflash.target_layers (GGUF)", &next, "input of decoder layer"),
        row("SGLang", &own, "output of decoder layer; SGLang adds 1 itself"),
    ];
    report.table("target_layers", &["format", "ids", "meaning"], rows);
}

/// What a target's configuration amounts to.
pub(super) fn target_facts(path: &Path, config: &TargetConfig, weights: Option<&Weights>) -> Value {
    json!({
        "path": path.display().to_string(),
        "family": config.family.model_type(),
        "fingerprint": weights.map(|weights| weights.fingerprint(config)),
        "num_hidden_layers": config.num_hidden_layers,
        "feature_layers_allowed": format!("-1 to {}", config.num_hidden_layers as i64 - 2),
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "qk_norm": config.qk_norm,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tie_word_embeddings,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope.theta,
        "rope_scaling": format!("{:?}", config.rope.scaling),
        "rms_norm_eps": config.rms_norm_eps,
        "bos_token_id": config.bos_token_id,
        "stop_ids": config.stop_ids,
    })
}

pub(super) fn drafter_facts(path: &Path, config: &DraftConfig) -> Value {
    let head = config.markov_head_type.map(MarkovHeadType::name);
    let is_dflash = head.is_none() && !config.enable_confidence_head;
    let (size, proposals) = (config.block_size, config.proposals());
    let layout = if config.sample_from_anchor {
        format!("anchor first: {size} rows give {proposals} proposals")
    } else {
        format!("1 + N: {size} rows, of which the anchor's predicts nothing, give {proposals} proposals")
    };
    let body = &config.body;
    json!({
        "path": path.display().to_string(),
        "algorithm": if is_dflash { "DFlash" } else { "DSpark" },
        "block_layout": layout,
        "sample_from_anchor": config.sample_from_anchor,
        "draft_vocabulary": format!("{} of {} tokens", config.draft_vocab(), body.vocab_size),
        "block_size": size,
        "proposals": proposals,
        "mask_token_id": config.mask_token_id,
        "markov_head": head,
        "markov_rank": config.markov_rank,
        "confidence_head": config.enable_confidence_head,
        "confidence_head_with_markov": config.confidence_head_with_markov,
        "sliding_window": config.sliding_window,
        "experts": config.moe.as_ref().map(ToString::to_string),
        "draft_layers": body.num_hidden_layers,
        "num_target_layers": config.num_target_layers,
        "hidden_size": body.hidden_size,
        "intermediate_size": body.intermediate_size,
        "num_attention_heads": body.num_attention_heads,
        "num_key_value_heads": body.num_key_value_heads,
        "head_dim": body.head_dim,
        "qk_norm": body.qk_norm,
        "vocab_size": body.vocab_size,
        "rope_theta": body.rope.theta,
        "stop_ids": body.stop_ids,
    })
}

fn is_drafter(config: &Value) -> bool {
    let names = config["architectures"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let is_named = names.into_iter().any(|name| ["DSpark", "DFlash", "Eagle"].iter().any(|kind| name.contains(kind)));
    is_named
        || ["target_layer_ids", "dflash_config", "eagle_config", "speculators_model_type"]
            .iter()
            .any(|key| config.get(key).is_some())
}

/// Whether a drafter is in the reference's layout for blocks, whose tensors are all listed with what is wrong.
fn is_block_of_reference(folder: &Path, config: &Value) -> bool {
    let is_eagle3 = config["architectures"][0].as_str().is_some_and(|name| name.contains("Eagle3"));
    let Ok(weights) = Weights::from_folder(folder, DType::F32, &Device::Cpu) else { return !is_eagle3 };
    !is_eagle3 && detect(folder, config, weights.names()).is_ok_and(|format| format == Format::Deepspec)
}

fn add_tensors(report: &mut Report, weights: &Weights, types: &BTreeMap<String, String>) {
    let elements = |name: &str| weights.shape(name).map_or(0, |shape| shape.iter().product::<usize>());
    let mut per_type = BTreeMap::<&str, usize>::new();
    for kind in types.values() {
        *per_type.entry(kind).or_default() += 1;
    }
    report.facts(
        "weights",
        json!({
            "tensors": weights.names().count(),
            "parameters": weights.names().map(elements).sum::<usize>(),
            "parameters_without_embedding_and_head": weights
                .names()
                .filter(|name| !FROZEN.contains(&name.trim_start_matches("model.")) && !VOCABULARY.contains(name))
                .map(elements)
                .sum::<usize>(),
            "tensors_per_type": per_type,
        }),
    );
    let rows = weights.names().map(|name| vec![json!(name), json!(weights.shape(name)), json!(types.get(name))]);
    report.table("tensors", &["name", "shape", "type"], rows.collect());
}

/// Adds what a strict load would refuse: tensors that are missing, misshapen or unknown.
pub(super) fn add_tensor_problems(report: &mut Report, weights: &Weights, expected: &Expected) {
    for (name, shape) in expected.required().filter(|(name, _)| !weights.contains(name)) {
        report.problem(refusal(format!("tensor `{name}` of shape {shape:?} is missing")));
    }
    for name in weights.names() {
        match (expected.shape(name), weights.shape(name)) {
            (Some(expected), Some(found)) if expected != found => {
                report.problem(refusal(format!("tensor `{name}` has shape {found:?}, expected {expected:?}")));
            }
            (None, _) if !is_derived(name) => {
                report.problem(refusal(format!("tensor `{name}` is none that the configuration asks for")));
            }
            _ => {}
        }
    }
}

/// Reads every tensor that `is_read` allows and adds those with values that are not finite.
pub(super) fn add_values_problems(report: &mut Report, weights: &Weights, is_read: impl Fn(&str) -> bool) {
    for name in weights.names().filter(|name| !is_derived(name) && is_read(name)) {
        report.ok(weights.check_finite(name));
    }
}

fn refusal(problem: String) -> Refusal {
    Refusal { problem, hint: None }
}

fn is_derived(name: &str) -> bool {
    DERIVED_BUFFERS.iter().any(|buffer| name.ends_with(buffer))
}

/// Type of each tensor as the headers of the folder's safetensors files name it. [`Weights`] checks the files in full.
fn stored_types(folder: &Path) -> anyhow::Result<BTreeMap<String, String>> {
    let single = folder.join(SINGLE_FILE);
    let mut files = vec![single.clone()];
    if !single.is_file() {
        let entries = fs_err::read_dir(folder)?.collect::<Result<Vec<_>, _>>()?;
        files = entries.into_iter().map(|entry| entry.path()).collect();
        files.retain(|path| path.extension().is_some_and(|extension| extension == "safetensors"));
    }
    let mut types = BTreeMap::new();
    for path in files {
        let header = header(&path).with_context(|| format!("cannot read the header of `{}`", path.display()))?;
        let entries = header.as_object().into_iter().flatten();
        let named = entries.filter_map(|(name, entry)| Some((name.clone(), entry["dtype"].as_str()?.to_owned())));
        types.extend(named);
    }
    Ok(types)
}

/// The JSON header of a safetensors file: its length in eight bytes, then the text.
fn header(path: &Path) -> anyhow::Result<Value> {
    let mut file = fs_err::File::open(path)?;
    let mut length = [0; 8];
    file.read_exact(&mut length)?;
    let length = u64::from_le_bytes(length).min(file.metadata()?.len());
    let mut header = Vec::new();
    file.take(length).read_to_end(&mut header)?;
    Ok(serde_json::from_slice(&header)?)
}
