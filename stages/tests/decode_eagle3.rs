//! Eagle3 in the engine: the decode traces of the Python reference, and that speculation changes neither a token at temperature
//! 0 nor the distribution above it.
#![expect(clippy::unwrap_used, reason = "tests fail as tests do")]

#[path = "common/requests.rs"]
mod requests;
#[path = "common/tiny.rs"]
mod tiny;
#[path = "common/traces.rs"]
mod traces;

use std::collections::{BTreeMap, BTreeSet, HashMap};

use candle_core::{Device, Tensor};
use deepspec_engine::{Adaptive, Engine, Finished, Request, StepCost, StepCosts};
use deepspec_models::linear::Precision;
use deepspec_models::speculate::{NgramProposer, NoProposer, Proposer, SamplingParams};
use deepspec_models::target::Target;
use deepspec_stages::drafter::{Drafter, load_drafter};
use deepspec_stages::recipe::Precision as Stored;
use requests::request;
use tiny::{load_target, target};
use traces::{golden, numbers, traces};

fn drafter(target: &Target) -> Drafter {
    load_drafter(&tiny::golden("decode/eagle3"), target.config(), Stored::F32).unwrap()
}

/// Target and drafter of the set that is compared with.
fn golden_models() -> (Target, Drafter) {
    let target = load_target(&golden("target"), Precision::F32);
    let drafter = load_drafter(&golden("decode/eagle3"), target.config(), Stored::F32).unwrap();
    (target, drafter)
}

fn run(mut engine: Engine<'_>, requests: Vec<Request>) -> Vec<Finished> {
    let mut finished = engine.run(requests, |_| Ok(())).unwrap();
    finished.sort_by_key(|f| f.request.id);
    finished
}

#[test]
fn golden_decode_traces_eagle3() {
    let (target, drafter) = golden_models();
    let traces = traces("decode/eagle3");
    assert_eq!(traces["max_proposal_tokens"], drafter.block_size());
    let cases = traces["cases"].as_array().unwrap();
    assert!(!cases.is_empty());
    for case in cases {
        let name = case["name"].as_str().unwrap();
        let prompt: Vec<u32> = numbers(&case["prompt_ids"]);
        let budget = case["max_new_tokens"].as_u64().unwrap() as usize;
        let decode = |budget: usize| {
            let mut request = request(0, prompt.clone(), budget);
            if !case["stop_token_ids"].is_null() {
                request.stop_ids = numbers(&case["stop_token_ids"]).into();
            }
            let room = prompt.len() + budget;
            let engine = Engine::new(&target, drafter.proposer(&target, 1, room).unwrap(), 1, room).unwrap();
            run(engine, vec![request]).remove(0)
        };
        let output = [prompt.clone(), decode(budget).output].concat();
        assert_eq!(output, numbers::<u32>(&case["output_ids"]), "{name}: tokens");
        // The reference does not cap a round by the budget and counts the last one in full: with room for one more block
        // the same rounds run uncapped.
        let roomy = decode(budget + drafter.block_size() + 1);
        let rounds = case["rounds"].as_array().unwrap();
        assert!(roomy.rounds.len() >= rounds.len(), "{name}: {} of {} rounds", roomy.rounds.len(), rounds.len());
        let expected: Vec<usize> = numbers(&case["acceptance_lengths"]);
        let proposals: Vec<usize> = numbers(&case["proposal_lengths"]);
        let accepted: Vec<usize> = numbers(&case["accepted_draft_lengths"]);
        for (i, (ours, theirs)) in roomy.rounds.iter().zip(rounds).enumerate() {
            assert_eq!(ours.block, numbers::<u32>(&theirs["verify_input_ids"])[1..], "{name} round {i}: proposal");
            assert_eq!(
                (ours.committed, ours.proposed, ours.accepted),
                (expected[i], proposals[i], accepted[i]),
                "{name} round {i}: acceptance and proposal length, accepted"
            );
        }
    }
}

