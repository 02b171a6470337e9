//! The cost of passes on disk: measured once per model and machine, and the tables of other engines.
//!
//! A profile of ours carries a fingerprint of what it was measured on, and is measured again where that differs. Two published
//! forms can be read and written besides: a table of steps per second by the tokens of a batch, and a sum of three parts.

use std::path::Path;

use deepspec_models::target::Target;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::run_dir::write_atomic;
use deepspec_engine::progress::Context;
use deepspec_engine::{StepCost, StepCosts};

/// Version of our own form.
const VERSION: u32 = 1;
/// A table whose most rows cost less than this many times one row says nothing about the cost of rows.
const FLAT: f64 = 1.02;
/// A kept profile is measured again where a pass of one row now takes this many times what it says, or less than one of them.
const CHANGED: f64 = 1.5;

/// What a profile was measured on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fingerprint {
    /// Identity of config and weights of the target.
    pub model: String,
    /// How its weights are held.
    pub precision: String,
    /// Processor, memory and system in words.
    pub machine: String,
    /// Worker threads.
    pub threads: usize,
    /// Kernels chosen.
    pub instruction_set: String,
    /// Version of the program.
    pub version: String,
}

impl std::fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { model, precision, machine, threads, instruction_set, version } = self;
        write!(f, "model {model} in {precision} on {machine}, {threads} threads, {instruction_set}, version {version}")
    }
}

/// Costs of passes with what they were measured on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SpsProfile {
    /// Version of the form.
    pub version: u32,
    /// What it was measured on.
    pub fingerprint: Fingerprint,
    /// Seconds of a pass by its rows.
    pub entries: Vec<StepCost>,
}

/// Steps per second by the tokens of a batch; between two counts the lower one's rate holds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RateTable {
    /// Tokens of a batch, rising.
    pub sample_batch_tokens: Vec<usize>,
    /// Steps per second with so many.
    pub sample_steps_per_sec: Vec<f64>,
    /// Most tokens of a batch.
    pub max_batch_tokens: usize,
}

/// Seconds of a step = bias + α(requests) + θ(tokens), each interpolated and held constant outside its probes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AdditiveTable {
    /// Seconds of any step.
    pub bias_seconds: f64,
    /// Requests, rising.
    pub bs_probes: Vec<usize>,
    /// Seconds that so many requests add.
    pub alpha_seconds: Vec<f64>,
    /// Tokens, rising.
    pub m_probes: Vec<usize>,
    /// Seconds that so many tokens add.
    pub theta_seconds: Vec<f64>,
}

/// Any form that a file may hold.
#[derive(Debug, Clone, PartialEq)]
pub enum Profile {
    /// Ours.
    Own(SpsProfile),
    /// Steps per second.
    Rates(RateTable),
    /// A sum of parts.
    Additive(AdditiveTable),
}

impl Profile {
    /// Reads any of the forms, told apart by their keys.
    ///
    /// # Errors
    /// The file cannot be read, has a form of none of them, or values that are no costs.
    pub fn load(path: &Path) -> Result<Self> {
        let text = fs_err::read_to_string(path)?;
        Self::from_json(&text).map_err(|problem| Error::Input(format!("profile `{}`: {problem}", path.display())))
    }

    fn from_json(text: &str) -> Result<Self, String> {
        let value: serde_json::Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
        let words = |error: serde_json::Error| error.to_string();
        let profile = if value.get("sample_batch_tokens").is_some() {
            Self::Rates(serde_json::from_str(text).map_err(words)?)
        } else if value.get("bias_seconds").is_some() {
            Self::Additive(serde_json::from_str(text).map_err(words)?)
        } else if value.get("fingerprint").is_some() {
            Self::Own(serde_json::from_str(text).map_err(words)?)
        } else {
            return Err(
                "none of the known forms: it has neither `fingerprint`, `sample_batch_tokens` nor `bias_seconds`"
                    .into(),
            );
        };
        match &profile {
            Self::Own(own) if own.version != VERSION => Err(format!("version {}, expected {VERSION}", own.version)),
            _ => profile.costs(1).map(|_| profile).map_err(|error| error.to_string()),
        }
    }

    /// The costs of passes that give `sequences` sequences their rows.
    ///
    /// # Errors
    /// [`Error::Input`] for lists that do not fit together or hold no costs.
    pub fn costs(&self, sequences: usize) -> Result<StepCosts> {
        let entries = match self {
            Self::Own(own) => own.entries.clone(),
            Self::Rates(table) => table.entries()?,
            Self::Additive(table) => table.entries(sequences)?,
        };
        Ok(StepCosts::new(entries)?)
    }
}

