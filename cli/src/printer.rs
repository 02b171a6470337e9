//! Where output goes: data to standard output, words for people to standard error.
//!
//! Colours are left out where a stream is no terminal or `NO_COLOR` is set. Words never carry foreign control characters.

use std::io::{self, Write as _};

use anstream::{AutoStream, ColorChoice};
use owo_colors::OwoColorize as _;

use crate::args::GlobalOptions;
use crate::visible;

/// Prints by the rules of the global options.
#[derive(Debug)]
pub(crate) struct Printer {
    /// Only data, warnings and errors are printed.
    quiet: bool,
    /// Long tables are printed whole.
    verbose: bool,
    /// Data is printed as JSON.
    json: bool,
    stdout: ColorChoice,
    stderr: ColorChoice,
}

impl Printer {
    /// A printer for these options.
    pub(crate) fn new(options: &GlobalOptions) -> Self {
        let GlobalOptions { quiet, verbose, json, .. } = *options;
        let (stdout, stderr) = (AutoStream::choice(&io::stdout()), AutoStream::choice(&io::stderr()));
        Self { quiet, verbose, json, stdout, stderr }
    }

    /// Whether long tables are printed whole.
    pub(crate) fn is_verbose(&self) -> bool {
        self.verbose
    }

    /// Whether data is wanted as JSON.
    pub(crate) fn wants_json(&self) -> bool {
        self.json
    }

    /// Whether standard output shows colours.
    pub(crate) fn colours_data(&self) -> bool {
        self.stdout != ColorChoice::Never
    }

    /// Data and a line break to standard output. Foreign text in it must have gone through [`visible`].
    ///
    /// # Errors
    /// The stream is closed (see `failure` for what that means) or its disk is full.
    pub(crate) fn data(&self, text: &str) -> io::Result<()> {
        let mut stdout = AutoStream::new(io::stdout().lock(), self.stdout);
        stdout.write_all(text.as_bytes())?;
        stdout.write_all(b"\n")?;
        stdout.flush()
    }

    /// A part of a line of data, shown at once. Foreign text in it must have gone through [`visible`].
    ///
    /// # Errors
    /// As [`Printer::data`].
    pub(crate) fn stream(&self, text: &str) -> io::Result<()> {
        let mut stdout = AutoStream::new(io::stdout().lock(), self.stdout);
        stdout.write_all(text.as_bytes())?;
        stdout.flush()
    }

    /// A heading.
    pub(crate) fn heading(&self, text: &str) {
        self.unless_quiet(&visible::text(text).bold());
    }

    /// A plain line for people.
    pub(crate) fn words(&self, text: &str) {
        self.unless_quiet(&visible::text(text));
    }

    /// Something to know and perhaps to change.
    pub(crate) fn warning(&self, text: &str) {
        self.to_stderr(&format_args!("{} {}", "warning:".yellow().bold(), visible::text(text)));
    }

    /// What failed.
    pub(crate) fn error(&self, text: &str) {
        self.to_stderr(&format_args!("{} {}", "error:".red().bold(), visible::text(text)));
    }

    /// What to do about what failed.
    pub(crate) fn hint(&self, text: &str) {
        self.to_stderr(&format_args!("{} {}", "hint:".cyan().bold(), visible::text(text)));
    }

    fn unless_quiet(&self, line: &dyn std::fmt::Display) {
        if !self.quiet {
            self.to_stderr(line);
        }
    }

    fn to_stderr(&self, line: &dyn std::fmt::Display) {
        // Words that nobody can read are no reason to stop the work.
        let _ = writeln!(AutoStream::new(io::stderr().lock(), self.stderr), "{line}");
    }
}
