//! Sampled output has the target's distribution, whoever proposes, however the length of what is verified is chosen, alone and
//! beside other sequences, with tokens that end the text.
//!
//! The target is a Markov chain, so every transition has a known probability: counts of all transitions are compared with it
//! (chi-square), and so are the share of stop tokens and the length of the texts. A test proves something only where proposals
//! were verified, accepted and rejected, so their shares are asserted, too.
#![expect(clippy::unwrap_used, reason = "tests fail as tests do")]

#[path = "common/toy.rs"]
mod toy;

use std::path::Path;

use candle_core::Tensor;
use deepspec_engine::{
    Adaptive, Allocation, Engine, FinishReason, Finished, Request, RequestOptions, StepCost, StepCosts,
};
use deepspec_models::checkpoint;
use deepspec_models::linear::Precision as Packing;
use deepspec_models::speculate::{Adjustments, NgramProposer, NoProposer, Proposer, SamplingParams};
use deepspec_models::target::Target;
use deepspec_stages::drafter::{Drafter, load_drafter};
use deepspec_stages::recipe::Precision;
use serde_json::json;
use tempfile::TempDir;
use toy::{HIDDEN, MASK, Named, VOCAB, body, embedding, layer, matrix, ones};

/// Tokens of a proposal.
const BLOCK: usize = 5;
/// The token that ends a text.
const STOP: u32 = 3;
const LONGEST: usize = 24;
/// Standard scores beyond this are a bias: about one in 150,000 by chance, and the draws are the same in every run.
const BIASED: f64 = 4.5;

/// Probabilities of the next token by the last one.
type Chain = [[f64; VOCAB]; VOCAB];

/// Every token as likely as any other.
fn uniform() -> Chain {
    [[1.0 / VOCAB as f64; VOCAB]; VOCAB]
}

/// Probabilities that differ by factors, others for each last token, from a seed.
fn skewed(seed: usize) -> Chain {
    let mut chain = uniform();
    for (last, row) in chain.iter_mut().enumerate() {
        for (next, p) in row.iter_mut().enumerate() {
            *p = [1.0, 0.2, 3.0, 0.5, 1.6][(seed * 2 + last * 3 + next * next + last * next) % 5];
        }
        let sum: f64 = row.iter().sum();
        for p in row.iter_mut() {
            *p /= sum;
        }
    }
    chain
}

/// A text that repeats itself: mostly the next token of a cycle, which the stop token is not part of.
fn cyclic() -> Chain {
    let mut chain = uniform();
    for (last, row) in chain.iter_mut().enumerate() {
        let next = if last + 1 == STOP as usize { last + 2 } else { last + 1 } % VOCAB;
        for (token, p) in row.iter_mut().enumerate() {
            *p = if token == next { 0.64 } else { 0.03 };
        }
    }
    chain
}

/// Half of each.
fn mixed(one: &Chain, other: &Chain) -> Chain {
    let mut chain = *one;
    for (row, other) in chain.iter_mut().zip(other) {
        for (p, q) in row.iter_mut().zip(other) {
            *p = 0.5 * *p + 0.5 * q;
        }
    }
    chain
}

/// An output head that gives a chain over normalised embeddings, which are 4 in one dimension and 0 elsewhere.
fn head(chain: &Chain) -> Tensor {
    let entries = chain.iter().enumerate().flat_map(|(last, row)| {
        row.iter().enumerate().map(move |(next, p)| (next, last, p.ln() / (HIDDEN as f64).sqrt()))
    });
    matrix(VOCAB, HIDDEN, entries)
}

/// What proposes.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    /// Markov head that knows a chain, confidences that depend on the token before.
    Dspark,
    /// Neither.
    Dflash,
    Eagle3,
}

