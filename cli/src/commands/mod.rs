//! One file per command: its arguments, one call into the crates below, a printed summary.

mod inspect;

use deepspec_stages::progress::Context;

use crate::args::Command;
use crate::printer::Printer;

/// Runs a command to its end.
pub(crate) fn run(command: &Command, printer: &Printer, context: Context<'_>) -> anyhow::Result<()> {
    match command {
        Command::Inspect(arguments) => inspect::run(arguments, printer, context),
    }
}
