//! `deepspec quickstart`: the whole product on a small real model.

use deepspec_engine::progress::Context;
use deepspec_stages::quickstart;
use serde_json::json;

use super::setup::Setup;
use super::{eval, prepare, train};
use crate::args::RunArguments;
use crate::printer::Printer;

/// Prepares, trains and evaluates, going on where an earlier call stopped.
///
/// # Errors
/// As the three stages.
pub(super) fn run(arguments: &RunArguments, printer: &Printer, context: Context<'_>) -> anyhow::Result<()> {
    let setup = Setup::new(arguments, false, |_| {})?;
    let run = setup.run_dir(context)?;
    let model = setup.target(context)?;
    let outcome = quickstart::run(&setup.recipe, &run, &model, &setup.provenance, context)?;
    if printer.wants_json() {
        let parts = json!({
            "prepare": outcome.prepare.summary(),
            "train": train::summary(&outcome.train),
            "eval": outcome.eval,
        });
        printer.data(&parts.to_string())?;
        return eval::refuse_lossy(&outcome.eval);
    }
    prepare::print(&outcome.prepare.summary(), printer)?;
    prepare::print(&train::summary(&outcome.train), printer)?;
    eval::print(&outcome.eval, &outcome.reports, printer)
}
