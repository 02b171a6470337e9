//! Every Markov head in both block layouts, on a tiny random model: gradients, the rows that the loss supervises, drafting
//! against the training forward, the start from a bigram.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod tiny;

use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use deepspec_models::checkpoint;
use deepspec_models::config::DraftConfig;
use deepspec_models::draft::dspark::TrainSequence;
use deepspec_models::draft::{DSpark, ParameterSource, Parameters, initialise, trainable_shapes};
use deepspec_models::linear::{Linear, Packed, Precision};
use deepspec_models::loss::dspark::{DSparkLoss, LossHead, LossWeights, Supervision, dspark_loss};
use deepspec_models::optimizer::Gradients;
use deepspec_models::speculate::{DSparkProposer, DraftRequest, Proposal, Proposer, SamplingParams, argmax_first};
use deepspec_models::weights::Weights;
use serde_json::{Value, json};
use tempfile::TempDir;

use tiny::{flat, random};

const CPU: Device = Device::Cpu;
const VOCAB: usize = 19;
const HIDDEN: usize = 16;
const RANK: usize = 5;
const MASK: u32 = 6;

/// One form of drafter.
#[derive(Debug, Clone, Copy)]
struct Form {
    head: Option<&'static str>,
    confidence_with_markov: Option<bool>,
    sample_from_anchor: bool,
}

/// Heads × confidence without and with Markov features, or none × block layouts.
fn forms() -> Vec<Form> {
    let mut forms = Vec::new();
    for head in [None, Some("vanilla"), Some("gated"), Some("rnn")] {
        for confidence_with_markov in [None, Some(false), Some(true)] {
            for sample_from_anchor in [true, false] {
                if head.is_some() || confidence_with_markov != Some(true) {
                    forms.push(Form { head, confidence_with_markov, sample_from_anchor });
                }
            }
        }
    }
    forms
}

impl Form {
    /// Four proposals in both layouts.
    fn config(self) -> DraftConfig {
        let json = json!({
            "architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "hidden_size": HIDDEN, "intermediate_size": 24,
            "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
            "vocab_size": VOCAB, "max_position_embeddings": 64, "rope_theta": 10000.0, "eos_token_id": 2,
            "num_target_layers": 4, "block_size": if self.sample_from_anchor { 4 } else { 5 },
            "sample_from_anchor": self.sample_from_anchor, "mask_token_id": MASK, "target_layer_ids": [0, 2],
            "markov_rank": if self.head.is_some() { RANK } else { 0 }, "markov_head_type": self.head,
            "enable_confidence_head": self.confidence_with_markov.is_some(),
            "confidence_head_with_markov": self.confidence_with_markov.unwrap_or(false),
        });
        let config = DraftConfig::from_json(Path::new("config.json"), &json).unwrap();
        assert_eq!(config.proposals(), 4);
        config
    }

    /// Weights large enough that every part matters.
    fn parameters(self) -> Parameters {
        let mut parameters = Parameters::default();
        for (number, (name, shape)) in trainable_shapes(&self.config()).into_iter().enumerate() {
            let values = random(number as u64, 1, shape.iter().product()).reshape(shape).unwrap();
            let value = match &name {
                norm if norm.ends_with("norm.weight") => (values * 0.1).unwrap() + 1.0,
                markov if markov.contains("markov_w") => values + 0.0,
                _ => values * 0.3,
            };
            parameters.insert(name, &value.unwrap()).unwrap();
        }
        parameters
    }
}

/// Tokens, loss mask and anchors of a sequence.
type Sequence = (Vec<u32>, Vec<u8>, Vec<Option<usize>>);

/// Two sequences with a hole in their masks, a block that runs past the end, and one that pads.
fn batch() -> Vec<Sequence> {
    [(11_u32, 17), (5, 12)]
        .into_iter()
        .map(|(factor, len)| {
            let tokens = (0..len).map(|i| (i * factor + 2) % VOCAB as u32).collect();
            let mask = (0..len).map(|i| u8::from(i > 2 && i != 7)).collect();
            (tokens, mask, vec![Some(3), Some(4), Some(9), None])
        })
        .collect()
}

