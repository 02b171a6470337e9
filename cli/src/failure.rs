//! What an error of a command means to the user: its words, the hint, and the exit code.

use std::error::Error as StdError;
use std::fmt;
use std::io;
use std::process::ExitCode;

use deepspec_datasets::target_cache::CacheError;
use deepspec_stages::Fault;

use crate::printer::Printer;
use crate::{BUG, INTERRUPTED};

/// Exit code of something that the user can fix.
const USER: u8 = 1;

/// An error of the program itself: what is wrong with what was asked for, and what to do.
#[derive(Debug)]
pub(crate) struct Refusal {
    /// What is wrong.
    pub problem: String,
    /// What to do.
    pub hint: Option<String>,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.problem)
    }
}

impl StdError for Refusal {}

/// Prints the error and its hint and gives the exit code.
pub(crate) fn report(error: &anyhow::Error, printer: &Printer) -> ExitCode {
    if error.chain().filter_map(io_error).any(|cause| cause.kind() == io::ErrorKind::BrokenPipe) {
        return ExitCode::SUCCESS;
    }
    printer.error(&words(error));
    if let Some(hint) = hint(error) {
        printer.hint(&hint);
    }
    ExitCode::from(exit_code(error))
}

/// The error and its causes in one line; a cause that repeats what was said before it is left out.
pub(crate) fn words(error: &anyhow::Error) -> String {
    error.chain().map(ToString::to_string).fold(String::new(), |said, cause| {
        if said.is_empty() {
            cause
        } else if said.contains(&cause) {
            said
        } else {
            format!("{said}: {cause}")
        }
    })
}

/// What to do about the error, from the outermost cause that knows.
pub(crate) fn hint(error: &anyhow::Error) -> Option<String> {
    error.chain().find_map(|cause| {
        let refusal = || cause.downcast_ref::<Refusal>().and_then(|error| error.hint.clone());
        let stage = || cause.downcast_ref::<deepspec_stages::Error>().and_then(deepspec_stages::Error::hint);
        let serve = || cause.downcast_ref::<deepspec_serve::Error>().and_then(deepspec_serve::Error::hint);
        let engine = || cause.downcast_ref::<deepspec_engine::Error>().and_then(deepspec_engine::Error::hint);
        let model = || cause.downcast_ref::<deepspec_models::Error>().and_then(deepspec_models::Error::hint);
        let data = || cause.downcast_ref::<deepspec_datasets::Error>().and_then(deepspec_datasets::Error::hint);
        let cache = || cause.downcast_ref::<CacheError>().and_then(CacheError::hint);
        refusal().or_else(stage).or_else(serve).or_else(engine).or_else(model).or_else(data).or_else(cache)
    })
}

fn exit_code(error: &anyhow::Error) -> u8 {
    error.chain().find_map(code_of).unwrap_or(USER)
}

