//! The device form of verification (`deepspec_kernels::verify`, on its CPU path) against the rule of the decoding engine.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use candle_core::{Device, Tensor};
use deepspec_kernels::verify::{DraftBlock, argmax_first, verify_blocks};
use deepspec_models::speculate::{self, CounterRng, Distribution, SamplingParams, Stream, verify_block};

const VOCAB: usize = 50;

/// Logits of row `row`, and the distribution they give: sharp for some rows, so that acceptance varies.
fn row(seed: u64, row: u64) -> (Vec<f32>, Distribution) {
    let draws = CounterRng::new(seed, Stream::Init, row);
    let scale = [1.0, 4.0][row as usize % 2];
    let logits: Vec<f32> = (0..VOCAB as u64).map(|i| (draws.normal(i) * scale) as f32).collect();
    let distribution = Distribution::from_logits(&logits, &SamplingParams::default()).unwrap();
    (logits, distribution)
}

fn dense(rows: &[Distribution]) -> Tensor {
    let values: Vec<f32> = rows.iter().flat_map(|row| (0..VOCAB as u32).map(|token| row.prob(token))).collect();
    Tensor::from_vec(values, (rows.len(), VOCAB), &Device::Cpu).unwrap()
}

#[test]
fn blocks_get_the_verdict_of_the_engine() {
    let (mut accepted, mut bonus) = (0, 0);
    for seed in 0..200 {
        let size = (seed % 6) as usize;
        let target: Vec<Distribution> = (0..=size as u64).map(|i| row(seed, i).1).collect();
        // Every other draft is the target itself, so that whole blocks are accepted, too.
        let draft_seed = if seed % 2 == 0 { seed } else { seed + 1000 };
        let draft: Vec<Distribution> = (0..size as u64).map(|i| row(draft_seed, i).1).collect();
        let position = 7;
        let uniform = |stream, k: usize| CounterRng::new(seed, stream, position + k as u64).uniform_f64(0);
        let tokens: Vec<u32> = draft.iter().enumerate().map(|(k, d)| d.sample(uniform(Stream::Draft, k))).collect();
        let expected = verify_block(&target, &draft, &tokens, seed, position).unwrap();
        let accept: Vec<f64> = (0..size).map(|k| uniform(Stream::Accept, k)).collect();
        let next: Vec<f64> = (0..=size).map(|k| uniform(Stream::Target, k)).collect();
        let block = DraftBlock { tokens: &tokens, accept: &accept, next: &next };
        let got = verify_blocks(&dense(&target), &dense(&draft), &[block]).unwrap()[0];
        assert_eq!((got.accepted, got.next_token), (expected.accepted, expected.next_token), "seed {seed}");
        accepted += expected.accepted;
        bonus += usize::from(expected.bonus && size > 0);
    }
    assert!(accepted > 100 && bonus > 50, "{accepted} accepted, {bonus} whole blocks: the cases are too easy");
}

#[test]
fn the_first_maximum_is_that_of_the_engine() {
    let mut values = Vec::new();
    for i in 0..20 {
        values.extend(row(3, i).0.iter().map(|v| v.round()));
    }
    let got = argmax_first(&Tensor::from_slice(&values, (20, VOCAB), &Device::Cpu).unwrap()).unwrap();
    let expected: Vec<u32> = values.chunks(VOCAB).map(|row| speculate::argmax_first(row).unwrap()).collect();
    assert_eq!(got, expected);
    for unusable in [f32::NAN, f32::INFINITY] {
        values[70] = unusable;
        assert!(argmax_first(&Tensor::from_slice(&values, (20, VOCAB), &Device::Cpu).unwrap()).is_err());
    }
}
