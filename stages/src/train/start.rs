//! A checkpoint that training starts from: refused where its tensors would fit and mean something else.
//!
//! Which target layers the features come from and in what order, the mask token, the rotary embedding: none of it shows in the shape of a
//! tensor, and with another value the weights are worth little more than random ones. What differs is listed in full.

use std::path::Path;

use deepspec_models::config::{DraftConfig, DrafterConfig, Eagle3Config, MarkovHeadType, RopeConfig, TargetConfig};
use deepspec_models::draft::DraftVocabulary;
use deepspec_models::weights::Weights;

use crate::error::{Error, Result};

/// Name of a fact that gives tensors their meaning, and its value.
type Fact = (&'static str, String);

/// Refuses the checkpoint in `folder` with the drafter `saved` as a start for the drafter `config`, whose draft vocabulary is
/// `vocabulary`.
///
/// # Errors
/// [`Error::OtherStart`] with everything that differs; the checkpoint's map of a draft vocabulary cannot be read.
pub(super) fn check(
    folder: &Path,
    saved: &DrafterConfig,
    weights: &Weights,
    config: &DrafterConfig,
    vocabulary: Option<&DraftVocabulary>,
) -> Result<()> {
    let mut differences: Vec<String> = facts(saved)
        .into_iter()
        .zip(facts(config))
        .filter(|((name, there), (other, here))| name != other || there != here)
        .map(|((name, there), (_, here))| difference(name, &there, &here))
        .collect();
    if std::mem::discriminant(saved) != std::mem::discriminant(config) {
        // The two have few facts in common; the first says it all.
        differences.truncate(1);
    } else if saved.body().vocab_size == config.body().vocab_size {
        let map = DraftVocabulary::read_map(weights, saved.draft_vocab(), saved.body().vocab_size)?;
        differences.extend(other_vocabulary(map.as_ref(), vocabulary));
    }
    if differences.is_empty() {
        return Ok(());
    }
    Err(Error::OtherStart { folder: folder.into(), differences })
}

fn difference(name: &str, there: &str, here: &str) -> String {
    format!("{name} differs: {there} in the checkpoint, {here} in the recipe")
}

/// What gives a drafter's tensors their meaning, in an order that depends on its kind alone.
fn facts(config: &DrafterConfig) -> Vec<Fact> {
    let kind = match config {
        DrafterConfig::Block(_) => "a block drafter",
        DrafterConfig::Eagle3(_) => "Eagle3",
    };
    let mut facts = vec![("kind of drafter", kind.to_owned())];
    facts.extend(body(config.body()));
    facts.push(("number of target layers", config.num_target_layers().to_string()));
    facts.push(("target_layer_ids", format!("{:?}", config.target_layer_ids())));
    match config {
        DrafterConfig::Block(config) => facts.extend(block(config)),
        DrafterConfig::Eagle3(Eagle3Config { norm_before_residual, .. }) => {
            facts.push(("norm_before_residual", norm_before_residual.to_string()));
        }
    }
    facts
}

fn body(body: &TargetConfig) -> Vec<Fact> {
    let RopeConfig { theta, partial_rotary_factor, .. } = body.rope;
    let rotary: Vec<f32> = body.rope.inverse_frequencies(body.head_dim);
    let lowest = rotary.last().copied().unwrap_or_default();
    let rope = format!(
        "theta {theta}, share {partial_rotary_factor}, {} scaling, lowest frequency {lowest:.6e}, length {:.6}",
        body.rope.scaling.name(),
        body.rope.attention_factor(),
    );
    vec![
        ("hidden_size", body.hidden_size.to_string()),
        ("vocab_size", body.vocab_size.to_string()),
        ("number of draft layers", body.num_hidden_layers.to_string()),
        ("intermediate_size", body.intermediate_size.to_string()),
        ("num_attention_heads", body.num_attention_heads.to_string()),
        ("num_key_value_heads", body.num_key_value_heads.to_string()),
        ("head_dim", body.head_dim.to_string()),
        ("rms_norm_eps", body.rms_norm_eps.to_string()),
        ("rope", rope),
        ("qk_norm", body.qk_norm.to_string()),
        ("attention_bias", body.attention_bias.to_string()),
        ("mlp_bias", body.mlp_bias.to_string()),
    ]
}

fn block(config: &DraftConfig) -> Vec<Fact> {
    vec![
        ("block layout", config.layout().name().to_owned()),
        ("mask_token_id", config.mask_token_id.to_string()),
        ("sliding_window", config.sliding_window.map_or("none".into(), |window| window.to_string())),
        ("Markov head", config.markov_head_type.map_or("none", MarkovHeadType::name).to_owned()),
        ("markov_rank", config.markov_rank.to_string()),
        ("confidence head", config.enable_confidence_head.to_string()),
        ("confidence_head_with_markov", config.confidence_head_with_markov.to_string()),
        (
            "experts",
            config.moe.as_ref().map_or("none".into(), |moe| format!("{moe}, norm_topk_prob {}", moe.norm_topk_prob)),
        ),
    ]
}

/// What two draft vocabularies differ in.
fn other_vocabulary(there: Option<&DraftVocabulary>, here: Option<&DraftVocabulary>) -> Option<String> {
    if there == here {
        return None;
    }
    let text = |map: Option<&DraftVocabulary>| match map {
        None => "all tokens".to_owned(),
        Some(map) => format!("{} tokens", map.size()),
    };
    let mut here_text = text(here);
    if let (Some(there), Some(here)) = (there, here) {
        let missing = there.tokens().iter().filter(|token| here.tokens().binary_search(token).is_err()).count();
        here_text += &format!(" without {missing} of those, the most frequent of the cache,");
    }
    Some(difference("draft vocabulary", &text(there), &here_text))
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};
    use deepspec_models::config::{RopeScaling, YarnScaling};

    use super::*;

    const BLOCK: &str = "decode/dspark_vanilla";
    const EAGLE3: &str = "decode/eagle3";

    /// What is said of a golden drafter as a start for itself with changes.
    fn said(name: &str, change: impl Fn(&mut DrafterConfig)) -> Result<(), String> {
        let folder = Path::new("../models/tests/golden").join(name);
        let saved = DrafterConfig::from_folder(&folder).unwrap();
        let weights = Weights::from_folder(&folder, DType::F32, &Device::Cpu).unwrap();
        let mut config = saved.clone();
        change(&mut config);
        check(&folder, &saved, &weights, &config, None).map_err(|error| {
            assert!(error.hint().is_some_and(|hint| hint.contains("init.from")));
            error.to_string()
        })
    }

    fn block(change: impl Fn(&mut DraftConfig)) -> Result<(), String> {
        said(BLOCK, |config| match config {
            DrafterConfig::Block(config) => change(config),
            DrafterConfig::Eagle3(_) => panic!("not a block drafter"),
        })
    }

    fn assert_told(said: Result<(), String>, parts: &[&str]) {
        let text = said.unwrap_err();
        assert!(parts.iter().all(|part| text.contains(part)), "{parts:?}: {text}");
    }

    #[test]
    fn a_drafter_is_a_start_for_itself_and_for_more_anchors_or_longer_blocks() {
        assert_eq!(said(BLOCK, |_| {}), Ok(()));
        assert_eq!(said(EAGLE3, |_| {}), Ok(()));
        assert_eq!(block(|config| (config.num_anchors, config.block_size) = (99, 7)), Ok(()));
    }

    #[test]
    fn everything_that_gives_a_block_drafters_tensors_their_meaning_is_compared() {
        assert_told(
            block(|c| c.target_layer_ids.reverse()),
            &["target_layer_ids differs: [0, 2, 4] in", "[4, 2, 0] in"],
        );
        assert_told(block(|c| c.target_layer_ids[1] = 3), &["target_layer_ids differs", "[0, 3, 4] in the recipe"]);
        assert_told(block(|c| c.mask_token_id = 7), &["mask_token_id differs: 6 in the checkpoint, 7 in the recipe"]);
        assert_told(block(|c| c.sliding_window = Some(64)), &["sliding_window differs: none in", "64 in the recipe"]);
        assert_told(block(|c| c.sample_from_anchor = false), &["block layout differs: anchor-first in", "1+N in"]);
        assert_told(block(|c| c.body.rope.theta = 5e5), &["rope differs: theta 1000000", "theta 500000"]);
        assert_told(
            block(|c| c.body.rope.scaling = RopeScaling::Linear { factor: 2.0 }),
            &["default scaling", "linear"],
        );
        let yarn = YarnScaling {
            factor: 2.0,
            original_max_position_embeddings: 64,
            beta_fast: 32.0,
            beta_slow: 1.0,
            truncate: true,
            attention_factor: 1.5,
        };
        assert_told(block(|c| c.body.rope.scaling = RopeScaling::Yarn(yarn)), &["yarn scaling", "length 1.5"]);
        assert_told(
            block(|c| c.body.qk_norm = false),
            &["qk_norm differs: true in the checkpoint, false in the recipe"],
        );
        assert_told(block(|c| c.body.rms_norm_eps = 1e-5), &["rms_norm_eps differs: 0.000001 in", "0.00001 in"]);
        assert_told(
            block(|c| c.markov_head_type = Some(MarkovHeadType::Rnn)),
            &["Markov head differs: vanilla in", "rnn in"],
        );
        assert_told(block(|c| c.markov_rank = 8), &["markov_rank differs: 16 in the checkpoint, 8 in the recipe"]);
        assert_told(block(|c| c.enable_confidence_head = false), &["confidence head differs: true in", "false in"]);
        assert_told(block(|c| c.confidence_head_with_markov = false), &["confidence_head_with_markov differs"]);
        assert_told(block(|c| c.body.num_attention_heads = 2), &["num_attention_heads differs: 4 in", "2 in"]);
    }

    #[test]
    fn all_differences_are_told_at_once() {
        let all = block(|config| {
            config.target_layer_ids.swap(0, 1);
            config.mask_token_id = 9;
            config.body.rope.theta = 1e4;
            config.sliding_window = Some(32);
        });
        assert_told(
            all,
            &["target_layer_ids differs", "mask_token_id differs", "rope differs", "sliding_window differs"],
        );
    }

    #[test]
    fn an_eagle3_drafter_is_compared_likewise_and_another_kind_is_refused_as_such() {
        let eagle3 = |change: &dyn Fn(&mut Eagle3Config)| {
            said(EAGLE3, |config| match config {
                DrafterConfig::Eagle3(config) => change(config),
                DrafterConfig::Block(_) => panic!("not Eagle3"),
            })
        };
        assert_told(eagle3(&|c| c.target_layer_ids.swap(0, 1)), &["target_layer_ids differs: [0, 1,", "[1, 0,"]);
        assert_told(eagle3(&|c| c.norm_before_residual = true), &["norm_before_residual differs: false in", "true in"]);
        assert_told(eagle3(&|c| c.body.rope.theta = 2e6), &["rope differs"]);
        assert_eq!(eagle3(&|c| c.ttt_length = 2), Ok(()));
        let other = DrafterConfig::from_folder(Path::new("../models/tests/golden").join(BLOCK)).unwrap();
        let text = said(EAGLE3, |config| *config = other.clone()).unwrap_err();
        assert!(
            text.ends_with("kind of drafter differs: Eagle3 in the checkpoint, a block drafter in the recipe"),
            "{text}"
        );
    }

    #[test]
    fn draft_vocabularies_of_other_tokens_are_told_with_how_many_differ() {
        let counts: Vec<u64> = (0..320).collect();
        let (there, here) =
            (DraftVocabulary::most_frequent(&counts, &[], 9), DraftVocabulary::most_frequent(&counts, &[2], 9));
        let (there, here) = (there.unwrap(), here.unwrap());
        assert_eq!(other_vocabulary(Some(&there), Some(&there)), None);
        let text = other_vocabulary(Some(&there), Some(&here)).unwrap();
        assert!(text.contains("9 tokens in the checkpoint") && text.contains("without 1 of those"), "{text}");
        let text = other_vocabulary(None, Some(&here)).unwrap();
        assert!(text.contains("all tokens in the checkpoint, 9 tokens in the recipe"), "{text}");
    }
}
