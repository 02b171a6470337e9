//! Runs the prompts: every proposer on every prompt, in rotating order, with a journal from which an interrupted run
//! goes on.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use deepspec_models::speculate::{NgramProposer, NoProposer, Proposer, SamplingParams, top_gap};
use deepspec_models::target::{NewTokens, Target};
use serde::{Deserialize, Serialize};

use super::cost::RoundTime;
use super::metrics::{Round, calibration};
use super::prompts::Prompt;
use super::speed::{Piece, Timing};
use super::turns::{self, Probe, Run, Turn};
use crate::drafter::{Drafter, limits};
use crate::error::{Error, Result};
use crate::recipe::{EvalRecipe, Proposer as Contender};
use crate::run_dir::{Journal, read_journal};
use deepspec_engine::progress::{Context, Event};
use deepspec_engine::{Adaptive, Engine, Finished, Request, RequestOptions, StepCosts};

/// Tokens of the answer that each engine gives before anything is timed.
const WARM_UP_TOKENS: usize = 16;
/// Samples between flushes of the journal to the disk.
const SYNC_EVERY: u64 = 16;

/// One answer of one proposer: a line of the journal.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// Identity of the evaluation that it belongs to.
    pub run: String,
    /// Name of the set.
    pub set: String,
    /// Place of the prompt in its set.
    pub prompt: usize,
    /// Temperature.
    pub temperature: f64,
    /// Who proposed.
    pub proposer: Contender,
    /// Tokens of the answer, a final stop token included.
    pub output: Vec<u32>,
    /// `stop` or `length`.
    pub finish: String,
    /// Smallest gap between the target's two best logits met at temperature 0.
    pub min_margin: Option<f32>,
    /// Its rounds.
    pub rounds: Vec<Round>,
    /// Its time.
    pub timing: Timing,
}

/// What a sample answers: places in the lists of temperatures, of prompts and of proposers.
pub(super) type Key = (usize, usize, usize);

/// Name of a proposer in tables.
pub(super) fn name(proposer: Contender, drafter: Option<&Drafter>) -> &'static str {
    match (proposer, drafter) {
        (Contender::Plain, _) => "plain",
        (Contender::Ngram, _) => "ngram",
        (Contender::Draft, drafter) => drafter.map_or("draft", Drafter::name),
        (Contender::Hybrid, _) => "hybrid",
    }
}

/// Most tokens that a proposer proposes in a round.
pub(super) fn block_size(proposer: Contender, drafter: Option<&Drafter>, settings: &EvalRecipe) -> usize {
    let drafted = drafter.map_or(0, Drafter::block_size);
    match proposer {
        Contender::Plain => 0,
        Contender::Ngram => settings.ngram_block,
        Contender::Draft => drafted,
        Contender::Hybrid => drafted.max(settings.ngram_block),
    }
}

/// What is to be run.
pub(super) struct Plan<'a> {
    pub(super) target: &'a Target,
    pub(super) drafter: Option<&'a Drafter>,
    pub(super) settings: &'a EvalRecipe,
    pub(super) prompts: &'a [Prompt],
    pub(super) stop_ids: Arc<[u32]>,
    pub(super) identity: &'a str,
    /// Costs by which rounds choose their length; `None` verifies every proposal whole.
    pub(super) step_costs: Option<&'a StepCosts>,
}

impl<'a> Plan<'a> {
    /// Runs what the journal does not hold yet and returns all samples.
    ///
    /// # Errors
    /// When a model fails, the journal cannot be read or written, or the user interrupts.
    pub(super) fn run(&self, journal: &Path, ctx: Context<'_>) -> Result<HashMap<Key, Sample>> {
        let mut samples = self.recorded(journal, ctx)?;
        let mut journal = Journal::open(journal, SYNC_EVERY)?;
        let contenders = &self.settings.proposers;
        let total = self.settings.temperatures.len() * self.prompts.len() * contenders.len();
        ctx.reporter.event(Event::Started {
            task: "evaluate",
            total: total as u64,
            done: samples.len() as u64,
            unit: "answers",
        });
        let is_missing = samples.len() < total;
        let mut engines = if is_missing { self.engines(ctx)? } else { Vec::new() };
        let mut probe = is_missing.then(|| Probe::new(self.target)).transpose()?;
        let batch_size = self.settings.batch_size;
        for (t, &temperature) in self.settings.temperatures.iter().enumerate() {
            for (number, batch) in self.prompts.chunks(batch_size).enumerate() {
                // Every proposer is as often first as last.
                let order = (0..contenders.len()).map(|turn| (number + turn) % contenders.len());
                let key = |i: usize, place: usize| (t, number * batch_size + i, place);
                let is_missing = |place: &usize| !(0..batch.len()).all(|i| samples.contains_key(&key(i, *place)));
                let order: Vec<usize> = order.filter(is_missing).collect();
                if order.is_empty() {
                    continue;
                }
                ctx.check_interrupt("answers so far are in the journal")?;
                let pass_s = probe.as_mut().map(Probe::time).transpose()?;
                let done = self.decode(&mut engines, &order, batch, temperature, pass_s, ctx)?;
                for (place, done) in order.into_iter().zip(done) {
                    let detail = format!("{} {:.1} tok/s", engines[place].proposer_name(), rate(&done));
                    for (i, sample) in done.into_iter().enumerate() {
                        journal.append(&sample)?;
                        samples.insert(key(i, place), sample);
                    }
                    ctx.reporter.event(Event::Advanced { done: samples.len() as u64, detail: &detail });
                }
            }
        }
        journal.sync()?;
        ctx.reporter.event(Event::Finished);
        Ok(samples)
    }

