//! What the stage commands share: recipe and run folder from the arguments, the environment's model settings, provenance.
#![expect(clippy::disallowed_methods, reason = "the one place where the program reads its environment")]

use std::env;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use deepspec_engine::progress::Context;
use deepspec_stages::model_source::ModelSourceConfig;
use deepspec_stages::recipe::Recipe;
use deepspec_stages::run_dir::{Provenance, RunDir};
use deepspec_stages::target_model::TargetModel;

use crate::args::RunArguments;

/// Recipe used where none is named or saved.
const DEFAULT_RECIPE: &str = "quickstart";

/// A recipe and the folder of its run.
pub(super) struct Setup {
    pub recipe: Recipe,
    pub folder: PathBuf,
    pub provenance: Provenance,
}

impl Setup {
    /// Resolves recipe and folder; `change` may alter the recipe before it is checked. A stage that `needs_run` works on
    /// what an earlier one left there.
    ///
    /// # Errors
    /// When the recipe cannot be found, read or used.
    pub(super) fn new(
        arguments: &RunArguments,
        needs_run: bool,
        change: impl FnOnce(&mut Recipe),
    ) -> anyhow::Result<Self> {
        let named = arguments.recipe.as_deref().map(stem);
        let default = || Path::new("runs").join(named.unwrap_or_else(|| DEFAULT_RECIPE.into()));
        let folder = arguments.run.clone().unwrap_or_else(default);
        let overrides = &arguments.overrides;
        let recipe = match &arguments.recipe {
            Some(name) => Recipe::open_with(name, overrides, change)?,
            // Where there is none, the error says what there is.
            None if needs_run || folder.join("recipe.toml").is_file() => {
                RunDir::saved_recipe(&folder)?.complete(overrides, change)?
            }
            None => Recipe::open_with(DEFAULT_RECIPE, overrides, change)?,
        };
        Ok(Self { recipe, folder, provenance: provenance() })
    }

    /// Opens the run folder.
    ///
    /// # Errors
    /// When another process uses it or it belongs to another recipe.
    pub(super) fn run_dir(&self, context: Context<'_>) -> anyhow::Result<RunDir> {
        let run = RunDir::create_or_open(&self.folder, &self.recipe, &self.provenance)?;
        for change in run.changes() {
            context.note(format!("recipe: {change}"));
        }
        context.note(format!("run folder: {}", run.path().display()));
        Ok(run)
    }

    /// Loads the target.
    ///
    /// # Errors
    /// When it cannot be found, fetched or loaded.
    pub(super) fn target(&self, context: Context<'_>) -> anyhow::Result<TargetModel> {
        Ok(TargetModel::load(&self.recipe.target, &model_source(), context)?)
    }
}

/// `dspark/smollm2_135m.toml` → `dspark_smollm2_135m`.
fn stem(name: &str) -> String {
    name.trim_end_matches(".toml").trim_start_matches("recipes/").replace(['/', '\\'], "_")
}

/// Where models are found and kept: `DEEPSPEC_CACHE`, `HF_HOME`, `HF_HUB_OFFLINE`, `DEEPSPEC_PYTHON`.
pub(super) fn model_source() -> ModelSourceConfig {
    let path = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let home = path("HOME").or_else(|| path("USERPROFILE")).unwrap_or_else(|| ".".into());
    let caches = path("XDG_CACHE_HOME").unwrap_or_else(|| home.join(".cache"));
    let offline = env::var("HF_HUB_OFFLINE").is_ok_and(|value| !matches!(value.as_str(), "" | "0" | "false"));
    ModelSourceConfig {
        cache_dir: path("DEEPSPEC_CACHE").unwrap_or_else(|| caches.join("deepspec")),
        hf_home: path("HF_HOME").unwrap_or_else(|| caches.join("huggingface")),
        offline,
        python: path("DEEPSPEC_PYTHON").unwrap_or_else(|| "python3".into()),
    }
}

fn provenance() -> Provenance {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    Provenance {
        version: env!("CARGO_PKG_VERSION").into(),
        git_commit: option_env!("DEEPSPEC_COMMIT").map(Into::into),
        started: utc(seconds),
        machine: machine(),
    }
}

/// Processor, cores, memory and system, as far as the system tells.
pub(super) fn machine() -> String {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let field = |file: &str, name: &str| {
        let text = fs_err::read_to_string(file).ok()?;
        let line = text.lines().find(|line| line.starts_with(name))?;
        line.split_once(':').map(|(_, value)| value.trim().to_owned())
    };
    let processor = field("/proc/cpuinfo", "model name").unwrap_or_else(|| env::consts::ARCH.into());
    let memory = field("/proc/meminfo", "MemTotal")
        .and_then(|value| value.split_whitespace().next()?.parse::<f64>().ok())
        .map_or(String::new(), |kib| format!(", {:.0} GiB", kib / (1 << 20) as f64));
    format!("{processor}, {cores} cores{memory}, {}", env::consts::OS)
}

/// Key of the API from the environment, `DEEPSPEC_API_KEY`, as it is, if it is set.
pub(super) fn api_key() -> Option<String> {
    // What is no UTF-8 becomes a key that is refused, and not one that is left out.
    env::var_os("DEEPSPEC_API_KEY").map(|key| key.to_string_lossy().into_owned())
}

/// Bytes of memory that this program can still get, by the system and by the control group it runs in; `None` where neither
/// tells.
pub(super) fn available_memory() -> Option<u64> {
    let read = |file: &str| fs_err::read_to_string(file).ok();
    let number = |file: &str| read(file)?.trim().parse::<u64>().ok();
    let system = read("/proc/meminfo").and_then(|text| {
        let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
        Some(line.split_whitespace().next()?.parse::<u64>().ok()? * 1024)
    });
    let group = number("/sys/fs/cgroup/memory.max")
        .zip(number("/sys/fs/cgroup/memory.current"))
        .map(|(most, used)| most.saturating_sub(used));
    system.into_iter().chain(group).min()
}

/// Seconds since 1970 as `2026-01-31T12:00:00Z` (days to date after Howard Hinnant's `civil_from_days`).
fn utc(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    let shifted = days + 719_468;
    let era = shifted / 146_097;
    let day_of_era = shifted % 146_097;
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z", rest / 3600, rest / 60 % 60, rest % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        assert_eq!(utc(0), "1970-01-01T00:00:00Z");
        assert_eq!(utc(951_782_399), "2000-02-28T23:59:59Z");
        assert_eq!(utc(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(utc(1_796_169_600), "2026-12-02T00:00:00Z");
    }

    #[test]
    fn run_folders_are_named_after_the_recipe() {
        assert_eq!(stem("quickstart"), "quickstart");
        assert_eq!(stem("recipes/dspark/smollm2_135m.toml"), "dspark_smollm2_135m");
    }
}
