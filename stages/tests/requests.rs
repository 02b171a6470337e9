//! What requests may ask of the engine, and that they get it whatever speculation does: penalties, biases, stop texts and log
//! probabilities as in plain decoding, isolation from what else is in the batch, and the target's distribution under every
//! schedule.
#![expect(clippy::unwrap_used, reason = "tests fail as tests do")]

mod common;
#[path = "common/requests.rs"]
mod common_requests;
#[path = "common/tiny.rs"]
mod tiny;
#[path = "common/tiny_drafter.rs"]
mod tiny_drafter;

use std::collections::{BTreeMap, BTreeSet};

use deepspec_engine::{
    Adaptive, Allocation, Engine, FinishReason, Finished, Request, Schedule, Sources, StepCost, StepCosts, TextOptions,
    Update,
};
use deepspec_models::draft::DSpark;
use deepspec_models::speculate::{Adjustments, CounterRng, DSparkProposer, Proposer, SamplingParams, Stream};
use deepspec_models::target::Target;

use common_requests::request;
use tiny_drafter::drafter;

const CAPACITY: usize = 160;

/// Costs of passes of 1, 9, 17, … rows, and of those between.
fn costs(seconds: [f64; 6]) -> StepCosts {
    StepCosts::new((0..6).map(|i| StepCost { rows: 8 * i + 1, seconds: seconds[i] }).collect()).unwrap()
}

const STEEP: [f64; 6] = [1.0, 1.35, 1.7, 2.05, 2.4, 2.8];

/// Engines of every schedule and source.
fn engines<'a>(target: &'a Target, drafter: &'a DSpark, slots: usize) -> Vec<(String, Engine<'a>)> {
    let mut engines = Vec::new();
    for schedule in
        [Schedule::Scheduled, Schedule::EarlyStop, Schedule::Threshold(0.4), Schedule::Fixed(2), Schedule::Plain]
    {
        for sources in [Sources::Ngram, Sources::Draft, Sources::Hybrid] {
            let proposer = DSparkProposer::new(drafter, target.lm_head(), slots, CAPACITY).unwrap();
            let proposer: Option<Box<dyn Proposer>> = Some(Box::new(proposer));
            let sizes = (slots, CAPACITY);
            let engine = Engine::scheduled(target, schedule, sources, proposer, Some(costs(STEEP)), sizes).unwrap();
            engines.push((format!("{schedule} {sources:?}"), engine));
        }
    }
    engines
}

/// News of all requests, joined, in the order of their ids.
fn run(engine: &mut Engine<'_>, requests: Vec<Request>) -> Vec<(Update, Finished)> {
    let mut joined: BTreeMap<u64, Update> = BTreeMap::new();
    let done = engine.run(requests, |update| {
        let known = joined.entry(update.id).or_insert_with(|| Update {
            id: update.id,
            tokens: Vec::new(),
            text: String::new(),
            reasoning: String::new(),
            logprobs: Vec::new(),
            round: None,
            finished: None,
            failed: None,
        });
        known.tokens.extend(&update.tokens);
        known.text.push_str(&update.text);
        known.logprobs.extend(update.logprobs.clone());
        Ok(())
    });
    let mut done = done.unwrap();
    done.sort_by_key(|done| done.request.id);
    joined.into_values().zip(done).collect()
}

/// Prompts with repeats, so that the lookup has something to find.
fn prompt(case: u32) -> Vec<u32> {
    (0..4 + case % 5).flat_map(|i| [(case * 37 + i % 2 * 11 + 9) % 250, 65 + i % 3]).collect()
}

/// Frequency penalties of both signs, with and without drafter.
#[test]
fn penalties_and_biases_act_as_in_plain_decoding() {
    let (target, drafter) = (tiny::target(), drafter("decode/dspark_vanilla"));
    let none = Adjustments::default;
    let settings = [
        none(),
        // The tiny target is very sure of what it says.
        Adjustments { frequency_penalty: 20.0, ..none() },
        Adjustments { frequency_penalty: -20.0, ..none() },
        Adjustments { presence_penalty: 15.0, ..none() },
        Adjustments { repetition_penalty: 4.0, ..none() },
        Adjustments { logit_bias: vec![(5, 30.0), (17, -100.0)], frequency_penalty: 3.0, ..none() },
    ];
    let requests = || -> Vec<Request> {
        (0..12_u32)
            .map(|i| {
                let mut request = request(u64::from(i), prompt(i / 6), 40);
                request.options.adjustments = settings[i as usize % 6].clone();
                request
            })
            .collect()
    };
    let plain = Engine::scheduled(&target, Schedule::Plain, Sources::Ngram, None, None, (1, CAPACITY));
    let plain = run(&mut plain.unwrap(), requests());
    let distinct: BTreeSet<&Vec<u32>> = plain[..6].iter().map(|(_, done)| &done.output).collect();
    assert!(distinct.len() >= 4, "the settings hardly change anything: {distinct:?}");
    let repeats = |done: &Finished| done.output.len() - done.output.iter().collect::<BTreeSet<_>>().len();
    assert!(repeats(&plain[2].1) > repeats(&plain[1].1), "a negative penalty favours repeats");
    let mut accepted = 0;
    for (name, mut engine) in engines(&target, &drafter, 4) {
        for ((_, done), (_, expected)) in run(&mut engine, requests()).into_iter().zip(&plain) {
            assert_eq!(done.output, expected.output, "{name}: {:?}", done.request.options.adjustments);
            accepted += done.rounds.iter().map(|round| round.accepted).sum::<usize>();
        }
    }
    assert!(accepted > 100, "{accepted} accepted tokens prove little");
}

