//! The folder of a run: its paths, its recipe and provenance on disk, and the lock that keeps other processes out.
//!
//! A run folder belongs to one recipe. Opened again with another, it accepts changes that cannot have altered what is
//! already written, saves them, and refuses all others by name:
//!
//! | keys | may change |
//! | --- | --- |
//! | `eval.*`, `data.max_bad_ratio`, `prepare.batch_size`, `draft.precision`, `train.checkpoint_every`, `train.keep_checkpoints`, `train.log_every`, `train.acceptance_*` | always |
//! | `target.*`, `data.*`, `prepare.*` | until there are answers, a cache, checkpoints or metrics |
//! | `draft.target_layer_ids` | until there is a cache, or there are checkpoints or metrics |
//! | `draft.*`, `init.*`, `train.*` | until there are checkpoints or metrics |

mod atomic;
mod journal;
mod missing;

#[cfg(test)]
mod tests;

use std::fs::TryLockError;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use serde::Serialize;
use serde_json::json;

pub use self::atomic::write_atomic;
pub use self::journal::{Journal, read_journal};
use crate::error::{Error, Result};
use crate::recipe::Recipe;

const RECIPE: &str = "recipe.toml";
const PROVENANCE: &str = "provenance.json";
const LOCK: &str = "run.lock";
/// How often a lock that is held is tried again, and the time between two tries.
const LOCK_TRIES: usize = 20;
const LOCK_PAUSE: Duration = Duration::from_millis(10);
const SHARED_CACHE: &str = "cache.path";

/// Keys that never change what is already written. How many sequences are decoded at once is among them, since a row's
/// result does not depend on its batch.
const FREE: &[&str] = &[
    "data.max_bad_ratio",
    "prepare.batch_size",
    "draft.precision",
    "train.checkpoint_every",
    "train.keep_checkpoints",
    "train.log_every",
    "train.acceptance_every",
    "train.acceptance_prompts",
];

/// Where a run comes from; the caller knows clock, machine and repository.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Provenance {
    /// Version of the program.
    pub version: String,
    /// Commit that the program was built from, where known.
    pub git_commit: Option<String>,
    /// Time of the start, such as `2026-01-31T12:00:00Z`.
    pub started: String,
    /// Processor, memory and system in words.
    pub machine: String,
}

/// A key whose value differs from the one saved in the run folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// Dotted key.
    pub key: String,
    /// Saved value as TOML; `none` if it had none.
    pub saved: String,
    /// New value.
    pub given: String,
}

impl std::fmt::Display for Change {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "`{}` was {}, is now {}", self.key, self.saved, self.given)
    }
}

/// An open run folder. No other process can open it while this value lives.
#[derive(Debug)]
pub struct RunDir {
    path: PathBuf,
    changes: Vec<Change>,
    /// Closing the file gives the lock back.
    _lock: fs_err::File,
}

impl RunDir {
    /// Makes the folder, or opens it again, and locks it. The resolved recipe and the provenance are on disk when this
    /// returns; the provenance stays that of the first opening.
    ///
    /// # Errors
    /// Another process has the folder open, the folder holds other things than a run, it belongs to a recipe that
    /// differs in keys that may not change (each is named with both values), or the disk refuses.
    pub fn create_or_open(path: impl AsRef<Path>, recipe: &Recipe, provenance: &Provenance) -> Result<Self> {
        let path = path.as_ref();
        if !path.join(RECIPE).is_file() && is_occupied(path)? {
            return Err(Error::RunDir {
                path: path.into(),
                problem: format!("not a run folder: it has files, but no `{RECIPE}`"),
                hint: Some("give a new or empty folder".into()),
            });
        }
        fs_err::create_dir_all(path)?;
        let mut run = Self { path: path.into(), changes: Vec::new(), _lock: lock(path)? };
        atomic::remove_leftovers(path)?;
        let text = recipe.to_toml()?;
        let is_run = path.join(RECIPE).is_file();
        if is_run {
            let saved = Self::saved_recipe(path)?;
            run.changes = changes(&saved, recipe)?;
            run.refuse_binding_changes()?;
        }
        if !is_run || !run.changes.is_empty() {
            write_atomic(path.join(RECIPE), text.as_bytes())?;
        }
        if !path.join(PROVENANCE).is_file() {
            let seeds = json!({ "prepare": recipe.prepare.seed, "train": recipe.train.seed, "eval": recipe.eval.seed });
            let mut record = json!({ "tool": "deepspec", "seeds": seeds });
            record["run"] = serde_json::to_value(provenance).map_err(std::io::Error::from)?;
            write_atomic(path.join(PROVENANCE), format!("{record:#}\n").as_bytes())?;
        }
        Ok(run)
    }

