//! Evaluation: speculative against plain decoding, and how good the drafter's confidence is.
//!
//! [`run`] decodes every prompt with every proposer in one go, checks that speculation changes no answer, and writes
//! what it found: `results.json` for programs, `README.md` and `report.html` for people, and `journal.jsonl` with every
//! answer and round, from which an interrupted evaluation goes on.

pub mod confidence;
pub mod cost;
pub mod decode;
mod html;
pub mod identity;
pub mod metrics;
pub mod outcome;
mod plots;
pub mod prompts;
pub mod report;
pub mod speed;

use std::fmt::Write;
use std::path::Path;

use deepspec_datasets::renderer::Renderer;
use deepspec_models::target::Target;
use sha2::{Digest, Sha256};

pub use outcome::EvalOutcome;
pub use report::Table;

use self::decode::{Difference, NO_DRAFTER, Plan, difference, is_greedy};
use self::identity::{Fingerprints, identity};
use self::outcome::{Answers, DrafterInfo, Origin, SCHEMA_VERSION};
use crate::drafter::Drafter;
use crate::error::{Error, Result};
use crate::progress::{Context, Event};
use crate::recipe::{Proposer, Recipe};
use crate::run_dir::{Provenance, write_atomic};

/// Evaluates `drafter` on `target` as `recipe.eval` says and writes the result to `out_dir`. Called again after an
/// interrupt, it goes on with the prompts that are missing; other evaluations in the same folder keep their lines of
/// the journal, the reports are those of the latest.
///
/// # Errors
/// The recipe asks for a drafter that is not given, no prompt can be used, a model fails, the disk refuses, or the user
/// interrupts.
pub fn run(
    recipe: &Recipe,
    out_dir: &Path,
    target: &Target,
    drafter: Option<&Drafter>,
    renderer: &Renderer,
    provenance: &Provenance,
    ctx: Context<'_>,
) -> Result<EvalOutcome> {
    recipe.validate()?;
    let settings = &recipe.eval;
    let drafter = drafter.filter(|_| settings.needs_drafter());
    if drafter.is_none() && settings.needs_drafter() {
        return Err(Error::Input(NO_DRAFTER.into()));
    }
    ctx.reporter.event(Event::Stage("evaluate"));
    let longest = target.config().max_position_embeddings;
    let (sets, prompts) = prompts::load(settings, renderer, longest)?;
    let origin = Origin {
        version: provenance.version.clone(),
        git_commit: provenance.git_commit.clone(),
        started: provenance.started.clone(),
        machine: provenance.machine.clone(),
        kernels: deepspec_models::instruction_set(),
        threads: rayon::current_num_threads(),
    };
    let fingerprints = Fingerprints::take(target, drafter, &prompts[0].ids)?;
    let (template, prompt_ids) = (sha256(renderer.template().source()), prompts::hash(&prompts));
    let inputs = [
        template.as_str(),
        renderer.tokenizer().hash(),
        &prompt_ids,
        &fingerprints.target,
        fingerprints.drafter.as_deref().unwrap_or_default(),
    ];
    let identity = identity(recipe, &origin, &inputs)?;
    fs_err::create_dir_all(out_dir)?;
    let longest_block =
        settings.proposers.iter().map(|&proposer| decode::block_size(proposer, drafter, settings)).max();
    let step_costs = cost::step_costs(
        &out_dir.join("step_costs.json"),
        &identity,
        target,
        longest_block.unwrap_or(0),
        settings.batch_size.min(prompts.len()),
    )?;
    let plan = Plan {
        target,
        drafter,
        settings,
        prompts: &prompts,
        stop_ids: renderer.stop_ids().into(),
        identity: &identity,
        step_costs: &step_costs,
    };
    let samples = plan.run(&out_dir.join("journal.jsonl"), ctx)?;
    let (compared, differences) = compare(&plan, &samples)?;
    let results =
        Answers { recipe, drafter, prompts: &prompts, samples: &samples, differences: &differences }.results()?;
    let outcome = EvalOutcome {
        schema_version: SCHEMA_VERSION,
        warnings: outcome::warnings(&results, &differences, &sets),
        origin,
        recipe: recipe.clone(),
        drafter: drafter.map(DrafterInfo::of),
        fingerprints,
        template_sha256: template,
        tokenizer: renderer.tokenizer().hash().into(),
        prompt_ids_sha256: prompt_ids,
        identity,
        sets,
        lossless: (compared > 0).then_some(differences.is_empty()),
        compared,
        differences,
        peak_memory_bytes: peak_memory_bytes(),
        step_costs: step_costs.entries().to_vec(),
        temperatures: results,
    };
    for warning in &outcome.warnings {
        ctx.warn(warning);
    }
    let json = serde_json::to_string_pretty(&outcome).map_err(std::io::Error::from)?;
    write_atomic(out_dir.join("results.json"), format!("{json}\n").as_bytes())?;
    write_atomic(out_dir.join("README.md"), outcome.markdown().as_bytes())?;
    write_atomic(out_dir.join("report.html"), html::page(&outcome).as_bytes())?;
    ctx.note(format!("report: {}", out_dir.join("report.html").display()));
    Ok(outcome)
}

/// Compares every answer at temperature 0 with that of plain decoding: how many were compared, and those that differ.
fn compare(
    plan: &Plan<'_>,
    samples: &std::collections::HashMap<decode::Key, decode::Sample>,
) -> Result<(usize, Vec<Difference>)> {
    let (mut compared, mut differences) = (0, Vec::new());
    let proposers = &plan.settings.proposers;
    let Some(plain) = proposers.iter().position(|&proposer| proposer == Proposer::Plain) else {
        return Ok((compared, differences));
    };
    let greedy = plan.settings.temperatures.iter().enumerate().filter(|(_, temperature)| is_greedy(**temperature));
    for (t, _) in greedy {
        for (place, prompt) in plan.prompts.iter().enumerate() {
            for other in (0..proposers.len()).filter(|&other| other != plain) {
                if let (Some(left), Some(right)) = (samples.get(&(t, place, plain)), samples.get(&(t, place, other))) {
                    compared += 1;
                    differences.extend(difference(plan.target, prompt, left, right)?);
                }
            }
        }
    }
    Ok((compared, differences))
}

/// Largest resident memory of this process, where the system tells.
fn peak_memory_bytes() -> Option<u64> {
    let status = fs_err::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

fn sha256(text: &str) -> String {
    hex(&Sha256::digest(text.as_bytes()))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        // Writing to a string cannot fail.
        _ = write!(text, "{byte:02x}");
        text
    })
}