#[test]
fn logprobs_are_those_of_plain_decoding() {
    let (target, drafter) = (tiny::target(), drafter("decode/dspark_vanilla"));
    let requests = || -> Vec<Request> {
        (0..6_u32)
            .map(|i| {
                let mut request = request(u64::from(i), prompt(i), 30);
                request.options.logprobs = Some(i as usize % 4);
                // They are the model's own, whatever else changes the choice.
                request.options.adjustments.frequency_penalty = 0.5 * (i % 2) as f32;
                request
            })
            .collect()
    };
    let plain = Engine::scheduled(&target, Schedule::Plain, Sources::Ngram, None, None, (1, CAPACITY));
    let plain = run(&mut plain.unwrap(), requests());
    for (news, done) in &plain {
        assert_eq!(news.logprobs.len(), done.output.len());
        for (found, &token) in news.logprobs.iter().zip(&done.output) {
            assert_eq!((found.token, found.top.len()), (token, done.request.options.logprobs.unwrap()));
            let is_greedy = done.request.options.adjustments.is_none();
            assert!(found.logprob <= 0.0 && (!is_greedy || found.top.first().is_none_or(|best| best.0 == token)));
        }
    }
    for (name, mut engine) in engines(&target, &drafter, 4) {
        for ((news, _), (expected, _)) in run(&mut engine, requests()).iter().zip(&plain) {
            assert_eq!(news.logprobs, expected.logprobs, "{name}");
        }
    }
}

#[test]
fn stop_texts_end_an_answer_where_they_do_in_plain_decoding() {
    let (target, drafter) = (tiny::target(), drafter("decode/dspark_vanilla"));
    let template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>{% endfor %}\
        {% if add_generation_prompt %}assistant: {% endif %}";
    let renderer = common::byte_renderer(template, &["<|end|>"], "<|end|>", &[]);
    let tokenizer = renderer.tokenizer().clone();
    let with_stop = |id: u64, case: u32, stop: Vec<String>| {
        let mut request = request(id, prompt(case), 50);
        request.options.text = Some(TextOptions { tokenizer: tokenizer.clone(), stop: stop.into(), reasoning: None });
        request
    };
    let plain = || Engine::scheduled(&target, Schedule::Plain, Sources::Ngram, None, None, (1, CAPACITY)).unwrap();
    let free = run(&mut plain(), (0..6).map(|i| with_stop(u64::from(i), i, Vec::new())).collect());
    // Stop texts of two and three characters from the middle of each answer, and one that is never written.
    let stops: Vec<String> = free
        .iter()
        .enumerate()
        .map(|(i, (news, _))| news.text.chars().skip(15 + i).take(2 + i % 2).collect::<String>())
        .collect();
    assert!(stops.iter().all(|stop| !stop.is_empty()));
    let requests = || -> Vec<Request> {
        (0..6_u32)
            .map(|i| with_stop(u64::from(i), i, vec!["never written".into(), stops[i as usize].clone()]))
            .collect()
    };
    let expected = run(&mut plain(), requests());
    for (((news, done), (whole, _)), stop) in expected.iter().zip(&free).zip(&stops) {
        assert_eq!((done.reason, done.stop_text.as_ref()), (FinishReason::Stop, Some(stop)));
        assert_eq!(news.text, whole.text[..whole.text.find(stop.as_str()).unwrap()]);
        assert!(done.output.len() < 50 && news.tokens == done.output);
    }
    for (name, mut engine) in engines(&target, &drafter, 3) {
        for ((news, done), (known, plain)) in run(&mut engine, requests()).into_iter().zip(&expected) {
            assert_eq!((news.text, done.output), (known.text.clone(), plain.output.clone()), "{name}");
            assert_eq!((done.reason, &done.stop_text), (plain.reason, &plain.stop_text), "{name}");
        }
    }
}

