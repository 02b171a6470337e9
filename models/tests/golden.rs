//! Values of the Python reference: target; forward, losses, metrics and every gradient of DSpark with each head and of DFlash;
//! optimiser steps.
//!
//! Sizes and hyperparameters come from the files. `DEEPSPEC_GOLDEN` names another folder of the same layout.
#![expect(clippy::unwrap_used, reason = "tests fail as tests do")]

mod reference;

use std::collections::HashMap;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use deepspec_kernels::linear::{Linear, Packed, Precision};
use deepspec_models::config::{DraftConfig, TargetConfig};
use deepspec_models::draft::dspark::TrainSequence;
use deepspec_models::draft::{DSpark, ParameterSource, Parameters};
use deepspec_models::loss::dspark::{DSparkLoss, LossHead, LossWeights, Supervision, anchor_candidates, dspark_loss};
use deepspec_models::optimizer::{AdamWConfig, Gradients, Optimizer, Schedule};
use deepspec_models::target::{NewTokens, Target};
use deepspec_models::weights::Weights;
use serde_json::Value;

use reference::{close, floats, golden, ints, json, relative, tensors};

#[test]
fn golden_target_hidden_states_and_logits() {
    let io = tensors("target/io.safetensors");
    let config = TargetConfig::from_folder(golden("target")).unwrap();
    let weights = Weights::from_folder(golden("target"), DType::F32, &Device::Cpu).unwrap();
    let target = Target::load(config, &weights, Precision::F32).unwrap();
    let layers = target.config().num_hidden_layers;
    let capture: Vec<i32> = (-1..layers as i32 - 1).collect();
    let (batch, length) = io["input_ids"].dims2().unwrap();
    let ids: Vec<u32> = ints(&io["input_ids"]).iter().map(|&id| id as u32).collect();
    let mut cache = target.new_cache(batch, length).unwrap();
    let rows: Vec<NewTokens> =
        ids.chunks(length).enumerate().map(|(slot, tokens)| NewTokens { slot, tokens }).collect();
    let out = target.forward(&mut cache, &rows, &capture).unwrap();
    let width = target.config().hidden_size;
    close("last_hidden_state", &floats(&out.hidden), &floats(&io["last_hidden_state"]), 1e-4, 1e-4);
    let features = out.features.unwrap();
    for i in 0..layers {
        let got = floats(&features.narrow(1, i * width, width).unwrap().contiguous().unwrap());
        close(&format!("hidden_states.{i}"), &got, &floats(&io[&format!("hidden_states.{i}")]), 1e-4, 1e-4);
    }
    let all: Vec<usize> = (0..batch * length).collect();
    let logits = floats(&target.logits(&out.hidden, &all).unwrap());
    close("logits", &logits, &floats(&io["logits"]), 1e-4, 1e-4);

    // One token at a time and after a rollback, the rows are the same bit for bit.
    cache.truncate(0, 3);
    let mut again = Vec::new();
    for &token in &ids[3..length] {
        let out = target.forward(&mut cache, &[NewTokens { slot: 0, tokens: &[token] }], &[]).unwrap();
        again.extend(floats(&out.hidden));
    }
    assert_eq!(again, floats(&out.hidden)[3 * width..length * width], "decoding differs from prefill");

    // Ragged rows: the padded case of the reference without its padding.
    let mask = ints(&io["padded.attention_mask"]);
    let padded: Vec<u32> = ints(&io["padded.input_ids"]).iter().map(|&id| id as u32).collect();
    let mut cache = target.new_cache(batch, length).unwrap();
    let lengths: Vec<usize> = mask.chunks(length).map(|row| row.iter().sum::<i64>() as usize).collect();
    let rows: Vec<NewTokens> = (0..batch)
        .map(|slot| NewTokens { slot, tokens: &padded[slot * length..slot * length + lengths[slot]] })
        .collect();
    let out = target.forward(&mut cache, &rows, &[]).unwrap();
    let (got, expected) = (floats(&out.hidden), floats(&io["padded.last_hidden_state"]));
    let mut first = 0;
    for (slot, &len) in lengths.iter().enumerate() {
        let from = slot * length * width;
        close(
            "padded hidden",
            &got[first * width..(first + len) * width],
            &expected[from..from + len * width],
            1e-4,
            1e-4,
        );
        first += len;
    }
}

