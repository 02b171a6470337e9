//! The sliding window: what a block sees in training, and a ring of context rows at inference.

use candle_core::Tensor;
use deepspec_kernels::attention::HeadLayout;
use deepspec_models::config::DraftConfig;
use deepspec_models::draft::DSpark;
use deepspec_models::draft::dspark::TrainSequence;
use deepspec_models::kv_cache::KvCache;
use deepspec_models::linear::Precision;
use proptest::prelude::*;
use serde_json::json;

use super::{BLOCK, CPU, HIDDEN, VOCAB, assert_close, config, flat, frozen, parameters, random, trainable};

fn windowed(window: usize) -> DraftConfig {
    config(&json!({"use_sliding_window": true, "sliding_window": window}))
}

/// A context that holds every position, as without a window.
fn whole_context(drafter: &DSpark, slots: usize, capacity: usize) -> KvCache {
    let heads = HeadLayout { heads: 4, kv_heads: 2, head_dim: 8 };
    KvCache::new(drafter.config().body.num_hidden_layers, slots, capacity, heads, &CPU).unwrap()
}

#[test]
fn training_blocks_see_the_last_rows_before_their_anchor_and_nothing_else() {
    let lengths = [13, 9];
    let tokens: Vec<Vec<u32>> = lengths.iter().map(|&n| (0..n).map(|i| (i * 5 + 1) % VOCAB as u32).collect()).collect();
    let anchors = [vec![Some(0), Some(3), None, Some(12)], vec![Some(1), Some(5), Some(8)]];
    let sequences: Vec<TrainSequence<'_>> = tokens
        .iter()
        .zip(&anchors)
        .map(|(tokens, anchors)| TrainSequence { tokens, anchors: anchors.clone() })
        .collect();
    let rows = 22;
    let features = random(1, rows, 2 * HIDDEN);
    // The mask by its definition, of all blocks and all context rows.
    let mask = |window: usize| -> Vec<Vec<bool>> {
        let mut mask = Vec::new();
        for (s, anchors) in anchors.iter().enumerate() {
            for anchor in anchors {
                let sees = |row: usize| {
                    let (of, position) = if row < 13 { (0, row) } else { (1, row - 13) };
                    anchor.is_some_and(|anchor| of == s && position < anchor && position + window >= anchor)
                };
                mask.push((0..rows).map(sees).collect());
            }
        }
        mask
    };
    for window in [1, 2, 4, 12, 100] {
        let config = windowed(window);
        let parameters = parameters(&config);
        let drafter = trainable(&config, &parameters);
        let blocks = |features: &Tensor| -> Vec<Vec<f32>> {
            let hidden = flat(&drafter.train_hidden(&sequences, features).unwrap());
            hidden.chunks(BLOCK * HIDDEN).map(<[f32]>::to_vec).collect()
        };
        let base = blocks(&features);
        let expected = mask(window);
        for row in 0..rows {
            let mut changed: Vec<Vec<f32>> = features.to_vec2().unwrap();
            changed[row] = flat(&random(50 + row as u64, 1, 2 * HIDDEN));
            let moved = blocks(&Tensor::new(changed, &CPU).unwrap());
            for (block, (before, after)) in base.iter().zip(&moved).enumerate() {
                assert_eq!(before != after, expected[block][row], "window {window}, block {block}, context row {row}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(24) })]

    #[test]
    fn a_ring_drafts_what_a_recomputed_context_and_the_training_forward_do(
        window in prop::sample::select(vec![1usize, 2, 5, 27, 28, 29, 60]),
        commits in prop::collection::vec(1usize..12, 1..14),
        long in 0usize..150, seed in any::<u64>(),
    ) {
        let config = windowed(window);
        let parameters = parameters(&config);
        let drafter = frozen(&config, &parameters, Precision::F32);
        let capacity = 400;
        let mut ring = drafter.new_context(1, capacity).unwrap();
        prop_assert!(ring.rows() >= window + BLOCK && ring.rows() < window + BLOCK + 32);
        let mut whole = whole_context(&drafter, 1, capacity);
        let mut rows = Vec::new();
        // A prompt of any length first, then what rounds commit.
        for (round, len) in [long].into_iter().chain(commits).enumerate() {
            if len > 0 {
                let features = random(seed ^ round as u64, len, 2 * HIDDEN);
                drafter.extend_context(&mut ring, &features, &[(0, len)]).unwrap();
                for row in 0..len {
                    drafter.extend_context(&mut whole, &features.narrow(0, row, 1).unwrap(), &[(0, 1)]).unwrap();
                }
                rows.push(features);
            }
            let anchor = ring.len(0);
            prop_assert_eq!(anchor, whole.len(0));
            let token = (anchor % VOCAB) as u32;
            let drafted = drafter.block_hidden(&ring, &[(0, token)]).unwrap();
            let recomputed = drafter.block_hidden(&whole, &[(0, token)]).unwrap();
            prop_assert!(flat(&drafted) == flat(&recomputed), "round {round}, anchor {anchor}, window {window}");
            if anchor > 0 && round % 4 == 0 {
                let mut tokens = vec![1; anchor];
                tokens.push(token);
                // One more row, which no block before it may see.
                let features = Tensor::cat(&[rows.as_slice(), &[random(7, 1, 2 * HIDDEN)]].concat(), 0).unwrap();
                let sequence = TrainSequence { tokens: &tokens, anchors: vec![Some(anchor)] };
                let trained = trainable(&config, &parameters).train_hidden(&[sequence], &features).unwrap();
                assert_close("training forward", &drafted, &trained, 2e-4);
            }
        }
    }
}

#[test]
fn memory_does_not_depend_on_the_length_of_the_context() {
    let drafter = |config: &DraftConfig| frozen(config, &parameters(config), Precision::F32);
    let bytes = |drafter: &DSpark, capacity| drafter.new_context(3, capacity).unwrap().allocated_bytes();
    let with_window = drafter(&windowed(128));
    assert_eq!(bytes(&with_window, 1_000), bytes(&with_window, 100_000));
    // 2 layers, 2 sides, 3 slots, 2 heads of 8 values in panels of 32 for the values; 132 rows in whole panels.
    let rows = 160;
    assert_eq!(bytes(&with_window, 1_000), 4 * 2 * 3 * 2 * (rows * 8 + rows * 32));
    let without = drafter(&config(&json!({})));
    assert!(bytes(&without, 10_000) > 9 * bytes(&without, 1_000));
    // A short context takes no more than it needs.
    assert!(bytes(&with_window, 64) < bytes(&with_window, 1_000));
}

#[test]
fn slots_of_a_ring_are_apart_and_start_anew_after_a_release() {
    let config = windowed(7);
    let drafter = frozen(&config, &parameters(&config), Precision::F32);
    let mut ring = drafter.new_context(3, 500).unwrap();
    let alone = |features: &Tensor, token: u32| {
        let mut context = whole_context(&drafter, 1, 500);
        let rows = features.dims()[0];
        drafter.extend_context(&mut context, features, &[(0, rows)]).unwrap();
        flat(&drafter.block_hidden(&context, &[(0, token)]).unwrap())
    };
    let [a, b, c] = [(1, 90), (2, 41), (3, 3)].map(|(seed, rows)| random(seed, rows, 2 * HIDDEN));
    // Both sequences in one call, with a part of each in the next.
    let part = |t: &Tensor, from: usize, rows: usize| t.narrow(0, from, rows).unwrap();
    let first = Tensor::cat(&[part(&a, 0, 80), part(&b, 0, 40)], 0).unwrap();
    drafter.extend_context(&mut ring, &first, &[(2, 80), (0, 40)]).unwrap();
    drafter.block_hidden(&ring, &[(0, 1), (2, 1)]).unwrap();
    let second = Tensor::cat(&[part(&b, 40, 1), part(&a, 80, 10)], 0).unwrap();
    drafter.extend_context(&mut ring, &second, &[(0, 1), (2, 10)]).unwrap();
    let both = flat(&drafter.block_hidden(&ring, &[(0, 4), (2, 5)]).unwrap());
    assert_eq!(both, [alone(&b, 4), alone(&a, 5)].concat());
    // Another sequence takes over a slot whose ring is full.
    ring.truncate(2, 0);
    drafter.extend_context(&mut ring, &c, &[(2, 3)]).unwrap();
    let both = flat(&drafter.block_hidden(&ring, &[(2, 8), (0, 4)]).unwrap());
    assert_eq!(both, [alone(&c, 8), alone(&b, 4)].concat());
}

#[test]
fn positions_before_the_window_can_be_passed_over() {
    let config = windowed(7);
    let drafter = frozen(&config, &parameters(&config), Precision::F32);
    let features = random(1, 90, 2 * HIDDEN);
    let part = |from: usize, len: usize| features.narrow(0, from, len).unwrap();
    let [mut all, mut part_of_it] = [(); 2].map(|()| drafter.new_context(1, 500).unwrap());
    drafter.extend_context(&mut all, &features, &[(0, 90)]).unwrap();
    drafter.extend_context(&mut part_of_it, &part(0, 40), &[(0, 40)]).unwrap();
    drafter.block_hidden(&part_of_it, &[(0, 1)]).unwrap();
    drafter.skip_context(&mut part_of_it, 0, 43).unwrap();
    drafter.extend_context(&mut part_of_it, &part(83, 7), &[(0, 7)]).unwrap();
    let block = |context: &KvCache| flat(&drafter.block_hidden(context, &[(0, 4)]).unwrap());
    assert_eq!(block(&all), block(&part_of_it));
    assert!(drafter.skip_context(&mut part_of_it, 0, 411).is_err(), "no room for 501 positions");
    let whole = frozen(&super::config(&json!({})), &parameters(&super::config(&json!({}))), Precision::F32);
    let mut context = whole.new_context(1, 500).unwrap();
    assert!(whole.skip_context(&mut context, 0, 3).unwrap_err().to_string().contains("without a window"));
}

#[test]
fn what_does_not_fit_a_context_is_refused() {
    let config = windowed(7);
    let drafter = frozen(&config, &parameters(&config), Precision::F32);
    let mut ring = drafter.new_context(1, 50).unwrap();
    let error = drafter.extend_context(&mut ring, &random(1, 51, 2 * HIDDEN), &[(0, 51)]).unwrap_err().to_string();
    assert!(error.contains("51") && error.contains("50"), "{error}");
    let error = drafter.extend_context(&mut ring, &random(1, 12, 2 * HIDDEN), &[(0, 11)]).unwrap_err().to_string();
    assert!(error.contains("12 feature rows for commits of 11"), "{error}");
    drafter.extend_context(&mut ring, &random(1, 47, 2 * HIDDEN), &[(0, 47)]).unwrap();
    assert!(drafter.block_hidden(&ring, &[(0, 1)]).is_err(), "the block ends at 51");
}