    /// The recipe saved in a run folder. Takes no lock.
    ///
    /// # Errors
    /// There is none, or it cannot be read.
    pub fn saved_recipe(path: impl AsRef<Path>) -> Result<Recipe> {
        let path = path.as_ref();
        let recipe = path.join(RECIPE);
        if !recipe.is_file() {
            return Err(missing::error(path));
        }
        Recipe::load(recipe)
    }

    /// The path again where it is a folder.
    ///
    /// # Errors
    /// It is not; the error says which runs there are.
    pub fn must_exist(path: &Path) -> Result<&Path> {
        if path.is_dir() { Ok(path) } else { Err(missing::error(path)) }
    }

    /// The runs in a folder such as `runs`, by name.
    pub fn all_in(folder: impl AsRef<Path>) -> Vec<String> {
        missing::runs_in(folder.as_ref())
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Keys in which the saved recipe differed when the folder was opened again; the new values are saved.
    pub fn changes(&self) -> &[Change] {
        &self.changes
    }

    /// The recipe as used.
    pub fn recipe(&self) -> PathBuf {
        self.path.join(RECIPE)
    }

    /// Version, commit, time, machine and seeds of the first opening.
    pub fn provenance(&self) -> PathBuf {
        self.path.join(PROVENANCE)
    }

    /// Journal of the target's answers.
    pub fn answers(&self) -> PathBuf {
        self.path.join("answers.jsonl")
    }

    /// Rows that could not be used, with file, line and reason.
    pub fn rejects(&self) -> PathBuf {
        self.path.join("rejects.jsonl")
    }

    /// Folder of the target cache.
    pub fn cache(&self) -> PathBuf {
        self.path.join("cache")
    }

    /// Folder of the cache that the run trains on: that of another run where one was shared with it, else its own.
    ///
    /// # Errors
    /// When the note of it cannot be read.
    pub fn training_cache(&self) -> Result<PathBuf> {
        let note = self.path.join(SHARED_CACHE);
        if !note.is_file() {
            return Ok(self.cache());
        }
        Ok(PathBuf::from(fs_err::read_to_string(note)?.trim_end_matches('\n')))
    }

    /// Lets the run train on the cache of another run, now and whenever it goes on. The other run's files are only read.
    ///
    /// # Errors
    /// There is no such folder, its path cannot be noted, the run has a cache of its own, or it has begun to train on another.
    pub fn share_cache(&self, cache: &Path) -> Result<()> {
        let refuse = |problem: String| Error::RunDir {
            path: self.path.clone(),
            problem,
            hint: Some("give another run folder".into()),
        };
        let cache = fs_err::canonicalize(cache)?;
        let known = self.training_cache()?;
        if known == cache || fs_err::canonicalize(&known).is_ok_and(|known| known == cache) {
            return Ok(());
        }
        if is_occupied(&self.cache())? {
            return Err(refuse(format!("it has a cache of its own and cannot train on `{}`", cache.display())));
        }
        if is_occupied(&self.checkpoints())? || is_occupied(&self.metrics())? {
            return Err(refuse(format!("it trains on `{}`, not on `{}`", known.display(), cache.display())));
        }
        let text = cache.to_str().filter(|text| !text.contains('\n'));
        let text = text.ok_or_else(|| refuse(format!("the path `{}` is not text of one line", cache.display())))?;
        write_atomic(self.path.join(SHARED_CACHE), format!("{text}\n").as_bytes())
    }

    /// Folder of the checkpoints, one folder each.
    pub fn checkpoints(&self) -> PathBuf {
        self.path.join("checkpoints")
    }

    /// Journal of the training metrics.
    pub fn metrics(&self) -> PathBuf {
        self.path.join("metrics.jsonl")
    }

    /// Folder of the TensorBoard event files.
    pub fn tensorboard(&self) -> PathBuf {
        self.path.join("tensorboard")
    }

    /// Folder of the evaluation's results.
    pub fn eval(&self) -> PathBuf {
        self.path.join("eval")
    }

    fn refuse_binding_changes(&self) -> Result<()> {
        let trained = is_occupied(&self.checkpoints())? || is_occupied(&self.metrics())?;
        let cached = trained || is_occupied(&self.cache())?;
        let answered = cached || is_occupied(&self.answers())?;
        let binds = |key: &str| {
            if FREE.contains(&key) {
                return false;
            }
            match key.split('.').next() {
                Some("eval") => false,
                Some("target" | "data" | "prepare") => answered,
                _ if key == "draft.target_layer_ids" => cached,
                _ => trained,
            }
        };
        let binding: Vec<String> =
            self.changes.iter().filter(|change| binds(&change.key)).map(ToString::to_string).collect();
        if binding.is_empty() {
            return Ok(());
        }
        Err(Error::RunDir {
            path: self.path.clone(),
            problem: format!("belongs to another recipe: {}", binding.join("; ")),
            hint: Some(format!(
                "give another folder, or go on with the saved recipe: `--recipe {}`",
                self.recipe().display()
            )),
        })
    }
}

/// Whether a path is a file with content or a folder with entries.
fn is_occupied(path: &Path) -> Result<bool> {
    let Ok(metadata) = fs_err::metadata(path) else { return Ok(false) };
    if !metadata.is_dir() {
        return Ok(metadata.len() > 0);
    }
    // A crash right after the start leaves a lock and perhaps a part of the recipe.
    let temporary = format!(".{RECIPE}.");
    for entry in fs_err::read_dir(path)? {
        let name = entry?.file_name();
        if name != LOCK && !name.to_string_lossy().starts_with(&temporary) {
            return Ok(true);
        }
    }
    Ok(false)
}

fn lock(path: &Path) -> Result<fs_err::File> {
    let mut file =
        fs_err::OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path.join(LOCK))?;
    let mut locked = file.file().try_lock();
    // A process that this one just started holds copies of open files until it runs its own program, also of a lock that was
    // given back meanwhile.
    for _ in 0..LOCK_TRIES {
        if !matches!(locked, Err(TryLockError::WouldBlock)) {
            break;
        }
        thread::sleep(LOCK_PAUSE);
        locked = file.file().try_lock();
    }
    match locked {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            let mut owner = String::new();
            file.read_to_string(&mut owner)?;
            return Err(Error::RunDir {
                path: path.into(),
                problem: format!("in use by another process ({})", owner.trim()),
                hint: Some("wait for it to end, or give another folder".into()),
            });
        }
        Err(TryLockError::Error(source)) => {
            let message = format!("cannot lock `{}`: {source}", path.join(LOCK).display());
            return Err(std::io::Error::new(source.kind(), message).into());
        }
    }
    file.set_len(0)?;
    file.seek(SeekFrom::Start(0))?;
    writeln!(file, "process {}", std::process::id())?;
    Ok(file)
}

/// Keys whose values differ, sorted.
fn changes(saved: &Recipe, given: &Recipe) -> Result<Vec<Change>> {
    let (saved, given) = (saved.entries()?, given.entries()?);
    let value = |entries: &std::collections::BTreeMap<String, String>, key: &String| {
        entries.get(key).cloned().unwrap_or_else(|| "none".into())
    };
    let mut keys: Vec<&String> = saved.keys().chain(given.keys()).collect();
    keys.sort_unstable();
    keys.dedup();
    let differing = keys.into_iter().filter(|key| saved.get(*key) != given.get(*key));
    let change = |key: &String| Change { key: key.clone(), saved: value(&saved, key), given: value(&given, key) };
    Ok(differing.map(change).collect())
}
