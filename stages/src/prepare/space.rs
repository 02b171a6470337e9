//! Room on the disk for answers and cache: asked for before the first answer is made, as answers show how much will be needed, and
//! before each shard. A run that cannot be written to its end stops as soon as that is certain.
//!
//! Before the answers are known, what is certain is their prompts and one token each; that is what is asked for, since the longest
//! answers allowed may be many times what a target writes. That bound is told, with a warning where it does not fit.

use std::path::Path;

use deepspec_datasets::target_cache::CacheError;

use super::answers::Answer;
use super::cache::Extent;
use super::regenerate::Prompt;
use super::{Settings, size};
use crate::error::Result;
use deepspec_engine::progress::Context;

/// Tells the bytes that can still be written to the disk of a folder, which need not exist yet.
pub type FreeBytes = fn(&Path) -> Result<u64, CacheError>;

/// Bytes of a line of the file of answers besides tokens and text.
const ANSWER_BYTES: u64 = 200;
/// Bytes of a token in that file, as a number and as text, on the short side.
const ANSWER_TOKEN_BYTES: u64 = 4;

/// Makes sure that `needed` bytes can be written to `dir`.
///
/// # Errors
/// They cannot, or the file system does not say.
pub(super) fn require(settings: &Settings<'_>, dir: &Path, needed: u64) -> Result<()> {
    let available = (settings.free_bytes)(dir)?;
    if needed > available {
        return Err(CacheError::NotEnoughSpace { dir: dir.to_owned(), needed, available }.into());
    }
    Ok(())
}

/// What a run with regenerated answers will need, as far as it is certain.
pub(super) struct Needed<'a> {
    settings: &'a Settings<'a>,
    cache: &'a Path,
    /// Bytes of shards that an earlier run left.
    written: u64,
    /// Of the samples, with one token for each answer that is still to be made.
    samples: Extent,
    /// Answers that have no line yet.
    missing: u64,
}

impl<'a> Needed<'a> {
    /// Of prompts without any answer, whose cache will be in `cache`.
    ///
    /// # Errors
    /// The folder of the cache cannot be read.
    pub(super) fn of(prompts: &[Prompt], settings: &'a Settings<'a>, cache: &'a Path) -> Result<Self> {
        let each = settings.recipe.prepare.samples_per_prompt as u64;
        let mut samples = Extent::default();
        for prompt in prompts {
            samples.add(each, prompt.first_tokens + 1, 0);
        }
        Ok(Self { settings, cache, written: bytes_in(cache)?, samples, missing: prompts.len() as u64 * each })
    }

    /// Takes an answer into account.
    pub(super) fn answered(&mut self, answer: &Answer) {
        let tokens: usize = answer.turns.iter().map(|turn| turn.ids.len()).sum();
        self.samples.add(1, tokens.saturating_sub(1), 0);
        self.samples.samples -= 1;
        self.missing = self.missing.saturating_sub(1);
    }

    /// Makes sure that there is room for what is still to be written.
    ///
    /// # Errors
    /// There is not, or the file system does not say.
    pub(super) fn check(&self) -> Result<()> {
        let cache = self.samples.bytes(self.settings).saturating_sub(self.written);
        require(self.settings, self.cache, cache + self.missing * (ANSWER_BYTES + ANSWER_TOKEN_BYTES))
    }
}

/// Says before the target starts what it may come to, and warns where that might not fit on the disk.
///
/// # Errors
/// The file system does not say what is free.
pub(super) fn announce(most: &Extent, settings: &Settings<'_>, cache: &Path, ctx: Context<'_>) -> Result<()> {
    let bytes = most.bytes_at_most(settings);
    ctx.note(format!(
        "{} answers to make; at most {} tokens and {} of target cache",
        most.samples,
        most.tokens,
        size(bytes)
    ));
    let free = (settings.free_bytes)(cache)?.saturating_add(bytes_in(cache)?);
    if bytes > free {
        ctx.warn(format!(
            "the target cache may need up to {}, and the disk has {} free; `data.limit`, `prepare.max_new_tokens` and \
             `prepare.max_length` make it smaller",
            size(bytes),
            size(free)
        ));
    }
    Ok(())
}

/// Bytes of all files in a folder; none where it does not exist.
fn bytes_in(dir: &Path) -> Result<u64> {
    let mut bytes = 0;
    if dir.is_dir() {
        for entry in fs_err::read_dir(dir)? {
            bytes += entry?.metadata()?.len();
        }
    }
    Ok(bytes)
}
