//! Drafters made by hand, so that what they must propose is known: the same function in both block layouts, ties, and a
//! configuration as it is published.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

#[path = "common/toy.rs"]
mod toy;

use std::path::Path;

use candle_core::{DType, Tensor};
use deepspec_engine::{Adaptive, Engine, Finished, Request, RequestOptions, StepCost, StepCosts};
use deepspec_models::checkpoint;
use deepspec_models::config::DraftConfig;
use deepspec_models::draft::initialise;
use deepspec_models::linear::Precision as Packing;
use deepspec_models::speculate::{NoProposer, Proposer, SamplingParams};
use deepspec_models::target::Target;
use deepspec_stages::drafter::{Drafter, describe, load_drafter};
use deepspec_stages::eval::metrics::{Acceptance, Round};
use deepspec_stages::recipe::{Precision, Proposer as Contender};
use serde_json::{Value, json};
use tempfile::TempDir;
use toy::{HEAD_DIM, HIDDEN, MASK, Named, TOKENS, VOCAB, body, embedding, layer, matrix, ones};

/// Tokens proposed per block.
const PROPOSALS: usize = 4;
/// Query heads of the drafter: one per distance of a block row from the anchor.
const HEADS: usize = PROPOSALS + 1;

/// Token t + 1 follows t, and the first the last.
fn successor_head() -> Tensor {
    matrix(VOCAB, HIDDEN, (0..TOKENS).map(|token| ((token + 1) % TOKENS, token, 1.0)))
}

/// The drafter of the toy language in either layout.
///
/// Query head h of a row at distance j from the anchor scores the anchor with cos(j − h) by the fastest pair of the rotary
/// embedding, and mask tokens with 0.8 by the slowest, whatever their distance. So it fetches the anchor's token where j = h
/// and nothing elsewhere, and the output map moves the token on by as much as the row is to predict.
fn write_drafter(folder: &Path, sample_from_anchor: bool, change: impl Fn(&mut Value)) {
    // So large that the softmax is exactly one-hot in f32.
    const QUERY: f64 = 200.0;
    let rows = if sample_from_anchor { PROPOSALS } else { PROPOSALS + 1 };
    let mut config = body(HEADS, 1);
    for (key, value) in [
        ("architectures", json!(["Qwen3DSparkModel"])),
        ("model_type", json!("qwen3")),
        ("qk_norm", json!(false)),
        ("num_target_layers", json!(2)),
        ("block_size", json!(rows)),
        ("sample_from_anchor", json!(sample_from_anchor)),
        ("mask_token_id", json!(MASK)),
        ("target_layer_ids", json!([0])),
        ("markov_rank", json!(0)),
        ("enable_confidence_head", json!(false)),
    ] {
        config[key] = value;
    }
    change(&mut config);
    let (first, slowest) = (HEAD_DIM / 2, HEAD_DIM / 2 - 1);
    let query = (0..HEADS).flat_map(|h| {
        let (row, angle) = (h * HEAD_DIM, h as f64);
        (0..VOCAB).flat_map(move |token| {
            let entries = [(0, angle.cos()), (first, -angle.sin()), (slowest, 1.0)];
            entries.map(|(dim, value)| (row + dim, token, QUERY * value))
        })
    });
    let key = (0..TOKENS).map(|token| (0, token, 1.0)).chain([(slowest, MASK, 0.8)]);
    let value = (0..TOKENS).map(|token| (token, token, 1.0));
    // How far head h moves the token on; the output head adds one more.
    let step = |h: usize| match (sample_from_anchor, h) {
        (true, 0) => None,
        (true, h) => Some(h),
        // The anchor's own row, which must not be read: a wrong token.
        (false, 0) => Some(TOKENS / 2),
        (false, h) => Some(h - 1),
    };
    let moves = (0..HEADS).filter_map(|h| step(h).map(|step| (h, step)));
    let output = moves.flat_map(|(h, step)| (0..TOKENS).map(move |t| ((t + step) % TOKENS, h * HEAD_DIM + t, 1.0)));
    let mut tensors = layer("layers.0", HEADS, HIDDEN);
    for (name, tensor) in [
        ("layers.0.self_attn.q_proj.weight", matrix(HEADS * HEAD_DIM, HIDDEN, query)),
        ("layers.0.self_attn.k_proj.weight", matrix(HEAD_DIM, HIDDEN, key)),
        ("layers.0.self_attn.v_proj.weight", matrix(HEAD_DIM, HIDDEN, value)),
        ("layers.0.self_attn.o_proj.weight", matrix(HIDDEN, HEADS * HEAD_DIM, output)),
        ("fc.weight", matrix(HIDDEN, HIDDEN, [])),
        ("hidden_norm.weight", ones()),
        ("norm.weight", ones()),
        ("embed_tokens.weight", embedding()),
        ("lm_head.weight", successor_head()),
    ] {
        tensors.retain(|(other, _)| other != name);
        tensors.push((name.into(), tensor));
    }
    checkpoint::save(folder, &config, &tensors).unwrap();
}

