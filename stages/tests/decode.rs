//! The engine against the decode traces of the Python reference, and its promises: speculation changes no token, a
//! sequence does not depend on its batch.
#![expect(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    reason = "tests read the environment to find golden data and fail as tests do"
)]

use std::path::PathBuf;

use candle_core::{DType, Device};
use deepspec_models::config::{DraftConfig, TargetConfig};
use deepspec_models::draft::{DSpark, ParameterSource};
use deepspec_models::linear::Precision;
use deepspec_models::speculate::{DSparkProposer, NgramProposer, NoProposer, Proposer, SamplingParams};
use deepspec_models::target::Target;
use deepspec_models::weights::Weights;
use deepspec_stages::engine::{Engine, Finished, Request};
use serde_json::Value;

fn golden(part: &str) -> PathBuf {
    let root = std::env::var("DEEPSPEC_GOLDEN").map_or_else(|_| PathBuf::from("../models/tests/golden"), PathBuf::from);
    root.join(part)
}

fn target(precision: Precision) -> Target {
    let config = TargetConfig::from_folder(golden("target")).unwrap();
    let weights = Weights::from_folder(golden("target"), DType::F32, &Device::Cpu).unwrap();
    Target::load(config, &weights, precision).unwrap()
}

fn drafter(name: &str) -> DSpark {
    let config = DraftConfig::from_folder(golden(name)).unwrap();
    let weights = Weights::from_folder(golden(name), DType::F32, &Device::Cpu).unwrap();
    let table = [config.body.vocab_size, config.body.hidden_size];
    let embed = weights.get("embed_tokens.weight", &table).unwrap();
    weights.skip("lm_head.weight");
    let drafter = DSpark::new(config, embed, ParameterSource::Frozen(&weights, Precision::F32)).unwrap();
    weights.finish().unwrap();
    drafter
}

fn request(id: u64, prompt: Vec<u32>, max_new_tokens: usize) -> Request {
    Request {
        id,
        prompt,
        sampling: SamplingParams::greedy(),
        seed: 7 + id,
        max_new_tokens,
        stop_ids: Vec::new().into(),
        confidence_threshold: 0.0,
    }
}

fn run(target: &Target, proposer: Box<dyn Proposer + '_>, slots: usize, requests: Vec<Request>) -> Vec<Finished> {
    let capacity = capacity(&requests);
    let mut engine = Engine::new(target, proposer, slots, capacity).unwrap();
    let mut finished = engine.run(requests, |_| Ok(())).unwrap();
    finished.sort_by_key(|f| f.request.id);
    finished
}

/// Room for the longest request.
fn capacity(requests: &[Request]) -> usize {
    requests.iter().map(|r| r.prompt.len() + r.max_new_tokens).max().unwrap()
}

fn numbers<T: TryFrom<u64>>(value: &Value) -> Vec<T>
where
    T::Error: std::fmt::Debug,
{
    value.as_array().unwrap().iter().map(|v| T::try_from(v.as_u64().unwrap()).unwrap()).collect()
}

#[test]
fn golden_decode_traces_dspark_vanilla() {
    let (target, drafter) = (target(Precision::F32), drafter("decode/dspark_vanilla"));
    let traces: Value =
        serde_json::from_slice(&fs_err::read(golden("decode/dspark_vanilla/traces.json")).unwrap()).unwrap();
    let block = drafter.config().block_size;
    let cases = traces["cases"].as_array().unwrap();
    assert!(!cases.is_empty());
    for case in cases {
        let name = case["name"].as_str().unwrap();
        let prompt: Vec<u32> = numbers(&case["prompt_ids"]);
        let output: Vec<u32> = numbers(&case["output_ids"]);
        let budget = case["max_new_tokens"].as_u64().unwrap() as usize;
        let stop_ids: Vec<u32> = match &case["stop_token_ids"] {
            Value::Null => Vec::new(),
            list => numbers(list),
        };
        let threshold = case["confidence_threshold"].as_f64().unwrap() as f32;
        let decode = |budget: usize| {
            let mut request = request(0, prompt.clone(), budget);
            request.stop_ids = stop_ids.clone().into();
            request.confidence_threshold = threshold;
            let room = capacity(std::slice::from_ref(&request));
            let proposer = DSparkProposer::new(&drafter, target.lm_head(), 1, room).unwrap();
            run(&target, Box::new(proposer), 1, vec![request]).remove(0)
        };
        let done = decode(budget);
        assert_eq!([prompt.clone(), done.output.clone()].concat(), output, "{name}: tokens");
        // The reference does not cap a round by the budget and counts the last one in full: with room for one more block
        // the same rounds run uncapped.
        let roomy = decode(budget + block + 1);
        let rounds = case["rounds"].as_array().unwrap();
        assert!(roomy.rounds.len() >= rounds.len(), "{name}: {} of {} rounds", roomy.rounds.len(), rounds.len());
        let expected: Vec<usize> = numbers(&case["acceptance_lengths"]);
        let proposals: Vec<usize> = numbers(&case["proposal_lengths"]);
        for (i, (ours, theirs)) in roomy.rounds.iter().zip(rounds).enumerate() {
            assert_eq!(ours.committed, expected[i], "{name} round {i}: acceptance length");
            assert_eq!(ours.proposed, proposals[i], "{name} round {i}: proposal length");
            assert_eq!(ours.block, numbers::<u32>(&theirs["block_tokens_before_threshold"]), "{name} round {i}: block");
            let logits = theirs["confidence_logits"].as_array().unwrap();
            assert_eq!(ours.confidence_logits.len(), logits.len(), "{name} round {i}");
            for (got, expected) in ours.confidence_logits.iter().zip(logits) {
                let expected = expected.as_f64().unwrap() as f32;
                assert!((got - expected).abs() <= 1e-3 + 1e-3 * expected.abs(), "{name} round {i}: {got}, {expected}");
            }
        }
    }
}

