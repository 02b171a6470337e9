//! A drafter with a draft vocabulary: its checkpoints, its loss and its proposals, on a tiny random model.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod tiny;

use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use deepspec_models::checkpoint;
use deepspec_models::config::DraftConfig;
use deepspec_models::draft::dspark::TrainSequence;
use deepspec_models::draft::{DSpark, DraftVocabulary, ParameterSource, Parameters, initialise};
use deepspec_models::error::Error;
use deepspec_models::linear::{Linear, Packed, Precision};
use deepspec_models::loss::dspark::{DSparkLoss, LossHead, LossWeights, Supervision, WeightSums, dspark_loss};
use deepspec_models::speculate::{DSparkProposer, Distribution, DraftRequest, Proposal, Proposer, SamplingParams};
use deepspec_models::weights::Weights;
use serde_json::json;
use tempfile::TempDir;

use tiny::{flat, random};

const CPU: Device = Device::Cpu;
const VOCAB: usize = 23;
const HIDDEN: usize = 16;
const RANK: usize = 4;
const TOKENS: [u32; 8] = [2, 3, 5, 8, 11, 13, 17, 21];

fn config(draft_vocab_size: Option<usize>) -> DraftConfig {
    let json = json!({
        "architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "hidden_size": HIDDEN, "intermediate_size": 24,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": VOCAB,
        "draft_vocab_size": draft_vocab_size, "max_position_embeddings": 64, "rope_theta": 10000.0, "eos_token_id": 2,
        "num_target_layers": 4, "block_size": 4, "mask_token_id": 6, "target_layer_ids": [0, 2], "markov_rank": RANK,
        "markov_head_type": "vanilla", "enable_confidence_head": true, "confidence_head_with_markov": true,
    });
    DraftConfig::from_json(Path::new("config.json"), &json).unwrap()
}

fn vocabulary() -> DraftVocabulary {
    let mut counts = vec![0; VOCAB];
    for token in TOKENS {
        counts[token as usize] = 1;
    }
    DraftVocabulary::most_frequent(&counts, &[2], TOKENS.len()).unwrap()
}

/// A drafter of the whole vocabulary with weights large enough to matter, and the same one restricted to some tokens.
struct Pair {
    lm_head: Tensor,
    embed: Tensor,
    full: Parameters,
    pruned: Parameters,
}

fn pair() -> Pair {
    let mut full = initialise::random(&config(None), 3).unwrap();
    for (name, rows, cols) in [("w1", VOCAB, RANK), ("w2", VOCAB, RANK)] {
        full.insert(format!("markov_head.markov_{name}.weight"), &random(rows as u64 + name.len() as u64, rows, cols))
            .unwrap();
    }
    let mut pruned = Parameters::default();
    for (name, var) in full.iter() {
        let value = var.as_tensor();
        let is_w2 = name.contains("markov_w2");
        let value = if is_w2 { vocabulary().rows_of(value).unwrap() } else { value.clone() };
        pruned.insert(name, &value).unwrap();
    }
    Pair { lm_head: random(8, VOCAB, HIDDEN), embed: random(9, VOCAB, HIDDEN), full, pruned }
}

type Named = Vec<(String, Tensor)>;

fn pruned_tensors(pair: &Pair) -> Named {
    let mut tensors: Named = pair.pruned.iter().map(|(name, var)| (name.to_owned(), var.as_tensor().clone())).collect();
    tensors.push(("embed_tokens.weight".into(), pair.embed.clone()));
    tensors.push(("lm_head.weight".into(), vocabulary().rows_of(&pair.lm_head).unwrap()));
    tensors.extend(vocabulary().tensors().unwrap());
    tensors
}

/// Writes a checkpoint and reads its draft vocabulary.
fn written_and_read(config: &DraftConfig, tensors: &Named) -> Result<Option<DraftVocabulary>, Error> {
    let folder = TempDir::new().unwrap();
    checkpoint::save(folder.path().join("c"), &config.to_json(), tensors).unwrap();
    let weights = Weights::from_folder(folder.path().join("c"), DType::F32, &CPU).unwrap();
    DraftVocabulary::read(&weights, config)
}

