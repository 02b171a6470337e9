//! The result of an evaluation: what was run, on what, and the numbers, as written to `results.json`.

use std::collections::HashMap;

use deepspec_models::config::DrafterConfig;
use serde::{Deserialize, Serialize};

use super::calibrate::CalibrationOutcome;
use super::confidence::CalibrationReport;
use super::cost::RoundCost;
use super::decode::{Difference, Key, Sample, is_greedy, name};
use super::identity::Fingerprints;
use super::metrics::{Acceptance, Round, calibration, repetition};
use super::prompts::{Prompt, SetInfo};
use super::speed::{Speed, Speedup, Timing, drift, speedup};
use super::verdict::{Comparison, Verdict};
use crate::drafter::Drafter;
use crate::error::{Error, Result};
use crate::recipe::{Proposer, Recipe};
use deepspec_engine::StepCost;

/// Version of the layout of `results.json`.
pub const SCHEMA_VERSION: u32 = 1;
/// Share of repeated 4-grams above which an answer set is called looping.
const LOOPING: f64 = 0.3;

/// Where a result comes from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Origin {
    /// Version of the program.
    pub version: String,
    /// Commit that the program was built from, where known.
    pub git_commit: Option<String>,
    /// Time of the start, as the caller gave it.
    pub started: String,
    /// Processor, memory and system in words.
    pub machine: String,
    /// Instruction set of the kernels.
    pub kernels: String,
    /// Threads of the kernels.
    pub threads: usize,
}

/// The drafter that was measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DrafterInfo {
    /// `dspark`, `dflash` or `eagle3`.
    pub name: String,
    /// Tokens proposed per round.
    pub block_size: usize,
    /// Decoder layers.
    pub layers: usize,
    /// Target layers that it reads.
    pub target_layer_ids: Vec<i32>,
    /// Rank of the Markov head; 0 without one.
    pub markov_rank: usize,
    /// Whether it has a confidence head.
    pub confidence_head: bool,
    /// Trained parameters: without the copies of the target's embedding and output head.
    #[serde(default)]
    pub parameters: usize,
    /// What its confidence logits are divided by, where it is calibrated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub temperatures: Option<Vec<f32>>,
}

impl DrafterInfo {
    /// Facts of a drafter.
    pub(super) fn of(drafter: &Drafter) -> Self {
        let config = drafter.config();
        Self {
            name: drafter.name().into(),
            block_size: drafter.block_size(),
            layers: config.body().num_hidden_layers,
            target_layer_ids: config.target_layer_ids().to_vec(),
            markov_rank: if let DrafterConfig::Block(config) = &config { config.markov_rank } else { 0 },
            confidence_head: drafter.has_confidence(),
            parameters: config.trainable_shapes().values().map(|shape| shape.iter().product::<usize>()).sum(),
            temperatures: drafter.calibration().map(|temperatures| temperatures.values().to_vec()),
        }
    }
}

/// The whole result.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EvalOutcome {
    /// Version of this layout.
    pub schema_version: u32,
    /// Program, time and machine.
    pub origin: Origin,
    /// Short hash of all that answers and times depend on; the `run` of the journal's lines.
    pub identity: String,
    /// The recipe as used.
    pub recipe: Recipe,
    /// The drafter, where there was one.
    pub drafter: Option<DrafterInfo>,
    /// Hashes of what the models compute.
    pub fingerprints: Fingerprints,
    /// SHA-256 of the chat template.
    pub template_sha256: String,
    /// Hash of the tokenizer.
    pub tokenizer: String,
    /// SHA-256 of names, places and tokens of all prompts.
    pub prompt_ids_sha256: String,
    /// The sets.
    pub sets: Vec<SetInfo>,
    /// Whether every answer at temperature 0 equals that of plain decoding; `None` if there was nothing to compare, or no draft was
    /// accepted.
    pub lossless: Option<bool>,
    /// Answers that were compared with those of plain decoding.
    pub compared: usize,
    /// The same with their tokens.
    #[serde(default)]
    pub comparison: Comparison,
    /// Those that differ.
    pub differences: Vec<Difference>,
    /// What the reader should know before using the numbers.
    pub warnings: Vec<String>,
    /// Largest resident memory of the process, in bytes; `None` where the system does not tell.
    pub peak_memory_bytes: Option<u64>,
    /// Cost of the target's passes by their rows, as measured before the first answer.
    #[serde(default)]
    pub step_costs: Vec<StepCost>,
    /// The numbers, one entry per temperature.
    pub temperatures: Vec<TemperatureResult>,
    /// What a calibration was fitted on and what it brought, where this evaluation made one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub calibration: Option<CalibrationOutcome>,
}