struct Run {
    parameters: Parameters,
    drafter: DSpark,
    hidden: Tensor,
    target: Tensor,
    supervision: Supervision,
    loss: DSparkLoss,
}

fn lm_head() -> Tensor {
    (random(8, VOCAB, HIDDEN) * 0.4).unwrap()
}

fn run(config: DraftConfig, parameters: Parameters, weights: &LossWeights) -> Run {
    let batch = batch();
    let sequences: Vec<TrainSequence<'_>> =
        batch.iter().map(|(tokens, _, anchors)| TrainSequence { tokens, anchors: anchors.clone() }).collect();
    let masks: Vec<&[u8]> = batch.iter().map(|(_, mask, _)| mask.as_slice()).collect();
    let rows = batch.iter().map(|(tokens, ..)| tokens.len()).sum();
    let (features, target) = (random(20, rows, 2 * HIDDEN), random(21, rows, HIDDEN));
    let supervision = Supervision::new(&sequences, &masks, config.proposals(), MASK, Some(4.0), None).unwrap();
    let packed = Packed::new(&[&flat(&lm_head())], HIDDEN, None, Precision::F32).unwrap();
    let head = LossHead::new(&lm_head(), Arc::new(packed), None).unwrap();
    let drafter = DSpark::new(config, random(9, VOCAB, HIDDEN), ParameterSource::Trainable(&parameters)).unwrap();
    let hidden = drafter.train_hidden(&sequences, &features).unwrap();
    let sums = supervision.weights;
    let loss = dspark_loss(&drafter, &head, weights, &supervision, &hidden, &target, sums, true).unwrap();
    Run { parameters, drafter, hidden, target, supervision, loss }
}

const WEIGHTS: LossWeights =
    LossWeights { ce: 0.4, tv: 0.9, kl: 0.3, kl_temperature: 1.0, confidence: 1.0, decay_gamma: Some(4.0) };

fn assert_all_gradients(run: &Run, what: &str) {
    let grads = run.loss.loss.backward().unwrap();
    let mut all = Gradients::default();
    all.add(&run.parameters, &grads).unwrap();
    for (name, _) in run.parameters.iter() {
        let grad = flat(all.get(name).unwrap());
        assert!(grad.iter().all(|g| g.is_finite()), "{what}: gradient of {name} is not finite");
        assert!(grad.iter().any(|g| *g != 0.0), "{what}: gradient of {name} is zero");
    }
}

/// Permanent: nothing that is to be trained goes without a gradient, whatever the drafter and its start.
#[test]
fn every_trainable_tensor_of_every_form_has_a_gradient() {
    for form in forms() {
        let what = format!("{form:?}");
        let config = form.config();
        assert_all_gradients(&run(config.clone(), form.parameters(), &WEIGHTS), &what);
        assert_all_gradients(&run(config.clone(), initialise::random(&config, 1).unwrap(), &WEIGHTS), &what);
        if form.head.is_some() {
            let mut started = initialise::random(&config, 1).unwrap();
            let (w1, w2) = (random(31, VOCAB, RANK), random(32, VOCAB, RANK));
            initialise::markov_from_bigram(&mut started, &config, &w1, &w2).unwrap();
            assert_all_gradients(&run(config, started, &WEIGHTS), &format!("{what} from a bigram"));
        }
    }
}