/// Writes a drafter whose proposals follow `chain`: DSpark's token by token, the others' by the token before or at the anchor.
fn write_drafter(folder: &Path, kind: Kind, chain: &Chain) {
    let mut config = body(1, 1);
    let markov = kind == Kind::Dspark;
    let named =
        |entries: Vec<(&str, Tensor)>| -> Named { entries.into_iter().map(|(name, x)| (name.to_owned(), x)).collect() };
    let mut tensors: Named = match kind {
        Kind::Eagle3 => layer("layers.0", 1, 2 * HIDDEN),
        Kind::Dspark | Kind::Dflash => layer("layers.0", 1, HIDDEN),
    };
    tensors.extend(named(vec![
        // Eagle3's rows are the embeddings of the tokens before the anchor.
        ("fc.weight", matrix(HIDDEN, HIDDEN, (0..VOCAB).map(|token| (token, token, 1.0)))),
        ("norm.weight", ones()),
        ("embed_tokens.weight", embedding()),
        ("lm_head.weight", if markov { matrix(VOCAB, HIDDEN, []) } else { head(chain) }),
    ]));
    let shared = json!({
        "model_type": "qwen3", "qk_norm": false, "num_target_layers": 2, "target_layer_ids": [0],
    });
    let own = match kind {
        Kind::Eagle3 => {
            tensors.extend(named(vec![("layers.0.hidden_norm.weight", ones())]));
            json!({ "architectures": ["Qwen3Eagle3Model"], "ttt_length": BLOCK, "step_loss_decay": 0.8 })
        }
        Kind::Dspark | Kind::Dflash => {
            tensors.extend(named(vec![("hidden_norm.weight", ones())]));
            json!({
                "architectures": ["Qwen3DSparkModel"], "block_size": BLOCK, "sample_from_anchor": true,
                "mask_token_id": MASK, "markov_rank": if markov { VOCAB } else { 0 },
                "markov_head_type": if markov { json!("vanilla") } else { json!(null) },
                "enable_confidence_head": markov, "confidence_head_with_markov": markov,
            })
        }
    };
    if markov {
        let logs = (0..VOCAB).flat_map(|last| (0..VOCAB).map(move |next| (next, last, chain[last][next].ln())));
        // Sure of what follows every third token, unsure behind others.
        let confidences = (0..VOCAB).map(|last| (0, HIDDEN + last, [2.5, -2.0, 0.5][last % 3]));
        tensors.extend(named(vec![
            ("markov_head.markov_w1.weight", matrix(VOCAB, VOCAB, (0..VOCAB).map(|token| (token, token, 1.0)))),
            ("markov_head.markov_w2.weight", matrix(VOCAB, VOCAB, logs)),
            ("confidence_head.proj.weight", matrix(1, HIDDEN + VOCAB, confidences)),
            ("confidence_head.proj.bias", matrix(1, 1, []).flatten_all().unwrap()),
        ]));
    }
    for part in [shared, own] {
        for (key, value) in part.as_object().unwrap() {
            config[key] = value.clone();
        }
    }
    checkpoint::save(folder, &config, &tensors).unwrap();
}

/// How much of a proposal is verified.
#[derive(Debug, Clone, Copy)]
enum Rule {
    Whole,
    Fixed(usize),
    Threshold(f32),
    /// By estimates and the costs of passes.
    Costs(Allocation, Table),
}

/// What passes cost, in plain ones of as many sequences.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Table {
    /// So much for any further row that only whole proposals of all sequences pay: one that ends early must not be left out.
    Steep,
    /// A little for the first further row, next to nothing for others.
    Step,
    /// Every third row is dear, the others nearly free.
    Jagged,
}

impl Table {
    fn seconds(self, rows: usize, sequences: usize) -> f64 {
        let Some(further) = rows.checked_sub(sequences).filter(|&further| further > 0) else { return 1.0 };
        let each = further as f64 / sequences as f64;
        match self {
            Self::Steep if sequences == 1 => 3.0,
            Self::Steep => 2.5,
            Self::Step => 1.2 + 0.02 * each,
            Self::Jagged => 1.0 + 0.02 * each + 0.14 * (each / 3.0).ceil(),
        }
    }

    fn costs(self, sequences: usize) -> StepCosts {
        let entry = |rows| StepCost { rows, seconds: self.seconds(rows, sequences) };
        StepCosts::new((1..=sequences * (BLOCK + 1)).map(entry).collect()).unwrap()
    }
}

