//! Where tests find data that is not committed.

use std::path::PathBuf;

/// The path in an environment variable; prints that the test is skipped when it is unset.
#[expect(clippy::disallowed_methods, reason = "tests find data that is not committed through the environment")]
pub(crate) fn path(variable: &str) -> Option<PathBuf> {
    let path = std::env::var_os(variable).map(PathBuf::from);
    if path.is_none() {
        println!("skipped: {variable} is not set");
    }
    path
}