impl RateTable {
    /// The table of known costs.
    pub fn of(costs: &StepCosts) -> Self {
        let rows: Vec<usize> = costs.entries().iter().map(|entry| entry.rows).collect();
        Self {
            sample_steps_per_sec: rows.iter().map(|&rows| 1.0 / costs.seconds(rows)).collect(),
            max_batch_tokens: rows.last().copied().unwrap_or(0),
            sample_batch_tokens: rows,
        }
    }

    /// A stair: each rate holds up to the next count.
    fn entries(&self) -> Result<Vec<StepCost>> {
        let (rows, rates) = (&self.sample_batch_tokens, &self.sample_steps_per_sec);
        rising("sample_batch_tokens", rows, rates.len())?;
        let mut entries = Vec::new();
        for (i, (&count, rate)) in rows.iter().zip(rates).enumerate() {
            let seconds = 1.0 / rate;
            entries.push(StepCost { rows: count, seconds });
            let end = rows.get(i + 1).map_or(self.max_batch_tokens, |next| next - 1);
            if end > count {
                entries.push(StepCost { rows: end, seconds });
            }
        }
        Ok(entries)
    }
}

impl AdditiveTable {
    /// The table of known costs, all of them by tokens.
    pub fn of(costs: &StepCosts) -> Self {
        let m_probes: Vec<usize> = costs.entries().iter().map(|entry| entry.rows).collect();
        let bias_seconds = m_probes.first().map_or(0.0, |&rows| costs.seconds(rows));
        let theta_seconds = m_probes.iter().map(|&rows| costs.seconds(rows) - bias_seconds).collect();
        Self { bias_seconds, bs_probes: vec![1], alpha_seconds: vec![0.0], m_probes, theta_seconds }
    }

    fn entries(&self, requests: usize) -> Result<Vec<StepCost>> {
        rising("bs_probes", &self.bs_probes, self.alpha_seconds.len())?;
        rising("m_probes", &self.m_probes, self.theta_seconds.len())?;
        let alpha = interpolated(&self.bs_probes, &self.alpha_seconds, requests);
        let entry = |(&rows, theta): (&usize, &f64)| StepCost { rows, seconds: self.bias_seconds + alpha + theta };
        Ok(self.m_probes.iter().zip(&self.theta_seconds).map(entry).collect())
    }
}

/// Checks a list of counts and the length of the list that belongs to it.
fn rising(name: &str, counts: &[usize], values: usize) -> Result<()> {
    if counts.is_empty() || counts[0] == 0 || !counts.is_sorted_by(|a, b| a < b) || counts.len() != values {
        let problem = format!("`{name}` has to rise from at least 1, with one value for each of its {}", counts.len());
        return Err(Error::Input(problem));
    }
    Ok(())
}

/// Value at `count`, linear between probes and constant outside.
fn interpolated(probes: &[usize], values: &[f64], count: usize) -> f64 {
    let above = probes.partition_point(|&probe| probe < count);
    if above == 0 {
        return values[0];
    }
    if above == probes.len() {
        return values[above - 1];
    }
    let share = (count - probes[above - 1]) as f64 / (probes[above] - probes[above - 1]) as f64;
    values[above - 1] + share * (values[above] - values[above - 1])
}

/// Costs of passes for `sequences` sequences with blocks of `block`: from `given` where the user names a file, else from
/// `kept` if that was measured on the same, else measured and kept there.
///
/// # Errors
/// The given file cannot be used, belongs to other models or machines, or the target fails.
pub fn step_costs(
    target: &Target,
    (block, sequences): (usize, usize),
    fingerprint: &Fingerprint,
    given: Option<&Path>,
    kept: &Path,
    ctx: Context<'_>,
) -> Result<StepCosts> {
    let costs = match given {
        Some(path) => {
            let profile = Profile::load(path)?;
            if let Profile::Own(own) = &profile
                && own.fingerprint != *fingerprint
            {
                return Err(Error::Mismatch {
                    what: "what the costs of passes were measured on".into(),
                    left: format!("{} in `{}`", own.fingerprint, path.display()),
                    right: format!("{fingerprint} here"),
                    hint: Some("leave `--profile` out to have them measured".into()),
                });
            }
            profile.costs(sequences)?
        }
        None => match Profile::load(kept) {
            Ok(Profile::Own(own))
                if own.fingerprint == *fingerprint && covers(&own, block, sequences) && still_holds(&own, target)? =>
            {
                StepCosts::new(own.entries)?
            }
            _ => measure(target, (block, sequences), fingerprint, kept, ctx)?,
        },
    };
    let (first, last) = (costs.entries()[0], costs.entries()[costs.entries().len() - 1]);
    ctx.note(format!(
        "passes of {} to {} rows take {:.1} to {:.1} ms",
        first.rows,
        last.rows,
        1e3 * costs.seconds(first.rows),
        1e3 * costs.seconds(last.rows)
    ));
    if costs.seconds(last.rows) < FLAT * costs.seconds(first.rows) {
        ctx.warn("by the costs of passes, rows cost nothing: everything that is proposed will be verified");
    }
    Ok(costs)
}