fn with(tensors: &Named, name: &str, tensor: Option<Tensor>) -> Named {
    let mut tensors: Named = tensors.iter().filter(|(other, _)| other != name).cloned().collect();
    tensors.extend(tensor.map(|tensor| (name.to_owned(), tensor)));
    tensors
}

#[test]
fn a_checkpoint_brings_its_vocabulary_back() {
    let (config, tensors) = (config(Some(TOKENS.len())), pruned_tensors(&pair()));
    assert_eq!(config.to_json()["draft_vocab_size"], json!(TOKENS.len()));
    assert_eq!(written_and_read(&config, &tensors).unwrap(), Some(vocabulary()));
    // Engines do not need the flags, so a file may lack them.
    assert_eq!(written_and_read(&config, &with(&tensors, "t2d", None)).unwrap(), Some(vocabulary()));

    let folder = TempDir::new().unwrap();
    checkpoint::save(folder.path().join("c"), &config.to_json(), &tensors).unwrap();
    let file = fs_err::read(folder.path().join("c/model.safetensors")).unwrap();
    let stored = safetensors::SafeTensors::deserialize(&file).unwrap();
    let (d2t, t2d) = (stored.tensor("d2t").unwrap(), stored.tensor("t2d").unwrap());
    assert_eq!((d2t.dtype(), t2d.dtype()), (safetensors::Dtype::I64, safetensors::Dtype::BOOL));
    assert_eq!(d2t.data()[8..16], 2_i64.to_le_bytes(), "draft token 1 is token 3");
    assert_eq!(t2d.data()[..4], [0, 0, 1, 1]);
}

#[test]
fn a_map_of_every_token_is_no_draft_vocabulary() {
    let full = DraftVocabulary::most_frequent(&[1; VOCAB], &[], VOCAB).unwrap();
    assert_eq!(config(Some(VOCAB)).draft_vocab_size, None);
    let tensors: Named = full.tensors().unwrap().into();
    assert_eq!(written_and_read(&config(None), &tensors).unwrap(), None);
    assert_eq!(written_and_read(&config(None), &vec![("fc.weight".into(), random(1, 2, 2))]).unwrap(), None);
}

#[test]
fn what_is_no_map_is_refused_with_tensor_and_entry() {
    let (config, tensors) = (config(Some(TOKENS.len())), pruned_tensors(&pair()));
    let offsets = |change: fn(&mut [i64])| {
        let mut offsets: Vec<i64> = TOKENS.iter().enumerate().map(|(i, &token)| i64::from(token) - i as i64).collect();
        change(&mut offsets);
        Some(Tensor::new(offsets, &CPU).unwrap())
    };
    let flags = |token: usize| {
        let mut flags: Vec<u8> = (0..VOCAB as u32).map(|token| TOKENS.contains(&token).into()).collect();
        flags[token] ^= 1;
        Some(Tensor::new(flags, &CPU).unwrap())
    };
    let short = Some(Tensor::new(&[2i64, 2], &CPU).unwrap());
    let cases = [
        ("d2t", None, "lacks tensor `d2t` of shape [8]"),
        ("d2t", short, "tensor `d2t` has shape [2], expected [8]"),
        ("d2t", Some(Tensor::zeros(8, DType::F32, &CPU).unwrap()), "tensor `d2t` is stored as F32, expected I64"),
        (
            "d2t",
            offsets(|o| o[0] = -1),
            "entry 0 of tensor `d2t` is -1, which maps draft token 0 to -1, expected a token from 0 to 22",
        ),
        ("d2t", offsets(|o| o[7] = 16), "entry 7 of tensor `d2t` is 16, which maps draft token 7 to 23"),
        ("d2t", offsets(|o| o[4] = i64::MAX), "entry 4 of tensor `d2t`"),
        (
            "d2t",
            offsets(|o| o[3] = 2),
            "entry 3 of tensor `d2t` is 2, which maps draft token 3 to 5, expected a token above",
        ),
        ("d2t", offsets(|o| o[3] = 1), "maps draft token 3 to 4, expected a token above the one before"),
        ("t2d", flags(3), "entry 3 of tensor `t2d` is 0, expected 1 as `d2t` has it"),
        ("t2d", flags(22), "entry 22 of tensor `t2d` is 1, expected 0 as `d2t` has it"),
        ("t2d", Some(Tensor::zeros(22, DType::U8, &CPU).unwrap()), "tensor `t2d` has shape [22], expected [23]"),
    ];
    for (name, tensor, expected) in cases {
        let error = written_and_read(&config, &with(&tensors, name, tensor)).unwrap_err();
        assert!(error.to_string().contains(expected) && error.hint().is_some(), "{error}");
    }
    // Without the size in the configuration the map has to be of every token.
    let error = written_and_read(&self::config(None), &tensors).unwrap_err().to_string();
    assert!(error.contains("tensor `d2t` has shape [8], expected [23]"), "{error}");
}

