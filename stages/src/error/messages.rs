//! How the messages of this crate read, over every variant: a new one is in no arm here, and does not compile without.

use std::io;
use std::path::PathBuf;

use super::Error;
use super::message_form::{NAME, PATH, check, faults, samples};
use crate::eval::confidence::ConfidenceError;
use crate::train::tensorboard::EventFileError;

fn path() -> PathBuf {
    PATH.into()
}

#[test]
fn every_message_reads_as_the_others_do() {
    let hint = || Some("do otherwise".to_owned());
    let problem = || "it is not as it should be".to_owned();
    check(samples! {Error:
        Error::Interrupted { .. } => (Error::Interrupted { safe: "all answers are saved" }, true),
        Error::Io(_) => (io::Error::new(io::ErrorKind::NotFound, format!("failed to open file `{PATH}`")).into(), false),
        Error::Recipe { .. } => (Error::Recipe { origin: format!("`{PATH}`"), problem: problem() }, true),
        Error::ModelSource { .. } => (Error::ModelSource { model: NAME.into(), problem: problem(), hint: hint() }, true),
        Error::RunDir { .. } => (Error::RunDir { path: path(), problem: problem(), hint: hint() }, true),
        Error::Mismatch { .. } => ({
            let what = "the size of the vocabulary".to_owned();
            Error::Mismatch { what, left: "8 here".into(), right: "9 there".into(), hint: hint() }
        }, true),
        Error::OtherStart { .. } =>
            (Error::OtherStart { folder: path(), differences: vec!["`mask_token_id` is 3 there, 4 here".into()] }, true),
        Error::Calibration { .. } => (Error::Calibration { path: path(), problem: problem() }, true),
        Error::NotFinite { .. } => ({
            let (what, origin) = ("the loss".to_owned(), "sample 3 in its cross-entropy".to_owned());
            Error::NotFinite { what, step: 7, origin, hint: "look at that sample".into() }
        }, true),
        Error::DrafterFailed { .. } =>
            (Error::DrafterFailed { reason: "drafter `dspark` failed: it gave no number".into(), requests: 3 }, true),
        Error::Input(_) => (Error::Input(problem()), false),
        Error::Invariant(_) => (Error::Invariant("no weights to average".into()), false),
        Error::Engine(_) => (deepspec_engine::Error::Invariant("2 proposals for 3 requests".into()).into(), false),
        Error::Model(_) => (deepspec_models::Error::TokenRange { token: 9, vocab: 8 }.into(), true),
        Error::Dataset(_) => (deepspec_datasets::Error::NoRows { path: path() }.into(), true),
        Error::Cache(_) => (deepspec_datasets::target_cache::CacheError::NotACache { dir: path() }.into(), true),
        Error::Confidence(_) => (ConfidenceError::NotAProbability { position: 0, value: 2.0 }.into(), true),
        Error::EventFile(_) => (EventFileError::NotAnEventFile { path: path() }.into(), true),
    });
}

#[test]
fn every_message_about_metrics_reads_as_the_others_do() {
    check(samples! {ConfidenceError:
        ConfidenceError::NotAProbability { .. } => (ConfidenceError::NotAProbability { position: 0, value: f64::NAN }, true),
        ConfidenceError::TooMany { .. } =>
            (ConfidenceError::TooMany { what: "the number of accepted tokens", found: 9, limit: 8 }, false),
    });
    check(samples! {EventFileError:
        EventFileError::Io(_) => (io::Error::other(format!("failed to write `{PATH}`")).into(), false),
        EventFileError::NotAnEventFile { .. } => (EventFileError::NotAnEventFile { path: path() }, true),
        EventFileError::Corrupt { .. } =>
            (EventFileError::Corrupt { path: path(), offset: 9, found: 1, expected: 2 }, true),
    });
}

/// Messages that are put together where they arise.
#[test]
fn a_run_that_is_not_there_is_told_with_those_that_are() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("runs/mine");
    let error = |path: &PathBuf| crate::run_dir::RunDir::saved_recipe(path).unwrap_err();
    let absent = error(&run);
    assert!(absent.to_string().contains("there is no such folder"), "{absent}");
    assert!(absent.hint().unwrap().contains("deepspec prepare --run"), "{absent}");
    for name in ["b", "a"] {
        fs_err::create_dir_all(folder.path().join("runs").join(name)).unwrap();
        fs_err::write(folder.path().join("runs").join(name).join("recipe.toml"), "").unwrap();
    }
    let hint = error(&run).hint().unwrap();
    let (a, b) = (folder.path().join("runs/a"), folder.path().join("runs/b"));
    assert!(hint.ends_with(&format!("there is `{}`, `{}`", a.display(), b.display())), "{hint}");
    fs_err::create_dir(&run).unwrap();
    assert!(error(&run).to_string().contains("not a run folder: it has no `recipe.toml`"));
    let file = folder.path().join("file");
    fs_err::write(&file, "").unwrap();
    assert!(error(&file).to_string().contains("not a run folder, but a file"));
    for error in [error(&run), error(&file), absent] {
        assert!(faults(&error.to_string()).is_empty() && faults(&error.hint().unwrap()).is_empty(), "{error}");
    }
}