/// Long requests and short ones on one slot, filled to the last token that it holds.
#[test]
fn slots_are_used_again_and_to_their_end() {
    let (target, drafter) = (tiny::target(), drafter("decode/dspark_vanilla"));
    let requests = |engine_capacity: usize| -> Vec<Request> {
        let lengths = [engine_capacity - 1, 2, engine_capacity - 2, 5, engine_capacity - 3, 1, engine_capacity - 9];
        let of_length = |(id, &length): (usize, &usize)| {
            request(id as u64, prompt(3).into_iter().cycle().take(length).collect(), engine_capacity - length)
        };
        lengths.iter().enumerate().map(of_length).collect()
    };
    let fresh: Vec<Vec<u32>> = requests(40)
        .into_iter()
        .map(|request| {
            let engine = Engine::scheduled(&target, Schedule::Plain, Sources::Ngram, None, None, (1, 40));
            engine.unwrap().run([request], |_| Ok(())).unwrap().remove(0).output
        })
        .collect();
    for length in [1, 2, 4, 5] {
        for sources in [Sources::Draft, Sources::Hybrid] {
            let proposer = Box::new(DSparkProposer::new(&drafter, target.lm_head(), 1, 40).unwrap());
            let mut engine =
                Engine::scheduled(&target, Schedule::Fixed(length), sources, Some(proposer), None, (1, 40)).unwrap();
            for _ in 0..2 {
                let outputs: Vec<_> = run(&mut engine, requests(40)).into_iter().map(|(_, done)| done.output).collect();
                assert_eq!(outputs, fresh, "{sources:?} of at most {length}");
            }
        }
    }
}

/// Nothing is scheduled by a table that is not there.
#[test]
fn a_schedule_without_costs_or_drafter_is_refused() {
    let target = tiny::target();
    let engine = |schedule, sources| Engine::scheduled(&target, schedule, sources, None, None, (1, 16)).map(|_| ());
    assert!(engine(Schedule::Scheduled, Sources::Ngram).unwrap_err().to_string().contains("costs of passes"));
    assert!(engine(Schedule::EarlyStop, Sources::Ngram).is_err());
    assert!(engine(Schedule::Fixed(2), Sources::Hybrid).unwrap_err().to_string().contains("drafter"));
    assert!(engine(Schedule::Fixed(2), Sources::Ngram).is_ok());
}