/// Tokens, loss mask and anchors of a sequence.
type Sequence = (Vec<u32>, Vec<u8>, Vec<Option<usize>>);

/// Two sequences, all supervised but the start.
fn batch() -> Vec<Sequence> {
    [(11_u32, 17), (5, 12)]
        .into_iter()
        .map(|(factor, len)| {
            let tokens = (0..len).map(|i| (i * factor + 2) % VOCAB as u32).collect();
            let mask = (0..len).map(|i| u8::from(i > 2)).collect();
            (tokens, mask, vec![Some(3), Some(5), Some(8), None])
        })
        .collect()
}

const WEIGHTS: LossWeights =
    LossWeights { ce: 0.4, tv: 0.9, kl: 0.3, kl_temperature: 1.0, confidence: 1.0, decay_gamma: Some(4.0) };

struct Run {
    parameters: Parameters,
    hidden: Tensor,
    target: Tensor,
    supervision: Supervision,
    loss: DSparkLoss,
}

fn run(pair: &Pair, parameters: Parameters, vocabulary: Option<DraftVocabulary>, weights: &LossWeights) -> Run {
    let size = vocabulary.as_ref().map(DraftVocabulary::size).filter(|&size| size < VOCAB);
    let config = config(size);
    let batch = batch();
    let sequences: Vec<TrainSequence<'_>> =
        batch.iter().map(|(tokens, _, anchors)| TrainSequence { tokens, anchors: anchors.clone() }).collect();
    let masks: Vec<&[u8]> = batch.iter().map(|(_, mask, _)| mask.as_slice()).collect();
    let rows = batch.iter().map(|(tokens, ..)| tokens.len()).sum();
    let (features, target) = (random(20, rows, 2 * HIDDEN), random(21, rows, HIDDEN));
    let supervision =
        Supervision::new(&sequences, &masks, config.proposals(), 6, Some(4.0), vocabulary.as_ref()).unwrap();
    let packed = Packed::new(&[&flat(&pair.lm_head)], HIDDEN, None, Precision::F32).unwrap();
    let head = LossHead::new(&pair.lm_head, Arc::new(packed), vocabulary).unwrap();
    let drafter = DSpark::new(config, pair.embed.clone(), ParameterSource::Trainable(&parameters)).unwrap();
    let hidden = drafter.train_hidden(&sequences, &features).unwrap();
    let sums = supervision.weights;
    let loss = dspark_loss(&drafter, &head, weights, &supervision, &hidden, &target, sums, true).unwrap();
    Run { parameters, hidden, target, supervision, loss }
}

fn softmax(logits: &[f64]) -> Vec<f64> {
    let total: f64 = logits.iter().map(|u| u.exp()).sum();
    logits.iter().map(|u| u.exp() / total).collect()
}

