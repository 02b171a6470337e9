//! A real target on a CUDA device: its logits against the CPU's, and verifying a block against decoding token by token
//! (feature `cuda`).
//!
//! The model is found through `DEEPSPEC_SMOLLM2_GGUF`; without it, or without a device, the tests say so and pass.
#![cfg(feature = "cuda")]
#![expect(
    clippy::disallowed_methods,
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "tests read the environment to find the model and fail as tests do"
)]

use std::sync::Arc;

use candle_core::{DType, Device};
use deepspec_kernels::linear::Precision;
use deepspec_models::config::TargetConfig;
use deepspec_models::gguf::Gguf;
use deepspec_models::target::{NewTokens, Target};
use deepspec_models::weights::Weights;

fn target(device: &Device, precision: Precision) -> Option<Target> {
    let Ok(path) = std::env::var("DEEPSPEC_SMOLLM2_GGUF") else {
        println!("skipped: DEEPSPEC_SMOLLM2_GGUF does not name the model");
        return None;
    };
    let gguf = Arc::new(Gguf::open(path).unwrap());
    let config = TargetConfig::from_gguf(&gguf).unwrap();
    let weights = Weights::from_gguf(gguf, DType::F32, device).unwrap();
    Some(Target::load(config, &weights, precision).unwrap())
}

fn gpu() -> Option<Device> {
    let device = Device::new_cuda(0);
    if let Err(error) = &device {
        println!("skipped: no CUDA device: {error}");
    }
    device.ok()
}

/// Logits of all tokens, given in calls of at most `step` tokens.
fn logits(target: &Target, tokens: &[u32], step: usize) -> Vec<Vec<f32>> {
    let mut cache = target.new_cache(1, tokens.len()).unwrap();
    let mut all = Vec::new();
    for tokens in tokens.chunks(step) {
        let rows = target.forward(&mut cache, &[NewTokens { slot: 0, tokens }], &[]).unwrap();
        let wanted: Vec<usize> = (0..tokens.len()).collect();
        all.extend(target.logits(&rows.hidden, &wanted).unwrap().to_vec2::<f32>().unwrap());
    }
    all
}

#[test]
fn a_target_gives_the_logits_of_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let tokens: Vec<u32> = (0..100).map(|i| 1000 + 37 * i).collect();
    for precision in [Precision::F32, Precision::Bf16] {
        let (Some(on_cpu), Some(on_gpu)) = (target(&Device::Cpu, precision), target(&gpu, precision)) else { return };
        let (expected, got) = (logits(&on_cpu, &tokens, 100), logits(&on_gpu, &tokens, 100));
        for (row, (got, expected)) in got.iter().zip(&expected).enumerate() {
            for (got, expected) in got.iter().zip(expected) {
                assert!((got - expected).abs() < 5e-3, "{precision:?}, row {row}: {got}, expected {expected}");
            }
        }
    }
}

#[test]
fn verifying_a_block_is_decoding_token_by_token_bit_for_bit() {
    let Some(gpu) = gpu() else { return };
    let tokens: Vec<u32> = (0..48).map(|i| 1000 + 37 * i).collect();
    for precision in [Precision::F32, Precision::Bf16] {
        let Some(target) = target(&gpu, precision) else { return };
        let alone = logits(&target, &tokens, 1);
        for block in [3, 8, 16, 48] {
            assert_eq!(logits(&target, &tokens, block), alone, "{precision:?}, blocks of {block}");
        }
    }
}
