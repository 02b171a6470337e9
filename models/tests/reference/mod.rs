//! Values of the Python reference, and comparing with them.
#![expect(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    reason = "helpers of tests read the environment to find golden data and fail as tests do"
)]

use std::collections::HashMap;
use std::path::PathBuf;

use candle_core::{DType, Device, Tensor};
use serde_json::Value;

/// A part of the golden data; `DEEPSPEC_GOLDEN` names another set.
pub(crate) fn golden(part: &str) -> PathBuf {
    let root = std::env::var("DEEPSPEC_GOLDEN").map_or_else(|_| PathBuf::from("tests/golden"), PathBuf::from);
    root.join(part)
}

pub(crate) fn json(part: &str) -> Value {
    serde_json::from_slice(&fs_err::read(golden(part)).unwrap()).unwrap()
}

pub(crate) fn tensors(part: &str) -> HashMap<String, Tensor> {
    candle_core::safetensors::load(golden(part), &Device::Cpu).unwrap()
}

pub(crate) fn floats(t: &Tensor) -> Vec<f32> {
    t.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

pub(crate) fn ints(t: &Tensor) -> Vec<i64> {
    t.to_dtype(DType::I64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// atol + rtol · |expected|
pub(crate) fn close(what: &str, got: &[f32], expected: &[f32], atol: f32, rtol: f32) {
    assert_eq!(got.len(), expected.len(), "{what}: length");
    for (i, (g, e)) in got.iter().zip(expected).enumerate() {
        assert!((g - e).abs() <= atol + rtol * e.abs(), "{what}[{i}]: got {g}, expected {e}");
    }
}

pub(crate) fn relative(what: &str, got: f64, expected: f64, tolerance: f64) {
    assert!((got - expected).abs() <= tolerance * expected.abs().max(1e-6), "{what}: got {got}, expected {expected}");
}
