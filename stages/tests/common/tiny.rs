//! The tiny target of the golden data.
#![expect(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    reason = "helpers of tests read the environment to find golden data and fail as tests do"
)]

use std::path::PathBuf;

use candle_core::{DType, Device};
use deepspec_models::config::TargetConfig;
use deepspec_models::linear::Precision;
use deepspec_models::target::Target;
use deepspec_models::weights::Weights;

/// A part of the golden data; `DEEPSPEC_GOLDEN` names another set.
pub(crate) fn golden(part: &str) -> PathBuf {
    let root = std::env::var("DEEPSPEC_GOLDEN").map_or_else(|_| PathBuf::from("../models/tests/golden"), PathBuf::from);
    root.join(part)
}

pub(crate) fn target_in(precision: Precision) -> Target {
    let config = TargetConfig::from_folder(golden("target")).unwrap();
    let weights = Weights::from_folder(golden("target"), DType::F32, &Device::Cpu).unwrap();
    Target::load(config, &weights, precision).unwrap()
}

pub(crate) fn target() -> Target {
    target_in(Precision::F32)
}
