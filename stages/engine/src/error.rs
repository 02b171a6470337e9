//! Errors of the engine: facts in the variant, advice in [`Error::hint`], those of the models passed through.

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything the engine reports.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The user asked to stop.
    #[error("interrupted; {safe}")]
    Interrupted {
        /// What has been saved.
        safe: &'static str,
    },
    /// Whoever is told the news of a step could not pass them on.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// A request, a schedule or a table of costs cannot be used.
    #[error("{0}")]
    Input(String),
    /// An invariant does not hold.
    #[error("engine: {0}")]
    Invariant(String),
    /// From the models crate.
    #[error(transparent)]
    Model(#[from] deepspec_models::Error),
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

impl Error {
    /// What the user can do about it, where something can be done.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Interrupted { .. } => Some("run the same command again to go on from there".into()),
            Self::Model(error) => error.hint(),
            Self::Io(_) | Self::Input(_) | Self::Invariant(_) => None,
        }
    }
}

#[cfg(test)]
#[path = "../../../models/src/error/message_form.rs"]
mod message_form;

#[cfg(test)]
mod tests {
    use super::Error;
    use super::message_form::{NAME, PATH, check, samples};

    #[test]
    fn every_message_reads_as_the_others_do() {
        check(samples! {Error:
            Error::Interrupted { .. } => (Error::Interrupted { safe: "all answers are saved" }, true),
            Error::Io(_) => (std::io::Error::other(format!("failed to write `{PATH}`")).into(), false),
            Error::Input(_) => (Error::Input(format!("`{NAME}` needs a drafter")), false),
            Error::Invariant(_) => (Error::Invariant("2 proposals for 3 requests".into()), false),
            Error::Model(_) => (deepspec_models::Error::TokenRange { token: 9, vocab: 8 }.into(), true),
        });
    }
}