/// The exit code, if the cause alone tells it.
fn code_of(cause: &(dyn StdError + 'static)) -> Option<u8> {
    use deepspec_models::Error as Model;

    if let Some(error) = io_error(cause) {
        let is_fixable = matches!(
            error.kind(),
            io::ErrorKind::NotFound
                | io::ErrorKind::PermissionDenied
                | io::ErrorKind::AlreadyExists
                | io::ErrorKind::NotADirectory
                | io::ErrorKind::IsADirectory
                | io::ErrorKind::InvalidInput
                | io::ErrorKind::InvalidData
                | io::ErrorKind::InvalidFilename
        );
        return Some(if is_fixable { USER } else { BUG });
    }
    if let Some(error) = cause.downcast_ref::<deepspec_stages::Error>() {
        return Some(match error.fault() {
            Fault::User => USER,
            Fault::Environment => BUG,
            Fault::Interrupted => INTERRUPTED,
        });
    }
    match cause.downcast_ref::<deepspec_engine::Error>() {
        Some(deepspec_engine::Error::Interrupted { .. }) => return Some(INTERRUPTED),
        Some(deepspec_engine::Error::Invariant(_)) => return Some(BUG),
        _ => {}
    }
    if let Some(deepspec_serve::Error::Invariant(_)) = cause.downcast_ref() {
        return Some(BUG);
    }
    match cause.downcast_ref::<Model>() {
        Some(Model::Tensor { .. } | Model::NoGradient { .. }) => Some(BUG),
        _ if cause.is::<rayon::ThreadPoolBuildError>() || cause.is::<ctrlc::Error>() => Some(BUG),
        _ => None,
    }
}

/// The operating system's error that a cause is, or passes through as its own.
fn io_error<'a>(cause: &'a (dyn StdError + 'static)) -> Option<&'a io::Error> {
    use deepspec_datasets::Error as Data;
    use deepspec_models::Error as Model;
    use deepspec_stages::Error as Stage;

    let of_model = |error: &'a Model| if let Model::Io(error) = error { Some(error) } else { None };
    let of_data = |error: &'a Data| if let Data::Read(error) = error { Some(error) } else { None };
    let of_cache = |error: &'a CacheError| match error {
        CacheError::Io(error) | CacheError::DiskFull(error) => Some(error),
        _ => None,
    };
    let of_stage = |error: &'a Stage| match error {
        Stage::Io(error) => Some(error),
        Stage::Model(error) => of_model(error),
        Stage::Dataset(error) => of_data(error),
        Stage::Cache(error) => of_cache(error),
        _ => None,
    };
    let of_engine = |error: &'a deepspec_engine::Error| match error {
        deepspec_engine::Error::Io(error) => Some(error),
        deepspec_engine::Error::Model(error) => of_model(error),
        _ => None,
    };
    let of_serve = |error: &'a deepspec_serve::Error| match error {
        deepspec_serve::Error::Io(error) => Some(error),
        _ => None,
    };
    let lower = || cause.downcast_ref().and_then(of_model).or_else(|| cause.downcast_ref().and_then(of_data));
    let stage = || cause.downcast_ref().and_then(of_stage).or_else(|| cause.downcast_ref().and_then(of_cache));
    let upper = || cause.downcast_ref().and_then(of_engine).or_else(|| cause.downcast_ref().and_then(of_serve));
    cause.downcast_ref().or_else(lower).or_else(stage).or_else(upper)
}

#[cfg(test)]
mod tests {
    use anyhow::{Context as _, anyhow};

    use super::*;

    fn missing() -> io::Error {
        io::Error::new(io::ErrorKind::NotFound, "no such file")
    }

    #[test]
    fn code_says_whose_move_it_is() {
        let full = || io::Error::new(io::ErrorKind::StorageFull, "disk full");
        let stage = |error: deepspec_stages::Error| anyhow::Error::from(error);
        assert_eq!(exit_code(&anyhow!("wrong")), 1);
        assert_eq!(exit_code(&missing().into()), 1);
        assert_eq!(exit_code(&anyhow::Error::from(full()).context("cannot write")), 2);
        assert_eq!(exit_code(&stage(missing().into())), 1);
        assert_eq!(exit_code(&stage(deepspec_models::Error::from(missing()).into())), 1);
        assert_eq!(exit_code(&deepspec_models::Error::from(full()).into()), 2);
        assert_eq!(exit_code(&deepspec_datasets::Error::from(missing()).into()), 1);
        assert_eq!(exit_code(&stage(deepspec_stages::Error::Invariant("x".into()))), 2);
        assert_eq!(exit_code(&deepspec_engine::Error::Invariant("x".into()).into()), 2);
        assert_eq!(exit_code(&deepspec_engine::Error::Input("x".into()).into()), 1);
        assert_eq!(exit_code(&deepspec_engine::Error::Model(deepspec_models::Error::from(full())).into()), 2);
        assert_eq!(exit_code(&deepspec_engine::Error::Interrupted { safe: "all is saved" }.into()), 130);
        assert_eq!(exit_code(&deepspec_serve::Error::Invariant("x".into()).into()), 2);
        assert_eq!(exit_code(&deepspec_serve::Error::Io(missing()).into()), 1);
        assert_eq!(exit_code(&stage(deepspec_stages::Error::Interrupted { safe: "all is saved" })), 130);
    }

    #[test]
    fn causes_are_told_once_and_hints_are_found() {
        let error = Err::<(), _>(missing()).context("cannot read `x`: no such file").unwrap_err();
        assert_eq!(words(&error), "cannot read `x`: no such file");
        let error = Err::<(), _>(missing()).context("cannot read `x`").unwrap_err();
        assert_eq!(words(&error), "cannot read `x`: no such file");
        let refusal = Refusal { problem: "bad".into(), hint: Some("better".into()) };
        assert_eq!(hint(&anyhow::Error::from(refusal).context("outer")), Some("better".into()));
        assert_eq!(hint(&missing().into()), None);
    }
}
