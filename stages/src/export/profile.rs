//! `speculation_profile.json`: how often each position of a proposal was accepted, on what data, with how many tokens drafted.

use std::path::Path;

use deepspec_models::formats::Canonical;
use serde_json::{Value, json};

use super::target_layer_ids;
use crate::error::{Error, Result};
use crate::eval::EvalOutcome;
use crate::recipe::Proposer;

/// The profile of a drafter from the results of its evaluation; `path` is for messages.
///
/// # Errors
/// The evaluation had no drafter, or one of another shape.
pub fn profile(results: &EvalOutcome, drafter: &Canonical, path: &Path) -> Result<Value> {
    let Some(info) = &results.drafter else {
        return Err(Error::Input(format!("`{}` is of an evaluation without a drafter", path.display())));
    };
    let ours = target_layer_ids(drafter);
    if info.target_layer_ids != ours {
        return Err(Error::Mismatch {
            what: "target_layer_ids".into(),
            left: format!("{:?} of the drafter in `{}`", info.target_layer_ids, path.display()),
            right: format!("{ours:?} of the one to export"),
            hint: Some("give the results of this drafter's evaluation".into()),
        });
    }
    let mut k = 0;
    let mut measured = Vec::new();
    for result in &results.temperatures {
        let is_draft = |found: &&crate::eval::outcome::ProposerResult| found.proposer == Proposer::Draft;
        let Some(all) = result.all.proposers.iter().find(is_draft) else { continue };
        k = k.max(all.acceptance.positions.len());
        let data: Vec<Value> = result
            .sets
            .iter()
            .filter_map(|set| {
                let found = set.proposers.iter().find(is_draft)?;
                Some(json!({ "set": set.name, "prompts": set.prompts, "acceptance_length": found.acceptance.tau }))
            })
            .collect();
        measured.push(json!({
            "temperature": result.temperature,
            "acceptance_length": all.acceptance.tau,
            "rounds": all.acceptance.rounds,
            "positions": all.acceptance.positions,
            "data": data,
        }));
    }
    if measured.is_empty() {
        return Err(Error::Input(format!("`{}` holds no measurement of the drafter", path.display())));
    }
    Ok(json!({
        "k": k,
        "drafter": info,
        "target_fingerprint": results.fingerprints.target,
        "drafter_fingerprint": results.fingerprints.drafter,
        "origin": results.origin,
        "measured": measured,
    }))
}