/// The numbers of one temperature.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TemperatureResult {
    /// The temperature.
    pub temperature: f64,
    /// All prompts together.
    pub all: Group,
    /// Each set.
    pub sets: Vec<Group>,
    /// Each domain, over all sets; prompts without one are left out.
    pub domains: Vec<Group>,
}

/// The numbers of some prompts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Group {
    /// Name of the set or domain, or `all`.
    pub name: String,
    /// Number of prompts.
    pub prompts: usize,
    /// How far plain passes drifted in the course of the run, as a share; `None` where that is not known.
    #[serde(default)]
    pub drift: Option<f64>,
    /// One entry per proposer, in the order of the recipe.
    pub proposers: Vec<ProposerResult>,
}

/// The numbers of one proposer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ProposerResult {
    /// Its kind.
    pub proposer: Proposer,
    /// Its name in tables: `plain`, `ngram`, `dspark`, `dflash` or `hybrid`.
    pub name: String,
    /// Acceptance.
    pub acceptance: Acceptance,
    /// Speed.
    pub speed: Speed,
    /// What its rounds cost; `None` without rounds.
    #[serde(default)]
    pub round_cost: Option<RoundCost>,
    /// Speed relative to plain decoding; `None` for plain decoding itself or where it was not run.
    pub speedup: Option<Speedup>,
    /// What that speedup allows to say.
    #[serde(default)]
    pub verdict: Option<Verdict>,
    /// Whether all answers equal those of plain decoding; `None` where they need not or cannot be compared, or no draft was
    /// accepted.
    pub identical_to_plain: Option<bool>,
    /// What that rests on; `None` where answers need not or cannot be compared.
    #[serde(default)]
    pub comparison: Option<Comparison>,
    /// Share of repeated 4-grams in its answers.
    pub repetition: Option<f64>,
    /// Quality of its confidences, over all prompts only.
    pub calibration: Option<CalibrationReport>,
}

/// All samples with what is needed to group them.
pub(super) struct Answers<'a> {
    pub(super) recipe: &'a Recipe,
    pub(super) drafter: Option<&'a Drafter>,
    pub(super) prompts: &'a [Prompt],
    pub(super) samples: &'a HashMap<Key, Sample>,
    pub(super) differences: &'a [Difference],
}

impl<'a> Answers<'a> {
    /// All numbers.
    ///
    /// # Errors
    /// A sample is missing or a confidence is no number.
    pub(super) fn results(&self) -> Result<Vec<TemperatureResult>> {
        let every: Vec<usize> = (0..self.prompts.len()).collect();
        let result = |(t, &temperature): (usize, &f64)| {
            let groups = |key: fn(&Prompt) -> Option<&str>| -> Result<Vec<Group>> {
                let mut parts: Vec<(&str, Vec<usize>)> = Vec::new();
                for (place, prompt) in self.prompts.iter().enumerate() {
                    let Some(name) = key(prompt) else { continue };
                    match parts.iter_mut().find(|(known, _)| *known == name) {
                        Some((_, places)) => places.push(place),
                        None => parts.push((name, vec![place])),
                    }
                }
                parts.into_iter().map(|(name, places)| self.group(name, t, &places)).collect()
            };
            let mut all = self.group("all", t, &every)?;
            for (c, result) in all.proposers.iter_mut().enumerate() {
                let samples = self.select(t, c, &every)?;
                result.calibration = calibration(rounds(&samples))?;
            }
            Ok(TemperatureResult {
                temperature,
                all,
                sets: groups(|prompt| Some(&prompt.set))?,
                domains: groups(|prompt| prompt.domain.as_deref())?,
            })
        };
        self.recipe.eval.temperatures.iter().enumerate().map(result).collect()
    }

