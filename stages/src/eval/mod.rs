//! Evaluation: speculative against plain decoding, and how good the drafter's confidence is.
//!
//! [`run`] decodes every prompt with every proposer in one go, checks that speculation changes no answer, and writes
//! what it found: `results.json` for programs, `README.md` and `report.html` for people, and `journal.jsonl` with every
//! answer and round, from which an interrupted evaluation goes on. [`run_calibrated`] fits the drafter's confidences first.

pub mod calibrate;
pub mod confidence;
pub mod cost;
pub mod decode;
mod html;
pub mod identity;
pub mod metrics;
pub mod outcome;
mod plots;
pub mod prompts;
mod reliability;
pub mod report;
pub mod speed;
mod turns;
pub mod verdict;

use std::fmt::Write;
use std::path::Path;

use deepspec_datasets::renderer::Renderer;
use deepspec_models::speculate::Temperatures;
use deepspec_models::target::Target;
use sha2::{Digest, Sha256};

pub use outcome::EvalOutcome;
pub use report::Table;

use self::calibrate::CalibrationOutcome;
use self::decode::{Difference, NO_DRAFTER, Plan, difference, is_greedy};
use self::identity::{Fingerprints, identity};
use self::outcome::{Answers, DrafterInfo, Origin, SCHEMA_VERSION};
use self::prompts::{Prompt, SetInfo};
use self::verdict::Comparison;
use crate::drafter::Drafter;
use crate::error::{Error, Result};
use crate::recipe::{Proposer, Recipe};
use crate::run_dir::{Provenance, write_atomic};
use deepspec_engine::progress::{Context, Event};

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
    let drafter = drafter.filter(|_| recipe.eval.needs_drafter());
    if drafter.is_none() && recipe.eval.needs_drafter() {
        return Err(Error::Input(NO_DRAFTER.into()));
    }
    let evaluation = Evaluation::new(recipe, out_dir, target, renderer, provenance, ctx);
    let (sets, prompts) = evaluation.prompts()?;
    evaluation.run(drafter, sets, &prompts, None)
}

/// As [`run`], but first fits the temperatures of the drafter's confidences on a share of the prompts and writes them beside
/// its `checkpoint` (see [`calibrate`]); the others are evaluated with them. Of a drafter without a confidence head a warning
/// says that there is nothing to fit; the same prompts are held out, so that the results of several drafters can be compared.
///
/// # Errors
/// As [`run`]; the recipe measures no drafter, `drafter` is calibrated already, there are too few prompts, or too few blocks.
pub fn run_calibrated(
    recipe: &Recipe,
    out_dir: &Path,
    target: &Target,
    drafter: Drafter,
    checkpoint: &Path,
    renderer: &Renderer,
    provenance: &Provenance,
    ctx: Context<'_>,
) -> Result<EvalOutcome> {
    recipe.validate()?;
    if !recipe.eval.needs_drafter() || drafter.calibration().is_some() {
        let problem = "a calibration wants `draft` or `hybrid` in `eval.proposers`, and a drafter without one";
        return Err(Error::Input(problem.into()));
    }
    let evaluation = Evaluation::new(recipe, out_dir, target, renderer, provenance, ctx);
    let (mut sets, prompts) = evaluation.prompts()?;
    let (share, rest) = calibrate::split(prompts, &mut sets)?;
    if !drafter.has_confidence() {
        ctx.warn(format!(
            "the drafter has no confidence head, so there is nothing to calibrate; {} prompts are held out all the same, as \
             they are for drafters with one",
            share.len()
        ));
        return evaluation.run(Some(&drafter), sets, &rest, None);
    }
    ctx.reporter.event(Event::Stage("calibrate"));
    let all = [&share[..], &rest].concat();
    let outcome = evaluation.calibrate(&drafter, &all, share.len())?;
    outcome.table.save(checkpoint)?;
    ctx.note(outcome.table.describe());
    ctx.note(outcome.headline());
    let temperatures = Temperatures::new(outcome.table.temperatures.clone(), drafter.block_size())?;
    evaluation.run(Some(&drafter.with_calibration(temperatures)?), sets, &rest, Some(outcome))
}

/// What all parts of an evaluation share.
struct Evaluation<'a> {
    recipe: &'a Recipe,
    out_dir: &'a Path,
    target: &'a Target,
    renderer: &'a Renderer,
    origin: Origin,
    template: String,
    ctx: Context<'a>,
}

/// What makes one part of an evaluation itself.
struct Identity {
    fingerprints: Fingerprints,
    prompt_ids: String,
    hash: String,
}

impl<'a> Evaluation<'a> {
    fn new(
        recipe: &'a Recipe,
        out_dir: &'a Path,
        target: &'a Target,
        renderer: &'a Renderer,
        provenance: &Provenance,
        ctx: Context<'a>,
    ) -> Self {
        let origin = Origin {
            version: provenance.version.clone(),
            git_commit: provenance.git_commit.clone(),
            started: provenance.started.clone(),
            machine: provenance.machine.clone(),
            kernels: deepspec_models::instruction_set(),
            threads: rayon::current_num_threads(),
        };
        Self { recipe, out_dir, target, renderer, origin, template: sha256(renderer.template().source()), ctx }
    }

    fn prompts(&self) -> Result<(Vec<SetInfo>, Vec<Prompt>)> {
        prompts::load(&self.recipe.eval, self.renderer, self.target.config().max_position_embeddings)
    }

