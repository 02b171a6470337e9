//! Errors of the stages: facts in the variant, advice in [`Error::hint`], the lower crates' errors passed through.

#[cfg(test)]
#[path = "../../models/src/error/message_form.rs"]
mod message_form;
#[cfg(test)]
mod messages;

use std::path::PathBuf;

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Whose move it is, for the exit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The user can fix it: bad input, arguments or files (exit code 1).
    User,
    /// A bug or the environment: memory, disk, device (exit code 2).
    Environment,
    /// The user interrupted the run; work is saved (exit code 130).
    Interrupted,
}

/// Everything the stages report.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The user asked to stop.
    #[error("interrupted; {safe}")]
    Interrupted {
        /// What has been saved.
        safe: &'static str,
    },
    /// The operating system refused a file operation; the source names the path.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// A recipe cannot be used.
    #[error("recipe {origin}: {problem}")]
    Recipe {
        /// File, or `--set`.
        origin: String,
        /// Field, value found and what is expected.
        problem: String,
    },
    /// A model cannot be found or fetched.
    #[error("cannot get model `{model}`: {problem}")]
    ModelSource {
        /// As the user wrote it.
        model: String,
        /// What went wrong.
        problem: String,
        /// What to do.
        hint: Option<String>,
    },
    /// A run folder is in use or belongs to another run.
    #[error("run folder `{}`: {problem}", path.display())]
    RunDir {
        /// The folder.
        path: PathBuf,
        /// What is wrong.
        problem: String,
        /// What to do.
        hint: Option<String>,
    },
    /// Two things that must belong together do not.
    #[error("{what} differs: {left} against {right}")]
    Mismatch {
        /// What differs.
        what: String,
        /// One side, with its origin.
        left: String,
        /// Other side, with its origin.
        right: String,
        /// What to do.
        hint: Option<String>,
    },
    /// A checkpoint cannot be the start of a training run, since its tensors mean something else.
    #[error("cannot start from `{}`: {}", folder.display(), differences.join("; "))]
    OtherStart {
        /// The checkpoint.
        folder: PathBuf,
        /// Everything that differs, each with both sides.
        differences: Vec<String>,
    },
    /// The table of confidence temperatures beside a checkpoint cannot be used.
    #[error("calibration `{}`: {problem}", path.display())]
    Calibration {
        /// The file.
        path: PathBuf,
        /// Field, value found and what is expected.
        problem: String,
    },
    /// A loss or gradient is infinite or no number, and where that began is known.
    #[error("{what} is not finite at step {step}: {origin}")]
    NotFinite {
        /// Quantity concerned.
        what: String,
        /// Optimiser step, from 1.
        step: u64,
        /// Weight, or sample with loss term or gradient.
        origin: String,
        /// What to do.
        hint: String,
    },
    /// A stage has nothing it could work on, or its input contradicts itself.
    #[error("{0}")]
    Input(String),
    /// A drafter failed or gave unusable numbers where its own results are asked for.
    #[error("{reason}, in {requests} requests")]
    DrafterFailed {
        /// Its name and what the last failure was.
        reason: String,
        /// Requests that it failed in.
        requests: usize,
    },
    /// An invariant of a stage does not hold.
    #[error("{0}")]
    Invariant(String),
    /// From the engine, where it is none of the others.
    #[error(transparent)]
    Engine(deepspec_engine::Error),
    /// From the models crate.
    #[error(transparent)]
    Model(#[from] deepspec_models::Error),
    /// From the datasets crate.
    #[error(transparent)]
    Dataset(#[from] deepspec_datasets::Error),
    /// From the target cache.
    #[error(transparent)]
    Cache(#[from] deepspec_datasets::target_cache::CacheError),
    /// From the calibration metrics.
    #[error(transparent)]
    Confidence(#[from] crate::eval::confidence::ConfidenceError),
    /// From the TensorBoard event file.
    #[error(transparent)]
    EventFile(#[from] crate::train::tensorboard::EventFileError),
}

impl From<deepspec_engine::Error> for Error {
    fn from(error: deepspec_engine::Error) -> Self {
        match error {
            deepspec_engine::Error::Interrupted { safe } => Self::Interrupted { safe },
            deepspec_engine::Error::Input(problem) => Self::Input(problem),
            deepspec_engine::Error::Io(error) => Self::Io(error),
            deepspec_engine::Error::Model(error) => Self::Model(error),
            other => Self::Engine(other),
        }
    }
}

impl From<candle_core::Error> for Error {
    fn from(error: candle_core::Error) -> Self {
        Self::Model(error.into())
    }
}

impl From<deepspec_models::speculate::SpeculateError> for Error {
    fn from(error: deepspec_models::speculate::SpeculateError) -> Self {
        Self::Model(error.into())
    }
}

/// Whether a write failed for want of space, on the disk or of the user's share of it.
fn is_full(error: &std::io::Error) -> bool {
    matches!(error.kind(), std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded)
}

impl Error {
    /// What the user can do about it, where something can be done.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Interrupted { .. } => Some("run the same command again to go on from there".into()),
            Self::ModelSource { hint, .. } | Self::RunDir { hint, .. } | Self::Mismatch { hint, .. } => hint.clone(),
            Self::OtherStart { .. } => Some(
                "set the keys of the recipe as the checkpoint has them, with its target and its cache, or leave out `init.from`"
                    .into(),
            ),
            Self::Calibration { .. } => Some(
                "fit it again with `deepspec eval --calibrate`, or do without it: `--set eval.calibration=false`"
                    .into(),
            ),
            Self::NotFinite { hint, .. } => Some(hint.clone()),
            Self::DrafterFailed { .. } => Some(
                "look at the checkpoint with `deepspec inspect`, or use another one; the target alone decodes as ever"
                    .into(),
            ),
            Self::Model(error) => error.hint(),
            Self::Dataset(error) => error.hint(),
            Self::Cache(error) => error.hint(),
            Self::Confidence(error) => error.hint(),
            Self::EventFile(error) => error.hint(),
            Self::Io(error) if is_full(error) => {
                Some("free some space and run the same command again; what was written is kept".into())
            }
            Self::Recipe { .. } => {
                Some("correct that in the recipe, or change the value with `--set KEY=VALUE`".into())
            }
            Self::Engine(error) => error.hint(),
            Self::Io(_) | Self::Input(_) | Self::Invariant(_) => None,
        }
    }

    /// Whose move it is.
    pub fn fault(&self) -> Fault {
        match self {
            Self::Interrupted { .. } => Fault::Interrupted,
            Self::Io(_) | Self::Engine(_) | Self::Invariant(_) => Fault::Environment,
            Self::Model(deepspec_models::Error::Tensor { .. } | deepspec_models::Error::NoGradient { .. }) => {
                Fault::Environment
            }
            _ => Fault::User,
        }
    }
}