    fn group(&self, group: &str, t: usize, places: &[usize]) -> Result<Group> {
        let settings = &self.recipe.eval;
        let plain = settings.proposers.iter().position(|&proposer| proposer == Proposer::Plain);
        let plain = plain.map(|c| self.select(t, c, places)).transpose()?;
        let plain_timings = plain.as_deref().map(timings);
        let drift = plain_timings.as_deref().and_then(drift);
        let mut proposers = Vec::new();
        for (c, &proposer) in settings.proposers.iter().enumerate() {
            let samples = self.select(t, c, places)?;
            let timings = timings(&samples);
            let baseline = plain_timings.as_deref().filter(|_| proposer != Proposer::Plain);
            let pairs = |plain: &[&'a Timing]| -> Vec<(&'a Timing, &'a Timing)> {
                plain.iter().copied().zip(timings.iter().copied()).collect()
            };
            let is_compared = baseline.is_some() && is_greedy(settings.temperatures[t]);
            let comparison = is_compared.then(|| self.compare(proposer, places, &samples));
            let acceptance = Acceptance::of(rounds(&samples));
            let speedup = baseline.and_then(|plain| speedup(&pairs(plain), settings.seed));
            proposers.push(ProposerResult {
                proposer,
                name: name(proposer, self.drafter).into(),
                verdict: speedup.map(|speedup| Verdict::of(&speedup, acceptance.tau, drift)),
                acceptance,
                speedup,
                round_cost: RoundCost::of(&timings, baseline),
                speed: Speed::of(&timings),
                identical_to_plain: comparison.and_then(|comparison| comparison.is_identical()),
                comparison,
                repetition: repetition(samples.iter().map(|sample| sample.output.as_slice())),
                calibration: None,
            });
        }
        Ok(Group { name: group.into(), prompts: places.len(), drift, proposers })
    }

    /// Counts what was compared of a proposer's answers, and what differs.
    fn compare(&self, proposer: Proposer, places: &[usize], samples: &[&Sample]) -> Comparison {
        let is_different = |place: &&usize| {
            let Prompt { set, index, .. } = &self.prompts[**place];
            let same = |d: &Difference| d.proposer == proposer && d.set == *set && d.prompt == *index;
            self.differences.iter().any(same)
        };
        Comparison {
            answers: samples.len(),
            different: places.iter().filter(is_different).count(),
            tokens: samples.iter().map(|sample| sample.output.len() as u64).sum(),
            accepted: rounds(samples).map(|round| round.accepted as u64).sum(),
        }
    }

    fn select(&self, t: usize, c: usize, places: &[usize]) -> Result<Vec<&'a Sample>> {
        let sample = |&place: &usize| {
            self.samples.get(&(t, place, c)).ok_or_else(|| Error::Invariant(format!("prompt {place} has no answer")))
        };
        places.iter().map(sample).collect()
    }
}

fn timings<'a>(samples: &[&'a Sample]) -> Vec<&'a Timing> {
    samples.iter().map(|sample| &sample.timing).collect()
}

fn rounds<'a>(samples: &'a [&Sample]) -> impl Iterator<Item = &'a Round> {
    samples.iter().flat_map(|sample| &sample.rounds)
}

/// What the reader should know before using the numbers, most serious first.
pub(super) fn warnings(results: &[TemperatureResult], differences: &[Difference], sets: &[SetInfo]) -> Vec<String> {
    let mut warnings = Vec::new();
    if let Some(first) = differences.first() {
        let proposers = results.iter().flat_map(|result| &result.all.proposers);
        let name = proposers.filter(|found| found.proposer == first.proposer).map(|found| found.name.as_str()).next();
        warnings.push(format!(
            "not lossless: {} answers at temperature 0 differ from plain decoding; the first at token {} of prompt \
             {} of `{}` ({}), where the target's two best logits are {:.2e} apart",
            differences.len(),
            first.position,
            first.prompt,
            first.set,
            name.unwrap_or_default(),
            first.target_gap
        ));
    }
    for result in results {
        let at = format!("at temperature {}", result.temperature);
        for proposer in result.all.proposers.iter().filter(|found| found.proposer != Proposer::Plain) {
            let idle = proposer.acceptance.idle_warning(&proposer.name, proposer.proposer);
            warnings.extend(idle.map(|text| format!("{text} ({at})")));
        }
        let loops = result.all.proposers.iter().filter_map(|found| found.repetition).fold(0.0, f64::max);
        if loops > LOOPING {
            warnings.push(format!(
                "{:.0} % of the 4-grams in the answers {at} are repeats: looping text is easy to draft, so the speed \
                 here says little about other text",
                100.0 * loops
            ));
        }
    }
    for set in sets.iter().filter(|set| set.rejected > 0) {
        let first = set.first_rejects.first().map_or("", String::as_str);
        warnings.push(format!("{} rows of `{}` could not be used; the first: {first}", set.rejected, set.name));
    }
    warnings
}
