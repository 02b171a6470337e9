//! The whole product in one go: prepare, train and eval of one recipe in one run folder.
//!
//! Every part resumes by itself, so a quickstart that was interrupted is simply run again.

use std::path::PathBuf;

use crate::calibration;
use crate::drafter::load_drafter_for;
use crate::error::Result;
use crate::eval::{self, EvalOutcome};
use crate::prepare::{self, PrepareOutcome};
use crate::recipe::Recipe;
use crate::run_dir::{Provenance, RunDir};
use crate::target_model::TargetModel;
use crate::train::{self, TrainOutcome};
use deepspec_engine::progress::Context;

/// What the three stages came to.
#[derive(Debug)]
pub struct QuickstartOutcome {
    /// Answers and cache.
    pub prepare: PrepareOutcome,
    /// The drafter.
    pub train: TrainOutcome,
    /// How it does.
    pub eval: EvalOutcome,
    /// Folder of the reports.
    pub reports: PathBuf,
}

/// Runs the three stages one after the other.
///
/// # Errors
/// As the stages.
pub fn run(
    recipe: &Recipe,
    run: &RunDir,
    model: &TargetModel,
    provenance: &Provenance,
    ctx: Context<'_>,
) -> Result<QuickstartOutcome> {
    let prepare = prepare::run(recipe, run, &model.target, &model.text.renderer, &model.fingerprint, ctx)?;
    let train = train::run(recipe, run, model, ctx)?;
    let mut drafter = load_drafter_for(&train.checkpoint, model, recipe.draft.precision)?;
    if recipe.eval.calibration {
        drafter = calibration::attach(drafter, &train.checkpoint, ctx)?;
    }
    let reports = run.eval();
    let renderer = &model.text.renderer;
    let eval = eval::run(recipe, &reports, &model.target, Some(&drafter), renderer, provenance, ctx)?;
    Ok(QuickstartOutcome { prepare, train, eval, reports })
}
