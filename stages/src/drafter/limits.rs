//! What a drafter is asked for beyond what it was made for: it works all the same, so that it is said instead of refused.

use std::path::Path;

use candle_core::{DType, Device};
use deepspec_models::config::DrafterConfig;
use deepspec_models::weights::Weights;

use crate::error::Result;
use crate::recipe::Precision;
use crate::target_model::packing;
use deepspec_engine::Schedule;

/// Tensor that every drafter has and trains.
const ANY_TENSOR: &str = "fc.weight";

/// Says that contexts of so many tokens are longer than the drafter was made for.
pub fn beyond_context(config: &DrafterConfig, capacity: usize) -> Option<String> {
    let longest = config.body().max_position_embeddings;
    (capacity > longest).then(|| {
        format!(
            "the drafter was made for {longest} positions (`max_position_embeddings`), the context here has {capacity}: \
             beyond them its drafts may be worth less"
        )
    })
}

/// Says that a schedule wants more tokens of a proposal than there can be.
pub fn beyond_block(schedule: Schedule, block_size: usize) -> Option<String> {
    match schedule {
        Schedule::Fixed(tokens) if tokens > block_size => Some(format!(
            "`--schedule {schedule}`: at most {block_size} tokens can be proposed, so that is what it comes to"
        )),
        _ => None,
    }
}

/// Says that a checkpoint's weights are held in another precision than they are stored in, which is the one they were trained for.
///
/// # Errors
/// When the weights cannot be opened.
pub fn other_precision(folder: &Path, precision: Precision) -> Result<Option<String>> {
    let weights = Weights::from_folder(folder, DType::F32, &Device::Cpu)?;
    let stored = weights.stored_type(ANY_TENSOR).unwrap_or_default().to_lowercase();
    let held = packing(precision).name();
    Ok((stored != held).then(|| format!("drafter weights: stored as {stored}, run in {held}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fixed_length_above_what_can_be_proposed_is_said() {
        let said = |schedule, block| beyond_block(schedule, block);
        assert_eq!(said(Schedule::Fixed(3), 3), None);
        assert_eq!(said(Schedule::Scheduled, 3), None);
        assert_eq!(said(Schedule::Threshold(0.5), 3), None);
        let text = said(Schedule::Fixed(9), 3).unwrap();
        assert!(text.contains("fixed=9") && text.contains("at most 3 tokens"), "{text}");
        // The lookup's own limit counts as much as a block's.
        let text = said(Schedule::Fixed(6), deepspec_engine::Sources::Ngram.block_size(None)).unwrap();
        assert!(text.contains("fixed=6") && text.contains("at most 5 tokens"), "{text}");
    }

    #[test]
    fn a_context_longer_than_the_drafter_was_made_for_is_said_with_both_numbers() {
        for name in ["decode/dspark_vanilla", "decode/eagle3"] {
            let folder = Path::new("../models/tests/golden").join(name);
            let config = DrafterConfig::from_folder(&folder).unwrap();
            assert_eq!(beyond_context(&config, 512), None);
            let text = beyond_context(&config, 513).unwrap();
            assert!(text.contains("made for 512") && text.contains("has 513"), "{text}");
        }
    }

    #[test]
    fn another_precision_than_the_stored_one_is_said() {
        let folder = Path::new("../models/tests/golden/decode/dspark_vanilla");
        assert_eq!(other_precision(folder, Precision::F32).unwrap(), None);
        for (precision, name) in [(Precision::Q8, "q8"), (Precision::Bf16, "bf16")] {
            let text = other_precision(folder, precision).unwrap().unwrap();
            assert_eq!(text, format!("drafter weights: stored as f32, run in {name}"));
        }
    }
}
