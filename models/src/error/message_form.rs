//! The form of messages and hints: what tests look for in every one of them, in all crates that have errors of their own.

/// A sample of each variant, and whether there is something that the user can do.
macro_rules! samples {
    ($error:ident: $($pattern:pat => ($sample:expr, $has_hint:expr)),+ $(,)?) => {{
        // Without a wildcard: a new variant has to be added below, with a sample.
        let _every_variant = |error: &$error| match error { $($pattern => ()),+ };
        vec![$({
            let sample: $error = $sample;
            assert!(matches!(&sample, $pattern), "a sample of another variant: {sample:?}");
            (sample.to_string(), sample.hint(), $has_hint)
        }),+]
    }};
}
pub(crate) use samples;

/// A path as it stands in the samples; in messages it is in backticks.
pub(crate) const PATH: &str = "/folder/file.gguf";
/// A name, likewise.
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

/// Fails where a message or its hint has another form, or there is a hint where none is expected, or none where one is.
pub(crate) fn check(samples: Vec<(String, Option<String>, bool)>) {
    for (message, hint, has_hint) in samples {
        assert!(faults(&message).is_empty(), "{:?}: {message}", faults(&message));
        assert_eq!(hint.is_some(), has_hint, "the hint of: {message}");
        if let Some(hint) = hint {
            assert!(faults(&hint).is_empty(), "{:?}: {hint}", faults(&hint));
        }
    }
}
