//! `deepspec train`: a drafter from the run's target cache.

use deepspec_engine::progress::Context;
use deepspec_stages::train::{TrainOutcome, Training};

use super::prepare::print;
use super::setup::Setup;
use crate::args::TrainArguments;
use crate::printer::Printer;

/// Trains, or goes on training. The target's memory is free before the first step, unless acceptance is measured on the way.
///
/// # Errors
/// As [`Training::set_up`] and [`Training::run`].
pub(super) fn run(arguments: &TrainArguments, printer: &Printer, context: Context<'_>) -> anyhow::Result<()> {
    let setup = Setup::new(&arguments.run, true, |recipe| {
        if let Some(from) = &arguments.init_from {
            recipe.init.from = Some(from.clone());
        }
    })?;
    let run = setup.run_dir(context)?;
    if let Some(cache) = &arguments.cache {
        run.share_cache(cache)?;
    }
    let model = setup.target(context)?;
    let training = Training::set_up(&setup.recipe, &run, &model, context)?;
    let is_measured = setup.recipe.train.acceptance_every.is_some_and(|every| every > 0);
    let target = is_measured.then_some(model.target);
    let outcome = training.run(target.as_ref(), context)?;
    print(&summary(&outcome), printer)
}

/// The outcome as rows of a table.
pub(super) fn summary(outcome: &TrainOutcome) -> Vec<(String, String)> {
    let mut rows = vec![
        ("steps".to_owned(), outcome.steps.to_string()),
        ("trainable parameters".to_owned(), format!("{:.1} M", outcome.parameters as f64 / 1e6)),
        ("time".to_owned(), format!("{:.0} s for {} steps", outcome.seconds, outcome.steps - outcome.resumed_from)),
        ("checkpoint".to_owned(), outcome.checkpoint.display().to_string()),
    ];
    if let Some(coverage) = &outcome.coverage {
        rows.insert(1, ("draft vocabulary".to_owned(), coverage.to_string()));
    }
    let shown = ["loss", "ce_loss", "tau_probabilistic", "accept_rate@0"];
    for (name, value) in outcome.metrics.iter().filter(|(name, _)| shown.contains(&name.as_str())) {
        rows.push((format!("{name} (last steps, on training data)"), format!("{value:.3}")));
    }
    rows
}
