//! A drafter that fails or gives unusable numbers: every answer is that of plain decoding, and the engine says what happened.
#![expect(clippy::unwrap_used, reason = "tests fail as tests do")]

#[path = "common/requests.rs"]
mod requests;
#[path = "common/tiny.rs"]
mod tiny;
#[path = "common/tiny_drafter.rs"]
mod tiny_drafter;
#[path = "common/turns_bad.rs"]
mod turns_bad;

use candle_core::Tensor;
use deepspec_engine::{Adaptive, Engine, Finished, Request, StepCost, StepCosts};
use deepspec_models::Error as ModelError;
use deepspec_models::speculate::{
    DSparkProposer, Distribution, DraftRequest, NgramProposer, NoProposer, Proposal, Proposer, SpeculateError,
};
use deepspec_models::target::Target;
use requests::request;
use tiny::target;
use turns_bad::{Fault, TurnsBad};

fn requests(target: &Target) -> Vec<Request> {
    let vocab = target.config().vocab_size;
    let prompt = |i: usize| (0..3 + i % 5).map(|j| ((i * 37 + j * 11 + 9) % vocab) as u32).collect();
    (0..24).map(|i| request(i as u64, prompt(i), 20 + i % 11)).collect()
}

fn run(engine: &mut Engine<'_>, requests: Vec<Request>) -> Vec<Finished> {
    let mut finished = engine.run(requests, |_| Ok(())).unwrap();
    finished.sort_by_key(|done| done.request.id);
    finished
}

fn costs() -> StepCosts {
    let entries = [(1, 1.0), (8, 1.2), (48, 2.0)];
    StepCosts::new(entries.map(|(rows, seconds)| StepCost { rows, seconds }).to_vec()).unwrap()
}

#[test]
fn a_drafter_that_turns_bad_changes_no_answer_and_is_dropped() {
    let target = target();
    let drafter = tiny_drafter::drafter("decode/dspark_vanilla");
    let outputs =
        |finished: &[Finished]| -> Vec<Vec<u32>> { finished.iter().map(|done| done.output.clone()).collect() };
    let plain = outputs(&run(&mut Engine::new(&target, Box::new(NoProposer), 8, 64).unwrap(), requests(&target)));
    for fault in [Fault::Propose, Fault::Observe, Fault::Row, Fault::Confidence, Fault::Missing] {
        for good_calls in [0, 1, 6] {
            let bad = || -> Box<dyn Proposer> {
                let inner = Box::new(DSparkProposer::new(&drafter, target.lm_head(), 8, 64).unwrap());
                Box::new(TurnsBad { inner, fault, good_calls })
            };
            let engines = [
                Engine::new(&target, bad(), 8, 64).unwrap(),
                Engine::new(&target, bad(), 8, 64).unwrap().adapt(Adaptive::fixed(costs(), 0.05)),
                Engine::hybrid(&target, Box::new(NgramProposer::new(3, 5)), bad(), 8, 64).unwrap(),
            ];
            for (way, mut engine) in engines.into_iter().enumerate() {
                let finished = run(&mut engine, requests(&target));
                let name = format!("{fault:?} after {good_calls} calls, engine {way}");
                assert_eq!(outputs(&finished), plain, "{name}");
                assert!(finished.iter().all(|done| done.output.len() == done.request.max_new_tokens), "{name}");
                let faults = engine.drafter_faults().unwrap_or_else(|| panic!("{name}: no fault was noticed"));
                assert!(faults.is_dropped && faults.requests >= 3, "{name}: {faults:?}");
                assert!(faults.message().contains("`dspark`") && faults.message().contains("no longer"), "{faults:?}");
                // Once it is dropped, nothing is drafted any more.
                let before = engine.drafter_faults().cloned();
                let later = run(&mut engine, requests(&target));
                assert_eq!(outputs(&later), plain, "{name}, afterwards");
                assert!(later.iter().flat_map(|done| &done.rounds).all(|round| round.drafted == 0), "{name}");
                assert_eq!(engine.drafter_faults().cloned(), before, "{name}");
                assert_eq!(engine.free_slots(), 8, "{name}");
            }
        }
    }
}

/// Tokens that the target never writes are no fault.
#[test]
fn a_useless_drafter_changes_no_answer_and_is_kept() {
    let target = target();
    let drafter = tiny_drafter::drafter("decode/dspark_vanilla");
    let inner = Box::new(DSparkProposer::new(&drafter, target.lm_head(), 8, 64).unwrap());
    let useless = TurnsBad { inner, fault: Fault::Useless, good_calls: 0 };
    let mut engine = Engine::new(&target, Box::new(useless), 8, 64).unwrap();
    let found = run(&mut engine, requests(&target));
    let plain = run(&mut Engine::new(&target, Box::new(NoProposer), 8, 64).unwrap(), requests(&target));
    let (mut verified, mut accepted) = (0, 0);
    for (done, plain) in found.iter().zip(&plain) {
        assert_eq!(done.output, plain.output);
        verified += done.rounds.iter().map(|round| round.proposed).sum::<usize>();
        accepted += done.rounds.iter().map(|round| round.accepted).sum::<usize>();
    }
    assert!(verified > 500 && 20 * accepted < verified, "{accepted} of {verified} accepted");
    assert_eq!(engine.drafter_faults(), None);
}

