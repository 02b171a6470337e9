//! `eval --calibrate`: fits the temperatures of a drafter's confidences on a share of the prompts, and shows on the others what
//! that brought.
//!
//! The drafter answers all prompts at all temperatures of the recipe, every block verified whole, so that no confidence decides
//! what is observed. Temperatures are fitted on the calibration share, pooled over the sampling temperatures; everything that is
//! reported comes from the rest. Its answers have a journal of their own, so an interrupted calibration goes on.

use std::collections::HashMap;

use deepspec_models::speculate::Temperatures;
use deepspec_models::speculate::calibrate::{VerifiedBlock, fit};
use serde::{Deserialize, Serialize};

use super::confidence::{CalibrationReport, CalibrationSummary};
use super::decode::{Key, Sample};
use super::metrics::{Round, calibration};
use super::prompts::{Prompt, SetInfo};
use super::report::{Table, number};
use crate::calibration::CalibrationTable;
use crate::error::{Error, Result};
use crate::recipe::{EvalRecipe, Proposer};

/// The last of every so many prompts of a set is for calibration.
pub const STRIDE: usize = 4;

/// What a calibration was fitted on and what it brought.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CalibrationOutcome {
    /// What was written beside the checkpoint.
    pub table: CalibrationTable,
    /// Prompts of the fit.
    pub fitted_on: usize,
    /// Prompts behind the reports, none of them among those of the fit.
    pub reported_on: usize,
    /// Over all sampling temperatures.
    pub all: BeforeAfter,
    /// At each of them.
    pub temperatures: Vec<BeforeAfter>,
}

/// Quality of the confidences of blocks that were verified whole, without and with scaling.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BeforeAfter {
    /// Sampling temperature; `None` for all together.
    pub temperature: Option<f64>,
    /// Without scaling.
    pub before: CalibrationReport,
    /// With scaling.
    pub after: CalibrationReport,
}

/// Takes the calibration share, prompts 3, 7, 11, … of each set, out of `prompts`; `sets` then count both.
///
/// # Errors
/// No set has that many prompts.
pub(super) fn split(prompts: Vec<Prompt>, sets: &mut [SetInfo]) -> Result<(Vec<Prompt>, Vec<Prompt>)> {
    let (share, rest): (Vec<Prompt>, Vec<Prompt>) =
        prompts.into_iter().partition(|prompt| prompt.index % STRIDE == STRIDE - 1);
    if share.is_empty() || rest.is_empty() {
        return Err(Error::Input(format!(
            "no set has the {STRIDE} prompts that a calibration share needs: every {STRIDE}th is held out for it"
        )));
    }
    for set in sets {
        set.calibration = share.iter().filter(|prompt| prompt.set == set.name).count();
        set.prompts -= set.calibration;
    }
    Ok((share, rest))
}

/// Settings under which blocks are collected: the drafter alone, every block verified whole.
pub(super) fn collecting(settings: &EvalRecipe) -> EvalRecipe {
    EvalRecipe {
        proposers: vec![Proposer::Draft],
        adaptive: false,
        confidence_threshold: 0.0,
        calibration: false,
        ..settings.clone()
    }
}

/// Fits temperatures to the answers of the calibration share and reports on those of the rest. `prompts` holds the share first,
/// `share` prompts of it; `samples` answers all of them.
///
/// # Errors
/// Too few blocks were verified, or a confidence is no number.
pub(super) fn outcome(
    block_size: usize,
    settings: &EvalRecipe,
    prompts: &[Prompt],
    share: usize,
    samples: &HashMap<Key, Sample>,
) -> Result<CalibrationOutcome> {
    let rounds = |temperature: Option<usize>, places: std::ops::Range<usize>| -> Vec<&Round> {
        let temperatures = temperature.map_or(0..settings.temperatures.len(), |t| t..t + 1);
        let keys = temperatures.flat_map(|t| places.clone().map(move |place| (t, place, 0)));
        let rounds = keys.filter_map(|key| samples.get(&key)).flat_map(|sample| &sample.rounds);
        rounds.filter(|round| !round.confidence_logits.is_empty()).collect()
    };
    let observed = rounds(None, 0..share);
    let blocks: Vec<VerifiedBlock<'_>> = observed
        .iter()
        .map(|round| VerifiedBlock { logits: &round.confidence_logits, accepted: round.accepted })
        .collect();
    let fit = fit(block_size, &blocks)?;
    let table = CalibrationTable::of(&fit, dataset(settings, &prompts[..share]));
    let before_after = |temperature: Option<usize>| -> Result<BeforeAfter> {
        let raw = rounds(temperature, share..prompts.len());
        let nothing = || Error::Input("the prompts that were held out gave no block with confidences".into());
        Ok(BeforeAfter {
            temperature: temperature.map(|t| settings.temperatures[t]),
            before: calibration(raw.iter().copied())?.ok_or_else(nothing)?,
            after: calibration(&scaled(&raw, &fit.temperatures))?.ok_or_else(nothing)?,
        })
    };
    Ok(CalibrationOutcome {
        table,
        fitted_on: share,
        reported_on: prompts.len() - share,
        all: before_after(None)?,
        temperatures: (0..settings.temperatures.len()).map(|t| before_after(Some(t))).collect::<Result<_>>()?,
    })
}

