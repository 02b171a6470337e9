//! The mixture of experts: its output and losses against plain loops, gradients against differences, configuration, start.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Tensor};
use deepspec_models::checkpoint;
use deepspec_models::config::{DraftConfig, MoeConfig};
use deepspec_models::draft::dspark::{TrainRows, TrainSequence};
use deepspec_models::draft::moe::{MixtureOfExperts, Routing};
use deepspec_models::draft::{ParameterSource, Parameters, initialise, trainable_shapes};
use deepspec_models::linear::{Packed, Precision};
use deepspec_models::loss::dspark::{DSparkLoss, LossHead, LossWeights, Supervision, dspark_loss};
use deepspec_models::loss::router::RouterWeights;
use deepspec_models::optimizer::Gradients;
use deepspec_models::weights::Weights;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::{
    BLOCK, CPU, HIDDEN, MASK, VOCAB, assert_close, config, embedding, flat, frozen, parameters, random, saved,
    trainable,
};

fn fields(experts: usize, per_token: usize, norm: bool, shared: usize) -> Value {
    json!({
        "num_experts": experts, "num_experts_per_tok": per_token, "moe_intermediate_size": 6, "norm_topk_prob": norm,
        "shared_expert_intermediate_size": shared,
    })
}

fn mixture(config: &DraftConfig, source: ParameterSource<'_>) -> MixtureOfExperts {
    MixtureOfExperts::new(config.moe.as_ref().unwrap(), HIDDEN, 0, source).unwrap()
}

