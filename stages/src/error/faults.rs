//! The form of messages: what tests look for in every one of them.

/// A path and a name as they stand in the samples; in messages they are in backticks.
pub(crate) const PATH: &str = "/folder/file.gguf";
pub(crate) const NAME: &str = "some_name";

/// What is wrong with the form of a message or a hint.
pub(crate) fn faults(text: &str) -> Vec<&'static str> {
    let mut faults = Vec::new();
    let starts = |c: char| c.is_lowercase() || c.is_ascii_digit() || c == '`';
    if !text.chars().next().is_some_and(starts) {
        faults.push("starts with a capital or with nothing");
    }
    if text.ends_with(['.', '!', ' ', '\n']) {
        faults.push("ends with a full stop or a space");
    }
    if ["Some(", "None", "Ok(", "Err(", "\\\"", "\\n", " { ", "PathBuf"].iter().any(|leak| text.contains(leak)) {
        faults.push("shows how a value is held");
    }
    for name in [PATH, NAME] {
        for (at, _) in text.match_indices(name) {
            if text[..at].matches('`').count().is_multiple_of(2) {
                faults.push("has a name or a path without backticks");
            }
        }
    }
    faults
}