#[test]
fn golden_target_refuses_its_last_layer_as_a_feature() {
    let config = TargetConfig::from_folder(golden("target")).unwrap();
    let last = config.num_hidden_layers as i32 - 1;
    let weights = Weights::from_folder(golden("target"), DType::F32, &Device::Cpu).unwrap();
    let target = Target::load(config, &weights, Precision::F32).unwrap();
    let mut cache = target.new_cache(1, 4).unwrap();
    let batch = [NewTokens { slot: 0, tokens: &[1, 2] }];
    for layer in [last, -2] {
        let error = target.forward(&mut cache, &batch, &[layer]).unwrap_err();
        assert!(error.to_string().contains(&layer.to_string()), "{error}");
    }
    assert!(target.forward(&mut cache, &[NewTokens { slot: 0, tokens: &[1; 9] }], &[]).is_err());
    assert!(target.forward(&mut cache, &[NewTokens { slot: 0, tokens: &[u32::MAX] }], &[]).is_err());
}

/// A DSpark golden set: its checkpoint as variables, and its batch without padding.
struct Set {
    drafter: DSpark,
    parameters: Parameters,
    head: LossHead,
    data: HashMap<String, Tensor>,
    summary: Value,
    lengths: Vec<usize>,
    tokens: Vec<Vec<u32>>,
    masks: Vec<Vec<u8>>,
    anchors: Vec<Vec<Option<usize>>>,
}

impl Set {
    fn load(name: &str) -> Self {
        let config = DraftConfig::from_folder(golden(name)).unwrap();
        let weights = Weights::from_folder(golden(name), DType::F32, &Device::Cpu).unwrap();
        let summary = json(&format!("{name}/train.json"));
        let mut parameters = Parameters::default();
        for name in summary["params_trainable"].as_array().unwrap() {
            let name = name.as_str().unwrap();
            let shape = weights.shape(name).unwrap().to_vec();
            parameters.insert(name, &weights.get(name, &shape).unwrap()).unwrap();
        }
        let table = [config.body.vocab_size, config.body.hidden_size];
        let embed = weights.get("embed_tokens.weight", &table).unwrap();
        let weight = weights.get("lm_head.weight", &table).unwrap();
        weights.finish().unwrap();
        let packed = Packed::new(&[&floats(&weight)], table[1], None, Precision::F32).unwrap();
        let head = LossHead::new(&weight, Arc::new(packed), None).unwrap();
        let drafter = DSpark::new(config, embed, ParameterSource::Trainable(&parameters)).unwrap();
        let data = tensors(&format!("{name}/train.safetensors"));
        let (_, length) = data["in.input_ids"].dims2().unwrap();
        let (_, blocks) = data["in.anchor_positions"].dims2().unwrap();
        let lengths: Vec<usize> =
            ints(&data["in.attention_mask"]).chunks(length).map(|row| row.iter().sum::<i64>() as usize).collect();
        let cut = |key: &str, i: usize| ints(&data[key])[i * length..i * length + lengths[i]].to_vec();
        let tokens = (0..lengths.len()).map(|i| cut("in.input_ids", i).iter().map(|&t| t as u32).collect()).collect();
        let masks = (0..lengths.len()).map(|i| cut("in.loss_mask", i).iter().map(|&t| t as u8).collect()).collect();
        let anchors = ints(&data["in.anchor_positions"])
            .chunks(blocks)
            .zip(ints(&data["in.block_keep_mask"]).chunks(blocks))
            .map(|(anchors, keep)| anchors.iter().zip(keep).map(|(&a, &k)| (k == 1).then_some(a as usize)).collect())
            .collect();
        Self { drafter, parameters, head, data, summary, lengths, tokens, masks, anchors }
    }

    /// Rows of a padded `[batch, T, width]` tensor without the padding.
    fn ragged(&self, key: &str) -> Tensor {
        let padded = &self.data[key];
        let rows: Vec<Tensor> = self
            .lengths
            .iter()
            .enumerate()
            .map(|(i, &len)| padded.get(i).unwrap().narrow(0, 0, len).unwrap())
            .collect();
        Tensor::cat(&rows, 0).unwrap()
    }

