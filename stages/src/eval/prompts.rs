//! The prompts of an evaluation as tokens: sets read, cut to the limit, rendered, and what could not be used counted.

use deepspec_datasets::benchmarks::{EvalPrompt, EvalSet, PythonRandom, built_in_eval, load_eval_set};
use deepspec_datasets::renderer::Renderer;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::hex;
use crate::error::{Error, Result};
use crate::recipe::{EvalRecipe, PromptSource};

/// Refused rows of a set that are listed one by one.
const LISTED_REJECTS: usize = 5;

/// A prompt ready to run.
#[derive(Debug, Clone)]
pub(super) struct Prompt {
    /// Name of its set.
    pub(super) set: String,
    /// Place in its set; added to the seed.
    pub(super) index: usize,
    /// The row's domain.
    pub(super) domain: Option<String>,
    /// Tokens up to and with the generation prompt.
    pub(super) ids: Vec<u32>,
}

/// What was taken of a set.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SetInfo {
    /// Name of the set.
    pub name: String,
    /// Prompts run and reported.
    pub prompts: usize,
    /// Further prompts that were held out for calibration.
    #[serde(default)]
    pub calibration: usize,
    /// Of all these, prompts with further turns, which are not used.
    pub multi_turn: usize,
    /// Rows that could not be used.
    pub rejected: usize,
    /// The first of these, each with its line and reason.
    pub first_rejects: Vec<String>,
}

/// Reads and renders all sets of a recipe. `longest` is the target's context length; a prompt that leaves no room for a
/// whole answer in it is counted as rejected.
///
/// # Errors
/// A set cannot be read or has the name of another, or no prompt is left.
pub(super) fn load(settings: &EvalRecipe, renderer: &Renderer, longest: usize) -> Result<(Vec<SetInfo>, Vec<Prompt>)> {
    let (mut sets, mut prompts): (Vec<SetInfo>, Vec<Prompt>) = (Vec::new(), Vec::new());
    for source in &settings.prompts {
        let set = read(source, settings)?;
        if sets.iter().any(|known| known.name == set.name) {
            return Err(Error::Input(format!(
                "two evaluation sets are called `{}`; rename one of the files",
                set.name
            )));
        }
        let mut rejects: Vec<String> =
            set.rejects.iter().map(|reject| format!("line {}: {}", reject.line, reject.reason)).collect();
        let before = prompts.len();
        let mut multi_turn = 0;
        for prompt in set.prompts {
            match render(&prompt, renderer, longest, settings.max_new_tokens) {
                Ok(ids) => {
                    multi_turn += usize::from(prompt.turns > 1);
                    prompts.push(Prompt { set: set.name.clone(), index: prompt.index, domain: prompt.domain, ids });
                }
                Err(reason) => rejects.push(format!("line {}: {reason}", prompt.line)),
            }
        }
        sets.push(SetInfo {
            name: set.name,
            prompts: prompts.len() - before,
            calibration: 0,
            multi_turn,
            rejected: rejects.len(),
            first_rejects: rejects.into_iter().take(LISTED_REJECTS).collect(),
        });
    }
    if prompts.is_empty() {
        let reason = sets.iter().find_map(|set| set.first_rejects.first()).map_or("the sets are empty", String::as_str);
        return Err(Error::Input(format!("no evaluation prompt can be used; the first reason: {reason}")));
    }
    Ok((sets, prompts))
}

fn read(source: &PromptSource, settings: &EvalRecipe) -> Result<EvalSet> {
    let path = match source {
        PromptSource::File(path) => path,
        PromptSource::BuiltIn => {
            let mut set = built_in_eval()?;
            // As for a file with more rows than wanted.
            if let Some(limit) = settings.limit.filter(|limit| *limit < set.prompts.len()) {
                PythonRandom::new(settings.seed).shuffle(&mut set.prompts);
                set.prompts.truncate(limit);
                for (index, prompt) in set.prompts.iter_mut().enumerate() {
                    prompt.index = index;
                }
            }
            return Ok(set);
        }
    };
    Ok(load_eval_set(path, settings.limit, settings.seed)?)
}

fn render(prompt: &EvalPrompt, renderer: &Renderer, longest: usize, answer: usize) -> Result<Vec<u32>, String> {
    let ids = renderer.render_prompt(&prompt.messages, prompt.tools.as_ref()).map_err(|error| {
        let hint = error.hint().map_or_else(String::new, |hint| format!(" ({hint})"));
        format!("{error}{hint}")
    })?;
    let needed = ids.len() + answer;
    if needed > longest {
        return Err(format!(
            "{} prompt tokens and {answer} new ones exceed the target's context of {longest}",
            ids.len()
        ));
    }
    Ok(ids)
}

/// Hash of names, places and tokens of all prompts: two results with the same hash ran the same prompts.
pub(super) fn hash(prompts: &[Prompt]) -> String {
    let mut hash = Sha256::new();
    for prompt in prompts {
        hash.update(format!("{}\0{}\0{}\0", prompt.set, prompt.index, prompt.ids.len()));
        hash.update(bytemuck::cast_slice::<u32, u8>(&prompt.ids));
    }
    hex(&hash.finalize())
}
