//! What is said where a run folder is named and there is none: which ones there are, and how one is made.

use std::path::Path;

use super::RECIPE;
use crate::error::Error;

/// Folder that runs are made in where nobody says otherwise.
const USUAL: &str = "runs";
/// Runs that are listed.
const MOST_LISTED: usize = 8;

/// The error for a path that holds no run.
pub(super) fn error(path: &Path) -> Error {
    let problem = if path.is_dir() {
        format!("not a run folder: it has no `{RECIPE}`")
    } else if path.exists() {
        "not a run folder, but a file".into()
    } else {
        "there is no such folder".into()
    };
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let mut runs = parent.map(runs_in).unwrap_or_default();
    if runs.is_empty() {
        runs = runs_in(Path::new(USUAL));
    }
    let others = match runs.as_slice() {
        [] => String::new(),
        [.., last] if runs.len() > MOST_LISTED => format!("; there are {} runs, such as `{last}`", runs.len()),
        runs => format!("; there is `{}`", runs.join("`, `")),
    };
    let hint =
        Some(format!("make it with `deepspec prepare --run {}`, or give that of another run{others}", path.display()));
    Error::RunDir { path: path.into(), problem, hint }
}

/// The runs in a folder, by name; none where it cannot be read.
pub(super) fn runs_in(folder: &Path) -> Vec<String> {
    let entries = fs_err::read_dir(folder).into_iter().flatten().filter_map(Result::ok);
    let runs = entries.map(|entry| entry.path()).filter(|path| path.join(RECIPE).is_file());
    let mut names: Vec<String> = runs.map(|path| path.display().to_string()).collect();
    names.sort();
    names
}
