//! `deepspec prepare`: answers by the target, then the target cache.

use deepspec_datasets::target_cache::Reader;
use deepspec_engine::progress::Context;
use deepspec_models::config::TargetConfig;
use deepspec_stages::model_source::{load_text_side, resolve};
use deepspec_stages::prepare;
use deepspec_stages::recipe::PromptSource;
use serde_json::{Map, Value};

use super::setup::{Setup, model_source};
use super::tables;
use crate::args::PrepareArguments;
use crate::printer::Printer;

/// Prepares the cache, or with `--dry-run` only says what it would cost.
///
/// # Errors
/// As [`prepare::run`].
pub(super) fn run(arguments: &PrepareArguments, printer: &Printer, context: Context<'_>) -> anyhow::Result<()> {
    let setup = Setup::new(&arguments.run, false, |recipe| {
        if let Some(file) = &arguments.prompts {
            recipe.data.prompts = PromptSource::File(file.clone());
        }
        recipe.data.limit = arguments.limit.or(recipe.data.limit);
    })?;
    if arguments.dry_run {
        let resolved = resolve(&setup.recipe.target.model, &model_source())?;
        let (config, text) = (TargetConfig::open(&resolved.path)?, load_text_side(&resolved)?);
        let plan = prepare::plan(&setup.recipe, &config, &text.renderer, context)?;
        return print(&plan.summary(), printer);
    }
    let run = setup.run_dir(context)?;
    let model = setup.target(context)?;
    if let Some(from) = &arguments.import_cache {
        let (target, renderer, fingerprint) = (&model.target, &model.text.renderer, &model.fingerprint);
        let manifest = prepare::import(&setup.recipe, &run, target, renderer, fingerprint, from, context)?;
        let summary = [
            ("samples".to_owned(), manifest.samples.to_string()),
            ("tokens".to_owned(), manifest.tokens.to_string()),
            ("supervised tokens".to_owned(), manifest.supervised_tokens.to_string()),
            ("cache".to_owned(), run.cache().display().to_string()),
        ];
        return print(&summary, printer);
    }
    let outcome = prepare::run(&setup.recipe, &run, &model.target, &model.text.renderer, &model.fingerprint, context)?;
    print(&outcome.summary(), printer)?;
    let samples = Reader::open(&run.cache())?.len();
    let (cache, model) = (run.cache(), model.path);
    printer.words(&format!(
        "look at one of the {samples} samples with `deepspec inspect {} --sample 0 --model {}`",
        cache.display(),
        model.display()
    ));
    Ok(())
}

/// Prints a summary as a table or as JSON.
pub(super) fn print(summary: &[(String, String)], printer: &Printer) -> anyhow::Result<()> {
    if printer.wants_json() {
        let object: Map<String, Value> =
            summary.iter().map(|(what, value)| (what.clone(), Value::String(value.clone()))).collect();
        printer.data(&Value::Object(object).to_string())?;
    } else {
        printer.data(&tables::pairs(summary))?;
    }
    Ok(())
}
