//! Eagle3 against values of the Python reference: every step's rows and logits, losses, metrics, every gradient; and what its
//! loss does to the ends of a sequence.
//!
//! Sizes and hyperparameters come from the files. `DEEPSPEC_GOLDEN` names another folder of the same layout.
#![expect(clippy::unwrap_used, reason = "tests fail as tests do")]

mod reference;

use std::collections::HashMap;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor, Var};
use deepspec_kernels::linear::{Linear, Packed, Precision};
use deepspec_models::config::{DrafterConfig, Eagle3Config};
use deepspec_models::draft::eagle3::StepRows;
use deepspec_models::draft::{DraftVocabulary, Eagle3, ParameterSource, Parameters};
use deepspec_models::loss::dspark::LossHead;
use deepspec_models::loss::eagle3::{Eagle3Loss, eagle3_loss};
use deepspec_models::optimizer::Gradients;
use deepspec_models::weights::Weights;
use serde_json::Value;

use reference::{close, floats, golden, ints, json, relative, tensors};

/// The golden checkpoint as variables, and its batch without padding.
struct Set {
    drafter: Eagle3,
    parameters: Parameters,
    head: LossHead,
    lm_head: Tensor,
    data: HashMap<String, Tensor>,
    summary: Value,
    tokens: Vec<Vec<u32>>,
    masks: Vec<Vec<u8>>,
    /// B·T
    positions: usize,
}

impl Set {
    fn load() -> Self {
        Self::with(|config| config)
    }

    fn with(change: impl FnOnce(Eagle3Config) -> Eagle3Config) -> Self {
        let DrafterConfig::Eagle3(config) = DrafterConfig::from_folder(golden("eagle3")).unwrap() else {
            panic!("not an Eagle3 drafter")
        };
        let config = change(config);
        let weights = Weights::from_folder(golden("eagle3"), DType::F32, &Device::Cpu).unwrap();
        let summary: Value = json("eagle3/train.json");
        let mut parameters = Parameters::default();
        let shapes = DrafterConfig::Eagle3(config.clone()).trainable_shapes();
        let mut trained: Vec<&str> =
            summary["params_trainable"].as_array().unwrap().iter().map(|name| name.as_str().unwrap()).collect();
        trained.sort_unstable();
        assert!(shapes.keys().map(String::as_str).eq(trained), "trainable tensors {:?}", shapes.keys());
        for (name, shape) in shapes {
            parameters.insert(&name, &weights.get(&name, &shape).unwrap()).unwrap();
        }
        let table = [config.body.vocab_size, config.body.hidden_size];
        let embed = weights.get("embed_tokens.weight", &table).unwrap();
        let lm_head = weights.get("lm_head.weight", &table).unwrap();
        weights.finish().unwrap();
        let drafter = Eagle3::new(config, embed, ParameterSource::Trainable(&parameters)).unwrap();
        let data = tensors("eagle3/train.safetensors");
        let (batch, length) = data["in.input_ids"].dims2().unwrap();
        let mask = ints(&data["in.attention_mask"]);
        let lengths: Vec<usize> = mask.chunks(length).map(|row| row.iter().sum::<i64>() as usize).collect();
        let cut = |key: &str, i: usize| ints(&data[key])[i * length..i * length + lengths[i]].to_vec();
        let tokens = (0..batch).map(|i| cut("in.input_ids", i).iter().map(|&t| t as u32).collect()).collect();
        let masks = (0..batch).map(|i| cut("in.loss_mask", i).iter().map(|&t| t as u8).collect()).collect();
        let head = head(&lm_head, None);
        Self { drafter, parameters, head, lm_head, data, summary, tokens, masks, positions: batch * length }
    }

    /// Rows of a padded `[batch, T, ..]` tensor without the padding.
    fn ragged(&self, key: &str) -> Tensor {
        let rows: Vec<Tensor> = (0..self.tokens.len())
            .map(|i| self.data[key].get(i).unwrap().narrow(0, 0, self.tokens[i].len()).unwrap())
            .collect();
        Tensor::cat(&rows, 0).unwrap()
    }

    /// Output rows of every position at every step, and the loss.
    fn loss(&self, features: &Tensor) -> (Vec<Tensor>, Eagle3Loss) {
        self.loss_over(features, &StepRows::all(features.dims()[0], self.drafter.config().ttt_length))
    }

    fn loss_over(&self, features: &Tensor, rows: &StepRows) -> (Vec<Tensor>, Eagle3Loss) {
        let tokens: Vec<&[u32]> = self.tokens.iter().map(Vec::as_slice).collect();
        let steps = self.drafter.train_hidden(&tokens, features, rows).unwrap();
        let target = self.ragged("in.target_last_hidden_states");
        let masks = self.masks();
        let loss = eagle3_loss(&self.drafter, &self.head, &masks, rows, &steps, &target, self.positions).unwrap();
        (steps, loss)
    }

    fn masks(&self) -> Vec<&[u8]> {
        self.masks.iter().map(Vec::as_slice).collect()
    }
}

