//! The tiny target of the golden data.
#![expect(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    reason = "helpers of tests read the environment to find golden data and fail as tests do"
)]

use std::path::PathBuf;

use candle_core::quantized::{GgmlDType, QTensor};
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
    let weights = match precision {
        Precision::Q4 => four_bit_weights(),
        Precision::F32 | Precision::Bf16 | Precision::Q8 => {
            Weights::from_folder(golden("target"), DType::F32, &Device::Cpu).unwrap()
        }
    };
    Target::load(config, &weights, precision).unwrap()
}

/// The target's weights as they come out of a file in Q4_1.
fn four_bit_weights() -> Weights {
    let mut tensors = candle_core::safetensors::load(golden("target").join("model.safetensors"), &Device::Cpu).unwrap();
    for tensor in tensors.values_mut().filter(|tensor| tensor.rank() == 2) {
        let wide = tensor.to_dtype(DType::F32).unwrap();
        *tensor = QTensor::quantize(&wide, GgmlDType::Q4_1).unwrap().dequantize(&Device::Cpu).unwrap();
    }
    let folder = tempfile::tempdir().unwrap();
    candle_core::safetensors::save(&tensors, folder.path().join("model.safetensors")).unwrap();
    Weights::from_folder(folder.path(), DType::F32, &Device::Cpu).unwrap()
}

pub(crate) fn target() -> Target {
    target_in(Precision::F32)
}