/// Random requests come, go and are cancelled at random; each that is answered is answered as if it were alone.
#[test]
fn no_request_sees_another() {
    const INTERLEAVINGS: u64 = 200;
    let (target, drafter) = (tiny::target(), drafter("decode/dspark_vanilla"));
    let random = |case: u64, id: u64| -> Request {
        let draws = CounterRng::new(case % 20, Stream::Init, id);
        let tokens = 1 + draws.below(0, 30);
        let prompt = (0..tokens).map(|i| draws.below(10 + i % 12, 250) as u32).collect();
        let mut request = request(id, prompt, 1 + draws.below(2, 40) as usize);
        request.seed = draws.u64_at(50);
        if draws.below(3, 3) > 0 {
            request.sampling = SamplingParams {
                temperature: 0.5 + draws.uniform_f64(60),
                top_k: draws.below(4, 3) as usize * 8,
                top_p: 0.8 + 0.2 * draws.uniform_f64(61),
                min_p: 0.0,
            };
            request.options.is_reproducible = true;
        }
        if draws.below(5, 3) == 0 {
            request.options.adjustments.presence_penalty = 1.0;
        }
        request.stop_ids = vec![draws.below(6, 300) as u32].into();
        request
    };
    let mut solo: BTreeMap<(usize, u64, u64), Vec<u32>> = BTreeMap::new();
    let (mut answered, mut cancelled) = (0, 0);
    let mut alone = engines(&target, &drafter, 1);
    let mut crowds: Vec<Vec<(String, Engine<'_>)>> = [2, 3, 5].map(|slots| engines(&target, &drafter, slots)).into();
    for case in 0..INTERLEAVINGS {
        let draws = CounterRng::new(case, Stream::Shuffle, 0);
        // Engines are used again and again: nothing of an earlier interleaving may be left in them.
        let kind = (case % alone.len() as u64) as usize;
        let (name, engine) = &mut crowds[draws.below(1, 3) as usize][kind];
        let count = 2 + draws.below(2, 15);
        let (mut next, mut step) = (0, 100);
        let mut gone = BTreeSet::new();
        let mut done = Vec::new();
        while next < count || !engine.is_idle() {
            step += 3;
            if next < count && (engine.is_idle() || draws.below(step, 3) == 0) {
                engine.submit(random(case, next)).unwrap();
                next += 1;
            }
            if next > 0 && draws.below(step + 1, 12) == 0 {
                let id = draws.below(step + 2, next);
                if engine.cancel(id) {
                    gone.insert(id);
                }
            }
            done.extend(engine.step().unwrap().into_iter().filter_map(|update| update.finished));
        }
        assert_eq!(done.len() + gone.len(), count as usize, "{name}");
        cancelled += gone.len();
        for done in done {
            answered += 1;
            let id = done.request.id;
            let expected = solo
                .entry((kind, case % 20, id))
                .or_insert_with(|| alone[kind].1.run([random(case, id)], |_| Ok(())).unwrap().remove(0).output);
            assert_eq!(&done.output, expected, "{name}, case {case}, request {id}");
        }
        assert_eq!((engine.active(), engine.waiting(), engine.free_slots()), (0, 0, engine.slots()));
    }
    assert!(answered > 1000 && cancelled > 100, "{answered} answered, {cancelled} cancelled");
}

/// How often each answer was given.
type Counts = BTreeMap<Vec<u32>, f64>;

/// Two-sample chi-square as a standard score (Wilson–Hilferty); both samples are of one size.
fn two_sample_score(left: &Counts, right: &Counts) -> f64 {
    let keys: BTreeSet<&Vec<u32>> = left.keys().chain(right.keys()).collect();
    let (mut cells, mut pool) = (Vec::new(), (0.0, 0.0));
    for key in keys {
        let (l, r) = (left.get(key).copied().unwrap_or(0.0), right.get(key).copied().unwrap_or(0.0));
        if l + r < 20.0 { pool = (pool.0 + l, pool.1 + r) } else { cells.push((l, r)) }
    }
    cells.push(pool);
    let statistic: f64 = cells.iter().filter(|(l, r)| l + r > 0.0).map(|(l, r)| (l - r).powi(2) / (l + r)).sum();
    let freedom = (cells.len() - 1) as f64;
    assert!(freedom > 20.0, "{freedom} degrees of freedom");
    let spread = 2.0 / (9.0 * freedom);
    ((statistic / freedom).cbrt() - (1.0 - spread)) / spread.sqrt()
}

#[test]
fn scheduling_a_batch_keeps_the_distribution() {
    const ANSWERS: u64 = 6000;
    let (target, drafter) = (tiny::target(), drafter("decode/dspark_vanilla"));
    let requests = |seed: u64, penalty: f32| -> Vec<Request> {
        let one = |id: u64| {
            let mut request = request(id, vec![5, 9, 5, 9, 7, 5, 9], 5);
            request.seed = seed + id;
            request.sampling = SamplingParams { temperature: 4.0, top_k: 4, ..SamplingParams::default() };
            request.options.adjustments.presence_penalty = penalty;
            request
        };
        (0..ANSWERS).map(one).collect()
    };
    let counts = |mut engine: Engine<'_>, requests: Vec<Request>| -> (Counts, BTreeSet<Vec<usize>>) {
        let (mut counts, mut lengths) = (BTreeMap::new(), BTreeSet::new());
        for done in engine.run(requests, |_| Ok(())).unwrap() {
            *counts.entry(done.output[..4].to_vec()).or_insert(0.0) += 1.0;
            lengths.insert(done.rounds.iter().map(|round| round.proposed).collect());
        }
        (counts, lengths)
    };
    let plain = |penalty: f32| {
        let engine = Engine::scheduled(&target, Schedule::Plain, Sources::Ngram, None, None, (8, 16)).unwrap();
        counts(engine, requests(1 << 20, penalty)).0
    };
    // Curves on which the choice is a close thing.
    let curves = [STEEP, [1.0, 1.6, 1.65, 1.7, 1.75, 1.8]];
    for (penalty, allocation, seconds) in [
        (0.0, Allocation::Budget, curves[0]),
        (0.0, Allocation::EarlyStop, curves[0]),
        (2.0, Allocation::Budget, curves[1]),
    ] {
        let proposer = DSparkProposer::new(&drafter, target.lm_head(), 8, 16).unwrap();
        let engine = Engine::new(&target, Box::new(proposer), 8, 16).unwrap();
        let engine = engine.adapt(Adaptive::fixed(costs(seconds), 0.0).allocate(allocation));
        let (found, lengths) = counts(engine, requests(1 << 30, penalty));
        assert!(lengths.len() > 8, "{allocation:?}: hardly a choice, {lengths:?}");
        let score = two_sample_score(&plain(penalty), &found);
        assert!(score.abs() < 3.7, "{allocation:?}, penalty {penalty}: score {score}");
    }
}