/// Draft logits of the traces, through the cache as drafting uses it.
#[test]
fn golden_draft_logits_eagle3() {
    let (target, drafter) = golden_models();
    let Drafter::Eagle3(drafter) = drafter else { panic!("not an Eagle3 drafter") };
    let traces = traces("decode/eagle3");
    let logits: HashMap<String, Tensor> =
        candle_core::safetensors::load(golden("decode/eagle3/traces.safetensors"), &Device::Cpu).unwrap();
    let mut checked = 0;
    for case in traces["cases"].as_array().unwrap() {
        let Some(expected) = logits.get(&format!("{}.round0.draft_logits", case["name"].as_str().unwrap())) else {
            continue;
        };
        let (prompt, round) = (numbers::<u32>(&case["prompt_ids"]), &case["rounds"][0]);
        let block: Vec<u32> = numbers(&round["verify_input_ids"]);
        let mut cache = target.new_cache(1, prompt.len()).unwrap();
        let rows = [deepspec_models::target::NewTokens { slot: 0, tokens: &prompt }];
        let out = target.forward(&mut cache, &rows, &drafter.config().target_layer_ids).unwrap();
        let mut context = drafter.new_context(1, prompt.len() + block.len()).unwrap();
        let features = drafter.feature_rows(&out.features.unwrap()).unwrap();
        let next: Vec<u32> = prompt[1..].iter().chain(&block[..1]).copied().collect();
        let mut hidden = drafter.extend_context(&mut context, &features, &next, &[(0, prompt.len())]).unwrap();
        for ahead in 0..block.len() - 1 {
            if ahead > 0 {
                hidden = drafter.draft_rows(&context, &hidden, &block[ahead..=ahead], &[0], ahead - 1).unwrap();
            }
            let got = target.lm_head().forward(&drafter.head_rows(&hidden).unwrap()).unwrap();
            let got: Vec<f32> = got.flatten_all().unwrap().to_vec1().unwrap();
            let expected: Vec<f32> = expected.get(ahead).unwrap().to_vec1().unwrap();
            for (got, expected) in got.iter().zip(&expected) {
                assert!((got - expected).abs() <= 1e-4 + 1e-4 * expected.abs(), "token {ahead}: {got}, {expected}");
                checked += 1;
            }
        }
    }
    assert!(checked > 0);
}

fn prompts(vocab: usize) -> Vec<Vec<u32>> {
    (0..12u32).map(|i| (0..3 + i % 5).map(|j| (i * 37 + j * 11 + 9) % vocab as u32).collect()).collect()
}

fn costs(seconds: &[f64]) -> StepCosts {
    let entries = seconds.iter().enumerate().map(|(i, &seconds)| StepCost { rows: i + 1, seconds });
    StepCosts::new(entries.collect()).unwrap()
}

#[test]
fn speculation_batching_and_resting_change_no_token() {
    let target = target();
    let drafter = drafter(&target);
    for temperature in [0.0, 0.8] {
        let requests = || -> Vec<Request> {
            let with_budget = |(i, prompt): (usize, Vec<u32>)| {
                let mut request = request(i as u64, prompt, 20 + 15 * (i % 3));
                request.sampling.temperature = temperature;
                request.stop_ids = vec![2, 17].into();
                request
            };
            prompts(target.config().vocab_size).into_iter().enumerate().map(with_budget).collect()
        };
        let outputs = |engine: Engine<'_>| -> Vec<Vec<u32>> {
            run(engine, requests()).into_iter().map(|done| done.output).collect()
        };
        let eagle3 = |slots| -> Box<dyn Proposer> { drafter.proposer(&target, slots, 64).unwrap() };
        let alone = outputs(Engine::new(&target, eagle3(1), 1, 64).unwrap());
        assert_eq!(alone, outputs(Engine::new(&target, eagle3(5), 5, 64).unwrap()), "batched at {temperature}");
        if temperature == 0.0 {
            assert_eq!(alone, outputs(Engine::new(&target, Box::new(NoProposer), 5, 64).unwrap()));
            // A drafter that rests now and then gets what it missed in one piece.
            for table in [&[1.0, 1.001, 1.002][..], &[1.0, 1.9, 2.9, 3.9], &[1.0, 1.5, 1.5, 1.5, 1.5, 1.5, 4.0]] {
                let lookup = || Box::new(NgramProposer::new(4, 6));
                for engine in [
                    Engine::new(&target, eagle3(3), 3, 64).unwrap(),
                    Engine::hybrid(&target, lookup(), eagle3(3), 3, 64).unwrap(),
                ] {
                    assert_eq!(alone, outputs(engine.adapt(Adaptive::fixed(costs(table), 0.1))), "{table:?}");
                }
            }
        }
    }
}