/// Through contiguous normalisation, softmax and rotary embedding, and through every head.
#[test]
fn gradients_equal_finite_differences() {
    for form in forms().into_iter().filter(|form| form.confidence_with_markov == Some(form.head.is_some())) {
        // The confidence's label is no part of the gradient: its term can be checked for its own head alone. Total variation
        // has kinks, in which differences say nothing.
        let backbone = LossWeights { tv: 0.0, confidence: 0.0, ..WEIGHTS };
        let base = run(form.config(), form.parameters(), &backbone);
        let grads = base.loss.loss.backward().unwrap();
        let with_confidence = run(form.config(), form.parameters(), &WEIGHTS);
        let confidence_grads = with_confidence.loss.loss.backward().unwrap();
        for (name, _) in base.parameters.iter() {
            let is_confidence = name.starts_with("confidence_head");
            let (run_of, grads, weights) = if is_confidence {
                (&with_confidence, &confidence_grads, &WEIGHTS)
            } else {
                (&base, &grads, &backbone)
            };
            let var = run_of.parameters.get(name).unwrap();
            let grad = flat(grads.get(var).unwrap());
            let scale = grad.iter().fold(0f32, |m, g| m.max(g.abs()));
            assert!(scale > 1e-4, "{form:?} {name}: {scale}");
            for probe in 0..3 {
                let at = probe * 7919 % grad.len();
                let loss_at = |offset: f32| {
                    let mut moved = flat(var);
                    moved[at] += offset;
                    let mut parameters = form.parameters();
                    parameters.insert(name, &Tensor::from_vec(moved, var.shape(), &CPU).unwrap()).unwrap();
                    run(form.config(), parameters, weights).loss.sums.loss
                };
                let expected = (loss_at(4e-3) - loss_at(-4e-3)) / 8e-3;
                let error = (f64::from(grad[at]) - expected).abs();
                let allowed = 4e-2 * f64::from(scale) + 1e-4;
                assert!(error < allowed, "{form:?} {name}[{at}]: {} against {expected}", grad[at]);
            }
        }
    }
}

/// Cross-entropy and total variation of a vanilla head by plain loops over positions: row j of a 1+N block predicts its own
/// position anchor + j, row j of an anchor-first block the one after it.
#[test]
fn the_loss_reads_the_rows_that_the_layout_says() {
    for sample_from_anchor in [true, false] {
        let form = Form { head: Some("vanilla"), confidence_with_markov: None, sample_from_anchor };
        let run = run(form.config(), form.parameters(), &WEIGHTS);
        let rows = |tensor: &Tensor| -> Vec<Vec<f32>> { tensor.to_vec2().unwrap() };
        let (hidden, target, head) = (rows(&run.hidden.detach()), rows(&run.target), rows(&lm_head()));
        let parameter = |name: &str| rows(run.parameters.get(&format!("markov_head.markov_{name}.weight")).unwrap());
        let (w1, w2) = (parameter("w1"), parameter("w2"));
        let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
        let softmax = |logits: Vec<f64>| -> Vec<f64> {
            let total: f64 = logits.iter().map(|u| u.exp()).sum();
            logits.iter().map(|u| u.exp() / total).collect()
        };
        let size = if sample_from_anchor { 4 } else { 5 };
        let (mut ce, mut tv, mut slots) = (0.0, 0.0, 0);
        let (mut first_context, mut first_row) = (0, 0);
        for (tokens, mask, anchors) in batch() {
            for anchor in anchors {
                let Some(anchor) = anchor else {
                    first_row += size;
                    continue;
                };
                for k in 0..4 {
                    let label = anchor + 1 + k;
                    if label >= tokens.len() || mask[label] == 0 {
                        break;
                    }
                    let row = if sample_from_anchor { label - anchor - 1 } else { label - anchor };
                    let latent = &w1[tokens[label - 1] as usize];
                    let logit = |v: usize| dot(&head[v], &hidden[first_row + row]) + dot(&w2[v], latent);
                    let p_d = softmax((0..VOCAB).map(logit).collect());
                    let p_t = softmax(head.iter().map(|e| dot(e, &target[first_context + label - 1])).collect());
                    let weight = (-(k as f64) / 4.0).exp();
                    ce -= weight * p_d[tokens[label] as usize].ln();
                    tv += weight * p_d.iter().zip(&p_t).map(|(d, t)| (d - t).abs()).sum::<f64>();
                    slots += 1;
                }
                first_row += size;
            }
            first_context += tokens.len();
        }
        let sums = &run.loss.sums;
        assert_eq!(run.supervision.slots.len(), slots);
        assert!(
            (sums.ce - ce).abs() < 1e-4 * ce && (sums.tv - tv).abs() < 1e-4 * tv,
            "{} {ce} {} {tv}",
            sums.ce,
            sums.tv
        );
        assert_eq!((sums.slots.len(), run.drafter.config().block_size), (4, size));
    }
}