/// Whether a table reaches as far as is needed.
fn covers(profile: &SpsProfile, block: usize, sequences: usize) -> bool {
    profile.entries.last().is_some_and(|entry| entry.rows >= (block + 1) * sequences)
}

/// Whether the machine is as fast as when it was measured: other work may have run beside it then, or does now.
fn still_holds(profile: &SpsProfile, target: &Target) -> Result<bool> {
    let ratio = StepCosts::measure(target, 0, 1)?.seconds(1) / StepCosts::new(profile.entries.clone())?.seconds(1);
    Ok((1.0 / CHANGED..CHANGED).contains(&ratio))
}

fn measure(
    target: &Target,
    (block, sequences): (usize, usize),
    fingerprint: &Fingerprint,
    kept: &Path,
    ctx: Context<'_>,
) -> Result<StepCosts> {
    let costs = StepCosts::measure(target, block, sequences)?;
    let entries = costs.entries().to_vec();
    let profile = SpsProfile { version: VERSION, fingerprint: fingerprint.clone(), entries };
    let text = serde_json::to_vec_pretty(&profile)
        .map_err(|error| Error::Invariant(format!("cannot write the costs of passes: {error}")))?;
    if let Some(folder) = kept.parent() {
        fs_err::create_dir_all(folder)?;
    }
    write_atomic(kept, &text)?;
    ctx.note(format!("costs of passes are kept in `{}`", kept.display()));
    Ok(costs)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn costs(entries: &[(usize, f64)]) -> StepCosts {
        StepCosts::new(entries.iter().map(|&(rows, seconds)| StepCost { rows, seconds }).collect()).unwrap()
    }

    #[test]
    fn published_forms_are_read() {
        let rates =
            r#"{"sample_batch_tokens": [1, 4, 8], "sample_steps_per_sec": [100, 50, 40], "max_batch_tokens": 16}"#;
        let costs = Profile::from_json(rates).unwrap().costs(1).unwrap();
        let seconds = [1, 3, 4, 7, 8, 16].map(|rows| costs.seconds(rows));
        assert_eq!(seconds, [0.01, 0.01, 0.02, 0.02, 0.025, 0.025]);
        let additive = r#"{"bias_seconds": 0.01, "bs_probes": [1, 5], "alpha_seconds": [0.0, 0.004],
            "m_probes": [1, 11], "theta_seconds": [0.001, 0.011]}"#;
        let profile = Profile::from_json(additive).unwrap();
        let at = |sequences, rows| profile.costs(sequences).unwrap().seconds(rows);
        assert!(
            (at(1, 6) - 0.016).abs() < 1e-12 && (at(3, 6) - 0.018).abs() < 1e-12 && (at(9, 1) - 0.015).abs() < 1e-12
        );
    }

    #[test]
    fn published_forms_are_written() {
        let known = costs(&[(1, 0.01), (4, 0.02), (8, 0.025)]);
        let text = serde_json::to_string(&RateTable::of(&known)).unwrap();
        let back = Profile::from_json(&text).unwrap().costs(1).unwrap();
        let text = serde_json::to_string(&AdditiveTable::of(&known)).unwrap();
        let sum = Profile::from_json(&text).unwrap().costs(4).unwrap();
        for rows in [1, 4, 8] {
            assert!((back.seconds(rows) - known.seconds(rows)).abs() < 1e-12);
            assert!((sum.seconds(rows) - known.seconds(rows)).abs() < 1e-12);
        }
        assert!((sum.seconds(6) - known.seconds(6)).abs() < 1e-12);
    }

    #[test]
    fn tables_that_are_none_are_refused() {
        for wrong in [
            "[]",
            "{}",
            r#"{"sample_batch_tokens": [4, 1], "sample_steps_per_sec": [1, 2], "max_batch_tokens": 4}"#,
            r#"{"sample_batch_tokens": [1], "sample_steps_per_sec": [1, 2], "max_batch_tokens": 4}"#,
            r#"{"sample_batch_tokens": [1], "sample_steps_per_sec": [0], "max_batch_tokens": 4}"#,
            r#"{"sample_batch_tokens": [1], "sample_steps_per_sec": [-1], "max_batch_tokens": 4}"#,
            r#"{"bias_seconds": 1, "bs_probes": [1], "alpha_seconds": [0], "m_probes": [], "theta_seconds": []}"#,
        ] {
            assert!(Profile::from_json(wrong).is_err(), "{wrong}");
        }
    }
}
