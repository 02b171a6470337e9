//! Acceptance and residuals against the reference's numbers, and chi-square tests that the emitted text has the target's
//! distribution.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Deserialize;

use super::*;

const VOCAB: usize = 16;
const BLOCK: usize = 3;
const DRAWS: usize = 200_000;

#[derive(Deserialize)]
struct Golden {
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    name: String,
    temperature: f64,
    target_logits: Vec<f32>,
    draft_logits: Vec<f32>,
    target_probs: Vec<f32>,
    draft_probs: Vec<f32>,
    accept_prob_per_token: Vec<f64>,
    residual_distribution: Vec<f32>,
    residual_ill_conditioned_use_probs_as_input: bool,
}

/// The golden folder of this crate, or the one that `DEEPSPEC_GOLDEN` names.
#[expect(clippy::disallowed_methods, reason = "a test may be pointed at another set of golden files")]
fn golden_folder() -> PathBuf {
    std::env::var_os("DEEPSPEC_GOLDEN")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden"), PathBuf::from)
}

fn assert_close(case: &str, what: &str, found: &Distribution, expected: &[f32]) {
    for (token, &expected) in expected.iter().enumerate() {
        let found = found.prob(token as u32);
        assert!((found - expected).abs() <= 1e-6, "{case}: {what} of token {token} is {found}, expected {expected}");
    }
}

/// Tolerance 1e-6 absolute.
#[test]
fn golden_acceptance_and_residuals() {
    let golden: Golden = serde_json::from_slice(&fs_err::read(golden_folder().join("sampling.json")).unwrap()).unwrap();
    assert!(!golden.cases.is_empty());
    for case in &golden.cases {
        let name = &case.name;
        let params = SamplingParams { temperature: case.temperature, ..SamplingParams::default() };
        let mut target = Distribution::from_logits(&case.target_logits, &params).unwrap();
        let mut draft = Distribution::from_logits(&case.draft_logits, &params).unwrap();
        assert_close(name, "target probability", &target, &case.target_probs);
        assert_close(name, "draft probability", &draft, &case.draft_probs);
        if case.residual_ill_conditioned_use_probs_as_input {
            target = Distribution::from_probs(case.target_probs.clone()).unwrap();
            draft = Distribution::from_probs(case.draft_probs.clone()).unwrap();
        }
        for (token, &expected) in case.accept_prob_per_token.iter().enumerate() {
            let found = accept_probability(&target, &draft, token as u32);
            assert!((found - expected).abs() <= 1e-6, "{name}: acceptance of {token} is {found}, expected {expected}");
        }
        assert_close(name, "residual", &residual(&target, &draft).unwrap(), &case.residual_distribution);
    }
}

/// How the drafter of a chi-square test relates to the target.
#[derive(Debug, Clone, Copy)]
enum Drafter {
    /// The target's logits with a little noise.
    Good,
    /// Logits that have nothing to do with the target's.
    Bad,
    /// Mass only where the target has the least.
    Disjoint,
    /// Good, but with every third token of the vocabulary alone.
    Pruned,
}

/// A language in which the next token depends on the last one: row r is the distribution after token r.
struct Language {
    target: Vec<Distribution>,
    draft: Vec<Distribution>,
}

fn language(params: &SamplingParams, drafter: Drafter) -> Language {
    let mut language = Language { target: Vec::new(), draft: Vec::new() };
    for row in 0..VOCAB as u64 {
        let noise = |offset: u64| {
            let rng = CounterRng::new(100 + offset, Stream::Init, row);
            (0..VOCAB as u64).map(|token| rng.normal(token) as f32).collect::<Vec<_>>()
        };
        let target: Vec<f32> = noise(0);
        let draft: Vec<f32> = match drafter {
            Drafter::Good | Drafter::Pruned => {
                target.iter().zip(noise(1)).map(|(logit, noise)| logit + 0.3 * noise).collect()
            }
            Drafter::Bad => noise(2),
            Drafter::Disjoint => {
                let least = target.iter().copied().fold(f32::INFINITY, f32::min);
                target.iter().map(|&logit| if logit == least { 0.0 } else { f32::NEG_INFINITY }).collect()
            }
        };
        language.target.push(Distribution::from_logits(&target, params).unwrap());
        language.draft.push(match drafter {
            Drafter::Pruned => {
                let tokens: Arc<[u32]> = (0..VOCAB as u32).step_by(3).collect();
                let draft: Vec<f32> = tokens.iter().map(|&token| draft[token as usize]).collect();
                Distribution::from_logits(&draft, params).unwrap().over(&tokens).unwrap()
            }
            Drafter::Good | Drafter::Bad | Drafter::Disjoint => Distribution::from_logits(&draft, params).unwrap(),
        });
    }
    language
}