/// The form's drafter as it is loaded for inference.
fn frozen(form: Form, folder: &Path) -> DSpark {
    let parameters = form.parameters();
    let mut tensors: Vec<(String, Tensor)> =
        parameters.iter().map(|(name, var)| (name.to_owned(), var.as_tensor().clone())).collect();
    tensors.push(("embed_tokens.weight".into(), random(9, VOCAB, HIDDEN)));
    tensors.push(("lm_head.weight".into(), lm_head()));
    checkpoint::save(folder, &form.config().to_json(), &tensors).unwrap();
    let (json, weights): (Value, Weights) = checkpoint::load(folder, DType::F32, &CPU).unwrap();
    let config = DraftConfig::from_json(folder, &json).unwrap();
    assert_eq!(config, form.config());
    let embed = weights.get("embed_tokens.weight", &[VOCAB, HIDDEN]).unwrap();
    let head = weights.get("lm_head.weight", &[VOCAB, HIDDEN]).unwrap();
    let drafter = DSpark::new(config, embed, ParameterSource::Frozen(&weights, Precision::F32)).unwrap();
    weights.finish().unwrap();
    drafter.with_lm_head(Linear::frozen(&[&head], None, Precision::F32).unwrap())
}

fn features(prompt: &[u32]) -> Tensor {
    random(30 + prompt.len() as u64, prompt.len() + 8, 2 * HIDDEN)
}

fn propose(drafter: &DSpark, sampling: SamplingParams, prompts: &[&[u32]]) -> Vec<Proposal> {
    let target_head = Linear::frozen(&[&lm_head()], None, Precision::F32).unwrap();
    let mut proposer = DSparkProposer::new(drafter, &target_head, prompts.len(), 32).unwrap();
    assert_eq!(proposer.block_size(), 4);
    for (slot, prompt) in prompts.iter().enumerate() {
        let context = features(prompt).narrow(0, 0, prompt.len() - 1).unwrap();
        proposer.observe(&context, &[(slot, prompt.len() - 1)]).unwrap();
    }
    let request = |slot: usize| {
        let (tokens, most) = (prompts[slot], 4 - slot);
        DraftRequest { slot, tokens, most, stop_ids: &[], sampling: &sampling, adjustments: None, seed: 5, round: 0 }
    };
    let requests: Vec<DraftRequest<'_>> = (0..prompts.len()).map(request).collect();
    proposer.propose(&requests).unwrap()
}

/// What is drafted token by token is what the training forward gives when the drafted tokens are the text.
#[test]
fn drafting_equals_the_training_forward_on_the_drafted_text() {
    let folder = TempDir::new().unwrap();
    let (long, short): (&[u32], &[u32]) = (&[2, 4, 7, 8, 11, 3], &[1, 3]);
    for form in forms() {
        let drafter = frozen(form, &folder.path().join("c"));
        let parameters = form.parameters();
        let embed = random(9, VOCAB, HIDDEN);
        let trained = DSpark::new(form.config(), embed, ParameterSource::Trainable(&parameters)).unwrap();
        for sampling in [SamplingParams::greedy(), SamplingParams::default()] {
            let alone = propose(&drafter, sampling, &[long]).remove(0);
            let both = propose(&drafter, sampling, &[long, short]);
            assert_eq!(alone.tokens, both[0].tokens, "{form:?}: a proposal does not depend on its batch");
            assert_eq!(alone.confidence_logits, both[0].confidence_logits, "{form:?}");
            for (prompt, proposal) in [long, short].into_iter().zip(&both) {
                let text = [prompt, &proposal.tokens, &[0; 4]].concat();
                let anchor = prompt.len() - 1;
                let sequence = TrainSequence { tokens: &text, anchors: vec![Some(anchor)] };
                let context = features(prompt).narrow(0, 0, text.len()).unwrap();
                let hidden = trained.predicting_rows(&trained.train_hidden(&[sequence], &context).unwrap()).unwrap();
                let mut logits = hidden.matmul(&lm_head().t().unwrap()).unwrap();
                let embedding = trained.markov_head().map(|head| head.embedding(&text[anchor..anchor + 4]).unwrap());
                if let (Some(head), Some(embedding)) = (trained.markov_head(), &embedding) {
                    let latents = head.block_latents(embedding, &hidden, 4).unwrap();
                    logits = (logits + head.bias(&latents).unwrap()).unwrap();
                }
                for (k, row) in logits.to_vec2::<f32>().unwrap().iter().take(proposal.tokens.len()).enumerate() {
                    if sampling.is_greedy() {
                        assert_eq!(argmax_first(row).unwrap(), proposal.tokens[k], "{form:?}: token {k}");
                        continue;
                    }
                    let total: f32 = row.iter().map(|u| u.exp()).sum();
                    for (token, u) in row.iter().enumerate() {
                        let got = proposal.distributions[k].prob(token as u32);
                        assert!((got - u.exp() / total).abs() < 1e-5, "{form:?}: token {k}");
                    }
                }
                let Some(head) = trained.confidence_head() else { continue };
                let expected = flat(&head.logits(&hidden, embedding.as_ref()).unwrap());
                assert_eq!(proposal.confidence_logits.len(), proposal.tokens.len());
                for (got, expected) in proposal.confidence_logits.iter().zip(expected) {
                    assert!((got - expected).abs() < 1e-4, "{form:?}: confidence {got} against {expected}");
                }
            }
        }
    }
}

