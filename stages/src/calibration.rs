//! `calibration.json` beside a drafter's checkpoint: the temperatures of its confidences, in the form that SGLang reads and
//! writes, so that tables can be exchanged. `deepspec eval --calibrate` makes it; whoever decodes with the drafter reads it.

use std::path::Path;

use deepspec_models::speculate::Temperatures;
use deepspec_models::speculate::calibrate::Fit;
use serde::{Deserialize, Serialize};

use crate::drafter::Drafter;
use crate::error::{Error, Result};
use crate::run_dir::write_atomic;
use deepspec_engine::progress::Context;

/// Name of the file in a checkpoint's folder.
pub const CALIBRATION_FILE: &str = "calibration.json";

/// Content of the file; lists have one entry per block position, the first position first.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CalibrationTable {
    /// What the confidence logits are divided by.
    pub temperatures: Vec<f32>,
    /// What they were fitted on, in words.
    #[serde(default)]
    pub dataset: String,
    /// Verified blocks of the fit.
    #[serde(default)]
    pub num_samples: u64,
    /// Calibration error of the running product of confidences on these blocks, without scaling.
    #[serde(default)]
    pub ece_before: Vec<f64>,
    /// The same with scaling.
    #[serde(default)]
    pub ece_after: Vec<f64>,
}

impl CalibrationTable {
    /// The table of a fit.
    pub fn of(fit: &Fit, dataset: String) -> Self {
        Self {
            temperatures: fit.temperatures.values().to_vec(),
            dataset,
            num_samples: fit.blocks.first().map_or(0, |&blocks| blocks as u64),
            ece_before: fit.ece_before.clone(),
            ece_after: fit.ece_after.clone(),
        }
    }

    /// Writes the table beside a checkpoint, replacing one that is there as a whole.
    ///
    /// # Errors
    /// When the disk refuses.
    pub fn save(&self, checkpoint: &Path) -> Result<()> {
        let json = serde_json::to_string_pretty(self).map_err(std::io::Error::from)?;
        write_atomic(checkpoint.join(CALIBRATION_FILE), format!("{json}\n").as_bytes())
    }

    /// Reads the table beside a checkpoint, if there is one, for blocks with `confidences` of them.
    ///
    /// # Errors
    /// [`Error::Calibration`] names the field that is missing, of another length, or out of range.
    pub fn load(checkpoint: &Path, confidences: usize) -> Result<Option<Self>> {
        let path = checkpoint.join(CALIBRATION_FILE);
        let text = match fs_err::read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let refuse = |problem: String| Error::Calibration { path: path.clone(), problem };
        let table: Self = serde_json::from_slice(&text).map_err(|error| refuse(error.to_string()))?;
        Temperatures::new(table.temperatures.clone(), confidences).map_err(|error| refuse(error.to_string()))?;
        for (field, errors) in [("ece_before", &table.ece_before), ("ece_after", &table.ece_after)] {
            if !errors.is_empty() && errors.len() != confidences {
                return Err(refuse(format!("`{field}` has {} entries, expected {confidences}", errors.len())));
            }
            if let Some(at) = errors.iter().position(|error| !(0.0..=1.0).contains(error)) {
                return Err(refuse(format!("`{field}[{at}]` is {}, expected 0 to 1", errors[at])));
            }
        }
        Ok(Some(table))
    }

    /// One line that says what the table does.
    pub fn describe(&self) -> String {
        let list = |values: &mut dyn Iterator<Item = String>| values.collect::<Vec<_>>().join(", ");
        let temperatures = list(&mut self.temperatures.iter().map(|value| format!("{value:.2}")));
        let error = |errors: &[f64]| errors.iter().sum::<f64>() / errors.len() as f64;
        let gain = if self.ece_before.is_empty() || self.ece_after.is_empty() {
            String::new()
        } else {
            format!(", mean ECE {:.3} → {:.3} on", error(&self.ece_before), error(&self.ece_after))
        };
        format!("confidences are calibrated: temperatures [{temperatures}]{gain} {}", self.dataset)
            .trim_end()
            .to_owned()
    }
}

