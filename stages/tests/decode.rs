//! The engine against the decode traces of the Python reference, and its promises: speculation changes no token, a
//! sequence does not depend on its batch.
#![expect(clippy::unwrap_used, reason = "tests fail as tests do")]

#[path = "common/requests.rs"]
mod requests;
#[path = "common/tiny.rs"]
mod tiny;
#[path = "common/tiny_drafter.rs"]
mod tiny_drafter;
#[path = "common/traces.rs"]
mod traces;

use std::collections::{BTreeMap, BTreeSet};

use deepspec_engine::{Adaptive, Engine, Finished, Request, StepCost, StepCosts};
use deepspec_models::linear::Precision;
use deepspec_models::speculate::{DSparkProposer, NgramProposer, NoProposer, Proposer, SamplingParams};
use deepspec_models::target::Target;
use serde_json::Value;

use requests::request;
use tiny::{load_target, target, target_in};
use tiny_drafter::{drafter, load_drafter};
use traces::{golden, numbers, traces};

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

#[test]
fn golden_decode_traces_dspark_vanilla() {
    check_traces("decode/dspark_vanilla");
}

#[test]
fn golden_decode_traces_dspark_rnn() {
    check_traces("decode/dspark_rnn");
}

#[test]
fn golden_decode_traces_dflash() {
    check_traces("decode/dflash");
}

/// Every case of a set of traces: tokens, blocks, lengths and confidences of each round.
fn check_traces(set: &str) {
    let (target, drafter) = (load_target(&golden("target"), Precision::F32), load_drafter(&golden(set)));
    let traces = traces(set);
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
            // A set without a confidence head has none.
            let logits = theirs["confidence_logits"].as_array().map_or(&[][..], Vec::as_slice);
            assert_eq!(drafter.confidence_head().is_some(), !logits.is_empty(), "{name} round {i}");
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
        let target = target_in(precision);
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

/// Costs of passes of 1, 2, … rows.
fn costs(seconds: &[f64]) -> StepCosts {
    let entries = seconds.iter().enumerate().map(|(i, &seconds)| StepCost { rows: i + 1, seconds });
    StepCosts::new(entries.collect()).unwrap()
}

/// Tables that make every choice: rows nearly free, rows as dear as steps, only long blocks worthwhile, drafts free or dear.
fn choosers(target: &Target) -> Vec<(&'static str, Adaptive)> {
    let jagged = [1.0, 1.5, 1.5, 1.5, 1.5, 1.5, 4.0];
    vec![
        ("measured", Adaptive::new(StepCosts::measure(target, 6, 1).unwrap())),
        ("free rows", Adaptive::fixed(costs(&[1.0, 1.001, 1.002]), 0.0)),
        ("dear rows", Adaptive::fixed(costs(&[1.0, 1.9, 2.9, 3.9]), 0.0)),
        ("jagged", Adaptive::fixed(costs(&jagged), 0.1)),
        ("dear drafts", Adaptive::fixed(costs(&[1.0, 1.1]), 3.0)),
    ]
}

#[test]
fn choosing_lengths_changes_no_token() {
    let drafter = drafter("decode/dspark_vanilla");
    for precision in [Precision::F32, Precision::Q8, Precision::Q4] {
        let target = target_in(precision);
        let vocab = target.config().vocab_size;
        let requests = || -> Vec<Request> {
            let with_budget = |(i, p): (usize, Vec<u32>)| request(i as u64, p, 40 + 30 * (i % 3));
            prompts(vocab).into_iter().enumerate().map(with_budget).collect()
        };
        let outputs = |engine: &mut Engine<'_>| -> Vec<Finished> {
            let mut finished = engine.run(requests(), |_| Ok(())).unwrap();
            finished.sort_by_key(|done| done.request.id);
            finished
        };
        let plain = outputs(&mut Engine::new(&target, Box::new(NoProposer), 4, 160).unwrap());
        let (mut lengths, mut fallbacks) = (BTreeSet::new(), 0);
        for (name, adaptive) in choosers(&target) {
            for slots in [1, 4] {
                let lookup = || Box::new(NgramProposer::new(4, 6));
                let dspark = || Box::new(DSparkProposer::new(&drafter, target.lm_head(), slots, 160).unwrap());
                for engine in [
                    Engine::new(&target, lookup(), slots, 160).unwrap(),
                    Engine::new(&target, dspark(), slots, 160).unwrap(),
                    Engine::hybrid(&target, lookup(), dspark(), slots, 160).unwrap(),
                ] {
                    let mut engine = engine.adapt(adaptive.clone());
                    for (done, plain) in outputs(&mut engine).into_iter().zip(&plain) {
                        let proposer = engine.proposer_name();
                        assert_eq!(done.output, plain.output, "{proposer}, {name}, {slots} slots, {precision:?}");
                        let stats = done.stats();
                        fallbacks += stats.fallback_rounds;
                        assert!(stats.avg_verify_len <= stats.avg_draft_len, "{stats:?}");
                        lengths.extend(done.rounds.iter().map(|round| (proposer, round.proposed)));
                    }
                }
            }
        }
        for proposer in ["ngram", "dspark", "hybrid"] {
            let met: Vec<usize> = lengths.iter().filter(|(name, _)| *name == proposer).map(|(_, l)| *l).collect();
            assert!(met.contains(&0) && met.len() >= 4, "{proposer} verified lengths {met:?} in {precision:?}");
        }
        assert!(fallbacks > 0, "the drafter was never left out");
    }
}