    fn identity(&self, recipe: &Recipe, drafter: Option<&Drafter>, prompts: &[Prompt]) -> Result<Identity> {
        let fingerprints = Fingerprints::take(self.target, drafter, &prompts[0].ids)?;
        let prompt_ids = prompts::hash(prompts);
        let scaling = drafter.and_then(Drafter::calibration).map(|temperatures| format!("{:?}", temperatures.values()));
        let inputs = [
            self.template.as_str(),
            self.renderer.tokenizer().hash(),
            &prompt_ids,
            &fingerprints.target,
            fingerprints.drafter.as_deref().unwrap_or_default(),
            scaling.as_deref().unwrap_or_default(),
        ];
        let hash = identity(recipe, &self.origin, &inputs)?;
        Ok(Identity { fingerprints, prompt_ids, hash })
    }

    /// Lets the drafter answer all prompts with whole blocks and fits its temperatures on the first `share` of them.
    fn calibrate(&self, drafter: &Drafter, prompts: &[Prompt], share: usize) -> Result<CalibrationOutcome> {
        let mut recipe = self.recipe.clone();
        recipe.eval = calibrate::collecting(&recipe.eval);
        let Identity { hash, .. } = self.identity(&recipe, Some(drafter), prompts)?;
        fs_err::create_dir_all(self.out_dir)?;
        let plan = Plan {
            target: self.target,
            drafter: Some(drafter),
            settings: &recipe.eval,
            prompts,
            stop_ids: self.renderer.stop_ids().into(),
            identity: &hash,
            step_costs: None,
        };
        let samples = plan.run(&self.out_dir.join("calibration.jsonl"), self.ctx)?;
        calibrate::outcome(drafter.block_size(), &recipe.eval, prompts, share, &samples)
    }

    fn run(
        &self,
        drafter: Option<&Drafter>,
        sets: Vec<SetInfo>,
        prompts: &[Prompt],
        calibration: Option<CalibrationOutcome>,
    ) -> Result<EvalOutcome> {
        let Self { recipe, out_dir, target, ctx, .. } = *self;
        let settings = &recipe.eval;
        ctx.reporter.event(Event::Stage("evaluate"));
        let Identity { fingerprints, prompt_ids, hash: identity } = self.identity(recipe, drafter, prompts)?;
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
            prompts,
            stop_ids: self.renderer.stop_ids().into(),
            identity: &identity,
            step_costs: settings.adaptive.then_some(&step_costs),
        };
        let samples = plan.run(&out_dir.join("journal.jsonl"), ctx)?;
        let differences = compare(&plan, &samples)?;
        let results = Answers { recipe, drafter, prompts, samples: &samples, differences: &differences }.results()?;
        let of_all = |result: &outcome::TemperatureResult| -> Vec<Comparison> {
            result.all.proposers.iter().filter_map(|found| found.comparison).collect()
        };
        let comparison = results.iter().flat_map(of_all).fold(Comparison::default(), Comparison::and);
        let outcome = EvalOutcome {
            schema_version: SCHEMA_VERSION,
            warnings: outcome::warnings(&results, &differences, &sets),
            origin: self.origin.clone(),
            recipe: recipe.clone(),
            drafter: drafter.map(DrafterInfo::of),
            fingerprints,
            template_sha256: self.template.clone(),
            tokenizer: self.renderer.tokenizer().hash().into(),
            prompt_ids_sha256: prompt_ids,
            identity,
            sets,
            lossless: comparison.is_identical(),
            compared: comparison.answers,
            comparison,
            differences,
            peak_memory_bytes: peak_memory_bytes(),
            step_costs: step_costs.entries().to_vec(),
            temperatures: results,
            calibration,
        };
        for warning in &outcome.warnings {
            ctx.warn(warning);
        }
        outcome.write(out_dir)?;
        ctx.note(format!("report: {}", out_dir.join("report.html").display()));
        Ok(outcome)
    }
}

impl EvalOutcome {
    /// Writes all reports.
    fn write(&self, out_dir: &Path) -> Result<()> {
        let json = serde_json::to_string_pretty(self).map_err(std::io::Error::from)?;
        write_atomic(out_dir.join("results.json"), format!("{json}\n").as_bytes())?;
        write_atomic(out_dir.join("README.md"), self.markdown().as_bytes())?;
        write_atomic(out_dir.join("report.html"), html::page(self).as_bytes())?;
        let Some(calibration) = &self.calibration else { return Ok(()) };
        for (file, title, found) in [
            (report::RELIABILITY_BEFORE, "Reliability before calibration", &calibration.all.before),
            (report::RELIABILITY_AFTER, "Reliability after calibration", &calibration.all.after),
        ] {
            let (svg, legend) = reliability::diagram(title, found);
            write_atomic(out_dir.join(file), plots::standalone(title, &legend, &svg).as_bytes())?;
        }
        Ok(())
    }
}

/// Compares every answer at temperature 0 with that of plain decoding, and returns those that differ.
fn compare(
    plan: &Plan<'_>,
    samples: &std::collections::HashMap<decode::Key, decode::Sample>,
) -> Result<Vec<Difference>> {
    let mut differences = Vec::new();
    let proposers = &plan.settings.proposers;
    let Some(plain) = proposers.iter().position(|&proposer| proposer == Proposer::Plain) else {
        return Ok(differences);
    };
    let greedy = plan.settings.temperatures.iter().enumerate().filter(|(_, temperature)| is_greedy(**temperature));
    for (t, _) in greedy {
        for (place, prompt) in plan.prompts.iter().enumerate() {
            for other in (0..proposers.len()).filter(|&other| other != plain) {
                if let (Some(left), Some(right)) = (samples.get(&(t, place, plain)), samples.get(&(t, place, other))) {
                    differences.extend(difference(plan.target, prompt, left, right)?);
                }
            }
        }
    }
    Ok(differences)
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
