//! The dotted names of a recipe's keys: overrides, the nearest key for a misspelled one, and lists of differences.

use std::collections::BTreeMap;

use toml::{Table, Value};

use super::Recipe;
use crate::error::{Error, Result};

/// Every key, dotted; those of a phase stand under `train.phases`.
pub(super) const KEYS: &[&str] = &[
    "target.model",
    "target.precision",
    "data.prompts",
    "data.loss_on",
    "data.strip_invisible",
    "data.max_bad_ratio",
    "data.limit",
    "prepare.regenerate",
    "prepare.samples_per_prompt",
    "prepare.temperature",
    "prepare.top_p",
    "prepare.top_k",
    "prepare.min_p",
    "prepare.max_new_tokens",
    "prepare.max_length",
    "prepare.batch_size",
    "prepare.samples_per_shard",
    "prepare.seed",
    "draft.algorithm",
    "draft.num_layers",
    "draft.block_size",
    "draft.ttt_length",
    "draft.sample_from_anchor",
    "draft.vocab_size",
    "draft.target_layer_ids",
    "draft.mask_token_id",
    "draft.markov_rank",
    "draft.markov_head",
    "draft.confidence_head",
    "draft.confidence_head_with_markov",
    "draft.precision",
    "draft.qk_norm",
    "draft.sliding_window",
    "draft.num_experts",
    "draft.experts_per_token",
    "draft.moe_intermediate_size",
    "draft.shared_expert",
    "init.layers",
    "init.markov",
    "init.from",
    "train.epochs",
    "train.steps",
    "train.batch_size",
    "train.micro_batch_size",
    "train.num_anchors",
    "train.lr",
    "train.warmup_ratio",
    "train.weight_decay",
    "train.max_grad_norm",
    "train.loss_decay_gamma",
    "train.load_balance",
    "train.router_z",
    "train.step_loss_decay",
    "train.ema",
    "train.checkpoint_every",
    "train.keep_checkpoints",
    "train.log_every",
    "train.acceptance_every",
    "train.acceptance_prompts",
    "train.seed",
    "train.phases",
    "train.phases.until",
    "train.phases.ce",
    "train.phases.tv",
    "train.phases.kl",
    "train.phases.kl_temperature",
    "train.phases.confidence",
    "eval.prompts",
    "eval.limit",
    "eval.max_new_tokens",
    "eval.temperatures",
    "eval.top_p",
    "eval.top_k",
    "eval.min_p",
    "eval.proposers",
    "eval.ngram_max",
    "eval.ngram_block",
    "eval.confidence_threshold",
    "eval.seed",
    "eval.adaptive",
    "eval.calibration",
    "eval.batch_size",
];

/// Keys that may be absent; `--set key=none` takes them out.
const OPTIONAL: &[&str] = &[
    "data.limit",
    "draft.ttt_length",
    "draft.vocab_size",
    "draft.sliding_window",
    "draft.num_experts",
    "draft.experts_per_token",
    "draft.moe_intermediate_size",
    "draft.shared_expert",
    "init.from",
    "train.step_loss_decay",
    "train.epochs",
    "train.steps",
    "train.load_balance",
    "train.router_z",
    "train.ema",
    "train.acceptance_every",
    "eval.limit",
];

impl Recipe {
    /// Applies one override, `key=value`, such as `train.lr=3e-4` or `train.phases.0.ce=1`. The value is TOML; text
    /// that is no TOML value is taken as a string, so quotes can be left out. `none` takes an optional value out, and
    /// setting `train.steps` takes out `train.epochs` or the other way round. Ranges are checked by
    /// [`Recipe::validate`], once all overrides are in.
    ///
    /// # Errors
    /// [`Error::Recipe`] names the nearest key for one that does not exist, or the type that is expected; the recipe is
    /// then as it was.
    pub fn apply_set(&mut self, assignment: &str) -> Result<()> {
        let fail = |problem: String| Error::Recipe { origin: format!("override `--set {assignment}`"), problem };
        let (key, text) = assignment
            .split_once('=')
            .map(|(key, text)| (key.trim(), text.trim()))
            .ok_or_else(|| fail("expected `key=value`, such as `train.lr=3e-4`".into()))?;
        let is_number = |part: &&str| part.parse::<usize>().is_ok();
        let named: Vec<&str> = key.split('.').filter(|part| !is_number(part)).collect();
        let named = named.join(".");
        let (parent, name) = key.rsplit_once('.').unwrap_or_default();
        if !KEYS.contains(&named.as_str()) || is_number(&name) {
            return Err(fail(format!("there is no key `{key}` to set; nearest: `{}`", nearest(&named, false))));
        }
        let mut recipe = Value::Table(self.to_table()?);
        let fields = parent.split('.').try_fold(&mut recipe, |value, part| match value {
            Value::Table(table) => table.get_mut(part),
            Value::Array(list) => list.get_mut(part.parse::<usize>().ok()?),
            _ => None,
        });
        let Some(Value::Table(fields)) = fields else {
            let phases = self.train.phases.len();
            return Err(fail(format!(
                "there is no `{parent}`; phases are numbered from 0, as in `train.phases.0.ce`, and there are {phases}"
            )));
        };
        match key {
            "train.steps" => fields.remove("epochs"),
            "train.epochs" => fields.remove("steps"),
            _ => None,
        };
        if text == "none" && OPTIONAL.contains(&key) {
            fields.remove(name);
        } else {
            fields.insert(name.into(), text.parse().unwrap_or_else(|_| Value::String(text.into())));
        }
        let expected = |error: toml::de::Error| fail(error.to_string().trim_end().replace('\n', ", "));
        *self = recipe.try_into().map_err(expected)?;
        Ok(())
    }