    /// Samples of this evaluation that an earlier run has written.
    fn recorded(&self, journal: &Path, ctx: Context<'_>) -> Result<HashMap<Key, Sample>> {
        let places: HashMap<(&str, usize), usize> = self
            .prompts
            .iter()
            .enumerate()
            .map(|(place, prompt)| ((prompt.set.as_str(), prompt.index), place))
            .collect();
        let (mut samples, mut others) = (HashMap::new(), 0);
        for sample in read_journal::<Sample>(journal)? {
            if sample.run != self.identity {
                others += 1;
                continue;
            }
            let place = places.get(&(sample.set.as_str(), sample.prompt));
            // Reading a number back may miss its last bit.
            let is_same = |known: &f64| (known - sample.temperature).abs() < 1e-9;
            let temperature = self.settings.temperatures.iter().position(is_same);
            let proposer = self.settings.proposers.iter().position(|&known| known == sample.proposer);
            if let (Some(&place), Some(temperature), Some(proposer)) = (place, temperature, proposer) {
                samples.insert((temperature, place, proposer), sample);
            }
        }
        if others > 0 {
            ctx.note(format!(
                "the folder also holds {others} answers of evaluations with other settings, models or \
                 machines; they stay in the journal"
            ));
        }
        if !samples.is_empty() {
            ctx.note(format!("{} answers are taken from the journal", samples.len()));
        }
        Ok(samples)
    }

    /// One engine per proposer, in their order, each warmed up on the first prompt.
    fn engines(&self, ctx: Context<'_>) -> Result<Vec<Engine<'a>>> {
        let Plan { target, settings, .. } = *self;
        let longest = self.prompts.iter().map(|prompt| prompt.ids.len()).max().unwrap_or(0);
        let (slots, capacity) = (settings.batch_size.min(self.prompts.len()), longest + settings.max_new_tokens);
        if let Some(warning) = self.drafter.and_then(|drafter| limits::beyond_context(&drafter.config(), capacity)) {
            ctx.warn(warning);
        }
        if settings.ngram_block > settings.max_new_tokens && settings.proposers.contains(&Contender::Ngram) {
            ctx.warn(format!(
                "`eval.ngram_block` is {}: at most the {} tokens of `eval.max_new_tokens` can be proposed",
                settings.ngram_block, settings.max_new_tokens
            ));
        }
        let mut engines = Vec::new();
        for &contender in &settings.proposers {
            let lookup = || Box::new(NgramProposer::new(settings.ngram_max, settings.ngram_block));
            let drafter = || -> Result<Box<dyn Proposer + 'a>> {
                let drafter = self.drafter.ok_or_else(|| Error::Input(NO_DRAFTER.into()))?;
                drafter.proposer(target, slots, capacity)
            };
            let mut engine = match contender {
                Contender::Plain => Engine::new(target, Box::new(NoProposer), slots, capacity)?,
                Contender::Ngram => Engine::new(target, lookup(), slots, capacity)?,
                Contender::Draft => Engine::new(target, drafter()?, slots, capacity)?,
                Contender::Hybrid => Engine::hybrid(target, lookup(), drafter()?, slots, capacity)?,
            };
            if let Some(step_costs) = self.step_costs.filter(|_| contender != Contender::Plain) {
                engine = engine.adapt(Adaptive::new(step_costs.clone()));
            }
            let mut request = self.request(0, &self.prompts[0], self.settings.temperatures[0]);
            request.max_new_tokens = request.max_new_tokens.min(WARM_UP_TOKENS);
            engine.run([request], |_| ctx.check_interrupt("nothing has been measured yet"))?;
            engines.push(engine);
        }
        Ok(engines)
    }

