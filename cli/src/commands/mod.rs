//! One file per command: its arguments, one call into the crates below, a printed summary.

mod decoding;
mod eval;
mod export;
mod generate;
mod inspect;
mod prepare;
mod quickstart;
mod serve;
mod setup;
mod tables;
mod train;

use deepspec_engine::progress::Context;

use crate::args::Command;
use crate::printer::Printer;

/// Runs a command to its end.
pub(crate) fn run(command: &Command, printer: &Printer, context: Context<'_>) -> anyhow::Result<()> {
    match command {
        Command::Quickstart(arguments) => quickstart::run(arguments, printer, context),
        Command::Prepare(arguments) => prepare::run(arguments, printer, context),
        Command::Train(arguments) => train::run(arguments, printer, context),
        Command::Eval(arguments) => eval::run(arguments, printer, context),
        Command::Export(arguments) => export::run(arguments, printer, context),
        Command::Generate(arguments) => generate::run(arguments, printer, context),
        Command::Serve(arguments) => serve::run(arguments, context),
        Command::Inspect(arguments) => inspect::run(arguments, printer, context),
    }
}
