//! The vocabulary's loss with its gradients, and the optimiser's update.

use std::sync::Arc;

use candle_core::Var;
use deepspec_kernels::adamw::{AdamWStep, Moments, adamw};
use deepspec_kernels::linear::{Packed, Precision};
use deepspec_kernels::vocab_loss::{LossRow, VocabLoss};

use crate::{Bench, HIDDEN, VOCAB, Work, random};

const ROWS: usize = 448;
const POSITIONS: usize = 256;
const RANK: usize = 256;

pub(crate) fn run(bench: &mut Bench<'_>) {
    let lm_head_weight = random(1, VOCAB, HIDDEN);
    let data: Vec<f32> = lm_head_weight.flatten_all().unwrap().to_vec1().unwrap();
    let lm_head = Arc::new(Packed::new(&[&data], HIDDEN, None, Precision::F32).unwrap());
    let hidden = Var::from_tensor(&random(2, ROWS, HIDDEN)).unwrap();
    let latent = Var::from_tensor(&random(3, ROWS, RANK)).unwrap();
    let w2 = Var::from_tensor(&random(4, VOCAB, RANK)).unwrap();
    let target_hidden = random(5, POSITIONS, HIDDEN);
    let row = |row: usize| LossRow { row, target: row % POSITIONS, label: Some(row as u32), ce: 0.1, tv: 0.9, kl: 0.0 };
    let loss = VocabLoss {
        target_head: lm_head.clone(),
        draft_head: lm_head,
        draft_head_weight: lm_head_weight,
        draft_tokens: None,
        rows: (0..ROWS).map(row).collect(),
        kl_temperature: 1.0,
        with_target: true,
        soft_targets: false,
    };
    // Draft logits and their two gradients, the target's logits, the gradient of W2.
    let flops = 2 * VOCAB * (ROWS * (2 * HIDDEN + 3 * RANK) + POSITIONS * HIDDEN);
    bench.op("vocab loss forward and backward", Work::Flops(flops), || {
        let output = loss.clone().forward(&hidden, &latent, &w2, &target_hidden).unwrap();
        output.loss.sum_all().unwrap().backward().unwrap()
    });
    let parameter = random(6, VOCAB, RANK);
    let gradient = random(7, VOCAB, RANK);
    let mut moments = Moments::zeros(VOCAB * RANK);
    let step =
        AdamWStep { lr: 1e-4, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0, step: 1, gradient_scale: 1.0 };
    // Parameter and moments are read and written, the gradient is read.
    bench.op("adamw", Work::Bytes(7 * 4 * VOCAB * RANK), || {
        adamw(&parameter, &gradient, &mut moments, &step).unwrap();
    });
}