    fn sequences(&self) -> Vec<TrainSequence<'_>> {
        self.tokens.iter().zip(&self.anchors).map(|(t, a)| TrainSequence { tokens: t, anchors: a.clone() }).collect()
    }

    fn weights(hyper: &Value) -> LossWeights {
        let number = |key: &str| hyper[key].as_f64().unwrap();
        LossWeights {
            ce: number("ce"),
            tv: number("l1"),
            kl: 0.0,
            kl_temperature: 1.0,
            confidence: number("conf"),
            decay_gamma: hyper["gamma"].as_f64(),
        }
    }

    fn loss(&self, weights: &LossWeights) -> (Tensor, Supervision, DSparkLoss) {
        self.loss_with(weights, true)
    }

    fn loss_with(&self, weights: &LossWeights, with_acceptance: bool) -> (Tensor, Supervision, DSparkLoss) {
        let sequences = self.sequences();
        let hidden = self.drafter.train_hidden(&sequences, &self.ragged("in.target_hidden_states")).unwrap();
        let masks: Vec<&[u8]> = self.masks.iter().map(Vec::as_slice).collect();
        let config = self.drafter.config();
        let supervision =
            Supervision::new(&sequences, &masks, config.proposals(), config.mask_token_id, weights.decay_gamma, None)
                .unwrap();
        let target_hidden = self.ragged("in.target_last_hidden_states");
        let denominators = supervision.weights;
        let loss = dspark_loss(
            &self.drafter,
            &self.head,
            weights,
            &supervision,
            &hidden,
            &target_hidden,
            denominators,
            with_acceptance,
        )
        .unwrap();
        (hidden, supervision, loss)
    }

    fn check_metrics(&self, weights: &LossWeights, loss: &DSparkLoss, expected: &Value) {
        let with_confidence = self.drafter.confidence_head().is_some();
        let got: HashMap<String, f64> = loss.sums.metrics(weights, with_confidence).into_iter().collect();
        for (name, value) in expected["metrics"].as_object().unwrap() {
            let name = name.strip_prefix("train/").unwrap();
            let found = got.get(name).unwrap_or_else(|| panic!("no metric {name}"));
            relative(name, *found, value.as_f64().unwrap(), 1e-4);
        }
        relative("loss", loss.sums.loss, expected["loss"].as_f64().unwrap(), 1e-4);
        let terms = &expected["terms"];
        relative("ce_loss_num", loss.sums.ce, terms["ce_loss_num"].as_f64().unwrap(), 1e-4);
        if weights.tv != 0.0 {
            relative("l1_loss_num", loss.sums.tv, terms["l1_loss_num"].as_f64().unwrap(), 1e-4);
        }
        relative("ce_loss_den", loss.sums.weight + 1e-6, terms["ce_loss_den"].as_f64().unwrap(), 1e-4);
        if with_confidence {
            let expected = terms["confidence_loss_num"].as_f64().unwrap();
            relative("confidence_loss_num", loss.sums.confidence, expected, 1e-4);
        }
    }
}