fn rules(slots: usize, tables: &[Table]) -> Vec<Rule> {
    let mut rules = vec![Rule::Whole, Rule::Fixed(2), Rule::Threshold(0.5)];
    for &table in tables {
        let several = [Allocation::Alone, Allocation::Budget, Allocation::EarlyStop];
        // One sequence has nothing to share a budget with, and Algorithm 1 stops at the first row where it is dear.
        let makes_sense = |allocation: &Allocation| match allocation {
            Allocation::Alone => true,
            Allocation::Budget => slots > 1,
            Allocation::EarlyStop => table != Table::Steep,
        };
        rules.extend(several.into_iter().filter(makes_sense).map(|allocation| Rule::Costs(allocation, table)));
    }
    rules
}

fn request(id: u64, seed: u64, rule: Rule) -> Request {
    Request {
        id,
        prompt: vec![(id % 3) as u32, (id % VOCAB as u64) as u32],
        sampling: SamplingParams::default(),
        seed,
        max_new_tokens: LONGEST,
        stop_ids: vec![STOP].into(),
        confidence_threshold: if let Rule::Threshold(threshold) = rule { threshold } else { 0.0 },
        options: RequestOptions::default(),
    }
}

/// A target, and the drafters made for it.
struct Scene {
    target: Target,
    chain: Chain,
    _folder: TempDir,
}

fn scene(chain: &Chain) -> Scene {
    let folder = TempDir::new().unwrap();
    let target = toy::target(folder.path(), &head(chain), Packing::F32);
    Scene { target, chain: *chain, _folder: folder }
}

impl Scene {
    fn drafter(&self, kind: Kind, chain: &Chain) -> Drafter {
        let folder = TempDir::new().unwrap();
        write_drafter(folder.path(), kind, chain);
        load_drafter(folder.path(), self.target.config(), Precision::F32).unwrap()
    }

    /// Many answers from an engine with a drafter, a lookup, or both.
    fn answers(&self, who: (Option<&Drafter>, bool), rule: Rule, slots: usize, answers: u64) -> Vec<Finished> {
        let capacity = 2 + LONGEST;
        let (drafter, with_lookup) = who;
        let drafter = drafter.map(|drafter| drafter.proposer(&self.target, slots, capacity).unwrap());
        let lookup = || -> Box<dyn Proposer> { Box::new(NgramProposer::new(3, BLOCK)) };
        let mut engine = match drafter {
            Some(drafter) if with_lookup => Engine::hybrid(&self.target, lookup(), drafter, slots, capacity),
            Some(drafter) => Engine::new(&self.target, drafter, slots, capacity),
            None if with_lookup => Engine::new(&self.target, lookup(), slots, capacity),
            None => Engine::new(&self.target, Box::new(NoProposer), slots, capacity),
        }
        .unwrap();
        match rule {
            Rule::Whole | Rule::Threshold(_) => {}
            Rule::Fixed(tokens) => engine = engine.limit_drafts(tokens),
            Rule::Costs(allocation, table) => {
                engine = engine.adapt(Adaptive::fixed(table.costs(slots), 0.01).allocate(allocation));
            }
        }
        engine.run((0..answers).map(|id| request(id, 1_000_003 * (1 + id), rule)), |_| Ok(())).unwrap()
    }

    /// Fails where the answers do not have the target's distribution.
    fn check(&self, name: &str, answers: &[Finished]) {
        let mut counts = [[0.0; VOCAB]; VOCAB];
        let (mut tokens, mut length_score) = (0.0, (0.0, 0.0));
        for done in answers {
            let mut last = *done.request.prompt.last().unwrap() as usize;
            let (mean, variance) = self.length_after(last);
            length_score.0 += done.output.len() as f64 - mean;
            length_score.1 += variance;
            for &next in &done.output {
                counts[last][next as usize] += 1.0;
                last = next as usize;
                tokens += 1.0;
            }
            let is_stop = done.output.last() == Some(&STOP);
            assert_eq!(is_stop, done.reason == FinishReason::Stop, "{name}");
            assert!(!done.output[..done.output.len() - 1].contains(&STOP), "{name}: text goes on behind its end");
        }
        let (mut statistic, mut freedom, mut stops, mut spread) = (0.0, 0.0, 0.0, 0.0);
        for (row, chances) in counts.iter().zip(&self.chain) {
            let total: f64 = row.iter().sum();
            if total < 200.0 {
                continue;
            }
            freedom += VOCAB as f64 - 1.0;
            statistic += row.iter().zip(chances).map(|(n, p)| (n - total * p).powi(2) / (total * p)).sum::<f64>();
            let p = chances[STOP as usize];
            stops += row[STOP as usize] - total * p;
            spread += total * p * (1.0 - p);
        }
        assert!(freedom > 100.0 && tokens > 5000.0, "{name}: {freedom} degrees of freedom, {tokens} tokens");
        // Wilson and Hilferty's approximation.
        let width = 2.0 / (9.0 * freedom);
        let chi = ((statistic / freedom).cbrt() - (1.0 - width)) / width.sqrt();
        let stop = stops / spread.sqrt();
        let length = length_score.0 / length_score.1.sqrt();
        for (what, score) in [("transitions", chi), ("stop tokens", stop), ("lengths", length)] {
            assert!(score.abs() < BIASED, "{name}: {what} have a standard score of {score:.1}");
        }
    }