#[test]
fn the_loss_compares_with_the_whole_vocabulary() {
    let pair = pair();
    let full = run(&pair, self::pair().full, None, &WEIGHTS);
    let run = run(&pair, self::pair().pruned, Some(vocabulary()), &WEIGHTS);
    // The same slots, of which the drafter lacks some labels.
    let slots = &run.supervision.slots;
    assert_eq!(slots.len(), full.supervision.slots.len());
    let unlabelled = slots.iter().filter(|slot| slot.label.is_none()).count();
    assert!(unlabelled > 0 && unlabelled < slots.len());
    let labelled: f64 = slots.iter().filter(|slot| slot.label.is_some()).map(|slot| slot.weight).sum();
    assert_eq!(run.supervision.weights, WeightSums { all: full.supervision.weights.all, labelled });
    for (slot, whole) in slots.iter().zip(&full.supervision.slots) {
        assert_eq!(slot.label, whole.label.and_then(|token| vocabulary().draft_token(token)));
    }

    let rows = |tensor: &Tensor| -> Vec<Vec<f32>> { tensor.to_vec2().unwrap() };
    let (hidden, target, head) = (rows(&run.hidden.detach()), rows(&run.target), rows(&pair.lm_head));
    let w1 = rows(pair.full.get("markov_head.markov_w1.weight").unwrap());
    let w2 = rows(pair.full.get("markov_head.markov_w2.weight").unwrap());
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
    let (mut ce, mut tv, mut kl, mut expected_accepted) = (0.0, 0.0, 0.0, 0.0);
    for slot in slots {
        let p_t = softmax(&head.iter().map(|e| dot(e, &target[slot.target])).collect::<Vec<_>>());
        let logit = |token: u32| {
            let (token, previous) = (token as usize, slot.previous as usize);
            dot(&head[token], &hidden[slot.row]) + dot(&w2[token], &w1[previous])
        };
        let p = softmax(&TOKENS.iter().map(|&token| logit(token)).collect::<Vec<_>>());
        let mut p_d = [0.0; VOCAB];
        TOKENS.iter().zip(&p).for_each(|(&token, p)| p_d[token as usize] = *p);
        let distance = p_d.iter().zip(&p_t).map(|(d, t)| (d - t).abs()).sum::<f64>();
        tv += slot.weight * distance;
        expected_accepted += 1.0 - 0.5 * distance;
        kl += slot.weight
            * TOKENS.iter().map(|&y| p_t[y as usize] * (p_t[y as usize] / p_d[y as usize]).ln()).sum::<f64>();
        ce += slot.label.map_or(0.0, |label| -slot.weight * p[label as usize].ln());
    }
    let sums = &run.loss.sums;
    for (what, got, expected) in [("ce", sums.ce, ce), ("tv", sums.tv, tv), ("kl", sums.kl, kl)] {
        assert!((got - expected).abs() < 1e-4 * expected.abs(), "{what}: {got} against {expected}");
    }
    let all = run.supervision.weights.all + 1e-6;
    let expected = WEIGHTS.ce * ce / (labelled + 1e-6)
        + (WEIGHTS.tv * tv + WEIGHTS.kl * kl + WEIGHTS.confidence * sums.confidence) / all;
    assert!((sums.loss - expected).abs() < 1e-4 * expected, "{} against {expected}", sums.loss);
    let metrics = sums.metrics(&WEIGHTS, true);
    let metric = metrics.iter().find(|(name, _)| name == "ce_loss").unwrap().1;
    assert!((metric - ce / labelled).abs() < 1e-4 * metric);
    let accepted: f64 = sums.accepted.iter().sum();
    assert!((accepted - expected_accepted).abs() < 1e-3, "{accepted} against {expected_accepted}");
}