fn head(lm_head: &Tensor, vocabulary: Option<DraftVocabulary>) -> LossHead {
    let packed = Packed::new(&[&floats(lm_head)], lm_head.dims()[1], None, Precision::F32).unwrap();
    LossHead::new(lm_head, Arc::new(packed), vocabulary).unwrap()
}

#[test]
fn golden_eagle3_forward_losses_metrics_and_gradients() {
    let set = Set::load();
    let (steps, loss) = set.loss(&set.ragged("in.target_hidden_states"));
    assert_eq!(steps.len(), set.summary["hyper"]["ttt_length"].as_u64().unwrap() as usize);
    for (s, hidden) in steps.iter().enumerate() {
        let name = |part: &str| format!("step{s}.{part}");
        let logits = set.drafter.head_rows(hidden).unwrap().detach();
        let logits = Linear::trainable(set.lm_head.clone(), None).forward(&logits).unwrap();
        for (part, got) in [("hidden_states", &hidden.detach()), ("draft_logits", &logits)] {
            let expected = set.ragged(&name(part));
            let mut first = 0;
            for tokens in &set.tokens {
                // The rows behind these have no token of the sequence.
                let rows = |t: &Tensor| floats(&t.narrow(0, first, tokens.len() - s).unwrap());
                close(&name(part), &rows(got), &rows(&expected), 1e-4, 1e-4);
                first += tokens.len();
            }
        }
        let valid: f64 = floats(&set.data[&name("position_mask")]).iter().map(|v| f64::from(*v)).sum();
        assert_eq!(loss.sums.steps[s].valid, valid, "{}", name("position_mask"));
        let expected = f64::from(floats(&set.data["out.step_losses"])[s]);
        relative(&name("loss"), loss.sums.steps[s].loss, expected, 1e-4);
    }
    relative("loss", loss.sums.loss, set.summary["loss"].as_f64().unwrap(), 1e-4);
    let got: HashMap<String, f64> = loss.sums.metrics(1).into_iter().collect();
    for (name, value) in set.summary["metrics"].as_object().unwrap() {
        let name = name.strip_prefix("train/").unwrap();
        let found = got.get(name).unwrap_or_else(|| panic!("no metric {name}"));
        relative(name, *found, value.as_f64().unwrap(), 1e-4);
    }
    assert_eq!(got["covered"], 1.0);

    let mut gradients = Gradients::default();
    gradients.add(&set.parameters, &loss.loss.backward().unwrap()).unwrap();
    for (name, _) in set.parameters.iter() {
        let got = floats(gradients.get(name).unwrap());
        let expected = floats(&set.data[&format!("grad.{name}")]);
        let largest = expected.iter().fold(0f32, |m, v| m.max(v.abs()));
        assert!(got.iter().any(|g| *g != 0.0), "gradient of {name} is zero");
        close(&format!("grad.{name}"), &got, &expected, 5e-4 * largest + 1e-6, 0.0);
    }
    relative("gradient norm", gradients.norm().unwrap(), set.summary["grad_norm_all"].as_f64().unwrap(), 5e-4);
}

/// The last position of the prompt is trained, what lies behind the last position that can be is not.
#[test]
fn the_ends_of_the_supervised_part_have_the_gradients_they_should() {
    let set = Set::load();
    let features = Var::from_tensor(&set.ragged("in.target_hidden_states")).unwrap();
    let rows = StepRows::supervised(&set.masks(), set.drafter.config().ttt_length);
    let (_, loss) = set.loss_over(features.as_tensor(), &rows);
    let grads = loss.loss.backward().unwrap();
    let grad = grads.get(&features).unwrap();
    let (_, width) = grad.dims2().unwrap();
    let grad = floats(grad);
    let is_zero = |row: usize| grad[row * width..(row + 1) * width].iter().all(|g| *g == 0.0);
    let mut first = 0;
    for (tokens, mask) in set.tokens.iter().zip(&set.masks) {
        let prompt = mask.iter().position(|m| *m == 1).unwrap();
        assert!(prompt > 0 && !is_zero(first + prompt - 1), "position {} before the answer", prompt - 1);
        assert!(is_zero(first + tokens.len() - 1), "last position of {}", tokens.len());
        first += tokens.len();
    }
}