    /// Mean and variance of the length of a text after a token.
    fn length_after(&self, first: usize) -> (f64, f64) {
        let mut at = [0.0; VOCAB];
        at[first] = 1.0;
        let (mut mean, mut square) = (0.0, 0.0);
        for length in 1..=LONGEST {
            let mut next = [0.0; VOCAB];
            for (p, row) in at.iter().zip(&self.chain) {
                for (sum, q) in next.iter_mut().zip(row) {
                    *sum += p * q;
                }
            }
            let ends = if length == LONGEST { next.iter().sum() } else { next[STOP as usize] };
            mean += ends * length as f64;
            square += ends * (length * length) as f64;
            next[STOP as usize] = 0.0;
            at = next;
        }
        (mean, square - mean * mean)
    }
}

/// Tokens drafted, verified and accepted per round.
fn shares(answers: &[Finished]) -> (f64, f64, f64) {
    let rounds = answers.iter().flat_map(|done| &done.rounds);
    let count = rounds.clone().count() as f64;
    let sum = |part: fn(&deepspec_engine::RoundRecord) -> usize| rounds.clone().map(part).sum::<usize>() as f64;
    (sum(|r| r.block.len()) / count, sum(|r| r.proposed) / count, sum(|r| r.accepted) / count)
}

/// All rules with one sequence and with several; `least` is the number of tokens verified per round that shows something.
fn check_all(name: &str, scene: &Scene, who: (Option<&Drafter>, bool), tables: &[Table], answers: u64, least: f64) {
    for slots in [1, 2] {
        for rule in rules(slots, tables) {
            let name = format!("{name}, {rule:?}, {slots} at a time");
            // Algorithm 1 stops at the first row that does not pay, though the next ones would.
            let stops_soon = matches!(rule, Rule::Costs(Allocation::EarlyStop, _));
            let least = if stops_soon { least / 8.0 } else { least };
            let found = scene.answers(who, rule, slots, answers);
            let (drafted, verified, accepted) = shares(&found);
            assert!(
                verified > least && accepted > least / 4.0 && drafted >= verified,
                "{name} proves nothing: {drafted:.2} tokens drafted a round, {verified:.2} verified, {accepted:.2} accepted"
            );
            scene.check(&name, &found);
        }
    }
}

#[test]
fn plain_decoding_has_the_known_distribution() {
    let scene = scene(&skewed(1));
    scene.check("plain", &scene.answers((None, false), Rule::Whole, 2, 2000));
}

/// A proposal of Eagle3 ends behind a drafted stop token: whether its first token is verified must not depend on that.
#[test]
fn eagle3_is_lossless_when_its_proposals_end_at_stop_tokens() {
    let scene = scene(&uniform());
    let drafter = scene.drafter(Kind::Eagle3, &uniform());
    check_all("eagle3 like the target", &scene, (Some(&drafter), false), &[Table::Steep, Table::Jagged], 8000, 0.5);
}

#[test]
fn eagle3_is_lossless_when_it_is_wrong() {
    let scene = scene(&skewed(2));
    let drafter = scene.drafter(Kind::Eagle3, &mixed(&skewed(2), &skewed(3)));
    check_all("eagle3 unlike the target", &scene, (Some(&drafter), false), &[Table::Step, Table::Jagged], 2500, 0.4);
}

