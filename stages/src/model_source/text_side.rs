//! The text side of a target: tokenizer, chat template and the ids that end generation, from a folder or a GGUF file.

use std::path::Path;

use deepspec_datasets::chat_template::ChatTemplate;
use deepspec_datasets::renderer::Renderer;
use deepspec_datasets::tokenizer::{GgufVocabulary, Tokenizer};
use deepspec_engine::TextSide;
use deepspec_models::config::TargetConfig;
use deepspec_models::gguf::{Gguf, Vocabulary};
use serde_json::Value;

use super::{ResolvedModel, fail};
use crate::error::{Error, Result};

/// Texts of control tokens that end a turn or a document. A GGUF file states one or two ids, often not all of a model.
const END_TEXTS: &[&str] =
    &["<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>", "<end_of_turn>", "</s>"];

/// Pre-tokenizer of GGUF files whose texts begin with the beginning-of-text token where nothing else is said.
const BOS_BY_DEFAULT: &str = "llama-bpe";

/// Loads the text side of a target.
///
/// In a folder, `chat_template.jinja` counts before the template in `tokenizer_config.json`, of which the one named
/// `default` is taken if there are several. In a GGUF file, control tokens with well-known names, such as
/// `<|endoftext|>`, end generation beside the ids that the file states.
///
/// Raw texts begin with the beginning-of-text token where `add_bos_token` says so (in `tokenizer_config.json`, or in the
/// metadata of a GGUF file), else where the post-processor in `tokenizer.json` puts it there.
///
/// # Errors
/// A file is missing or damaged, there is no chat template, the tokenizer is of an unknown kind, or it has more ids
/// than the model has embeddings.
pub fn load_text_side(model: &ResolvedModel) -> Result<TextSide> {
    let parts = if model.is_gguf() { from_gguf(model)? } else { from_folder(model)? };
    let Parts { config, tokenizer, template, bos_text, eos_text, stop_ids } = parts;
    if tokenizer.vocab_size() > config.vocab_size {
        return Err(Error::Mismatch {
            what: "the size of the vocabulary".into(),
            left: format!("{} ids of the tokenizer", tokenizer.vocab_size()),
            right: format!("{} embeddings in `{}`", config.vocab_size, model.path.display()),
            hint: Some("use the tokenizer that belongs to the model".into()),
        });
    }
    let template = ChatTemplate::new(&template, &bos_text, &eos_text)?;
    let renderer = Renderer::new(template, tokenizer, &stop_ids)?;
    Ok(TextSide { renderer, bos: config.bos_token_id, pad: config.pad_token_id })
}

struct Parts {
    config: TargetConfig,
    tokenizer: Tokenizer,
    template: String,
    bos_text: String,
    eos_text: String,
    stop_ids: Vec<u32>,
}

fn from_gguf(model: &ResolvedModel) -> Result<Parts> {
    let gguf = Gguf::open(&model.path)?;
    let config = TargetConfig::from_gguf(&gguf)?;
    let Vocabulary { model: kind, pre, tokens, token_types, merges, chat_template, bos, eos, add_bos, .. } =
        gguf.vocabulary()?;
    let text = |id: Option<u32>| id.and_then(|id| tokens.get(id as usize)).cloned().unwrap_or_default();
    let (bos_text, eos_text) = (text(bos), text(eos));
    let text_start = match (add_bos, bos) {
        (Some(true), None) => return Err(no_bos(model, "tokenizer.ggml.add_bos_token", "tokenizer.ggml.bos_token_id")),
        (Some(false), _) => None,
        (Some(true), bos) => bos,
        // Files from before that key: what the models with this vocabulary want.
        (None, bos) => bos.filter(|_| pre.as_deref() == Some(BOS_BY_DEFAULT)),
    };
    let tokenizer = Tokenizer::from_gguf_parts(GgufVocabulary {
        model: kind,
        pre: pre.unwrap_or_default(),
        tokens,
        token_types,
        merges,
        add_bos: text_start.is_some(),
    })?;
    let tokenizer = tokenizer.with_text_start(text_start.as_slice());
    let template = chat_template.ok_or_else(|| no_template(model, "`tokenizer.chat_template` in its metadata"))?;
    let mut stop_ids = config.stop_ids.clone();
    let ends = tokenizer.special_tokens().iter().filter(|token| END_TEXTS.contains(&token.text.as_str()));
    stop_ids.extend(ends.map(|token| token.id).filter(|id| !config.stop_ids.contains(id)));
    Ok(Parts { config, tokenizer, template, bos_text, eos_text, stop_ids })
}