fn request(id: u64, prompt: Vec<u32>, max_new_tokens: usize) -> Request {
    Request {
        id,
        prompt,
        sampling: SamplingParams::greedy(),
        seed: 7,
        max_new_tokens,
        stop_ids: Vec::new().into(),
        confidence_threshold: 0.0,
        options: RequestOptions::default(),
    }
}

/// Answers to some prompts, in their order.
fn decode(target: &Target, drafter: Option<&Drafter>, adaptive: Option<Adaptive>) -> Vec<Finished> {
    let proposer: Box<dyn Proposer + '_> = match drafter {
        Some(drafter) => drafter.proposer(target, 2, 80).unwrap(),
        None => Box::new(NoProposer),
    };
    let mut engine = Engine::new(target, proposer, 2, 80).unwrap();
    if let Some(adaptive) = adaptive {
        engine = engine.adapt(adaptive);
    }
    let prompts = (0..TOKENS as u32).map(|token| vec![token; 1 + token as usize % 3]);
    let requests = prompts.enumerate().map(|(id, prompt)| request(id as u64, prompt, 60));
    let mut finished = engine.run(requests, |_| Ok(())).unwrap();
    finished.sort_by_key(|done| done.request.id);
    finished
}

fn acceptance(finished: &[Finished]) -> Acceptance {
    let rounds: Vec<Round> = finished.iter().flat_map(|done| &done.rounds).map(Round::from).collect();
    Acceptance::of(&rounds)
}

fn outputs(finished: &[Finished]) -> Vec<&[u32]> {
    finished.iter().map(|done| done.output.as_slice()).collect()
}

#[test]
fn one_function_in_both_layouts_is_accepted_alike_and_the_wrong_flag_is_called_out() {
    let folder = TempDir::new().unwrap();
    let target = toy::target(folder.path(), &successor_head(), Packing::F32);
    let plain = decode(&target, None, None);
    let load = |name: &str, sample_from_anchor, change: &dyn Fn(&mut Value)| {
        let path = folder.path().join(name);
        write_drafter(&path, sample_from_anchor, change);
        load_drafter(&path, target.config(), Precision::F32).unwrap()
    };
    let blocks = |finished: &[Finished]| -> Vec<Vec<u32>> {
        finished.iter().flat_map(|done| &done.rounds).map(|round| round.block.clone()).collect()
    };
    let right = [load("first", true, &|_| {}), load("masks", false, &|_| {})];
    let found = right.each_ref().map(|drafter| decode(&target, Some(drafter), None));
    assert_eq!(blocks(&found[0]), blocks(&found[1]), "every proposal");
    for (drafter, found) in right.iter().zip(&found) {
        assert_eq!(outputs(found), outputs(&plain));
        let acceptance = acceptance(found);
        assert!(acceptance.tau.unwrap() > 4.8, "{acceptance:?}");
        assert_eq!(acceptance.idle_warning("dflash", Contender::Draft), None);
        assert_eq!(drafter.config().proposals(), PROPOSALS);
    }
    assert!(describe(&right[0].config()).contains("anchor-first blocks of 4 rows with 4 proposals"));
    assert!(describe(&right[1].config()).contains("1+N blocks of 5 rows with 4 proposals"));

    // Without the flag, each architecture's own layout.
    let unmarked = |architecture: &'static str| {
        move |config: &mut Value| {
            config["architectures"] = json!([architecture]);
            config.as_object_mut().unwrap().remove("sample_from_anchor");
        }
    };
    for drafter in [
        load("unmarked-first", true, &unmarked("Qwen3DSparkModel")),
        load("unmarked-masks", false, &unmarked("DFlashDraftModel")),
    ] {
        assert_eq!(blocks(&decode(&target, Some(&drafter), None)), blocks(&found[0]));
    }

    // With the flag turned, the output stays right, nothing is accepted, and that is said, in adaptive runs too.
    for from_anchor in [true, false] {
        let drafter = load("wrong", from_anchor, &|config| config["sample_from_anchor"] = json!(!from_anchor));
        let entries = [1.0, 1.2].iter().enumerate().map(|(i, &seconds)| StepCost { rows: i + 1, seconds });
        let costs = StepCosts::new(entries.collect()).unwrap();
        for adaptive in [None, Some(Adaptive::fixed(costs, 0.1))] {
            let found = decode(&target, Some(&drafter), adaptive);
            assert_eq!(outputs(&found), outputs(&plain));
            let acceptance = acceptance(&found);
            let warning = acceptance.idle_warning("dflash", Contender::Draft);
            let is_called_out = warning.is_some_and(|warning| warning.contains("`sample_from_anchor`"));
            assert!(is_called_out, "{from_anchor}: {acceptance:?}");
        }
    }
}