#[test]
fn dspark_is_lossless_when_confidences_depend_on_the_tokens_drawn() {
    let scene = scene(&skewed(1));
    let drafter = scene.drafter(Kind::Dspark, &mixed(&skewed(1), &skewed(4)));
    check_all("dspark", &scene, (Some(&drafter), false), &[Table::Step, Table::Jagged], 2500, 0.4);
}

#[test]
fn dflash_is_lossless() {
    let scene = scene(&skewed(2));
    let drafter = scene.drafter(Kind::Dflash, &skewed(2));
    check_all("dflash", &scene, (Some(&drafter), false), &[Table::Step, Table::Jagged], 2500, 0.4);
}

#[test]
fn lookups_are_lossless() {
    let scene = scene(&cyclic());
    check_all("lookup", &scene, (None, true), &[Table::Step, Table::Jagged], 2500, 0.4);
}

#[test]
fn hybrids_are_lossless() {
    let scene = scene(&cyclic());
    for (kind, chain) in [(Kind::Dspark, cyclic()), (Kind::Eagle3, skewed(2))] {
        let drafter = scene.drafter(kind, &chain);
        check_all(
            &format!("lookup with {kind:?}"),
            &scene,
            (Some(&drafter), true),
            &[Table::Step, Table::Jagged],
            2000,
            0.4,
        );
    }
}

/// A penalty reaches both sides: a drafter like the target stays like the target, so that every token is accepted.
#[test]
fn penalties_and_biases_leave_a_drafter_like_the_target_accepted() {
    let scene = scene(&skewed(1));
    let drafter = scene.drafter(Kind::Dspark, &skewed(1));
    let wrong = scene.drafter(Kind::Dspark, &skewed(4));
    let adjustments = Adjustments {
        presence_penalty: 1.0,
        frequency_penalty: 0.5,
        repetition_penalty: 1.3,
        logit_bias: vec![(7, 2.0), (2, -3.0)],
    };
    let answers = |drafter: Option<&Drafter>| {
        let capacity = 2 + LONGEST;
        let proposer: Box<dyn Proposer> = match drafter {
            Some(drafter) => drafter.proposer(&scene.target, 2, capacity).unwrap(),
            None => Box::new(NoProposer),
        };
        let mut engine = Engine::new(&scene.target, proposer, 2, capacity).unwrap();
        let requests = (0..6000).map(|id| {
            let mut request = request(id, 77 + 1_000_003 * (id + u64::from(drafter.is_some()) * 6000), Rule::Whole);
            request.prompt = vec![1, 2];
            request.options.adjustments = adjustments.clone();
            request
        });
        engine.run(requests, |_| Ok(())).unwrap()
    };
    let (plain, right, wrong) = (answers(None), answers(Some(&drafter)), answers(Some(&wrong)));
    let (_, verified, accepted) = shares(&right);
    assert!(accepted > 0.99 * verified, "{accepted} of {verified} accepted");
    let (_, verified, accepted) = shares(&wrong);
    assert!(accepted < 0.8 * verified && accepted > 0.1 * verified, "{accepted} of {verified} accepted");
    // The first three tokens together, and how often a token stands at each later place.
    for (name, found) in [("like the target", &right), ("unlike the target", &wrong)] {
        let mut cells = std::collections::BTreeMap::<(usize, Vec<u32>), [f64; 2]>::new();
        for (side, answers) in [&plain, found].into_iter().enumerate() {
            for done in answers {
                let mut count = |cell| cells.entry(cell).or_default()[side] += 1.0;
                count((0, done.output.iter().take(2).copied().collect()));
                for (place, &token) in done.output.iter().enumerate().skip(2).take(6) {
                    count((place, vec![token]));
                }
            }
        }
        let frequent = cells.values().filter(|[a, b]| a + b > 40.0);
        let (statistic, freedom) =
            frequent.fold((0.0, 0.0), |(sum, n), [a, b]| (sum + (a - b).powi(2) / (a + b), n + 1.0));
        let width = 2.0 / (9.0 * freedom);
        let score = ((statistic / freedom).cbrt() - (1.0 - width)) / f64::sqrt(width);
        assert!(freedom > 60.0 && score < BIASED, "{name}: {score:.1} with {freedom} degrees of freedom");
    }
}