/// A drafted stop token ends a proposal, and only there.
#[test]
fn proposals_end_behind_a_stop_token() {
    let target = target();
    let drafter = drafter(&target);
    let requests = |stop_ids: &[u32]| -> Vec<Request> {
        let with_stops = |(i, prompt): (usize, Vec<u32>)| {
            let mut request = request(i as u64, prompt, 30);
            request.stop_ids = stop_ids.into();
            request
        };
        prompts(target.config().vocab_size).into_iter().enumerate().map(with_stops).collect()
    };
    let decode = |stop_ids: &[u32]| {
        let engine = Engine::new(&target, drafter.proposer(&target, 4, 48).unwrap(), 4, 48).unwrap();
        run(engine, requests(stop_ids))
    };
    // Tokens that are drafted often.
    let mut counts = BTreeMap::<u32, usize>::new();
    for token in decode(&[]).iter().flat_map(|done| &done.rounds).flat_map(|round| &round.block) {
        *counts.entry(*token).or_default() += 1;
    }
    let mut common: Vec<u32> = counts.keys().copied().collect();
    common.sort_by_key(|token| std::cmp::Reverse(counts[token]));
    let stops = &common[..4];
    let mut ended = 0;
    for done in decode(stops) {
        let full = |i: usize| {
            let before: usize = 1 + done.rounds[..i].iter().map(|round| round.committed).sum::<usize>();
            drafter.block_size().min(30 - before - 1)
        };
        for (i, round) in done.rounds.iter().enumerate() {
            let stop = round.block.iter().position(|token| stops.contains(token));
            assert_eq!(round.block.len(), stop.map_or(full(i), |at| at + 1), "round {i}: {:?}", round.block);
            ended += usize::from(stop.is_some_and(|at| at + 1 < full(i)));
        }
    }
    assert!(ended > 0, "no proposal ended early");
}

/// Two-sample chi-square, as a standard score (Wilson–Hilferty), of the tokens that the first rounds of a short answer write:
/// with Eagle3 and by plain decoding.
#[test]
fn drafting_keeps_the_distribution() {
    const ANSWERS: u64 = 6000;
    let target = target();
    let drafter = drafter(&target);
    let counts = |mut engine: Engine<'_>, seed: u64| -> BTreeMap<Vec<u32>, f64> {
        let one = |id: u64| {
            let mut request = request(id, vec![5, 9, 5, 9, 7, 5, 9], 5);
            request.seed = seed + id;
            request.sampling = SamplingParams { temperature: 4.0, top_k: 4, ..SamplingParams::default() };
            request
        };
        let mut counts = BTreeMap::new();
        for done in engine.run((0..ANSWERS).map(one), |_| Ok(())).unwrap() {
            *counts.entry(done.output[..4].to_vec()).or_insert(0.0) += 1.0;
        }
        counts
    };
    let plain = counts(Engine::new(&target, Box::new(NoProposer), 8, 16).unwrap(), 1 << 20);
    let eagle3 = || Engine::new(&target, drafter.proposer(&target, 8, 16).unwrap(), 8, 16).unwrap();
    let adaptive = || eagle3().adapt(Adaptive::fixed(costs(&[1.0, 1.1, 1.2, 1.3, 1.5, 1.8, 2.1, 2.5]), 0.05));
    for (name, found) in [("whole", counts(eagle3(), 1 << 30)), ("adaptive", counts(adaptive(), 1 << 31))] {
        let keys: BTreeSet<&Vec<u32>> = plain.keys().chain(found.keys()).collect();
        let (mut cells, mut pool) = (Vec::new(), (0.0, 0.0));
        for key in keys {
            let (l, r) = (plain.get(key).copied().unwrap_or(0.0), found.get(key).copied().unwrap_or(0.0));
            if l + r < 20.0 {
                pool = (pool.0 + l, pool.1 + r);
            } else {
                cells.push((l, r));
            }
        }
        cells.push(pool);
        let statistic: f64 = cells.iter().filter(|(l, r)| l + r > 0.0).map(|(l, r)| (l - r).powi(2) / (l + r)).sum();
        let freedom = (cells.len() - 1) as f64;
        assert!(freedom > 20.0, "{freedom} degrees of freedom");
        let spread = 2.0 / (9.0 * freedom);
        let score: f64 = ((statistic / freedom).cbrt() - (1.0 - spread)) / spread.sqrt();
        assert!(score.abs() < 3.7, "{name}: score {score}");
    }
}
