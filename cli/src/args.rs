//! The command line. Doc comments here are the help texts.

mod decoding;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

pub(crate) use decoding::{DecodingArguments, GenerateArguments, PrecisionChoice, ProposerChoice, ServeArguments};

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
    /// Everything at once on a small real model: prepare, train, evaluate, and print what it brought.
    Quickstart(RunArguments),
    /// Let the target answer the prompts and store what it computes: the target cache.
    Prepare(PrepareArguments),
    /// Train a drafter on the run's target cache, or go on doing so.
    Train(RunArguments),
    /// Measure plain decoding, n-gram lookup and the drafter on held-out prompts.
    Eval(EvalArguments),
    /// Answer one prompt on the terminal.
    Generate(GenerateArguments),
    /// Serve target and drafter over HTTP, to anything that speaks OpenAI's API.
    Serve(ServeArguments),
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

/// Which recipe, and which run folder.
#[derive(Debug, Args)]
pub(crate) struct RunArguments {
    /// Name of a built-in recipe, or a TOML file [default: the one saved in the run folder; where there is none,
    /// `quickstart` for quickstart and prepare, an error for train and eval].
    #[arg(long, value_name = "NAME|PATH")]
    pub recipe: Option<String>,
    /// Change a value of the recipe, such as `train.lr=3e-4`; may be given several times.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub overrides: Vec<String>,
    /// Folder that the run's files go to; an interrupted run goes on there [default: runs/RECIPE].
    #[arg(long, value_name = "DIR")]
    pub run: Option<PathBuf>,
}

/// Arguments of `prepare`.
#[derive(Debug, Args)]
pub(crate) struct PrepareArguments {
    #[command(flatten)]
    pub run: RunArguments,
    /// File of conversations (JSON lines), in place of the recipe's.
    #[arg(long, value_name = "FILE")]
    pub prompts: Option<PathBuf>,
    /// Use only the first N prompts.
    #[arg(long, value_name = "N")]
    pub limit: Option<usize>,
    /// Say what it would do and how much room it would take, and stop.
    #[arg(long)]
    pub dry_run: bool,
}

/// Arguments of `eval`.
#[derive(Debug, Args)]
pub(crate) struct EvalArguments {
    #[command(flatten)]
    pub run: RunArguments,
    /// Checkpoint folder of the drafter [default: the run's newest].
    #[arg(long, value_name = "DIR")]
    pub draft: Option<PathBuf>,
    /// File of prompts, in place of the recipe's; may be given several times.
    #[arg(long, value_name = "FILE")]
    pub prompts: Vec<PathBuf>,
    /// Use only N prompts of each set.
    #[arg(long, value_name = "N")]
    pub limit: Option<usize>,
    /// Folder of the reports [default: `eval` in the run folder].
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
}
