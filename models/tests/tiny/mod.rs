//! What tests on tiny random models share.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use candle_core::{Device, Tensor};
use deepspec_models::speculate::{CounterRng, Stream};

/// Normal numbers.
pub(crate) fn random(seed: u64, rows: usize, cols: usize) -> Tensor {
    let rng = CounterRng::new(seed, Stream::Init, 1 << 40);
    let values: Vec<f32> = (0..rows * cols).map(|i| rng.normal(i as u64) as f32).collect();
    Tensor::from_vec(values, (rows, cols), &Device::Cpu).unwrap()
}

pub(crate) fn flat(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}