fn scaled(rounds: &[&Round], temperatures: &Temperatures) -> Vec<Round> {
    let mut scaled: Vec<Round> = rounds.iter().map(|&round| round.clone()).collect();
    for round in &mut scaled {
        temperatures.scale(&mut round.confidence_logits);
    }
    scaled
}

/// The calibration share in words: sets, split, seed, sampling temperatures.
fn dataset(settings: &EvalRecipe, share: &[Prompt]) -> String {
    let mut sets: Vec<(&str, usize)> = Vec::new();
    for prompt in share {
        match sets.iter_mut().find(|(name, _)| *name == prompt.set) {
            Some((_, count)) => *count += 1,
            None => sets.push((&prompt.set, 1)),
        }
    }
    let sets: Vec<String> = sets.iter().map(|(name, count)| format!("{count} of `{name}`")).collect();
    let temperatures: Vec<String> = settings.temperatures.iter().map(ToString::to_string).collect();
    format!(
        "every {STRIDE}th prompt ({}; seed {}{}) at temperature {}",
        sets.join(", "),
        settings.seed,
        settings.limit.map_or(String::new(), |limit| format!(", limit {limit}")),
        temperatures.join(", ")
    )
}

impl CalibrationOutcome {
    /// What it brought, in a sentence.
    pub fn headline(&self) -> String {
        let ece = |report: &CalibrationReport| number(report.summary.ece);
        format!(
            "calibration: mean ECE {} → {} on the {} prompts that were held out from its fit on {}",
            ece(&self.all.before),
            ece(&self.all.after),
            self.reported_on,
            self.fitted_on
        )
    }

    /// Per position and sampling temperature what was predicted and observed, before and after.
    pub fn tables(&self) -> Vec<Table> {
        let parts: Vec<&BeforeAfter> = match &self.temperatures[..] {
            [only] => vec![only],
            several => [&self.all].into_iter().chain(several).collect(),
        };
        parts.into_iter().map(|part| self.table_of(part)).collect()
    }

    fn table_of(&self, part: &BeforeAfter) -> Table {
        let header = [
            "position",
            "scaling",
            "rounds",
            "observed",
            "predicted",
            "after",
            "ECE",
            "after",
            "AUROC",
            "after",
            "Brier",
            "after",
        ];
        let at = part.temperature.map_or("all temperatures".to_owned(), |value| format!("temperature {value}"));
        let title = format!("Confidence of whole blocks at {at}, before and after calibration");
        let mut table = Table::new(title, &header);
        let pair = |values: [Option<f64>; 2]| values.map(number);
        for (k, (before, after)) in part.before.positions.iter().zip(&part.after.positions).enumerate() {
            let mut row = vec![(k + 1).to_string(), number(self.table.temperatures.get(k).map(|&t| f64::from(t)))];
            row.extend([before.count.to_string(), number(before.observed_mean)]);
            row.extend(pair([before.predicted_mean, after.predicted_mean]));
            row.extend(pair([before.ece, after.ece]));
            row.extend(pair([before.auroc, after.auroc]));
            row.extend(pair([before.brier, after.brier]));
            table.rows.push(row);
        }
        let (before, after): (&CalibrationSummary, &CalibrationSummary) = (&part.before.summary, &part.after.summary);
        let mut row = vec!["mean".to_owned(), String::new(), String::new(), number(before.observed_mean)];
        row.extend(pair([before.predicted_mean, after.predicted_mean]));
        row.extend(pair([before.ece, after.ece]));
        row.extend(pair([before.auroc, after.auroc]));
        row.extend(pair([before.brier, after.brier]));
        table.rows.push(row);
        table
    }
}
