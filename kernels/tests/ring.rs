//! Ragged attention over slots that are rings: positions beyond the capacity, against caches that hold every position.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use candle_core::{Device, Tensor};
use deepspec_kernels::attention::HeadLayout;
use deepspec_kernels::attention::ragged::{RaggedAttention, Segment, Visibility, cache_shapes};
use deepspec_kernels::linear::PANEL;
use proptest::prelude::*;

/// Values in (−1, 1) from a seed.
fn tensor(seed: u64, rows: usize, cols: usize) -> Tensor {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    let data: Vec<f32> = (0..rows * cols).map(|_| next()).collect();
    Tensor::from_vec(data, (rows, cols), &Device::Cpu).unwrap()
}

fn values(t: &Tensor) -> Vec<f32> {
    t.flatten_all().unwrap().to_vec1().unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(48) })]

    #[test]
    fn a_ring_gives_the_bits_of_a_cache_that_holds_every_position(
        seed in any::<u64>(), lengths in prop::collection::vec((1usize..12, 1usize..12), 1..24),
        kv_heads in 1usize..3, group in prop::sample::select(vec![1usize, 2, 5, 14]), dim in 1usize..40,
        window in 1usize..70, causal in any::<bool>(),
    ) {
        let heads = HeadLayout { heads: kv_heads * group, kv_heads, head_dim: dim };
        // Room for the window and the longest segment; a causal row's own position is part of its window.
        let ring = (window + 11).next_multiple_of(PANEL);
        let whole = 24 * 11;
        let visibility = if causal { Visibility::Causal } else { Visibility::WholeSegment };
        let attention = |capacity, segments: &[Segment]| {
            RaggedAttention { segments: segments.into(), capacity, heads, visibility, window: Some(window) }
        };
        // Slots that begin full of what others left.
        let caches = [ring, whole].map(|capacity| cache_shapes(3, capacity, heads).map(|(rows, cols)| tensor(seed, rows, cols)));
        let mut starts = [0, 0];
        for (step, (first, second)) in lengths.into_iter().enumerate() {
            let segments = [(2, first), (0, second)].map(|(slot, len)| Segment { slot, start: starts[slot / 2], len });
            let rows = first + second;
            let [k, v] = [1, 2].map(|side| tensor(seed ^ (side + 4 * step as u64), rows, kv_heads * dim));
            let q = tensor(seed ^ (3 + 4 * step as u64), rows, heads.heads * dim);
            let [in_ring, in_whole] = [(ring, &caches[0]), (whole, &caches[1])].map(|(capacity, [keys, vals])| {
                let op = attention(capacity, &segments);
                op.store(&k, &v, keys, vals).unwrap();
                values(&op.forward(&q, keys, vals).unwrap())
            });
            prop_assert!(in_ring == in_whole, "step {step} from positions {starts:?}");
            starts[1] += first;
            starts[0] += second;
        }
    }
}

#[test]
fn what_a_ring_cannot_hold_is_refused() {
    let heads = HeadLayout { heads: 1, kv_heads: 1, head_dim: 4 };
    let tried = |capacity: usize, window: Option<usize>, start: usize, len: usize| {
        let [keys, vals] = cache_shapes(1, capacity, heads).map(|(rows, cols)| tensor(1, rows, cols));
        let segments = [Segment { slot: 0, start, len }];
        let visibility = Visibility::WholeSegment;
        let op = RaggedAttention { segments: segments.into(), capacity, heads, visibility, window };
        let rows = tensor(2, len, 4);
        (op.store(&rows, &rows, &keys, &vals).is_ok(), op.forward(&rows, &keys, &vals).is_ok())
    };
    assert_eq!(tried(64, Some(60), 1000, 4), (true, true));
    assert_eq!(tried(64, Some(60), 1000, 5), (true, false), "window and segment need 65 places");
    assert_eq!(tried(64, Some(60), 1000, 65), (false, false), "a segment longer than the ring");
    assert_eq!(tried(64, None, 61, 4), (false, false), "no window, so nothing may be overwritten");
    assert_eq!(tried(63, Some(8), 60, 4), (false, false), "no whole number of panels");
    assert_eq!(tried(63, Some(8), 59, 4), (true, true));
}
