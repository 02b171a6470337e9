//! `deepspec eval`: acceptance, calibration and measured speed on held-out prompts.

use std::path::Path;

use anyhow::Context as _;
use deepspec_engine::progress::Context;
use deepspec_stages::calibration;
use deepspec_stages::drafter::{describe, limits, load_drafter_for};
use deepspec_stages::eval::{self, EvalOutcome};
use deepspec_stages::recipe::PromptSource;
use deepspec_stages::train::latest_checkpoint;

use super::setup::Setup;
use super::tables;
use crate::args::EvalArguments;
use crate::failure::Refusal;
use crate::printer::Printer;

/// Evaluates the run's drafter, or the one given.
///
/// # Errors
/// As [`eval::run`]; also when speculative and plain output differ.
pub(super) fn run(arguments: &EvalArguments, printer: &Printer, context: Context<'_>) -> anyhow::Result<()> {
    let setup = Setup::new(&arguments.run, true, |recipe| {
        if !arguments.prompts.is_empty() {
            recipe.eval.prompts = arguments.prompts.iter().cloned().map(PromptSource::File).collect();
        }
        recipe.eval.limit = arguments.limit.or(recipe.eval.limit);
        recipe.eval.calibration |= arguments.calibrate;
    })?;
    let run = setup.run_dir(context)?;
    let model = setup.target(context)?;
    let checkpoint = match &arguments.draft {
        Some(folder) => Some(folder.clone()),
        None => latest_checkpoint(&run)?,
    };
    let wanted = setup.recipe.eval.needs_drafter();
    let out = arguments.out.clone().unwrap_or_else(|| run.eval());
    let (recipe, target, renderer, provenance) =
        (&setup.recipe, &model.target, &model.text.renderer, &setup.provenance);
    let outcome = match checkpoint.filter(|_| wanted) {
        Some(folder) => {
            let mut drafter = load_drafter_for(&folder, &model, recipe.draft.precision)?;
            context.note(format!("{}, from `{}`", describe(&drafter.config()), folder.display()));
            if let Some(note) = limits::other_precision(&folder, recipe.draft.precision)? {
                context.note(note);
            }
            if arguments.calibrate {
                eval::run_calibrated(recipe, &out, target, drafter, &folder, renderer, provenance, context)?
            } else {
                if recipe.eval.calibration {
                    drafter = calibration::attach(drafter, &folder, context)?;
                }
                eval::run(recipe, &out, target, Some(&drafter), renderer, provenance, context)?
            }
        }
        None if arguments.calibrate => {
            let problem = "no drafter to calibrate".to_owned();
            let hint = Some("train one, give `--draft`, and have `draft` or `hybrid` in `eval.proposers`".into());
            return Err(Refusal { problem, hint }.into());
        }
        None => eval::run(recipe, &out, target, None, renderer, provenance, context)?,
    };
    print(&outcome, &out, printer)
}

/// Prints tables or JSON, says where the reports are, and refuses to call a lossy run a success.
pub(super) fn print(outcome: &EvalOutcome, out: &Path, printer: &Printer) -> anyhow::Result<()> {
    if printer.wants_json() {
        printer.data(&serde_json::to_string(outcome).context("cannot write the outcome as JSON")?)?;
    } else {
        printer.data(&tables::evaluation(outcome))?;
    }
    printer.words(&format!("reports: {}/report.html, README.md, results.json", out.display()));
    refuse_lossy(outcome)
}

/// Speculation that changes the output is a failure, however fast.
pub(super) fn refuse_lossy(outcome: &EvalOutcome) -> anyhow::Result<()> {
    if outcome.lossless == Some(false) {
        return Err(Refusal {
            problem: format!("speculative output differs from plain output in {} answers", outcome.differences.len()),
            hint: Some("this is a bug; the reports list each prompt and position".into()),
        }
        .into());
    }
    Ok(())
}
