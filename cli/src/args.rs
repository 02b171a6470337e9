//! The command line. Doc comments here are the help texts.

mod decoding;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

pub(crate) use decoding::{
    DecodingArguments, GenerateArguments, PrecisionChoice, ProposerChoice, ReasoningPlace, ServeArguments,
};

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
    Train(TrainArguments),
    /// Measure plain decoding, n-gram lookup and the drafter on held-out prompts.
    Eval(EvalArguments),
    /// Write a drafter in the format of an engine or another trainer, or a target cache in the reference's.
    Export(ExportArguments),
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
    /// Model folder or GGUF file: the one whose tokenizer and template `--sample` is shown with (the text of a cache, or the
    /// tokens that a conversation would be trained on), or the target that a drafter borrows from.
    #[arg(long, value_name = "PATH")]
    pub model: Option<PathBuf>,
    /// Read a target cache, or a model that was fetched, from end to end and verify every checksum.
    #[arg(long)]
    pub check: bool,
}

/// What `export` writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ExportFormat {
    /// Drafter in the reference's layout, which holds every drafter.
    Deepspec,
    /// Drafter in the layout of the speculators library, for vLLM.
    Speculators,
    /// Drafter for SGLang: DSPARK, or EAGLE3.
    Sglang,
    /// DFlash drafter with blocks of 1+N, as z-lab has them.
    Zlab,
    /// Drafter in SpecForge's layout: DSpark, or EAGLE-3 with `midlayer`.
    Specforge,
    /// Target cache in the reference's format, version 2.
    CacheV2,
    /// Costs of passes as steps per second by the tokens of a batch, for SGLang's planner.
    SpsTable,
    /// Costs of passes as a sum of parts by requests and tokens, for SGLang's planner.
    SpsAdditive,
}

/// Arguments of `export`.
#[derive(Debug, Args)]
pub(crate) struct ExportArguments {
    /// Format to write.
    #[arg(long, value_enum)]
    pub to: ExportFormat,
    /// Folder to write; one with an earlier export of a drafter is replaced. Costs of passes are one file.
    #[arg(long, value_name = "PATH")]
    pub out: PathBuf,
    /// Run folder whose newest checkpoint, or whose cache, is exported.
    #[arg(long, value_name = "DIR")]
    pub run: Option<PathBuf>,
    /// Checkpoint of a drafter, in any layout that is read.
    #[arg(long, value_name = "DIR")]
    pub draft: Option<PathBuf>,
    /// Target cache.
    #[arg(long, value_name = "DIR")]
    pub cache: Option<PathBuf>,
    /// Costs of passes, in the file that `serve` and `generate` name when they have measured them.
    #[arg(long, value_name = "FILE")]
    pub costs: Option<PathBuf>,
    /// Target of the drafter: where its embedding and head come from, should the checkpoint lack them, and the name that engines
    /// find it by.
    #[arg(long, value_name = "NAME|PATH")]
    pub target: Option<String>,
    /// `results.json` of an evaluation of the drafter, for a `speculation_profile.json` beside it.
    #[arg(long, value_name = "FILE")]
    pub profile: Option<PathBuf>,
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
    /// Take over a target cache of the reference (version 2) in place of making one.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["prompts", "limit", "dry_run"])]
    pub import_cache: Option<PathBuf>,
    /// Say what it would do and how much room it would take, and stop.
    #[arg(long)]
    pub dry_run: bool,
}

/// Arguments of `train`.
#[derive(Debug, Args)]
pub(crate) struct TrainArguments {
    #[command(flatten)]
    pub run: RunArguments,
    /// Target cache of another run to train on, in place of the run's own; it must be of the same target and hold the recipe's
    /// target layers, and may hold more. The run remembers it.
    #[arg(long, value_name = "DIR")]
    pub cache: Option<PathBuf>,
    /// Checkpoint of a drafter to start from, such as a released one to tune on one's own prompts; as `--set init.from=DIR`.
    #[arg(long, value_name = "DIR")]
    pub init_from: Option<PathBuf>,
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
    /// Fit the temperatures of the drafter's confidences on every fourth prompt, store them beside the checkpoint, and evaluate on
    /// the other prompts, with reliability before and after.
    #[arg(long)]
    pub calibrate: bool,
    /// Folder of the reports [default: `eval` in the run folder].
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
}
