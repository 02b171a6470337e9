//! The block drafters of the golden data, for drafting beside the tiny target.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::path::Path;

use candle_core::{DType, Device};
use deepspec_models::config::DraftConfig;
use deepspec_models::draft::{DSpark, ParameterSource};
use deepspec_models::linear::Precision;
use deepspec_models::weights::Weights;

use crate::tiny::golden;

/// The drafter in a folder such as `decode/dspark_vanilla`; it drafts with the target's head.
pub(crate) fn drafter(name: &str) -> DSpark {
    load_drafter(&golden(name))
}

/// The drafter in a folder of any set.
pub(crate) fn load_drafter(folder: &Path) -> DSpark {
    let config = DraftConfig::from_folder(folder).unwrap();
    let weights = Weights::from_folder(folder, DType::F32, &Device::Cpu).unwrap();
    let table = [config.body.vocab_size, config.body.hidden_size];
    let embed = weights.get("embed_tokens.weight", &table).unwrap();
    weights.skip("lm_head.weight");
    let drafter = DSpark::new(config, embed, ParameterSource::Frozen(&weights, Precision::F32)).unwrap();
    weights.finish().unwrap();
    drafter
}