#[test]
fn the_first_maximum_wins_on_every_path() {
    let folder = TempDir::new().unwrap();
    // 9 follows 4 as well as 5 does, so nothing follows 8 and all tokens are tied there.
    let tied = matrix(
        VOCAB,
        HIDDEN,
        (0..TOKENS).map(|token| ((token + 1) % TOKENS, token, 1.0)).chain([(9, 4, 1.0), (9, 8, -1.0)]),
    );
    let follows = |token: u32| if token == 8 { 0 } else { (token + 1) % TOKENS as u32 };
    write_drafter(&folder.path().join("drafter"), true, |_| {});
    for precision in [Packing::F32, Packing::Bf16, Packing::Q8] {
        let target = toy::target(folder.path(), &tied, precision);
        let own = load_drafter(&folder.path().join("drafter"), target.config(), Precision::F32).unwrap();
        let tied_drafter = own.with_lm_head(target.lm_head().clone());
        let plain = decode(&target, None, None);
        for done in &plain {
            let mut last = *done.request.prompt.last().unwrap();
            for &token in &done.output {
                assert_eq!(token, follows(last), "plain decoding after {last} in {precision:?}");
                last = token;
            }
        }
        let found = decode(&target, Some(&tied_drafter), None);
        assert_eq!(outputs(&found), outputs(&plain), "{precision:?}");
        let (mut ties, mut accepted_ties) = (0, 0);
        for done in &found {
            let mut anchor = done.request.prompt.len();
            let text = [&done.request.prompt[..], &done.output].concat();
            for round in &done.rounds {
                for (k, token) in round.block.iter().enumerate() {
                    // The drafter knows nothing of the jump from 8 to 0: its k-th token is after anchor + k.
                    let before = (text[anchor] + k as u32) % TOKENS as u32;
                    assert_eq!(*token, follows(before), "drafted after {before} in {precision:?}");
                    ties += usize::from(before == 4);
                    accepted_ties += usize::from(before == 4 && k < round.accepted);
                }
                anchor += round.committed;
            }
        }
        assert!(ties > 10 && accepted_ties > 10, "{ties} ties drafted, {accepted_ties} accepted");
    }
}

/// As published for Qwen3 targets, but for the sizes.
#[test]
fn a_published_configuration_loads_without_more_flags() {
    let config = json!({
        "architectures": ["Qwen3DSparkModel"], "attention_bias": false, "attention_dropout": 0.0, "block_size": 7,
        "bos_token_id": 1, "confidence_head_with_markov": true, "dtype": "bfloat16", "enable_confidence_head": true,
        "eos_token_id": 2, "head_dim": 8, "hidden_act": "silu", "hidden_size": HIDDEN, "initializer_range": 0.02,
        "intermediate_size": 24, "layer_types": ["full_attention", "full_attention"], "markov_head_type": "vanilla",
        "markov_rank": 256, "mask_token_id": MASK, "max_position_embeddings": 40_960, "max_window_layers": 36,
        "model_type": "qwen3", "num_anchors": 512, "num_attention_heads": 2, "num_hidden_layers": 2,
        "num_key_value_heads": 1, "num_target_layers": 2, "rms_norm_eps": 1e-6, "rope_scaling": null,
        "rope_theta": 1_000_000, "sliding_window": null, "target_layer_ids": [-1, 0], "tie_word_embeddings": false,
        "transformers_version": "4.57.1", "use_cache": true, "use_sliding_window": false, "vocab_size": VOCAB,
    });
    let folder = TempDir::new().unwrap();
    let target = toy::target(folder.path(), &successor_head(), Packing::F32);
    let draft = DraftConfig::from_json(Path::new("config.json"), &config).unwrap();
    let mut tensors: Named = initialise::random(&draft, 1)
        .unwrap()
        .iter()
        .map(|(name, var)| (name.to_owned(), var.as_tensor().to_dtype(DType::BF16).unwrap()))
        .collect();
    for (name, tensor) in [("embed_tokens.weight", embedding()), ("lm_head.weight", successor_head())] {
        tensors.push((name.into(), tensor.to_dtype(DType::BF16).unwrap()));
    }
    let path = folder.path().join("drafter");
    checkpoint::save(&path, &config, &tensors).unwrap();
    let drafter = load_drafter(&path, target.config(), Precision::F32).unwrap();
    let line = describe(&drafter.config());
    assert!(line.contains("anchor-first blocks of 7 rows with 7 proposals"), "{line}");
    assert!(line.contains("vanilla Markov head of rank 256, confidence on"), "{line}");
    let (found, plain) = (decode(&target, Some(&drafter), None), decode(&target, None, None));
    assert_eq!(outputs(&found), outputs(&plain));
    assert!(found.iter().flat_map(|done| &done.rounds).any(|round| round.block.len() == 7));
}
