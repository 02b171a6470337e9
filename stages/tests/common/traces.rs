//! Decode traces of the Python reference.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use serde_json::Value;

use crate::tiny::golden;

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
