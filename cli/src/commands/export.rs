//! `deepspec export`: a drafter in the format of an engine or another trainer, a target cache in the reference's, or costs of passes.

use std::path::{Path, PathBuf};

use deepspec_datasets::target_cache::v2;
use deepspec_engine::progress::Context;
use deepspec_models::formats::Format;
use deepspec_stages::export::{self, CacheExport, CostForm, DrafterExport};
use deepspec_stages::model_source::resolve;
use deepspec_stages::run_dir::RunDir;
use deepspec_stages::train::checkpoint::Checkpoints;

use super::prepare::print;
use super::setup::model_source;
use crate::args::{ExportArguments, ExportFormat};
use crate::failure::Refusal;
use crate::printer::Printer;

/// What costs of passes are exported to, for messages.
const COST_FORMS: &str = "--to sps-table and sps-additive";

/// Exports what the arguments name.
///
/// # Errors
/// There is nothing to export, or as [`export::drafter`], [`export::cache`] and [`export::costs`].
pub(super) fn run(arguments: &ExportArguments, printer: &Printer, context: Context<'_>) -> anyhow::Result<()> {
    let format = match arguments.to {
        ExportFormat::CacheV2 => return cache(arguments, printer, context),
        ExportFormat::SpsTable => return costs(arguments, CostForm::Table, printer),
        ExportFormat::SpsAdditive => return costs(arguments, CostForm::Additive, printer),
        ExportFormat::Deepspec => Format::Deepspec,
        ExportFormat::Speculators => Format::Speculators,
        ExportFormat::Sglang => Format::Sglang,
        ExportFormat::Zlab => Format::Zlab,
        ExportFormat::Specforge => Format::Specforge,
    };
    drafter(arguments, format, printer, context)
}

fn drafter(arguments: &ExportArguments, format: Format, printer: &Printer, context: Context<'_>) -> anyhow::Result<()> {
    refuse(arguments.cache.is_some(), "--cache", "--to cache-v2")?;
    refuse(arguments.costs.is_some(), "--costs", COST_FORMS)?;
    let draft = match (&arguments.draft, &arguments.run) {
        (Some(draft), _) => draft.clone(),
        (None, Some(run)) => newest_checkpoint(RunDir::must_exist(run)?)?,
        (None, None) => return Err(nothing("a drafter", "`--draft` with a checkpoint, or `--run` with a run folder")),
    };
    // Engines find the target by the name that the run was made with.
    let named = arguments.run.as_ref().filter(|run| run.join("recipe.toml").is_file());
    let run_target = named.map(RunDir::saved_recipe).transpose()?.map(|recipe| recipe.target.model);
    let target = arguments.target.as_ref().map(|target| resolve(target, &model_source())).transpose()?;
    let export = DrafterExport {
        draft,
        format,
        out: arguments.out.clone(),
        target: target.map(|target| target.path),
        target_name: arguments.target.clone().or(run_target),
        results: arguments.profile.clone(),
    };
    let done = export::drafter(&export, context)?;
    let summary = [
        ("read".to_owned(), format!("{} ({})", export.draft.display(), done.from.name())),
        ("written".to_owned(), format!("{} ({})", export.out.display(), done.to.name())),
        ("target layers".to_owned(), format!("{:?}", done.layer_ids)),
        ("size".to_owned(), format!("{:.1} MB", done.bytes as f64 / 1e6)),
    ];
    print(&summary, printer)
}

fn cache(arguments: &ExportArguments, printer: &Printer, context: Context<'_>) -> anyhow::Result<()> {
    refuse_drafter_options(arguments)?;
    refuse(arguments.costs.is_some(), "--costs", COST_FORMS)?;
    let cache = match (&arguments.cache, &arguments.run) {
        (Some(cache), _) => cache.clone(),
        (None, Some(run)) => RunDir::must_exist(run)?.join("cache"),
        (None, None) => return Err(nothing("a target cache", "`--cache` with one, or `--run` with a run folder")),
    };
    let export = CacheExport { cache, out: arguments.out.clone(), max_shard_bytes: v2::MAX_SHARD_BYTES };
    let manifest = export::cache(&export, context)?;
    let summary = [
        ("read".to_owned(), export.cache.display().to_string()),
        ("written".to_owned(), format!("{} (version 2)", export.out.display())),
        ("samples".to_owned(), manifest.num_samples.to_string()),
        ("shards".to_owned(), manifest.num_shards.to_string()),
    ];
    print(&summary, printer)
}

fn costs(arguments: &ExportArguments, form: CostForm, printer: &Printer) -> anyhow::Result<()> {
    refuse_drafter_options(arguments)?;
    refuse(arguments.cache.is_some(), "--cache", "--to cache-v2")?;
    refuse(arguments.run.is_some(), "--run", "drafters and caches")?;
    let Some(from) = &arguments.costs else {
        return Err(nothing(
            "a table of costs",
            "`--costs` with the file that `serve` names when it has measured them",
        ));
    };
    let written = export::costs(from, form, &arguments.out)?;
    let (first, last) = (written.entries()[0], written.entries()[written.entries().len() - 1]);
    let summary = [
        ("read".to_owned(), from.display().to_string()),
        ("written".to_owned(), arguments.out.display().to_string()),
        ("passes".to_owned(), format!("{} to {} rows", first.rows, last.rows)),
        ("time".to_owned(), format!("{:.1} to {:.1} ms", 1e3 * first.seconds, 1e3 * last.seconds)),
    ];
    print(&summary, printer)
}

fn newest_checkpoint(run: &Path) -> anyhow::Result<PathBuf> {
    match Checkpoints::new(run.join("checkpoints"), 1).latest()? {
        Some(found) => Ok(found.folder),
        None => Err(nothing(&format!("a checkpoint in `{}`", run.display()), "another `--run`, or `--draft`")),
    }
}

fn nothing(what: &str, give: &str) -> anyhow::Error {
    Refusal { problem: format!("there is not {what} to export"), hint: Some(format!("give {give}")) }.into()
}

fn refuse_drafter_options(arguments: &ExportArguments) -> anyhow::Result<()> {
    refuse(arguments.draft.is_some(), "--draft", "drafters")?;
    refuse(arguments.target.is_some(), "--target", "drafters")?;
    refuse(arguments.profile.is_some(), "--profile", "drafters")
}

fn refuse(is_given: bool, option: &str, of: &str) -> anyhow::Result<()> {
    if !is_given {
        return Ok(());
    }
    Err(Refusal { problem: format!("`{option}` is for {of}"), hint: Some(format!("leave `{option}` out")) }.into())
}