/// The drafter with the calibration beside its checkpoint, if there is one; a note says so.
///
/// # Errors
/// The table is damaged or belongs to another drafter.
pub fn attach(drafter: Drafter, checkpoint: &Path, ctx: Context<'_>) -> Result<Drafter> {
    let confidences = drafter.confidences();
    let Some(table) = CalibrationTable::load(checkpoint, confidences)? else { return Ok(drafter) };
    ctx.note(table.describe());
    drafter.with_calibration(Temperatures::new(table.temperatures, confidences)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> CalibrationTable {
        CalibrationTable {
            temperatures: vec![2.5, 1.0, 0.7],
            dataset: "every 4th prompt of `math`".into(),
            num_samples: 120,
            ece_before: vec![0.2, 0.1, 0.1],
            ece_after: vec![0.02, 0.02, 0.03],
        }
    }

    fn refusal(change: impl FnOnce(&mut serde_json::Value)) -> String {
        let folder = tempfile::tempdir().unwrap();
        let mut json = serde_json::to_value(table()).unwrap();
        change(&mut json);
        fs_err::write(folder.path().join(CALIBRATION_FILE), json.to_string()).unwrap();
        let error = CalibrationTable::load(folder.path(), 3).unwrap_err();
        assert!(error.hint().unwrap().contains("--calibrate"));
        error.to_string()
    }

    #[test]
    fn a_table_is_read_as_written_and_absent_ones_are_none() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(CalibrationTable::load(folder.path(), 3).unwrap(), None);
        table().save(folder.path()).unwrap();
        assert_eq!(CalibrationTable::load(folder.path(), 3).unwrap(), Some(table()));
        let text = table().describe();
        assert!(text.contains("[2.50, 1.00, 0.70], mean ECE 0.133 → 0.023 on every 4th prompt"), "{text}");
        // What another program wrote may hold the temperatures alone.
        fs_err::write(folder.path().join(CALIBRATION_FILE), r#"{"temperatures": [1, 2, 3]}"#).unwrap();
        let bare = CalibrationTable::load(folder.path(), 3).unwrap().unwrap();
        assert_eq!((bare.temperatures.len(), bare.ece_before.len()), (3, 0));
        assert_eq!(bare.describe(), "confidences are calibrated: temperatures [1.00, 2.00, 3.00]");
    }

    /// A table with 5 temperatures for a block of 7, and a zero temperature.
    #[test]
    fn tables_of_another_block_or_with_a_zero_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let wrong = CalibrationTable { temperatures: vec![1.0; 5], ..table() };
        wrong.save(folder.path()).unwrap();
        let error = CalibrationTable::load(folder.path(), 7).unwrap_err().to_string();
        assert!(
            error.contains("calibration.json") && error.contains("`temperatures` has 5 entries, expected 7"),
            "{error}"
        );
        let error = refusal(|json| json["temperatures"][1] = 0.into());
        assert!(error.contains("`temperatures[1]` is 0, expected a finite number above 0"), "{error}");
    }

    #[test]
    fn damaged_tables_are_refused_by_field() {
        for (change, problem) in [
            ((|json| json["temperatures"][0] = (-2).into()) as fn(&mut serde_json::Value), "`temperatures[0]` is -2"),
            (|json| json["temperatures"][2] = 1e300.into(), "number out of range"),
            (|json| json["temperatures"] = "1".into(), "invalid type"),
            (|json| _ = json.as_object_mut().unwrap().remove("temperatures"), "missing field `temperatures`"),
            (|json| json["ece_after"] = vec![0.1].into(), "`ece_after` has 1 entries, expected 3"),
            (|json| json["ece_before"][1] = 7.into(), "`ece_before[1]` is 7, expected 0 to 1"),
        ] {
            let error = refusal(change);
            assert!(error.contains(problem), "{error}");
        }
    }
}