fn check_set(name: &str) {
    let set = Set::load(name);
    let weights = Set::weights(&set.summary["hyper"]);
    let (hidden, supervision, loss) = set.loss(&weights);
    close("output_hidden", &floats(&hidden), &floats(&set.data["mid.output_hidden"]), 1e-4, 1e-4);

    // Slots that count, their labels, and the logits of every row.
    let (batch, blocks, size) = set.data["out.eval_mask"].dims3().unwrap();
    let mut mask = vec![0i64; batch * blocks * size];
    let labels = ints(&set.data["out.target_ids"]);
    for slot in &supervision.slots {
        mask[slot.row] = 1;
        assert_eq!(labels[slot.row], i64::from(slot.label.unwrap()), "label of row {}", slot.row);
    }
    assert_eq!(mask, ints(&set.data["out.eval_mask"]), "eval_mask");
    let mut logits = Linear::trainable(set.head.weight().clone(), None).forward(&hidden.detach()).unwrap();
    let previous: Vec<u32> = set
        .sequences()
        .iter()
        .flat_map(|s| s.anchors.clone().into_iter().map(|a| (s.tokens.to_vec(), a)))
        .flat_map(|(tokens, anchor)| {
            (0..size).map(move |k| anchor.and_then(|a| tokens.get(a + k).copied()).unwrap_or(0)).collect::<Vec<_>>()
        })
        .collect();
    let embedding = set.drafter.markov_head().map(|markov| markov.embedding(&previous).unwrap());
    if let (Some(markov), Some(embedding)) = (set.drafter.markov_head(), &embedding) {
        let latents = markov.block_latents(embedding, &hidden, size).unwrap();
        logits = (logits + markov.bias(&latents).unwrap()).unwrap();
    }
    let vocab = set.drafter.config().body.vocab_size;
    let (got, expected) = (floats(&logits.detach()), floats(&set.data["out.draft_logits"]));
    for slot in &supervision.slots {
        let row = slot.row * vocab..(slot.row + 1) * vocab;
        close("draft_logits", &got[row.clone()], &expected[row], 1e-4, 1e-4);
    }
    if let Some(head) = set.drafter.confidence_head() {
        let got = floats(&head.logits(&hidden, embedding.as_ref()).unwrap().detach());
        let expected = floats(&set.data["out.confidence_pred"]);
        for slot in &supervision.slots {
            close("confidence_pred", &[got[slot.row]], &[expected[slot.row]], 1e-4, 1e-4);
        }
    }

    set.check_metrics(&weights, &loss, &set.summary);
    let grads = loss.loss.backward().unwrap();
    let mut gradients = Gradients::default();
    gradients.add(&set.parameters, &grads).unwrap();
    let mut checked = 0;
    for (name, _) in set.parameters.iter() {
        let got = floats(gradients.get(name).unwrap());
        let expected = floats(&set.data[&format!("grad.{name}")]);
        let largest = expected.iter().fold(0f32, |m, v| m.max(v.abs()));
        assert!(got.iter().any(|g| *g != 0.0), "gradient of {name} is zero");
        close(&format!("grad.{name}"), &got, &expected, 5e-4 * largest + 1e-6, 0.0);
        checked += 1;
    }
    assert_eq!(checked, set.summary["params_trainable"].as_array().unwrap().len());
    relative("gradient norm", gradients.norm().unwrap(), set.summary["grad_norm_all"].as_f64().unwrap(), 5e-4);

    for setting in set.summary["alternative_settings"].as_object().unwrap().values() {
        let weights = Set::weights(&setting["hyper"]);
        let (_, _, loss) = set.loss(&weights);
        set.check_metrics(&weights, &loss, setting);
        // Where no term needs the target's distributions, leaving them out changes nothing but the metrics.
        if weights.tv == 0.0 && weights.confidence == 0.0 {
            let (_, _, lean) = set.loss_with(&weights, false);
            assert_eq!(lean.sums.loss, loss.sums.loss);
            let (grads, lean_grads) = (loss.loss.backward().unwrap(), lean.loss.backward().unwrap());
            for (parameter, var) in set.parameters.iter() {
                let (full, lean) = (grads.get(var).unwrap(), lean_grads.get(var).unwrap());
                close(parameter, &floats(lean), &floats(full), 1e-7, 1e-5);
            }
        }
    }
}

#[test]
fn anchors_are_supervised_and_followed_by_a_supervised_token() {
    assert_eq!(anchor_candidates(&[0, 1, 1, 1, 0, 1, 0, 1, 1]), [1, 2, 7]);
    assert_eq!(anchor_candidates(&[0, 1]), Vec::<usize>::new(), "the position before an answer is none");
    assert_eq!(anchor_candidates(&[1, 0]), Vec::<usize>::new());
    assert_eq!(anchor_candidates(&[]), Vec::<usize>::new());
    // Those of the reference's batch are among them.
    let set = Set::load("dspark_vanilla");
    for (mask, anchors) in set.masks.iter().zip(&set.anchors) {
        let candidates = anchor_candidates(mask);
        assert!(anchors.iter().flatten().all(|anchor| candidates.contains(anchor)), "{anchors:?} of {candidates:?}");
    }
}

#[test]
fn golden_dspark_vanilla_forward_losses_metrics_and_gradients() {
    check_set("dspark_vanilla");
}

