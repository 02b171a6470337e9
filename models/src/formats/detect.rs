//! Which layout a checkpoint is in: told by what only that layout has, or by its architecture where nothing does.

use std::path::Path;

use serde_json::Value;

use super::Format;
use crate::error::{Error, Result};

/// Keys of a config that only one layout has, by their start.
const MARKS: [(&str, Format); 4] = [
    ("speculators_", Format::Speculators),
    ("dspark_config", Format::Sglang),
    ("dspark_block_size", Format::Sglang),
    ("dspark_markov_", Format::Sglang),
];

/// The layout of a checkpoint, from its config and the names of its tensors; `path` is for the message.
///
/// # Errors
/// [`Error::Layout`] when none fits or several do, with what was found.
pub fn detect<'a>(path: &Path, config: &Value, names: impl IntoIterator<Item = &'a str>) -> Result<Format> {
    let keys: Vec<&str> = config.as_object().into_iter().flatten().map(|(key, _)| key.as_str()).collect();
    let names: Vec<&str> = names.into_iter().collect();
    let architectures: Vec<&str> =
        config["architectures"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();

    let marked = |format| MARKS.iter().any(|(mark, of)| *of == format && keys.iter().any(|key| key.starts_with(mark)));
    let mut fits: Vec<Format> =
        [Format::Speculators, Format::Sglang].into_iter().filter(|format| marked(*format)).collect();
    let by_class = match architectures.as_slice() {
        [one] => of_class(one),
        _ => None,
    };
    let has_midlayer = names.iter().any(|name| name.starts_with("midlayer."));
    if has_midlayer || by_class == Some(Format::Specforge) && fits.is_empty() {
        fits.push(Format::Specforge);
    }
    // The reference's classes store `layers.*`, also where SGLang's keys stand beside them.
    match (fits.as_slice(), by_class) {
        ([], Some(format)) => fits.push(format),
        ([Format::Specforge], Some(format)) if format != Format::Specforge => fits.push(format),
        _ => {}
    }
    match fits.as_slice() {
        [one] => Ok(*one),
        _ => Err(Error::Layout {
            path: path.into(),
            fits: fits.iter().map(|format| format.name()).collect(),
            found: found(&architectures, &keys, &names),
        }),
    }
}

/// The layout that an architecture's class is stored in.
fn of_class(architecture: &str) -> Option<Format> {
    match architecture {
        "DFlashDraftModel" => Some(Format::Zlab),
        "DSparkDraftModel" | "LlamaForCausalLMEagle3" => Some(Format::Specforge),
        _ if architecture.ends_with("DSparkModel") || architecture.ends_with("Eagle3Model") => Some(Format::Deepspec),
        _ => None,
    }
}

/// What the layout could have been told by.
fn found(architectures: &[&str], keys: &[&str], names: &[&str]) -> String {
    let telling =
        ["speculators_model_type", "dflash_config", "dspark_config", "eagle_config", "transformer_layer_config"];
    let keys: Vec<&str> = telling.into_iter().filter(|key| keys.contains(key)).collect();
    let mut groups: Vec<&str> = names.iter().map(|name| name.split('.').next().unwrap_or(name)).collect();
    groups.dedup();
    groups.truncate(12);
    let listed = |names: &[&str]| match names {
        [] => "none".to_owned(),
        names => format!("`{}`", names.join("`, `")),
    };
    format!("architectures {}, keys {}, tensors {}", listed(architectures), listed(&keys), listed(&groups))
}
