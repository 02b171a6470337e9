//! Decode traces of the Python reference.
#![expect(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    reason = "helpers of tests read the environment to find golden data and fail as tests do"
)]

use std::path::PathBuf;

use serde_json::Value;

/// A part of the golden data; `DEEPSPEC_GOLDEN` names another set, which may have other sizes.
pub(crate) fn golden(part: &str) -> PathBuf {
    let root = std::env::var("DEEPSPEC_GOLDEN").map_or_else(|_| PathBuf::from("../models/tests/golden"), PathBuf::from);
    root.join(part)
}

/// The traces of a folder such as `decode/dspark_vanilla`.
pub(crate) fn traces(set: &str) -> Value {
    serde_json::from_slice(&fs_err::read(golden(&format!("{set}/traces.json"))).unwrap()).unwrap()
}

/// A list of numbers.
pub(crate) fn numbers<T: TryFrom<u64>>(value: &Value) -> Vec<T>
where
    T::Error: std::fmt::Debug,
{
    value.as_array().unwrap().iter().map(|v| T::try_from(v.as_u64().unwrap()).unwrap()).collect()
}