#[test]
fn a_run_with_fixed_costs_can_be_repeated() {
    let (target, drafter) = (target(), drafter("decode/dspark_vanilla"));
    let rounds = || {
        let lookup = Box::new(NgramProposer::new(4, 6));
        let dspark = Box::new(DSparkProposer::new(&drafter, target.lm_head(), 3, 160).unwrap());
        let engine = Engine::hybrid(&target, lookup, dspark, 3, 160).unwrap();
        let mut engine = engine.adapt(Adaptive::fixed(costs(&[1.0, 1.2, 1.3, 1.6]), 0.2));
        let mut all: Vec<Request> = prompts(target.config().vocab_size)
            .into_iter()
            .enumerate()
            .map(|(i, p)| request(i as u64, p, 60))
            .collect();
        for request in &mut all {
            request.sampling.temperature = 0.7;
        }
        let finished = engine.run(all, |_| Ok(())).unwrap();
        finished.into_iter().map(|done| (done.output, done.rounds)).collect::<Vec<_>>()
    };
    assert_eq!(rounds(), rounds());
}

/// Two-sample chi-square, as a standard score (Wilson–Hilferty), of the tokens that the first rounds of a short answer write:
/// with lengths chosen by confidences at hostile costs, and by plain decoding.
#[test]
fn choosing_lengths_keeps_the_distribution() {
    const ANSWERS: u64 = 6000;
    let (target, drafter) = (target(), drafter("decode/dspark_vanilla"));
    let requests = |seed: u64| -> Vec<Request> {
        let one = |id: u64| {
            // One token from the prompt, four from rounds; the text holds repeats for the lookup.
            let mut request = request(id, vec![5, 9, 5, 9, 7, 5, 9], 5);
            request.seed = seed + id;
            request.sampling = SamplingParams { temperature: 4.0, top_k: 4, ..SamplingParams::default() };
            request
        };
        (0..ANSWERS).map(one).collect()
    };
    let counts = |mut engine: Engine<'_>, seed: u64| -> (Counts, BTreeSet<(usize, usize)>) {
        let (mut counts, mut lengths) = (BTreeMap::new(), BTreeSet::new());
        for done in engine.run(requests(seed), |_| Ok(())).unwrap() {
            *counts.entry(done.output[..4].to_vec()).or_insert(0.0) += 1.0;
            lengths.extend(done.rounds.iter().map(|round| (round.block.len(), round.proposed)));
        }
        (counts, lengths)
    };
    let (plain, _) = counts(Engine::new(&target, Box::new(NoProposer), 8, 16).unwrap(), 1 << 20);
    let dspark = || Box::new(DSparkProposer::new(&drafter, target.lm_head(), 8, 16).unwrap());
    for (name, seconds, draft_s) in
        [("steep", [1.0, 1.35, 1.7, 2.05, 2.4], 0.0), ("jagged", [1.0, 1.6, 1.65, 1.7, 1.75], 0.05)]
    {
        for is_hybrid in [false, true] {
            let engine = if is_hybrid {
                Engine::hybrid(&target, Box::new(NgramProposer::new(2, 3)), dspark(), 8, 16)
            } else {
                Engine::new(&target, dspark(), 8, 16)
            };
            let seconds = StepCosts::new((0..5).map(|i| StepCost { rows: 8 * i + 1, seconds: seconds[i] }).collect());
            let adaptive = Adaptive::fixed(seconds.unwrap(), draft_s);
            let (found, lengths) = counts(engine.unwrap().adapt(adaptive), 1 << 30);
            assert!(lengths.len() > 4, "{name}: hardly a choice, {lengths:?}");
            let score = two_sample_score(&plain, &found);
            assert!(score.abs() < 3.7, "{name}, hybrid {is_hybrid}: score {score}");
        }
    }
}

/// How often each answer was given.
type Counts = BTreeMap<Vec<u32>, f64>;

fn two_sample_score(left: &Counts, right: &Counts) -> f64 {
    let keys: BTreeSet<&Vec<u32>> = left.keys().chain(right.keys()).collect();
    let (mut cells, mut pool) = (Vec::new(), (0.0, 0.0));
    for key in keys {
        let (l, r) = (left.get(key).copied().unwrap_or(0.0), right.get(key).copied().unwrap_or(0.0));
        if l + r < 20.0 {
            pool = (pool.0 + l, pool.1 + r);
        } else {
            cells.push((l, r));
        }
    }
    cells.push(pool);
    // Both samples are of one size.
    let statistic: f64 = cells.iter().filter(|(l, r)| l + r > 0.0).map(|(l, r)| (l - r).powi(2) / (l + r)).sum();
    let freedom = (cells.len() - 1) as f64;
    assert!(freedom > 20.0, "{freedom} degrees of freedom");
    let spread = 2.0 / (9.0 * freedom);
    ((statistic / freedom).cbrt() - (1.0 - spread)) / spread.sqrt()
}

#[test]
fn cancelled_slots_leave_nothing_behind() {
    let (target, drafter) = (target(), drafter("decode/dspark_vanilla"));
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
    let target = target();
    let mut engine = Engine::new(&target, Box::new(NoProposer), 1, 16).unwrap();
    assert!(engine.submit(request(0, vec![1; 10], 7)).unwrap_err().to_string().contains("capacity of 16"));
    assert!(engine.submit(request(0, Vec::new(), 4)).is_err());
    let mut bad = request(0, vec![1], 4);
    bad.sampling.temperature = -1.0;
    assert!(engine.submit(bad).is_err());
    let none = engine.run(vec![request(3, vec![1, 2], 0)], |_| Ok(())).unwrap();
    assert!(none[0].output.is_empty() && none[0].rounds.is_empty());
}
