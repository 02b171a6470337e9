//! Costs of passes in the forms that other engines' planners read.

use std::path::Path;

use crate::error::{Error, Result};
use crate::run_dir::write_atomic;
use crate::sps_profile::{AdditiveTable, Profile, RateTable};
use deepspec_engine::StepCosts;

/// A published form of costs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CostForm {
    /// Steps per second by the tokens of a batch.
    Table,
    /// Seconds as a sum of parts by requests and tokens.
    Additive,
}

/// Writes the costs of the file `from`, in whichever form it is, to the file `out`; returns them.
///
/// # Errors
/// As [`Profile::load`], or the file cannot be written.
pub fn costs(from: &Path, form: CostForm, out: &Path) -> Result<StepCosts> {
    let costs = Profile::load(from)?.costs(1)?;
    let text = match form {
        CostForm::Table => serde_json::to_vec_pretty(&RateTable::of(&costs)),
        CostForm::Additive => serde_json::to_vec_pretty(&AdditiveTable::of(&costs)),
    };
    write_atomic(out, &text.map_err(|error| Error::Invariant(format!("cannot write the costs of passes: {error}")))?)?;
    Ok(costs)
}
