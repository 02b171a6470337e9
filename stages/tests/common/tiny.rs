//! The tiny target and drafter of the golden data.
#![expect(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    reason = "helpers of tests read the environment to find golden data and fail as tests do"
)]

use std::path::PathBuf;

use candle_core::{DType, Device};
use deepspec_models::config::{DraftConfig, TargetConfig};
use deepspec_models::draft::{DSpark, ParameterSource};
use deepspec_models::linear::Precision;
use deepspec_models::target::Target;
use deepspec_models::weights::Weights;

fn golden(part: &str) -> PathBuf {
    let root = std::env::var("DEEPSPEC_GOLDEN").map_or_else(|_| PathBuf::from("../models/tests/golden"), PathBuf::from);
    root.join(part)
}

pub(crate) fn target() -> Target {
    let config = TargetConfig::from_folder(golden("target")).unwrap();
    let weights = Weights::from_folder(golden("target"), DType::F32, &Device::Cpu).unwrap();
    Target::load(config, &weights, Precision::F32).unwrap()
}

/// Trained on nothing, but with Markov and confidence heads.
pub(crate) fn drafter() -> DSpark {
    let folder = golden("decode/dspark_vanilla");
    let config = DraftConfig::from_folder(&folder).unwrap();
    let weights = Weights::from_folder(&folder, DType::F32, &Device::Cpu).unwrap();
    let table = [config.body.vocab_size, config.body.hidden_size];
    let embed = weights.get("embed_tokens.weight", &table).unwrap();
    weights.skip("lm_head.weight");
    let drafter = DSpark::new(config, embed, ParameterSource::Frozen(&weights, Precision::F32)).unwrap();
    weights.finish().unwrap();
    drafter
}