#[test]
fn gradients_equal_finite_differences() {
    let pair = pair();
    // The confidence's label is no part of the gradient, so that term cannot be checked by differences.
    let weights = LossWeights { confidence: 0.0, ..WEIGHTS };
    let base = run(&pair, self::pair().pruned, Some(vocabulary()), &weights);
    let grads = base.loss.loss.backward().unwrap();
    for name in
        ["markov_head.markov_w1.weight", "markov_head.markov_w2.weight", "norm.weight", "layers.1.mlp.up_proj.weight"]
    {
        let var = base.parameters.get(name).unwrap();
        let grad = flat(grads.get(var).unwrap());
        let scale = grad.iter().fold(0f32, |m, g| m.max(g.abs()));
        assert!(scale > 1e-3, "{name}: {scale}");
        for probe in 0..8 {
            let at = probe * 7919 % grad.len();
            let loss_at = |offset: f32| {
                let mut moved = flat(var);
                moved[at] += offset;
                let mut parameters = self::pair().pruned;
                parameters.insert(name, &Tensor::from_vec(moved, var.shape(), &CPU).unwrap()).unwrap();
                run(&pair, parameters, Some(vocabulary()), &weights).loss.sums.loss
            };
            let expected = (loss_at(4e-3) - loss_at(-4e-3)) / 8e-3;
            let error = (f64::from(grad[at]) - expected).abs();
            assert!(error < 4e-2 * f64::from(scale), "{name}[{at}]: {} against {expected}", grad[at]);
        }
    }
}

#[test]
fn a_map_of_every_token_trains_the_same_bits() {
    let pair = pair();
    let full = run(&pair, self::pair().full, None, &WEIGHTS);
    let every = DraftVocabulary::most_frequent(&[1; VOCAB], &[], VOCAB).unwrap();
    let mapped = run(&pair, self::pair().full, Some(every), &WEIGHTS);
    assert_eq!(full.loss.sums, mapped.loss.sums);
    let (a, b) = (full.loss.loss.backward().unwrap(), mapped.loss.loss.backward().unwrap());
    for ((name, full), (_, mapped)) in full.parameters.iter().zip(mapped.parameters.iter()) {
        assert_eq!(flat(a.get(full).unwrap()), flat(b.get(mapped).unwrap()), "{name}");
    }
}

#[test]
fn a_head_of_another_size_is_refused() {
    let packed = Arc::new(Packed::new(&[&[0.0; 6 * 4]], 4, None, Precision::F32).unwrap());
    let error = LossHead::new(&random(1, 6, 4), packed, Some(vocabulary())).unwrap_err().to_string();
    assert!(error.contains("[6, 4], packed [6, 4] for a vocabulary of 23"), "{error}");
}

fn frozen(folder: &Path, config: DraftConfig, tensors: &Named) -> DSpark {
    checkpoint::save(folder, &config.to_json(), tensors).unwrap();
    let weights = Weights::from_folder(folder, DType::F32, &CPU).unwrap();
    let embed = weights.get("embed_tokens.weight", &[VOCAB, HIDDEN]).unwrap();
    let head = weights.get("lm_head.weight", &[config.draft_vocab(), HIDDEN]).unwrap();
    let drafter = DSpark::new(config, embed, ParameterSource::Frozen(&weights, Precision::F32)).unwrap();
    weights.finish().unwrap();
    drafter.with_lm_head(Linear::frozen(&[&head], None, Precision::F32).unwrap())
}

fn proposals(drafter: &DSpark, target_head: &Linear, sampling: SamplingParams, prompts: &[&[u32]]) -> Vec<Proposal> {
    let mut proposer = DSparkProposer::new(drafter, target_head, prompts.len(), 32).unwrap();
    for (slot, prompt) in prompts.iter().enumerate() {
        let features = random(30 + prompt.len() as u64, prompt.len() - 1, 2 * HIDDEN);
        proposer.observe(&features, &[(slot, prompt.len() - 1)]).unwrap();
    }
    let request = |slot| {
        let (tokens, most) = (prompts[slot], 4 - slot);
        DraftRequest { slot, tokens, most, stop_ids: &[], sampling: &sampling, adjustments: None, seed: 5, round: 0 }
    };
    let requests: Vec<DraftRequest<'_>> = (0..prompts.len()).map(request).collect();
    proposer.propose(&requests).unwrap()
}

