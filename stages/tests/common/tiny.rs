//! The tiny target of the golden data.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::path::{Path, PathBuf};

use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device};
use deepspec_models::config::TargetConfig;
use deepspec_models::linear::Precision;
use deepspec_models::target::Target;
use deepspec_models::weights::Weights;

/// A part of the project's own golden data. What compares with the reference's numbers has a set named by `DEEPSPEC_GOLDEN` instead.
pub(crate) fn golden(part: &str) -> PathBuf {
    // From the folder of whichever crate is tested.
    let here = std::env::current_dir().unwrap();
    here.ancestors().map(|folder| folder.join("models/tests/golden")).find(|folder| folder.is_dir()).unwrap().join(part)
}

pub(crate) fn target_in(precision: Precision) -> Target {
    load_target(&golden("target"), precision)
}

/// The target in a folder.
pub(crate) fn load_target(folder: &Path, precision: Precision) -> Target {
    let config = TargetConfig::from_folder(folder).unwrap();
    let weights = match precision {
        Precision::Q4 => four_bit_weights(folder),
        Precision::F32 | Precision::Bf16 | Precision::Q8 => {
            Weights::from_folder(folder, DType::F32, &Device::Cpu).unwrap()
        }
    };
    Target::load(config, &weights, precision).unwrap()
}

/// The target's weights as they come out of a file in Q4_1.
fn four_bit_weights(folder: &Path) -> Weights {
    let mut tensors = candle_core::safetensors::load(folder.join("model.safetensors"), &Device::Cpu).unwrap();
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