/// The request in which it failed goes on without it; others keep it.
#[test]
fn a_fault_in_one_request_leaves_the_drafter_to_the_others() {
    /// Fails for sequences with a certain first token.
    struct Poisoned<'a>(Box<dyn Proposer + 'a>, u32);
    impl Proposer for Poisoned<'_> {
        fn name(&self) -> &'static str {
            self.0.name()
        }
        fn block_size(&self) -> usize {
            self.0.block_size()
        }
        fn feature_layers(&self) -> &[i32] {
            self.0.feature_layers()
        }
        fn observe(&mut self, features: &Tensor, commits: &[(usize, usize)]) -> Result<(), ModelError> {
            self.0.observe(features, commits)
        }
        fn propose(&mut self, requests: &[DraftRequest<'_>]) -> Result<Vec<Proposal>, ModelError> {
            let mut proposals = self.0.propose(requests)?;
            for (request, proposal) in requests.iter().zip(&mut proposals).filter(|(r, _)| r.tokens[0] == self.1) {
                assert_eq!(request.round, 0, "it is asked again");
                *proposal = Proposal { fault: Some(SpeculateError::NanLogit { token: 3 }), ..Proposal::default() };
            }
            Ok(proposals)
        }
        fn release(&mut self, slot: usize) {
            self.0.release(slot);
        }
    }
    let target = target();
    let drafter = tiny_drafter::drafter("decode/dspark_vanilla");
    let requests = requests(&target);
    let poisoned = requests[4].prompt[0];
    let inner = Box::new(DSparkProposer::new(&drafter, target.lm_head(), 6, 64).unwrap());
    let mut engine = Engine::new(&target, Box::new(Poisoned(inner, poisoned)), 6, 64).unwrap();
    let finished = run(&mut engine, requests.clone());
    let plain = run(&mut Engine::new(&target, Box::new(NoProposer), 6, 64).unwrap(), requests);
    let mut bad = 0;
    for (done, plain) in finished.iter().zip(&plain) {
        assert_eq!(done.output, plain.output);
        let drafted = done.rounds.iter().filter(|round| round.drafted > 0).count();
        if done.request.prompt[0] == poisoned {
            bad += 1;
            assert_eq!(drafted, 1, "only before it was dropped");
        } else {
            assert!(drafted > 2, "the drafter is lost to request {}", done.request.id);
        }
    }
    let faults = engine.drafter_faults().unwrap();
    assert_eq!((faults.requests, faults.is_dropped), (bad, false));
    assert!((1..3).contains(&bad));
}

/// A target that gives no distribution ends the sequence that asked for it, and only that one.
#[test]
fn a_sequence_that_the_target_cannot_go_on_with_ends_alone() {
    /// Proposes a token that is not in the vocabulary, after the target's pass has been fed it.
    struct Foreign(u32);
    impl Proposer for Foreign {
        fn name(&self) -> &'static str {
            "foreign"
        }
        fn block_size(&self) -> usize {
            1
        }
        fn propose(&mut self, requests: &[DraftRequest<'_>]) -> Result<Vec<Proposal>, ModelError> {
            let propose = |request: &DraftRequest<'_>| {
                let token = if request.seed == 7 + 2 { self.0 } else { request.tokens[0] };
                let distributions = vec![Distribution::OneHot(token)];
                Proposal { tokens: vec![token], distributions, ..Proposal::default() }
            };
            Ok(requests.iter().map(propose).collect())
        }
    }
    let target = target();
    let all: Vec<Request> = requests(&target).into_iter().take(6).collect();
    let plain = run(&mut Engine::new(&target, Box::new(NoProposer), 6, 64).unwrap(), all.clone());
    let mut engine = Engine::new(&target, Box::new(Foreign(u32::MAX)), 6, 64).unwrap();
    for request in all {
        engine.submit(request).unwrap();
    }
    let (mut finished, mut failed) = (Vec::new(), Vec::new());
    while !engine.is_idle() {
        for update in engine.step().unwrap() {
            failed.extend(update.failed.map(|error| (update.id, error.to_string())));
            finished.extend(update.finished);
        }
    }
    assert_eq!(failed.len(), 1, "{failed:?}");
    assert_eq!(failed[0].0, 2);
    assert!(failed[0].1.contains("outside the vocabulary"), "{failed:?}");
    assert_eq!((finished.len(), engine.free_slots()), (5, 6));
    for done in finished {
        assert_eq!(done.output, plain[done.request.id as usize].output);
    }
    let mut foreign = request(9, vec![1, u32::MAX], 4);
    foreign.seed = 1;
    assert!(engine.submit(foreign).unwrap_err().to_string().contains("outside the vocabulary"));
}