    /// Answers a batch of prompts with the engines at `order`, in turns, and measures them.
    fn decode(
        &self,
        engines: &mut [Engine<'_>],
        order: &[usize],
        batch: &[Prompt],
        temperature: f64,
        pass_s: Option<f64>,
        ctx: Context<'_>,
    ) -> Result<Vec<Vec<Sample>>> {
        let mut free: Vec<Option<&mut Engine<'_>>> = engines.iter_mut().map(Some).collect();
        let requests = || -> Vec<Request> {
            batch.iter().enumerate().map(|(id, prompt)| self.request(id as u64, prompt, temperature)).collect()
        };
        let engines = order.iter().filter_map(|&place| free[place].take());
        let turns = engines.map(|engine| Turn::new(engine, requests())).collect::<Result<Vec<_>>>()?;
        let runs = turns::take(turns, || Ok(ctx.check_interrupt("answers so far are in the journal")?))?;
        let of_run = |(&place, run): (&usize, Run)| {
            self.samples(self.settings.proposers[place], run, batch, temperature, pass_s)
        };
        order.iter().zip(runs).map(of_run).collect()
    }

    /// The answers of one proposer to a batch.
    fn samples(
        &self,
        contender: Contender,
        run: Run,
        batch: &[Prompt],
        temperature: f64,
        pass_s: Option<f64>,
    ) -> Result<Vec<Sample>> {
        let Run { finished, first_token_s, pieces, times: [before, after], rounds: [rounds_before, rounds_after] } =
            run;
        let tokens: usize = finished.iter().map(|done| done.output.len()).sum();
        let sample = |(prompt, (done, (first_token_s, pieces))): (&Prompt, (Finished, (f64, Vec<Piece>)))| {
            let share = if tokens == 0 { 1.0 / batch.len() as f64 } else { done.output.len() as f64 / tokens as f64 };
            let rounds: Vec<Round> = done.rounds.iter().map(Round::from).collect();
            // A confidence that is no number would spoil the journal.
            calibration(&rounds)?;
            Ok(Sample {
                run: self.identity.to_owned(),
                set: prompt.set.clone(),
                prompt: prompt.index,
                temperature,
                proposer: contender,
                finish: done.reason.name().to_owned(),
                min_margin: done.min_margin.is_finite().then_some(done.min_margin),
                rounds,
                timing: Timing {
                    tokens: done.output.len(),
                    wall_s: pieces.iter().map(|piece| piece.wall_s).sum(),
                    first_token_s,
                    draft_s: share * (after.draft_s - before.draft_s),
                    target_s: share * (after.target_s - before.target_s),
                    other_s: share * (after.other_s - before.other_s),
                    rounds: RoundTime::between(rounds_before, rounds_after, share),
                    pieces,
                    pass_s,
                },
                output: done.output,
            })
        };
        batch.iter().zip(finished.into_iter().zip(first_token_s.into_iter().zip(pieces))).map(sample).collect()
    }

    fn request(&self, id: u64, prompt: &Prompt, temperature: f64) -> Request {
        Request {
            id,
            prompt: prompt.ids.clone(),
            sampling: self.settings.sampling(temperature),
            seed: self.settings.seed.wrapping_add(prompt.index as u64),
            max_new_tokens: self.settings.max_new_tokens,
            stop_ids: self.stop_ids.clone(),
            confidence_threshold: self.settings.confidence_threshold as f32,
            options: RequestOptions::default(),
        }
    }
}

/// What is said when the recipe asks for a drafter that is not there.
pub(super) const NO_DRAFTER: &str = "`eval.proposers` has `draft` or `hybrid`, but no drafter was given; give one, or set \
`eval.proposers` to [\"plain\", \"ngram\"]";

fn rate(samples: &[Sample]) -> f64 {
    let tokens: usize = samples.iter().map(|sample| sample.timing.tokens).sum();
    let seconds: f64 = samples.iter().map(|sample| sample.timing.wall_s).sum();
    if seconds > 0.0 { tokens as f64 / seconds } else { 0.0 }
}

/// A place where an answer at temperature 0 leaves that of plain decoding.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Difference {
    /// Name of the set.
    pub set: String,
    /// Place of the prompt in its set.
    pub prompt: usize,
    /// Who proposed.
    pub proposer: Contender,
    /// Index of the first differing token of the answer, from 0.
    pub position: usize,
    /// Token of plain decoding there; `None` where its answer has ended.
    pub expected: Option<u32>,
    /// Token found there; `None` where the answer has ended.
    pub found: Option<u32>,
    /// Gap between the target's two best logits at that position.
    pub target_gap: f32,
}

/// Compares two answers to one prompt.
///
/// # Errors
/// When the target fails on the part that both have in common.
pub(super) fn difference(
    target: &Target,
    prompt: &Prompt,
    plain: &Sample,
    other: &Sample,
) -> Result<Option<Difference>> {
    if plain.output == other.output {
        return Ok(None);
    }
    let position = plain.output.iter().zip(&other.output).take_while(|(left, right)| left == right).count();
    let tokens = [&prompt.ids, &plain.output[..position]].concat();
    Ok(Some(Difference {
        set: prompt.set.clone(),
        prompt: prompt.index,
        proposer: other.proposer,
        position,
        expected: plain.output.get(position).copied(),
        found: other.output.get(position).copied(),
        target_gap: top_two_gap(target, &tokens)?,
    }))
}

/// Gap between the two largest logits after `tokens`.
fn top_two_gap(target: &Target, tokens: &[u32]) -> Result<f32> {
    let mut cache = target.new_cache(1, tokens.len())?;
    let rows = target.forward(&mut cache, &[NewTokens { slot: 0, tokens }], &[])?;
    let logits: Vec<f32> = target.logits(&rows.hidden, &[tokens.len() - 1])?.flatten_all()?.to_vec1()?;
    Ok(top_gap(&logits))
}

/// Whether answers at a temperature can be compared token by token.
pub(super) fn is_greedy(temperature: f64) -> bool {
    SamplingParams { temperature, ..SamplingParams::default() }.is_greedy()
}
