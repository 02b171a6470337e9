//! The `deepspec` program: reads the arguments, runs one command, and turns its error into words and an exit code.
//!
//! | code | meaning |
//! | --- | --- |
//! | 0 | done; also when whoever read the output stopped reading |
//! | 1 | something the user can fix: arguments, files, data; `inspect` found problems |
//! | 2 | the environment (disk, memory, device) or a bug |
//! | 130 | interrupted: work is saved, or there was none to save |
//!
//! A mistake in the arguments is 1 like any other that the user can fix, not clap's own 2. The first Ctrl-C, SIGTERM or
//! SIGHUP asks the command to save and stop; the second one ends the program at once.

mod args;
mod commands;
mod failure;
mod printer;
mod progress;
mod visible;

use std::io::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;

use anyhow::Context as _;
use clap::Parser as _;
use deepspec_engine::progress::{Context, Interrupt};

use crate::args::{Arguments, GlobalOptions};
use crate::printer::Printer;
use crate::progress::TerminalReporter;

/// Exit code of a program that Ctrl-C ended.
const INTERRUPTED: u8 = 130;
/// Exit code of a bug.
const BUG: u8 = 2;
/// Stack of a pool thread, as large as that of a main thread, since commands run on one.
const STACK_BYTES: usize = 8 << 20;

static INTERRUPT: Interrupt = Interrupt::new();

fn main() -> ExitCode {
    deepspec_models::keep_freed_memory();
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => return usage(&error),
    };
    let printer = Printer::new(&arguments.global);
    match catch_unwind(AssertUnwindSafe(|| run(&arguments, &printer))) {
        Ok(Ok(())) => ExitCode::SUCCESS,
        Ok(Err(error)) => failure::report(&error, &printer),
        Err(_) => {
            printer.error("this is a bug in deepspec; please report the lines above and the command");
            ExitCode::from(BUG)
        }
    }
}

/// Prints help, the version, or what is wrong with the arguments.
fn usage(error: &clap::Error) -> ExitCode {
    // Where nobody reads the help, there is nobody to tell.
    let _ = error.print();
    ExitCode::from(u8::from(error.use_stderr()))
}

fn run(arguments: &Arguments, printer: &Printer) -> anyhow::Result<()> {
    catch_signals()?;
    build_pool(&arguments.global)?;
    let reporter = TerminalReporter::new(printer, &arguments.global);
    let context = Context { reporter: &reporter, interrupt: &INTERRUPT };
    // Kernels split their work faster from a thread of the pool than from outside.
    rayon::scope(|_| commands::run(&arguments.command, printer, context))
}

fn build_pool(options: &GlobalOptions) -> anyhow::Result<()> {
    let mut pool = rayon::ThreadPoolBuilder::new().stack_size(STACK_BYTES);
    if let Some(threads) = options.threads {
        pool = pool.num_threads(usize::from(threads));
    }
    pool.build_global().context("cannot start the worker threads")
}

fn catch_signals() -> anyhow::Result<()> {
    #[expect(clippy::exit, reason = "the second signal ends the program even while the command is busy")]
    let on_signal = || {
        if INTERRUPT.is_set() {
            std::process::exit(i32::from(INTERRUPTED));
        }
        INTERRUPT.set();
        let _ = writeln!(anstream::stderr(), "\nstopping as soon as work is saved; once more to stop at once");
    };
    ctrlc::set_handler(on_signal).context("cannot catch signals")
}
