//! `deepspec inspect`: tells what a path is, shows what it holds and lists what is wrong with it.
//!
//! Each kind of path has a file here that fills a [`Report`]; text and JSON are two renderings of the same report.

mod cache_v2;
mod conversations;
mod drafter;
mod expected;
mod fetched;
mod gguf;
mod model;
mod report;
mod target_cache;
mod text_side;

use std::io::Read as _;
use std::path::Path;

use deepspec_datasets::target_cache::format::{MANIFEST_FILE, PROGRESS_FILE};
use deepspec_datasets::target_cache::v2;
use deepspec_engine::progress::Context;
use deepspec_stages::model_source::fetched_model_in;

use self::report::Report;
use crate::args::InspectArguments;
use crate::failure::Refusal;
use crate::printer::Printer;

/// First bytes of a GGUF file.
const GGUF_MAGIC: &[u8; 4] = b"GGUF";

/// What a path is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    TargetCache,
    CacheV2,
    Model,
    Gguf,
    Conversations,
}

/// Inspects the path and prints the report.
///
/// # Errors
/// The path cannot be read at all or is of no known kind, an option does not apply to its kind, or, after the report is
/// printed, problems were found.
pub(crate) fn run(arguments: &InspectArguments, printer: &Printer, context: Context<'_>) -> anyhow::Result<()> {
    // The folder of a fetched package is that of its model.
    let path = &fetched_model_in(&arguments.path).unwrap_or_else(|| arguments.path.clone());
    let kind = detect(path)?;
    refuse_options(arguments, kind)?;
    let report = match kind {
        Kind::TargetCache => target_cache::inspect(arguments, context)?,
        Kind::CacheV2 => cache_v2::inspect(arguments, context)?,
        Kind::Model => fetched::inspect(path, arguments.check, || model::inspect(path, arguments.model.as_deref()))?,
        Kind::Gguf => fetched::inspect(path, arguments.check, || gguf::inspect(path))?,
        Kind::Conversations => conversations::inspect(arguments, printer.is_verbose(), context)?,
    };
    print(&report, printer)?;
    match report.problem_count() {
        0 => Ok(()),
        count => {
            let problem = format!("found {count} problem(s) in `{}`", arguments.path.display());
            Err(Refusal { problem, hint: None }.into())
        }
    }
}

fn print(report: &Report, printer: &Printer) -> anyhow::Result<()> {
    let text = if printer.wants_json() {
        report.to_json()?
    } else {
        report.to_text(printer.colours_data(), printer.is_verbose())
    };
    Ok(printer.data(&text)?)
}

fn detect(path: &Path) -> anyhow::Result<Kind> {
    let refuse = |problem: &str, hint: &str| -> anyhow::Result<Kind> {
        let problem = format!("cannot inspect `{}`: {problem}", path.display());
        Err(Refusal { problem, hint: Some(hint.into()) }.into())
    };
    if !path.exists() {
        return refuse("there is no such file or folder", "check the spelling, and the folder that you are in");
    }
    if path.is_dir() {
        return if v2::is_v2(path) {
            Ok(Kind::CacheV2)
        } else if path.join(MANIFEST_FILE).is_file() || path.join(PROGRESS_FILE).is_file() {
            Ok(Kind::TargetCache)
        } else if path.join("config.json").is_file() {
            Ok(Kind::Model)
        } else {
            let problem = "the folder has neither `manifest.json` (target cache) nor `config.json` (model or drafter)";
            refuse(problem, "name the folder or file itself, not one above it")
        };
    }
    let mut start = Vec::new();
    fs_err::File::open(path)?.take(GGUF_MAGIC.len() as u64).read_to_end(&mut start)?;
    if start == GGUF_MAGIC {
        return Ok(Kind::Gguf);
    }
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("gguf") => refuse("it does not start with `GGUF`", "download the file again"),
        Some("safetensors") => refuse("weights alone do not tell the model", "inspect the folder with its config.json"),
        _ => Ok(Kind::Conversations),
    }
}

fn refuse_options(arguments: &InspectArguments, kind: Kind) -> anyhow::Result<()> {
    let is_cache = matches!(kind, Kind::TargetCache | Kind::CacheV2);
    let has_samples = is_cache || kind == Kind::Conversations;
    let given = [
        ("--sample", arguments.sample.is_some(), has_samples, "target caches and conversations"),
        (
            "--model",
            arguments.model.is_some(),
            has_samples || kind == Kind::Model,
            "target caches, conversations and drafters",
        ),
        ("--check", arguments.check, kind != Kind::Conversations, "target caches and fetched models"),
    ];
    for (option, is_given, applies, kinds) in given {
        if is_given && !applies {
            let found = match kind {
                Kind::TargetCache | Kind::CacheV2 => "a target cache",
                Kind::Model => "a model folder",
                Kind::Gguf => "a GGUF file",
                Kind::Conversations => "a file of conversations",
            };
            let problem = format!("`{option}` is for {kinds}, but `{}` is {found}", arguments.path.display());
            return Err(Refusal { problem, hint: Some(format!("leave `{option}` out")) }.into());
        }
    }
    if has_samples && arguments.model.is_some() && arguments.sample.is_none() {
        let problem = "`--model` shows a sample with the model's tokenizer, but no `--sample` is given".into();
        return Err(Refusal { problem, hint: Some("add `--sample 0`".into()) }.into());
    }
    Ok(())
}