#[test]
fn micro_batches_of_the_rows_that_count_add_up_to_the_whole() {
    let set = Set::load();
    let features = set.ragged("in.target_hidden_states");
    let target = set.ragged("in.target_last_hidden_states");
    let (_, whole) = set.loss(&features);
    let mut gradients = Gradients::default();
    let mut sums = deepspec_models::loss::eagle3::Eagle3Sums::default();
    let mut first = 0;
    for (tokens, mask) in set.tokens.iter().zip(&set.masks) {
        let part = |t: &Tensor| t.narrow(0, first, tokens.len()).unwrap();
        let rows = StepRows::supervised(&[mask], set.drafter.config().ttt_length);
        let steps = set.drafter.train_hidden(&[tokens], &part(&features), &rows).unwrap();
        let loss = eagle3_loss(&set.drafter, &set.head, &[mask], &rows, &steps, &part(&target), set.positions).unwrap();
        gradients.add(&set.parameters, &loss.loss.backward().unwrap()).unwrap();
        sums.add(&loss.sums);
        first += tokens.len();
    }
    relative("loss", sums.loss, whole.sums.loss, 1e-6);
    relative("tau", sums.tau(), whole.sums.tau(), 1e-6);
    let grads = whole.loss.backward().unwrap();
    for (name, var) in set.parameters.iter() {
        let expected = floats(grads.get(var).unwrap());
        let largest = expected.iter().fold(0f32, |m, v| m.max(v.abs()));
        close(name, &floats(gradients.get(name).unwrap()), &expected, 1e-5 * largest + 1e-8, 0.0);
    }
}

/// A draft vocabulary against the definition over whole distributions, and a finite difference through the whole drafter.
#[test]
fn a_draft_vocabulary_renormalises_the_target_and_leaves_out_what_it_lacks() {
    let vocab = Set::load().lm_head.dims()[0];
    let counts: Vec<u64> = (0..vocab).map(|v| u64::from(v % 3 != 0)).collect();
    let map = DraftVocabulary::most_frequent(&counts, &[], vocab * 5 / 8).unwrap();
    let mut set = Set::with(|config| Eagle3Config { draft_vocab_size: Some(vocab * 5 / 8), ..config });
    set.head = head(&set.lm_head, Some(map.clone()));
    let features = set.ragged("in.target_hidden_states");
    let (steps, loss) = set.loss(&features);
    let rows_of = |x: &Tensor| -> Vec<Vec<f64>> {
        let logits = Linear::trainable(set.lm_head.clone(), None).forward(x).unwrap();
        logits.to_vec2::<f32>().unwrap().into_iter().map(|row| row.into_iter().map(f64::from).collect()).collect()
    };
    let target = rows_of(&set.ragged("in.target_last_hidden_states"));
    let softmax = |row: &[f64]| -> Vec<f64> {
        let total: f64 = row.iter().map(|v| v.exp()).sum();
        row.iter().map(|v| v.exp() / total).collect()
    };
    let chosen = |row: &[f64]| -> Vec<f64> { map.tokens().iter().map(|&v| row[v as usize]).collect() };
    let (mut lacking, mut whole) = (0, 0.0);
    for (s, hidden) in steps.iter().enumerate() {
        let draft = rows_of(&set.drafter.head_rows(hidden).unwrap().detach());
        let (mut first, mut expected, mut accepted) = (0, 0.0, 0.0);
        for mask in &set.masks {
            for i in (0..mask.len().saturating_sub(1 + s)).filter(|i| mask[i + s] == 1) {
                let (u, t) = (&draft[first + i], &target[first + i + 1 + s]);
                let (p, q) = (softmax(&chosen(u)), softmax(&chosen(t)));
                let best = (0..t.len()).max_by(|&a, &b| t[a].total_cmp(&t[b])).unwrap();
                if map.draft_token(best as u32).is_some() {
                    expected -= p.iter().zip(&q).map(|(p, q)| q * p.ln()).sum::<f64>();
                } else {
                    lacking += 1;
                }
                let exact = softmax(t);
                accepted += p.iter().zip(map.tokens().iter()).map(|(p, &v)| p.min(exact[v as usize])).sum::<f64>();
            }
            first += mask.len();
        }
        let step = &loss.sums.steps[s];
        relative("soft cross-entropy", step.loss, expected / set.positions as f64, 1e-4);
        relative("acceptance", step.accepted, accepted, 1e-4);
        whole += set.drafter.config().step_loss_decay.powi(s as i32) * step.loss;
    }
    relative("loss", loss.sums.loss, whole, 1e-5);
    let covered: f64 = loss.sums.steps.iter().map(|step| step.covered).sum();
    assert!(lacking > 0 && covered == loss.sums.rows() - f64::from(lacking));

    let grads = loss.loss.backward().unwrap();
    for (name, at) in [("fc.weight", 77), ("layers.0.self_attn.k_proj.weight", 300), ("norm.weight", 5)] {
        let var = set.parameters.get(name).unwrap();
        let at = at % var.elem_count();
        let got = floats(grads.get(var).unwrap())[at];
        let base = floats(var.as_tensor());
        let moved = |h: f32| {
            let mut values = base.clone();
            values[at] += h;
            var.set(&Tensor::from_vec(values, var.shape(), &Device::Cpu).unwrap()).unwrap();
            // The variable's tensor is shared with the drafter.
            set.loss(&features).1.sums.loss
        };
        let difference = (moved(1e-2) - moved(-1e-2)) / 2e-2;
        moved(0.0);
        assert!((f64::from(got) - difference).abs() < 2e-2 * difference.abs() + 2e-4, "{name}: {got}, {difference}");
    }
}