    /// Every key and its value as TOML, dotted and sorted; phases are numbered, as in `train.phases.0.ce`.
    ///
    /// # Errors
    /// A number does not fit TOML.
    pub fn entries(&self) -> Result<BTreeMap<String, String>> {
        let mut entries = BTreeMap::new();
        flatten("", &Value::Table(self.to_table()?), &mut entries);
        Ok(entries)
    }

    pub(super) fn to_table(&self) -> Result<Table> {
        Table::try_from(self).map_err(|error| Error::Recipe { origin: "as TOML".into(), problem: error.to_string() })
    }
}

fn flatten(key: &str, value: &Value, entries: &mut BTreeMap<String, String>) {
    let join = |name: &str| if key.is_empty() { name.to_owned() } else { format!("{key}.{name}") };
    match value {
        Value::Table(table) => {
            for (name, value) in table {
                flatten(&join(name), value, entries);
            }
        }
        Value::Array(list) if list.iter().any(Value::is_table) => {
            for (index, value) in list.iter().enumerate() {
                flatten(&join(&index.to_string()), value, entries);
            }
        }
        _ => _ = entries.insert(key.to_owned(), value.to_string()),
    }
}

/// The error of a text that is no recipe: line and caret, and the nearest key where one is unknown.
pub(super) fn syntax_error(text: &str, origin: &str, error: &toml::de::Error) -> Error {
    let mut problem = error.to_string().trim_end().to_owned();
    if error.message().starts_with("unknown field")
        && let Some(key) = text.parse::<Table>().ok().and_then(|table| first_unknown(&table))
    {
        problem = format!("{problem}\nno key `{key}`; nearest: `{}`", nearest(&key, true));
    }
    Error::Recipe { origin: origin.into(), problem }
}

/// The first key of a parsed file that is not a recipe's, dotted.
fn first_unknown(table: &Table) -> Option<String> {
    fn search(prefix: &str, value: &Value) -> Option<String> {
        match value {
            Value::Table(table) => table.iter().find_map(|(name, value)| {
                let key = if prefix.is_empty() { name.clone() } else { format!("{prefix}.{name}") };
                let is_section =
                    KEYS.iter().any(|known| known.strip_prefix(&key).is_some_and(|rest| rest.starts_with('.')));
                if KEYS.contains(&key.as_str()) || is_section { search(&key, value) } else { Some(key) }
            }),
            Value::Array(list) => list.iter().find_map(|value| search(prefix, value)),
            _ => None,
        }
    }
    search("", &Value::Table(table.clone()))
}

/// The known key that takes the fewest edits to reach, or the known section for a key without one where `in_file`.
/// Where only the name is much alike, a wrong or missing section counts as one edit.
fn nearest(key: &str, in_file: bool) -> &'static str {
    let is_section = in_file && !key.contains('.');
    let name = |key: &str| key.rsplit('.').next().unwrap_or_default().to_owned();
    let distance = |known: &str| {
        let (whole, name_edits) = (edits(key, known), edits(&name(key), &name(known)));
        if !is_section && 3 * name_edits <= name(key).len() { whole.min(name_edits + 1) } else { whole }
    };
    let section = |known: &'static str| known.split('.').next().unwrap_or_default();
    let candidates = KEYS.iter().map(|known| if is_section { section(known) } else { known });
    candidates.min_by_key(|known| (distance(known), edits(key, known))).unwrap_or_default()
}

/// Insertions, deletions and replacements of characters that turn one text into the other.
pub(super) fn edits(left: &str, right: &str) -> usize {
    let right: Vec<char> = right.chars().collect();
    let mut row: Vec<usize> = (0..=right.len()).collect();
    for (index, l) in left.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = index + 1;
        for (column, r) in right.iter().enumerate() {
            let replaced = diagonal + usize::from(l != *r);
            diagonal = row[column + 1];
            row[column + 1] = replaced.min(diagonal + 1).min(row[column] + 1);
        }
    }
    row[right.len()]
}