#[test]
fn golden_dspark_vanilla_noconf_forward_losses_metrics_and_gradients() {
    check_set("dspark_vanilla_noconf");
}

#[test]
fn golden_dspark_gated_forward_losses_metrics_and_gradients() {
    check_set("dspark_gated");
}

#[test]
fn golden_dspark_rnn_forward_losses_metrics_and_gradients() {
    check_set("dspark_rnn");
}

#[test]
fn golden_dflash_forward_losses_metrics_and_gradients() {
    check_set("dflash");
}

fn check_optimizer_run(run: &str) {
    let file = json("optim/optim.json");
    let run = &file[run];
    let config = &run["config"];
    let set = Set::load("dspark_vanilla");
    let weights = Set::weights(&set.summary["hyper"]);
    let initial: HashMap<String, Vec<f32>> =
        set.parameters.iter().map(|(name, var)| (name.to_owned(), floats(var.as_tensor()))).collect();
    let settings = AdamWConfig {
        beta1: run["betas"][0].as_f64().unwrap(),
        beta2: run["betas"][1].as_f64().unwrap(),
        eps: run["eps"].as_f64().unwrap(),
        weight_decay: config["wd"].as_f64().unwrap(),
        max_grad_norm: config["clip"].as_f64().unwrap(),
    };
    let mut optimizer = Optimizer::new(settings, &set.parameters);
    let norm = |v: &[f32]| v.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
    for (i, step) in run["steps"].as_array().unwrap().iter().enumerate() {
        let (_, _, loss) = set.loss(&weights);
        relative(&format!("loss before step {i}"), loss.sums.loss, step["loss"].as_f64().unwrap(), 5e-4);
        let mut gradients = Gradients::default();
        gradients.add(&set.parameters, &loss.loss.backward().unwrap()).unwrap();
        let lr = step["lr_used"].as_f64().unwrap();
        let before = optimizer.update(&set.parameters, &gradients, lr).unwrap();
        relative("gradient norm", before, step["grad_norm_before_clip"].as_f64().unwrap(), 5e-4);
        for (name, var) in set.parameters.iter() {
            let expected = step["param_l2_after"][name].as_f64().unwrap();
            relative(&format!("{name} after step {i}"), norm(&floats(var.as_tensor())), expected, 5e-4);
        }
    }
    for (name, expected) in run["final"].as_object().unwrap() {
        let now = floats(set.parameters.get(name).unwrap().as_tensor());
        let moved: Vec<f32> = now.iter().zip(&initial[name]).map(|(a, b)| a - b).collect();
        relative(&format!("{name}: way gone"), norm(&moved), expected["delta_l2"].as_f64().unwrap(), 5e-3);
    }
}

#[test]
fn golden_optimizer_main_run() {
    check_optimizer_run("main");
}

#[test]
fn golden_optimizer_short_cosine_run() {
    check_optimizer_run("short_cosine");
}

/// The closed form, where the reference's recursion is exact up to the factor that it scales the cosine by.
#[test]
fn golden_schedules_follow_the_closed_form() {
    let schedules = json("optim/optim.json")["schedules"].clone();
    let schedules = schedules.as_array().unwrap();
    assert!(!schedules.is_empty());
    for schedule in schedules {
        let total = schedule["total_steps"].as_u64().unwrap();
        let base = schedule["base_lr"].as_f64().unwrap();
        let ours = Schedule::new(base, total, schedule["warmup_ratio"].as_f64().unwrap());
        let table = schedule["lr_used_at_step"].as_array().unwrap();
        assert_eq!(ours.warmup_steps, schedule["warmup_steps"].as_u64().unwrap());
        let span = (total - ours.warmup_steps) as f64;
        let factor = 2.0 / (1.0 + (std::f64::consts::PI / span).cos());
        for (step, lr) in table.iter().enumerate().take(total as usize) {
            let scale = if (step as u64) < ours.warmup_steps { 1.0 } else { factor };
            let (got, expected) = (ours.at(step as u64) * scale, lr.as_f64().unwrap());
            assert!((got - expected).abs() <= 1e-9 * base, "step {step} of {total}: {got} against {expected}");
        }
    }
}