/// Counts of (last token, next token) over a text written by speculative decoding, and the tokens committed per round.
fn write_text(
    language: &Language,
    seed: u64,
    verify: impl Fn(&[Distribution], &[Distribution], &[u32], u64) -> Verdict,
) -> (Vec<[usize; VOCAB]>, f64) {
    let mut counts = vec![[0_usize; VOCAB]; VOCAB];
    let (mut last, mut position, mut rounds) = (0_u32, 0_u64, 0_usize);
    while (position as usize) < DRAWS {
        let mut tokens = Vec::new();
        let (mut target, mut draft) = (vec![language.target[last as usize].clone()], Vec::new());
        let mut previous = last;
        for offset in 0..BLOCK as u64 {
            let row = &language.draft[previous as usize];
            previous = row.sample(CounterRng::new(seed, Stream::Draft, position + offset).uniform_f64(0));
            tokens.push(previous);
            draft.push(row.clone());
            target.push(language.target[previous as usize].clone());
        }
        let verdict = verify(&target, &draft, &tokens, position);
        for &token in tokens[..verdict.accepted].iter().chain([&verdict.next_token]) {
            counts[last as usize][token as usize] += 1;
            last = token;
            position += 1;
        }
        rounds += 1;
    }
    (counts, position as f64 / rounds as f64)
}

/// Standard score of the chi-square statistic of all rows together (Wilson–Hilferty); cells expected fewer than 5 times are
/// pooled per row. Infinite when a token of probability zero was written.
fn chi_square_score(counts: &[[usize; VOCAB]], target: &[Distribution]) -> f64 {
    let (mut statistic, mut freedom) = (0.0, 0.0);
    for (row, counts) in target.iter().zip(counts) {
        let total = counts.iter().sum::<usize>() as f64;
        let mut cells = Vec::new();
        let mut pool = (0.0, 0.0);
        for (token, &count) in counts.iter().enumerate() {
            let expected = total * f64::from(row.prob(token as u32));
            if expected == 0.0 && count > 0 && total > 0.0 {
                return f64::INFINITY;
            }
            if expected < 5.0 {
                pool = (pool.0 + count as f64, pool.1 + expected);
            } else {
                cells.push((count as f64, expected));
            }
        }
        if pool.1 >= 5.0 {
            cells.push(pool);
        }
        statistic += cells.iter().map(|(count, expected)| (count - expected).powi(2) / expected).sum::<f64>();
        freedom += cells.len().saturating_sub(1) as f64;
    }
    assert!(freedom >= 15.0, "too few cells to test: {freedom}");
    let spread = 2.0 / (9.0 * freedom);
    ((statistic / freedom).cbrt() - (1.0 - spread)) / spread.sqrt()
}

fn settings() -> [SamplingParams; 6] {
    let at = |temperature| SamplingParams { temperature, ..SamplingParams::default() };
    [
        at(0.7),
        at(1.0),
        SamplingParams { top_p: 0.8, ..at(1.0) },
        SamplingParams { top_k: 5, ..at(0.7) },
        SamplingParams { min_p: 0.2, ..at(1.0) },
        SamplingParams { top_k: 12, top_p: 0.9, min_p: 0.05, ..at(0.7) },
    ]
}

/// Scores above this have a probability below 1e-4 under the target's distribution; the seeds are fixed.
const REJECT_SCORE: f64 = 3.72;

#[test]
fn text_has_the_targets_distribution_whatever_the_drafter() {
    for (number, params) in settings().iter().enumerate() {
        for drafter in [Drafter::Good, Drafter::Bad, Drafter::Disjoint, Drafter::Pruned] {
            let language = language(params, drafter);
            let seed = number as u64;
            let (counts, per_round) = write_text(&language, seed, |target, draft, tokens, position| {
                verify_block(target, draft, tokens, seed, position).unwrap()
            });
            let score = chi_square_score(&counts, &language.target);
            assert!(score < REJECT_SCORE, "{params:?}, {drafter:?}: score {score}");
            match drafter {
                Drafter::Good => assert!(per_round > 2.0, "{params:?}: {per_round} tokens per round"),
                Drafter::Bad | Drafter::Pruned => assert!(per_round > 1.1, "{params:?}: {per_round} tokens per round"),
                Drafter::Disjoint => assert!(per_round < 1.1, "{params:?}: {per_round} tokens per round"),
            }
        }
    }
}

#[test]
fn the_same_test_rejects_broken_rules() {
    let params = SamplingParams::default();
    let language = language(&params, Drafter::Good);
    let accept_all = |target: &[Distribution], _: &[Distribution], tokens: &[u32], position: u64| {
        let u = CounterRng::new(0, Stream::Target, position + tokens.len() as u64).uniform_f64(0);
        Verdict { accepted: tokens.len(), next_token: target[tokens.len()].sample(u), bonus: true }
    };
    let resample_from_target = |target: &[Distribution], draft: &[Distribution], tokens: &[u32], position: u64| {
        let verdict = verify_block(target, draft, tokens, 0, position).unwrap();
        let u = CounterRng::new(0, Stream::Target, position + verdict.accepted as u64).uniform_f64(0);
        Verdict { next_token: target[verdict.accepted].sample(u), ..verdict }
    };
    let (accepted, _) = write_text(&language, 0, accept_all);
    let (resampled, _) = write_text(&language, 0, resample_from_target);
    assert!(chi_square_score(&accepted, &language.target) > REJECT_SCORE);
    assert!(chi_square_score(&resampled, &language.target) > REJECT_SCORE);
}