fn prompts(vocab: usize) -> Vec<Vec<u32>> {
    (0..12u32).map(|i| (0..3 + i % 5).map(|j| (i * 37 + j * 11 + 9) % vocab as u32).collect()).collect()
}

#[test]
fn speculation_and_batching_change_no_token() {
    let drafter = drafter("decode/dspark_vanilla");
    for precision in [Precision::F32, Precision::Bf16] {
        let target = target(precision);
        let vocab = target.config().vocab_size;
        for temperature in [0.0, 0.8] {
            let requests = || -> Vec<Request> {
                let budget = |i: usize| 20 + 5 * (i % 4);
                let mut all: Vec<Request> =
                    prompts(vocab).into_iter().enumerate().map(|(i, p)| request(i as u64, p, budget(i))).collect();
                for request in &mut all {
                    request.sampling.temperature = temperature;
                    request.stop_ids = vec![2, 17].into();
                }
                all
            };
            let outputs =
                |finished: Vec<Finished>| -> Vec<Vec<u32>> { finished.into_iter().map(|f| f.output).collect() };
            let plain = outputs(run(&target, Box::new(NoProposer), 1, requests()));
            assert_eq!(plain, outputs(run(&target, Box::new(NoProposer), 5, requests())), "batched plain decoding");
            let dspark = |slots| -> Box<dyn Proposer> {
                Box::new(DSparkProposer::new(&drafter, target.lm_head(), slots, 160).unwrap())
            };
            let alone = outputs(run(&target, dspark(1), 1, requests()));
            assert_eq!(
                alone,
                outputs(run(&target, dspark(5), 5, requests())),
                "batched speculation at T = {temperature}"
            );
            if temperature == 0.0 {
                assert_eq!(plain, alone, "speculation at T = 0 in {precision:?}");
                let ngram = outputs(run(&target, Box::new(NgramProposer::new(4, 6)), 3, requests()));
                assert_eq!(plain, ngram, "n-gram lookup at T = 0 in {precision:?}");
            }
        }
    }
}

#[test]
fn cancelled_slots_leave_nothing_behind() {
    let (target, drafter) = (target(Precision::F32), drafter("decode/dspark_vanilla"));
    let vocab = target.config().vocab_size;
    let solo: Vec<Vec<u32>> = prompts(vocab)
        .into_iter()
        .map(|prompt| run(&target, Box::new(NoProposer), 1, vec![request(0, prompt, 24)]).remove(0).output)
        .collect();
    let proposer = DSparkProposer::new(&drafter, target.lm_head(), 3, 160).unwrap();
    let mut engine = Engine::new(&target, Box::new(proposer), 3, 160).unwrap();
    for (i, prompt) in prompts(vocab).into_iter().enumerate() {
        engine.submit(request(i as u64, prompt, 24)).unwrap();
    }
    let mut finished = Vec::new();
    let mut steps = 0;
    while !engine.is_idle() {
        steps += 1;
        if steps == 3 {
            assert!(engine.cancel(1), "in work");
            assert!(engine.cancel(9), "waiting");
            assert!(!engine.cancel(77));
        }
        finished.extend(engine.step().unwrap().into_iter().filter_map(|update| update.finished));
    }
    assert_eq!(finished.len(), solo.len() - 2);
    for done in finished {
        assert_eq!(done.output, solo[done.request.id as usize], "request {}", done.request.id);
    }
}

#[test]
fn requests_that_cannot_fit_are_refused() {
    let target = target(Precision::F32);
    let mut engine = Engine::new(&target, Box::new(NoProposer), 1, 16).unwrap();
    assert!(engine.submit(request(0, vec![1; 10], 7)).unwrap_err().to_string().contains("capacity of 16"));
    assert!(engine.submit(request(0, Vec::new(), 4)).is_err());
    let mut bad = request(0, vec![1], 4);
    bad.sampling.temperature = -1.0;
    assert!(engine.submit(bad).is_err());
    let none = engine.run(vec![request(3, vec![1, 2], 0)], |_| Ok(())).unwrap();
    assert!(none[0].output.is_empty() && none[0].rounds.is_empty());
}
