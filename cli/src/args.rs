//! The command line. Doc comments here are the help texts.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

/// Make a language model decode faster without changing its output.
#[derive(Debug, Parser)]
#[command(name = "deepspec", version, propagate_version = true, arg_required_else_help = true)]
#[command(after_help = "Exit codes: 0 done, 1 something you can fix, 2 environment or bug, 130 interrupted.")]
pub(crate) struct Arguments {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
    /// Options of every command.
    #[command(flatten)]
    pub global: GlobalOptions,
}

/// Options of every command.
#[derive(Debug, Args)]
#[command(next_help_heading = "Output and threads")]
pub(crate) struct GlobalOptions {
    /// Say nothing but results, warnings and errors.
    #[arg(long, short, global = true, conflicts_with = "verbose")]
    pub quiet: bool,
    /// Show everything: all rows of long tables, all causes of refused rows.
    #[arg(long, short, global = true)]
    pub verbose: bool,
    /// Draw no progress bars; print a line every few seconds instead.
    #[arg(long, global = true)]
    pub no_progress: bool,
    /// Print results as JSON.
    #[arg(long, global = true)]
    pub json: bool,
    /// Worker threads [default: one per CPU].
    #[arg(long, global = true, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Show what a cache, checkpoint, model or data file holds, and what is wrong with it.
    Inspect(InspectArguments),
}

/// Arguments of `inspect`.
#[derive(Debug, Args)]
pub(crate) struct InspectArguments {
    /// Target cache folder, drafter or target folder, GGUF file, or JSON lines of conversations.
    pub path: PathBuf,
    /// Show sample N, counted from 0: what a cache holds with its loss mask, or a conversation as messages.
    #[arg(long, value_name = "N")]
    pub sample: Option<u64>,
    /// Model folder or GGUF file whose tokenizer and template the sample is shown with: the text of a cache, or the
    /// tokens that a conversation would be trained on.
    #[arg(long, value_name = "PATH", requires = "sample")]
    pub model: Option<PathBuf>,
    /// Read a target cache from end to end and verify every checksum.
    #[arg(long)]
    pub check: bool,
}