#[test]
fn a_pruned_drafter_proposes_as_the_full_one_does_among_its_tokens() {
    let pair = pair();
    let folder = TempDir::new().unwrap();
    let pruned = frozen(&folder.path().join("pruned"), config(Some(TOKENS.len())), &pruned_tensors(&pair));
    let mut tensors: Named = pair.full.iter().map(|(name, var)| (name.to_owned(), var.as_tensor().clone())).collect();
    tensors.push(("embed_tokens.weight".into(), pair.embed.clone()));
    tensors.push(("lm_head.weight".into(), pair.lm_head.clone()));
    let tokens: Arc<[u32]> = TOKENS.into();
    let full = frozen(&folder.path().join("full"), config(None), &tensors);
    let target_head = Linear::frozen(&[&pair.lm_head], None, Precision::F32).unwrap();

    let (long, short): (&[u32], &[u32]) = (&[2, 4, 6, 8, 11], &[1, 3]);
    let t1 = SamplingParams::default();
    for sampling in
        [SamplingParams::greedy(), t1, SamplingParams { top_k: 3, ..t1 }, SamplingParams { top_p: 0.6, ..t1 }]
    {
        let alone = proposals(&pruned, &target_head, sampling, &[long]);
        let both = proposals(&pruned, &target_head, sampling, &[long, short]);
        assert_eq!(alone[0].tokens, both[0].tokens, "a proposal does not depend on its batch");
        assert_eq!(alone[0].confidence_logits, both[0].confidence_logits);
        assert_eq!((both[0].tokens.len(), both[1].tokens.len()), (4, 3));
        for proposal in &both {
            assert_eq!(proposal.confidence_logits.len(), proposal.tokens.len());
            for (token, distribution) in proposal.tokens.iter().zip(&proposal.distributions) {
                assert!(TOKENS.contains(token) && distribution.prob(*token) > 0.0);
                let total: f32 = (0..VOCAB as u32).map(|token| distribution.prob(token)).sum();
                assert!((total - 1.0).abs() < 1e-5, "{total}");
                match distribution {
                    Distribution::OneHot(_) => assert!(sampling.is_greedy()),
                    Distribution::Subset { tokens: over, .. } => assert_eq!(over, &tokens),
                    Distribution::Dense(_) => panic!("a distribution over every token"),
                }
            }
        }
        // Slot 0 of the full drafter, restricted by hand.
        let whole = proposals(&full, &target_head, t1, &[long]).remove(0);
        let logits: Vec<f32> = TOKENS.iter().map(|&token| whole.distributions[0].prob(token).ln()).collect();
        let expected = Distribution::from_logits(&logits, &sampling).unwrap().over(&tokens).unwrap();
        for token in 0..VOCAB as u32 {
            let (got, expected) = (alone[0].distributions[0].prob(token), expected.prob(token));
            assert!((got - expected).abs() < 1e-4, "{sampling:?}: token {token} has {got}, expected {expected}");
        }
        assert_eq!(whole.confidence_logits[0], alone[0].confidence_logits[0]);
    }
}

#[test]
fn a_pruned_drafter_cannot_draft_with_the_targets_head() {
    let pair = pair();
    let folder = TempDir::new().unwrap();
    let drafter = frozen(&folder.path().join("c"), config(Some(TOKENS.len())), &pruned_tensors(&pair));
    let target_head = Linear::frozen(&[&pair.lm_head], None, Precision::F32).unwrap();
    let drafter = drafter.with_lm_head(target_head.clone());
    let error = DSparkProposer::new(&drafter, &target_head, 1, 16).unwrap_err().to_string();
    assert!(error.contains("23 outputs") && error.contains("8 draft tokens"), "{error}");
}