#[test]
fn a_head_that_starts_from_a_bigram_gives_it_exactly() {
    // One factor whose largest element an rnn head has to scale down, one it need not.
    for factor in [3.0, 0.1] {
        let (w1, w2) = ((random(31, VOCAB, RANK) * factor).unwrap(), random(32, VOCAB, RANK));
        let expected = w1.matmul(&w2.t().unwrap()).unwrap();
        for head in ["vanilla", "gated", "rnn"] {
            let form = Form { head: Some(head), confidence_with_markov: None, sample_from_anchor: true };
            let mut parameters = form.parameters();
            parameters
                .insert("markov_head.joint_proj.bias", &Tensor::zeros(3 * RANK, DType::F32, &CPU).unwrap())
                .unwrap();
            parameters.insert("markov_head.gate_proj.bias", &Tensor::zeros(RANK, DType::F32, &CPU).unwrap()).unwrap();
            initialise::markov_from_bigram(&mut parameters, &form.config(), &w1, &w2).unwrap();
            let embed = random(9, VOCAB, HIDDEN);
            let drafter = DSpark::new(form.config(), embed, ParameterSource::Trainable(&parameters)).unwrap();
            let markov = drafter.markov_head().unwrap();
            let every: Vec<u32> = (0..VOCAB as u32).collect();
            let hidden = random(40, VOCAB, HIDDEN);
            // Blocks of one length or another: the state must not matter yet.
            for slots in [1, VOCAB] {
                let latents = markov.block_latents(&markov.embedding(&every).unwrap(), &hidden, slots).unwrap();
                let got = flat(&markov.bias(&latents).unwrap().detach());
                for (got, expected) in got.iter().zip(flat(&expected)) {
                    assert!((got - expected).abs() < 1e-4 * (1.0 + expected.abs()), "{head}: {got}, {expected}");
                }
            }
        }
        let none = Form { head: None, confidence_with_markov: None, sample_from_anchor: true };
        assert!(initialise::markov_from_bigram(&mut none.parameters(), &none.config(), &w1, &w2).is_err());
    }
}

#[test]
fn rows_that_are_no_whole_blocks_are_refused() {
    let form = Form { head: Some("rnn"), confidence_with_markov: None, sample_from_anchor: false };
    let parameters = form.parameters();
    let drafter =
        DSpark::new(form.config(), random(9, VOCAB, HIDDEN), ParameterSource::Trainable(&parameters)).unwrap();
    assert!(drafter.predicting_rows(&random(1, 9, HIDDEN)).is_err());
    let markov = drafter.markov_head().unwrap();
    for slots in [0, 4] {
        let error = markov.block_latents(&random(1, 9, RANK), &random(1, 9, HIDDEN), slots).unwrap_err().to_string();
        assert!(error.contains(&format!("9 rows in blocks of {slots}")), "{error}");
    }
}
