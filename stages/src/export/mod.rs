//! Writes what this program makes in the formats of others: drafters for engines and other trainers, target caches for the reference,
//! costs of passes for planners.

mod cache;
mod costs;
mod profile;

use std::path::{Path, PathBuf};

use candle_core::{DType, Device};
use deepspec_models::config::TargetConfig;
use deepspec_models::formats::{Canonical, Format, Lender, PROFILE_FILE, Verifier};
use deepspec_models::weights::SINGLE_FILE;

pub use self::cache::{CacheExport, cache};
pub use self::costs::{CostForm, costs};
pub use self::profile::profile;
use crate::error::{Error, Result};
use crate::eval::EvalOutcome;
use deepspec_engine::progress::Context;

/// Files of an export; a folder with others is not replaced.
const FILES: [&str; 3] = ["config.json", SINGLE_FILE, PROFILE_FILE];

/// What to export, and how.
#[derive(Debug, Clone)]
pub struct DrafterExport {
    /// Checkpoint in any layout that is read.
    pub draft: PathBuf,
    /// Format to write.
    pub format: Format,
    /// Folder to write.
    pub out: PathBuf,
    /// Folder or GGUF file of the target.
    pub target: Option<PathBuf>,
    /// Name by which engines find the target.
    pub target_name: Option<String>,
    /// `results.json` of an evaluation of this drafter.
    pub results: Option<PathBuf>,
}

/// What an export came to.
#[derive(Debug, Clone)]
pub struct DrafterExported {
    /// Layout of the checkpoint that was read.
    pub from: Format,
    /// Format that was written.
    pub to: Format,
    /// Target layers, as the format counts them.
    pub layer_ids: Vec<i64>,
    /// Bytes of the folder.
    pub bytes: u64,
}

/// Converts a drafter's checkpoint. The folder appears as a whole or not at all.
///
/// # Errors
/// The checkpoint or the target cannot be read, the format cannot hold the drafter, the results are of another drafter, the folder
/// holds other files, or the disk refuses.
pub fn drafter(export: &DrafterExport, ctx: Context<'_>) -> Result<DrafterExported> {
    refuse_other_files(&export.out)?;
    let lender = export.target.as_ref().map(Lender::open).transpose()?;
    let drafter = Canonical::open(&export.draft, lender.as_ref(), DType::F32, &Device::Cpu)?;
    ctx.note(format!(
        "drafter `{}`: layout {}, {}",
        export.draft.display(),
        drafter.format.name(),
        block_rule(&drafter)
    ));
    let verifier = Verifier {
        name: export.target_name.clone(),
        architecture: lender.as_ref().map(|lender| architecture(lender.config())),
    };
    let profile = match &export.results {
        Some(path) => Some(profile(&read_results(path)?, &drafter, path)?),
        None => None,
    };
    drafter.write(export.format, &export.out, &verifier, profile.as_ref())?;
    let ids: Vec<i32> = target_layer_ids(&drafter);
    let mut bytes = 0;
    for entry in fs_err::read_dir(&export.out)? {
        bytes += entry?.metadata()?.len();
    }
    Ok(DrafterExported {
        from: drafter.format,
        to: export.format,
        layer_ids: export.format.layer_ids().write(&ids),
        bytes,
    })
}

/// Which rows of a block propose, in words.
pub fn block_rule(drafter: &Canonical) -> &'static str {
    match drafter.config["sample_from_anchor"].as_bool() {
        _ if drafter.is_eagle3() => "Eagle3, one token after the other",
        Some(true) => "anchor-first blocks",
        _ => "blocks of 1+N",
    }
}

/// Target layers in our convention.
pub fn target_layer_ids(drafter: &Canonical) -> Vec<i32> {
    let ids = drafter.config["target_layer_ids"].as_array();
    ids.into_iter().flatten().filter_map(|id| id.as_i64()?.try_into().ok()).collect()
}

fn architecture(config: &TargetConfig) -> String {
    let json = config.to_json();
    json["architectures"][0].as_str().unwrap_or_default().into()
}

fn read_results(path: &Path) -> Result<EvalOutcome> {
    let text = fs_err::read(path)?;
    serde_json::from_slice(&text)
        .map_err(|error| Error::Input(format!("`{}` is not the result of an evaluation: {error}", path.display())))
}

/// An export replaces an earlier one; a folder of anything else is not touched.
fn refuse_other_files(out: &Path) -> Result<()> {
    if !out.is_dir() {
        return Ok(());
    }
    for entry in fs_err::read_dir(out)? {
        let name = entry?.file_name();
        if !FILES.iter().any(|file| name == *file) {
            let problem = format!("`{}` holds `{}`, which is no file of an export", out.display(), name.display());
            return Err(Error::Input(problem));
        }
    }
    Ok(())
}