/// Output of layer 0's mixture for one row, in f64 and by its definition.
fn by_definition(moe: &MoeConfig, parameters: &Parameters, x: &[f32]) -> Vec<f64> {
    let matrix = |name: &str| -> Vec<Vec<f64>> {
        let rows: Vec<Vec<f32>> = parameters.get(&format!("layers.0.mlp.{name}.weight")).unwrap().to_vec2().unwrap();
        rows.into_iter().map(|row| row.into_iter().map(f64::from).collect()).collect()
    };
    let product = |m: &[Vec<f64>], x: &[f64]| -> Vec<f64> {
        m.iter().map(|row| row.iter().zip(x).map(|(a, b)| a * b).sum()).collect()
    };
    let x: Vec<f64> = x.iter().map(|v| f64::from(*v)).collect();
    let expert = |name: &str| {
        let gate = product(&matrix(&format!("{name}.gate_proj")), &x);
        let up = product(&matrix(&format!("{name}.up_proj")), &x);
        let inner: Vec<f64> = gate.iter().zip(&up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
        product(&matrix(&format!("{name}.down_proj")), &inner)
    };
    let logits = product(&matrix("gate"), &x);
    let total: f64 = logits.iter().map(|l| l.exp()).sum();
    let mut order: Vec<usize> = (0..moe.num_experts).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
    order.truncate(moe.num_experts_per_tok);
    let chosen: f64 = order.iter().map(|&e| logits[e].exp() / total).sum();
    let has_shared = moe.shared_expert_intermediate_size > 0;
    let mut y = if has_shared { expert("shared_expert") } else { vec![0.0; HIDDEN] };
    for e in order {
        let weight = logits[e].exp() / total / if moe.norm_topk_prob { chosen } else { 1.0 };
        y.iter_mut().zip(expert(&format!("experts.{e}"))).for_each(|(y, f)| *y += weight * f);
    }
    y
}

#[test]
fn a_row_gets_its_experts_with_the_routers_weights() {
    for (experts, per_token, norm, shared) in
        [(4, 2, true, 10), (4, 2, false, 10), (5, 1, false, 0), (3, 3, true, 0), (1, 1, true, 4), (16, 3, true, 0)]
    {
        let config = config(&fields(experts, per_token, norm, shared));
        let parameters = parameters(&config);
        let (_folder, weights) = saved(&config, &parameters);
        let x = random(4, 9, HIDDEN);
        let moe = config.moe.as_ref().unwrap();
        let rows: Vec<Vec<f32>> = x.to_vec2().unwrap();
        let expected: Vec<f32> =
            rows.iter().flat_map(|row| by_definition(moe, &parameters, row)).map(|v| v as f32).collect();
        let expected = Tensor::from_vec(expected, (9, HIDDEN), &CPU).unwrap();
        let sources = [ParameterSource::Trainable(&parameters), ParameterSource::Frozen(&weights, Precision::F32)];
        for source in sources {
            let (y, routing) = mixture(&config, source).forward(&x, None).unwrap();
            assert_close(&format!("{moe}"), &y, &expected, 2e-5);
            assert_eq!(routing.counts.iter().sum::<usize>(), 9 * per_token);
        }
        // Rows that are not routed have the shared expert's output alone.
        let (some, routing) = mixture(&config, sources[0]).forward(&x, Some(&[1, 7])).unwrap();
        assert_eq!(routing.counts.iter().sum::<usize>(), 2 * per_token);
        let (none, routing) = mixture(&config, sources[0]).forward(&x, Some(&[])).unwrap();
        assert_eq!(routing.counts, vec![0; experts]);
        for row in 0..9 {
            let expected = if [1, 7].contains(&row) { &expected } else { &none };
            let at = |t: &Tensor| t.narrow(0, row, 1).unwrap();
            assert_close("a part of the rows", &at(&some), &at(expected), 2e-5);
        }
    }
}

#[test]
fn a_rows_output_does_not_depend_on_its_batch() {
    let config = config(&fields(6, 2, true, 10));
    let parameters = parameters(&config);
    let (_folder, weights) = saved(&config, &parameters);
    let x = random(5, 40, HIDDEN);
    for precision in [Precision::F32, Precision::Bf16, Precision::Q8] {
        let experts = mixture(&config, ParameterSource::Frozen(&weights, precision));
        let (all, routing) = experts.forward(&x, None).unwrap();
        assert!(routing.counts.iter().all(|&count| count > 0), "every expert has rows: {:?}", routing.counts);
        for (first, rows) in [(0, 1), (17, 1), (39, 1), (3, 5), (20, 20)] {
            let (some, _) = experts.forward(&x.narrow(0, first, rows).unwrap(), None).unwrap();
            assert_eq!(flat(&some), flat(&all.narrow(0, first, rows).unwrap()), "{precision:?}, rows {first} + {rows}");
        }
    }
}

/// Compares the gradients of a scalar in all parameters of layer 0's mixture with central differences.
#[test]
fn gradients_are_those_of_differences() {
    for (per_token, norm, shared, routed) in
        [(2, true, 10, None), (2, false, 0, None), (1, false, 4, Some(&[0, 2, 3, 5][..]))]
    {
        let config = config(&fields(4, per_token, norm, shared));
        let parameters = parameters(&config);
        let x = random(6, 7, HIDDEN);
        let weight = random(7, 7, HIDDEN);
        let loss = |parameters: &Parameters| {
            let experts = mixture(&config, ParameterSource::Trainable(parameters));
            let (y, routing) = experts.forward(parameters.get("x").unwrap(), routed).unwrap();
            let main = (y * &weight).unwrap().sum_all().unwrap();
            let base = DSparkLoss { loss: main, sums: deepspec_models::loss::dspark::MetricSums::default() };
            let counts = routing.counts.clone();
            (base.with_routers(&[routing], RouterWeights { load_balance: 2.0, z: 0.3 }, 1.0).unwrap().loss, counts)
        };
        let with = |changed: &str, value: &Tensor| {
            let mut all = Parameters::default();
            all.insert("x", &x).unwrap();
            for (name, var) in parameters.iter().filter(|(name, _)| name.starts_with("layers.0.mlp.")) {
                all.insert(name, var.as_tensor()).unwrap();
            }
            all.insert(changed, value).unwrap();
            all
        };
        let base = with("x", &x);
        let (scalar, counts) = loss(&base);
        let store = scalar.backward().unwrap();
        for (name, var) in base.iter() {
            let Some(grad) = store.get(var) else {
                let idle = counts.iter().enumerate().filter(|(_, count)| **count == 0);
                assert!(idle.map(|(e, _)| format!(".{e}.")).any(|e| name.contains(&e)), "{name} has no gradient");
                continue;
            };
            let (grad, values) = (flat(grad), flat(var));
            let scale = grad.iter().fold(1e-2f32, |m, g| m.max(g.abs()));
            for probe in 0..12 {
                let at = probe * 7919 % values.len();
                let moved = |h: f32| {
                    let mut moved = values.clone();
                    moved[at] += h;
                    let (loss, moved_counts) = loss(&with(name, &Tensor::from_vec(moved, var.shape(), &CPU).unwrap()));
                    assert_eq!(moved_counts, counts, "the step is small enough not to send a row elsewhere");
                    f64::from(loss.to_scalar::<f32>().unwrap())
                };
                let expected = (moved(1e-3) - moved(-1e-3)) / 2e-3;
                let error = (f64::from(grad[at]) - expected).abs();
                assert!(error < 3e-2 * f64::from(scale), "{name} entry {at}: {} against {expected}", grad[at]);
            }
        }
    }
}

const WEIGHTS: LossWeights =
    LossWeights { ce: 1.0, tv: 0.0, kl: 0.0, kl_temperature: 1.0, confidence: 0.0, decay_gamma: Some(4.0) };

type Batch = [(Vec<u32>, Vec<Option<usize>>)];

/// Two sequences, supervised to their ends; anchors leave every block whole.
fn batch(pads: bool) -> Vec<(Vec<u32>, Vec<Option<usize>>)> {
    let tokens = |factor: u32, len: u32| (0..len).map(|i| (i * factor + 2) % VOCAB as u32).collect();
    let mut batch = vec![(tokens(11, 17), vec![Some(3), Some(5), Some(8)]), (tokens(5, 12), vec![Some(2), Some(6)])];
    if pads {
        batch[0].1.push(None);
        batch[1].1.extend([None, None]);
    }
    batch
}

struct Step {
    loss: DSparkLoss,
    routing: Vec<Routing>,
}

/// Loss of a part of a batch that has `share` of its blocks.
fn step(config: &DraftConfig, parameters: &Parameters, batch: &Batch, routers: RouterWeights, share: f64) -> Step {
    let sequences: Vec<TrainSequence<'_>> =
        batch.iter().map(|(tokens, anchors)| TrainSequence { tokens, anchors: anchors.clone() }).collect();
    let masks: Vec<Vec<u8>> = batch.iter().map(|(tokens, _)| vec![1; tokens.len()]).collect();
    let masks: Vec<&[u8]> = masks.iter().map(Vec::as_slice).collect();
    let rows = |seed, width| {
        let of_sequence = batch.iter().map(|(tokens, _)| random(seed + tokens.len() as u64, tokens.len(), width));
        Tensor::cat(&of_sequence.collect::<Vec<_>>(), 0).unwrap()
    };
    let supervision = Supervision::new(&sequences, &masks, BLOCK, MASK, WEIGHTS.decay_gamma, None).unwrap();
    let lm_head = random(8, VOCAB, HIDDEN);
    let packed = Packed::new(&[&flat(&lm_head)], HIDDEN, None, Precision::F32).unwrap();
    let head = LossHead::new(&lm_head, Arc::new(packed), None).unwrap();
    let drafter = trainable(config, parameters);
    let TrainRows { hidden, routing } = drafter.train_rows(&sequences, &rows(20, 2 * HIDDEN)).unwrap();
    let sums = supervision.weights;
    let loss = dspark_loss(&drafter, &head, &WEIGHTS, &supervision, &hidden, &rows(40, HIDDEN), sums, false).unwrap();
    Step { loss: loss.with_routers(&routing, routers, share).unwrap(), routing }
}

fn metric(loss: &DSparkLoss, name: &str) -> f64 {
    loss.sums.metrics(&WEIGHTS, false).into_iter().find(|(other, _)| other == name).unwrap().1
}

#[test]
fn router_losses_are_those_of_the_rows_of_real_blocks() {
    let config = config(&fields(5, 2, true, 10));
    let parameters = parameters(&config);
    let routers = RouterWeights { load_balance: 0.5, z: 0.25 };
    let Step { loss, routing } = step(&config, &parameters, &batch(true), routers, 1.0);
    assert_eq!(routing.iter().map(|r| r.layer).collect::<Vec<_>>(), [0, 1]);
    let (mut balance, mut z, mut busiest) = (0.0, 0.0, 0.0_f64);
    for routing in &routing {
        let logits: Vec<Vec<f32>> = routing.logits.to_vec2().unwrap();
        let rows = 5 * BLOCK;
        assert_eq!(logits.len(), rows, "five blocks have an anchor");
        let (mut probabilities, mut counts) = ([0.0; 5], [0.0; 5]);
        for row in &logits {
            let total: f64 = row.iter().map(|l| f64::from(*l).exp()).sum();
            z += total.ln().powi(2) / rows as f64 / 2.0;
            let mut order: Vec<usize> = (0..5).collect();
            order.sort_by(|&a, &b| row[b].total_cmp(&row[a]));
            order[..2].iter().for_each(|&e| counts[e] += 1.0);
            (0..5).for_each(|e| probabilities[e] += f64::from(row[e]).exp() / total / rows as f64);
        }
        assert_eq!(routing.counts.iter().map(|&count| count as f64).collect::<Vec<_>>(), counts);
        let f = |e: usize| counts[e] / (2 * rows) as f64;
        balance += 5.0 * (0..5).map(|e| f(e) * probabilities[e]).sum::<f64>() / 2.0;
        busiest = (0..5).map(f).fold(busiest, f64::max);
    }
    let close =
        |got: f64, expected: f64| assert!((got - expected).abs() < 1e-5 * expected.abs().max(1.0), "{got}, {expected}");
    close(metric(&loss, "load_balance_loss"), balance);
    close(metric(&loss, "router_z_loss"), z);
    close(metric(&loss, "busiest_expert_share"), busiest);
    let plain = step(&config, &parameters, &batch(true), RouterWeights::default(), 1.0).loss;
    close(metric(&loss, "loss"), metric(&plain, "loss") + 0.5 * balance + 0.25 * z);
    close(f64::from(loss.loss.to_scalar::<f32>().unwrap()), metric(&loss, "loss"));
    // Padding changes nothing.
    let without = step(&config, &parameters, &batch(false), routers, 1.0).loss;
    for name in ["loss", "load_balance_loss", "router_z_loss", "busiest_expert_share"] {
        close(metric(&loss, name), metric(&without, name));
    }
    // Without experts there is nothing to tell.
    let dense = super::config(&json!({}));
    let dense = step(&dense, &super::parameters(&dense), &batch(false), routers, 1.0).loss;
    assert!(dense.sums.metrics(&WEIGHTS, false).iter().all(|(name, _)| !name.contains("router")));
}

#[test]
fn micro_batches_add_up() {
    let config = config(&fields(3, 1, false, 10));
    let parameters = parameters(&config);
    let z_only = RouterWeights { load_balance: 0.0, z: 1.0 };
    let whole = step(&config, &parameters, &batch(false), z_only, 1.0).loss;
    let batch = batch(false);
    let mut first = step(&config, &parameters, &batch[..1], z_only, 0.6).loss;
    let second = step(&config, &parameters, &batch[1..], z_only, 0.4).loss;
    let plain: Vec<f64> = [(0..2, 1.0), (0..1, 0.6), (1..2, 0.4)]
        .map(|(part, share)| {
            metric(&step(&config, &parameters, &batch[part], RouterWeights::default(), share).loss, "loss")
        })
        .into();
    let z = |total: f64, main: f64| total - main;
    let parts = z(metric(&first, "loss"), plain[1]) + z(metric(&second, "loss"), plain[2]);
    let expected = z(metric(&whole, "loss"), plain[0]);
    assert!((parts - expected).abs() < 1e-4 * expected, "{parts} against {expected}");
    first.sums.add(&second.sums);
    for name in ["router_z_loss", "busiest_expert_share"] {
        let (sum, whole) = (metric(&first, name), metric(&whole, name));
        assert!((sum - whole).abs() < 1e-5 * whole, "{name}: {sum} against {whole}");
    }
}

#[test]
fn every_parameter_has_a_gradient_and_idle_experts_one_of_zeros() {
    let config = config(&fields(12, 1, false, 10));
    let parameters = parameters(&config);
    let batch = batch(true);
    // One block alone leaves many experts without a row.
    let one_block = [(batch[0].0.clone(), vec![Some(3), None])];
    let Step { loss, routing } = step(&config, &parameters, &one_block, RouterWeights::default(), 1.0);
    let store = loss.loss.backward().unwrap();
    let idle: BTreeSet<String> = routing.iter().flat_map(Routing::idle_parameters).collect();
    let without_rows: usize = routing.iter().flat_map(|r| &r.counts).filter(|count| **count == 0).count();
    assert!(without_rows >= 2 * (12 - BLOCK), "four rows reach at most four experts a layer");
    assert_eq!(idle.len(), 3 * without_rows);
    let error = Gradients::default().add(&parameters, &store).unwrap_err().to_string();
    assert!(error.contains(".mlp.experts.") && error.contains("no gradient"), "{error}");
    let mut gradients = Gradients::default();
    gradients.add_with_idle(&parameters, &store, &idle).unwrap();
    for (name, _) in parameters.iter() {
        let largest = flat(gradients.get(name).unwrap()).iter().fold(0f32, |m, g| m.max(g.abs()));
        assert_eq!(largest > 0.0, !idle.contains(name), "{name}: {largest}");
    }
    // Nothing but experts may be left out, and a micro-batch in which an expert has rows adds to it.
    let some: BTreeSet<String> = idle.iter().skip(1).cloned().collect();
    assert!(Gradients::default().add_with_idle(&parameters, &store, &some).is_err());
    let Step { loss, routing } = step(&config, &parameters, &batch, RouterWeights::default(), 1.0);
    let more: BTreeSet<String> = routing.iter().flat_map(Routing::idle_parameters).collect();
    assert!(more.len() < idle.len());
    let store = loss.loss.backward().unwrap();
    gradients.add_with_idle(&parameters, &store, &more).unwrap();
    let name = idle.difference(&more).next().unwrap();
    let grad = store.get(parameters.get(name).unwrap()).unwrap();
    assert_eq!(flat(gradients.get(name).unwrap()), flat(grad));
    // And the other way round.
    let mut reversed = Gradients::default();
    reversed.add_with_idle(&parameters, &store, &more).unwrap();
    let empty = step(&config, &parameters, &one_block, RouterWeights::default(), 1.0).loss.loss.backward().unwrap();
    reversed.add_with_idle(&parameters, &empty, &idle).unwrap();
    assert_eq!(flat(reversed.get(name).unwrap()), flat(grad));
}

#[test]
fn a_saved_drafter_drafts_as_it_was_trained() {
    let config = config(&fields(5, 2, true, 10));
    let parameters = parameters(&config);
    let shapes: BTreeMap<String, Vec<usize>> =
        parameters.iter().map(|(name, var)| (name.to_owned(), var.dims().to_vec())).collect();
    assert_eq!(shapes, trainable_shapes(&config));
    for (name, shape) in [
        ("layers.1.mlp.gate.weight", [5, HIDDEN]),
        ("layers.0.mlp.experts.4.up_proj.weight", [6, HIDDEN]),
        ("layers.0.mlp.experts.0.down_proj.weight", [HIDDEN, 6]),
        ("layers.1.mlp.shared_expert.gate_proj.weight", [10, HIDDEN]),
    ] {
        assert_eq!(shapes[name], shape, "{name}");
    }
    assert!(!shapes.contains_key("layers.0.mlp.up_proj.weight"));
    let features = random(2, 11, 2 * HIDDEN);
    let tokens = [3; 11];
    let sequence = TrainSequence { tokens: &tokens, anchors: vec![Some(10)] };
    let trained = trainable(&config, &parameters).train_hidden(&[sequence], &features).unwrap();
    let drafter = frozen(&config, &parameters, Precision::F32);
    let mut context = drafter.new_context(1, 20).unwrap();
    drafter.extend_context(&mut context, &features.narrow(0, 0, 10).unwrap(), &[(0, 10)]).unwrap();
    assert_close("block", &drafter.block_hidden(&context, &[(0, 3)]).unwrap(), &trained, 2e-4);
}

#[test]
fn a_start_from_the_target_is_nearly_its_layers() {
    let dense = config(&json!({}));
    let layer_of_target =
        |name: &str| format!("model.{}", name.replace("layers.1.", "layers.3.").replace("layers.0.", "layers.2."));
    let source = initialise::random(&dense, 11).unwrap();
    let mut tensors: Vec<(String, Tensor)> = source
        .iter()
        .filter(|(name, _)| name.starts_with("layers."))
        .map(|(name, var)| (layer_of_target(name), (var.as_tensor() * 4.0).unwrap()))
        .collect();
    tensors.push(("model.norm.weight".into(), Tensor::ones(HIDDEN, DType::F32, &CPU).unwrap()));
    let folder = TempDir::new().unwrap();
    checkpoint::save(folder.path().join("t"), &json!({}), &tensors).unwrap();
    let target = Weights::from_folder(folder.path().join("t"), DType::F32, &CPU).unwrap();
    let tokens = [4; 14];
    let hidden = |config: &DraftConfig| {
        let mut parameters = initialise::random(config, 5).unwrap();
        initialise::from_target_layers(&mut parameters, config, &target).unwrap();
        let sequence = TrainSequence { tokens: &tokens, anchors: vec![Some(5), Some(9)] };
        let drafter = trainable(config, &parameters);
        (drafter.train_hidden(&[sequence], &random(2, 14, 2 * HIDDEN)).unwrap(), parameters)
    };
    let distance = |a: &Tensor, b: &Tensor| -> f32 {
        let size = |v: &[f32]| v.iter().map(|v| v * v).sum::<f32>();
        let difference: Vec<f32> = flat(a).iter().zip(flat(b)).map(|(a, b)| a - b).collect();
        (size(&difference) / size(&flat(b))).sqrt()
    };
    let (expected, dense_parameters) = hidden(&dense);
    let (start, parameters) = hidden(&config(&fields(4, 2, true, 24)));
    assert!(distance(&start, &expected) < 1e-3, "{}", distance(&start, &expected));
    assert!(distance(&start, &expected) > 0.0, "experts take part");
    let value = |parameters: &Parameters, name: &str| flat(parameters.get(name).unwrap());
    let pair = ["layers.1.mlp.shared_expert.up_proj.weight", "layers.1.mlp.up_proj.weight"];
    assert_eq!(value(&parameters, pair[0]), value(&dense_parameters, pair[1]));
    // A shared expert of another width cannot start so; attention still does.
    let (other, parameters) = hidden(&config(&fields(4, 2, true, 10)));
    assert!(distance(&other, &expected) > 0.05, "{}", distance(&other, &expected));
    let name = "layers.0.self_attn.k_proj.weight";
    assert_eq!(value(&parameters, name), value(&dense_parameters, name));
}

#[test]
fn configurations_come_back_and_bad_ones_are_refused() {
    let whole = config(&fields(5, 2, true, 10));
    let path = Path::new("config.json");
    let json = whole.to_json();
    assert_eq!(DraftConfig::from_json(path, &json).unwrap(), whole);
    assert_eq!(whole.moe.as_ref().unwrap().to_string(), "5 experts of width 6, 2 per token, and a shared one of 10");
    assert_eq!(config(&json!({"num_experts": 0})).moe, None);
    assert!(config(&json!({})).to_json().get("num_experts").is_none());
    for (name, value, expected) in [
        ("num_experts_per_tok", json!(6), "1 to num_experts 5"),
        ("num_experts_per_tok", json!(null), "num_experts_per_tok"),
        ("moe_intermediate_size", json!(0), "moe_intermediate_size"),
        ("norm_topk_prob", json!(null), "norm_topk_prob"),
        ("shared_expert_intermediate_size", json!(-1), "shared_expert_intermediate_size"),
        ("decoder_sparse_step", json!(2), "experts in every layer"),
        ("mlp_only_layers", json!([1]), "experts in every layer"),
        ("mlp_bias", json!(true), "false with `num_experts`"),
    ] {
        let mut json = json.clone();
        json[name] = value;
        let error = DraftConfig::from_json(path, &json).unwrap_err().to_string();
        assert!(error.contains(expected), "{name}: {error}");
    }
    // A tensor that is missing is named.
    let parameters = parameters(&whole);
    let (folder, _) = saved(&whole, &parameters);
    let weights = Weights::from_folder(folder.path().join("c"), DType::F32, &CPU).unwrap();
    let more = config(&fields(6, 2, true, 10));
    let error =
        deepspec_models::draft::DSpark::new(more, embedding(), ParameterSource::Frozen(&weights, Precision::F32));
    let error = error.unwrap_err().to_string();
    assert!(error.contains("layers.0.mlp.gate.weight") && error.contains("[6, 16]"), "{error}");
}
