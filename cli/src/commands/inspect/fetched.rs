//! Models that were fetched: whether they are still what they were.

use std::path::Path;

use deepspec_stages::model_source::check_fetched;
use serde_json::json;

use super::report::Report;
use crate::failure::Refusal;

/// The report on a model, with what reading it whole has found if `is_checked`. A model that was damaged so that no report can be
/// made gets the words of the check, which knows what to do.
///
/// # Errors
/// Those of the report; the model cannot be read, or nothing says what was fetched.
pub(super) fn inspect(
    path: &Path,
    is_checked: bool,
    report: impl FnOnce() -> anyhow::Result<Report>,
) -> anyhow::Result<Report> {
    if !is_checked {
        return report();
    }
    let check = check_fetched(path)?.ok_or_else(|| Refusal {
        problem: format!("cannot check `{}`: nothing beside it says what was fetched", path.display()),
        hint: Some(
            "models fetched as `pypi:NAME` and those in the Hub's cache can be checked; leave `--check` out".into(),
        ),
    })?;
    let sound = check.problems.is_empty();
    let mut problems = check.problems.into_iter();
    let mut report = match report() {
        Ok(report) => report,
        Err(error) => return Err(problems.next().map_or(error, Into::into)),
    };
    report.facts("check", json!({ "sound": sound, "files_read": check.files, "total_bytes": check.bytes }));
    for problem in problems {
        report.problem(problem);
    }
    Ok(report)
}