fn from_folder(model: &ResolvedModel) -> Result<Parts> {
    let folder = &model.path;
    let config = TargetConfig::from_folder(folder)?;
    let tokenizer = Tokenizer::from_file(folder.join("tokenizer.json"))?;
    let settings = read_settings(&folder.join("tokenizer_config.json"))?;
    let jinja = folder.join("chat_template.jinja");
    let template = if jinja.is_file() {
        Some(fs_err::read_to_string(jinja)?)
    } else {
        default_template(&settings["chat_template"]).map(Into::into)
    };
    let template = template.ok_or_else(|| no_template(model, "`chat_template.jinja` or `tokenizer_config.json`"))?;
    let text = |key: &str, id: Option<u32>| -> Result<String> {
        let stated: Option<String> = settings[key].as_str().or(settings[key]["content"].as_str()).map(Into::into);
        if stated.is_none() && !settings[key].is_null() {
            let file = folder.join("tokenizer_config.json");
            let problem = format!("field `{key}` is {}, expected a text or an object with `content`", settings[key]);
            return Err(Error::Input(format!("`{}`: {problem}", file.display())));
        }
        let by_id = || Some(String::from_utf8_lossy(tokenizer.token_bytes(id?)?).into_owned());
        Ok(stated.or_else(by_id).unwrap_or_default())
    };
    let bos_text = text("bos_token", config.bos_token_id)?;
    let eos_text = text("eos_token", config.eos_token_ids.first().copied())?;
    // What is stated counts before the post-processor of `tokenizer.json`.
    let tokenizer = match settings["add_bos_token"].as_bool() {
        None => tokenizer,
        Some(false) => tokenizer.with_text_start(&[]),
        Some(true) => match tokenizer.id_of(&bos_text).or(config.bos_token_id) {
            Some(bos) => tokenizer.with_text_start(&[bos]),
            None => return Err(no_bos(model, "add_bos_token", "bos_token")),
        },
    };
    let mut stop_ids = config.stop_ids.clone();
    stop_ids.extend(tokenizer.id_of(&eos_text).filter(|id| !config.stop_ids.contains(id)));
    Ok(Parts { config, tokenizer, template, bos_text, eos_text, stop_ids })
}

/// The content of a `tokenizer_config.json`; an empty object where there is none.
fn read_settings(path: &Path) -> Result<Value> {
    if !path.is_file() {
        return Ok(Value::Object(serde_json::Map::new()));
    }
    serde_json::from_slice(&fs_err::read(path)?)
        .map_err(|error| Error::Input(format!("cannot read `{}`: {error}", path.display())))
}

/// A template given as text, or the one named `default` of a list.
fn default_template(value: &Value) -> Option<&str> {
    let named = || value.as_array()?.iter().find(|entry| entry["name"] == "default")?["template"].as_str();
    value.as_str().or_else(named)
}

fn no_bos(model: &ResolvedModel, flag: &str, token: &str) -> Error {
    fail(
        &model.path.display().to_string(),
        format!("`{flag}` is true, but `{token}` names no token of the vocabulary"),
        "fetch the model's tokenizer files again, or correct the one of them that is wrong",
    )
}

fn no_template(model: &ResolvedModel, place: &str) -> Error {
    fail(
        &model.path.display().to_string(),
        format!("there is no chat template in {place}"),
        "use an instruction-tuned model, or put its template into a folder as `chat_template.jinja`",
    )
}
