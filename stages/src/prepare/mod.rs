//! The prepare stage: prompts → answers of the target → target cache.
//!
//! [`run`] reads the data (`split`), has the target answer it or takes the answers in it (`regenerate`), turns both into
//! tokens with a loss mask (`samples`), and writes what the target computes for them (`cache`). Each part goes on where an
//! earlier run stopped, and the files of a finished run do not tell where it was interrupted. [`plan`] reads the data only
//! and says what the whole would cost.
//!
//! Memory: rows, answers and samples are held as text and tokens, about 15 bytes a token; hidden states are not held.

mod answers;
mod cache;
mod import;
mod regenerate;
mod rejects;
mod report;
mod samples;
mod space;
mod split;

use std::time::Instant;

use deepspec_datasets::renderer::Renderer;
use deepspec_datasets::target_cache::{Manifest, available_bytes};
use deepspec_models::config::TargetConfig;
use deepspec_models::target::Target;

pub use self::answers::{Answer, AnswerTurn, End, Finish};
use self::cache::Extent;
pub use self::import::import;
pub use self::regenerate::MIN_NEW_TOKENS;
use self::regenerate::Prompt;
pub use self::rejects::{Counts, Reject};
use self::report::size;
pub use self::report::{PrepareOutcome, PreparePlan, Seconds};
use self::samples::Sample;
pub use self::space::FreeBytes;
use self::space::Needed;
use self::split::Split;
use crate::error::{Error, Result};
use crate::recipe::Recipe;
use crate::run_dir::{RunDir, write_atomic};
use deepspec_engine::progress::{Context, Event};

/// What every part of the stage needs to know.
#[derive(Debug)]
struct Settings<'a> {
    recipe: &'a Recipe,
    renderer: &'a Renderer,
    config: &'a TargetConfig,
    layer_ids: Vec<i32>,
    free_bytes: FreeBytes,
}

/// Prepares the target cache of a run.
///
/// `fingerprint` identifies the target's weights, see [`deepspec_models::weights::Weights::fingerprint`].
///
/// # Errors
/// The recipe does not fit the target or the data; nothing usable, or more bad rows than allowed; files in the run folder
/// belong to other settings; not enough disk space; the target fails; [`Error::Interrupted`] when the user asks to stop.
pub fn run(
    recipe: &Recipe,
    run: &RunDir,
    target: &Target,
    renderer: &Renderer,
    fingerprint: &str,
    ctx: Context<'_>,
) -> Result<PrepareOutcome> {
    run_on_disk(recipe, run, target, renderer, fingerprint, available_bytes, ctx)
}

/// As [`run()`], on a disk of which `free_bytes` tells what is free.
///
/// # Errors
/// As [`run()`].
pub fn run_on_disk(
    recipe: &Recipe,
    run: &RunDir,
    target: &Target,
    renderer: &Renderer,
    fingerprint: &str,
    free_bytes: FreeBytes,
    ctx: Context<'_>,
) -> Result<PrepareOutcome> {
    ctx.reporter.event(Event::Stage("prepare"));
    let settings = Settings { free_bytes, ..Settings::new(recipe, target.config(), renderer)? };
    let mut lap = Lap::start();
    let mut seconds = Seconds::default();
    let mut shortened = Counts::new();
    let mut new_tokens = 0;
    let samples = if recipe.prepare.regenerate {
        let split = split::read(&recipe.data, ctx, |row| Prompt::new(row, &settings))?;
        seconds.read = lap.seconds();
        write_atomic(run.rejects(), &split.rejects.to_json_lines()?)?;
        let cache = run.cache();
        space::announce(&prompt_extent(&split.usable, recipe), &settings, &cache, ctx)?;
        let needed = Needed::of(&split.usable, &settings, &cache)?;
        let answers = run.answers();
        let regenerated = regenerate::regenerate(&split.usable, &settings, target, fingerprint, &answers, needed, ctx)?;
        seconds.regenerate = lap.seconds();
        new_tokens = regenerated.new_tokens;
        answered(split, &regenerated.answers, &settings, &mut shortened)?
    } else {
        let split = split::read(&recipe.data, ctx, |row| Sample::from_row(row, &settings, ctx))?;
        seconds.read = lap.seconds();
        split
    };
    write_atomic(run.rejects(), &samples.rejects.to_json_lines()?)?;
    if samples.usable.is_empty() {
        return Err(samples.rejects.nothing_left());
    }
    let manifest = cache::build(&samples.usable, &settings, target, fingerprint, &run.cache(), ctx)?;
    seconds.cache = lap.seconds();
    let outcome = outcome(samples, &manifest, shortened, new_tokens, seconds);
    if outcome.unsupervised_answers > 0 {
        ctx.warn(format!(
            "{} earlier answers are not supervised: the chat template prints them otherwise in history",
            outcome.unsupervised_answers
        ));
    }
    Ok(outcome)
}

/// Says what [`run`] would do and cost, reading nothing but the data.
///
/// # Errors
/// The recipe does not fit the target or the data; nothing usable, or more bad rows than allowed; [`Error::Interrupted`].
pub fn plan(recipe: &Recipe, config: &TargetConfig, renderer: &Renderer, ctx: Context<'_>) -> Result<PreparePlan> {
    let settings = Settings::new(recipe, config, renderer)?;
    if recipe.prepare.regenerate {
        let split = split::read(&recipe.data, ctx, |row| Prompt::new(row, &settings))?;
        let extent = prompt_extent(&split.usable, recipe);
        Ok(cost(split, extent, &settings))
    } else {
        let split = split::read(&recipe.data, ctx, |row| Sample::from_row(row, &settings, ctx))?;
        let extent = split.usable.iter().collect();
        Ok(cost(split, extent, &settings))
    }
}

fn cost<T>(split: Split<T>, extent: Extent, settings: &Settings<'_>) -> PreparePlan {
    PreparePlan {
        rows_read: split.rows_read,
        repaired: split.repaired,
        rejects: split.rejects.sorted(),
        prompts: split.usable.len() as u64,
        samples: extent.samples,
        tokens_at_most: extent.tokens,
        bytes_at_most: extent.bytes_at_most(settings),
    }
}

impl<'a> Settings<'a> {
    /// Checks that the recipe fits the target and its text side.
    fn new(recipe: &'a Recipe, config: &'a TargetConfig, renderer: &'a Renderer) -> Result<Self> {
        let layer_ids = recipe.draft.target_layer_ids.resolve(config.num_hidden_layers)?;
        let tokens = renderer.tokenizer().vocab_size();
        if tokens > config.vocab_size {
            return Err(Error::Mismatch {
                what: "the number of tokens".into(),
                left: format!("{tokens} of the tokenizer"),
                right: format!("{} rows of the target's embedding", config.vocab_size),
                hint: Some("use the tokenizer that belongs to the target".into()),
            });
        }
        let (length, longest) = (recipe.prepare.max_length, config.max_position_embeddings);
        if length > longest {
            return Err(Error::Recipe {
                origin: "and target do not fit".into(),
                problem: format!("`prepare.max_length` is {length}, the target's context holds {longest} tokens"),
            });
        }
        let mask_token_id = recipe.draft.mask_token_id;
        let unfit = |allowed: String| Error::Recipe {
            origin: "and target do not fit".into(),
            problem: format!("`draft.mask_token_id` is {mask_token_id}, allowed: {allowed}"),
        };
        if mask_token_id as usize >= config.vocab_size {
            return Err(unfit(format!("less than {}, the rows of the target's embedding", config.vocab_size)));
        }
        let used = config.bos_token_id.iter().chain(&config.pad_token_id).chain(&config.eos_token_ids);
        if used.chain(&config.stop_ids).chain(renderer.stop_ids()).any(|id| *id == mask_token_id) {
            return Err(unfit("a token that does not begin, end or pad texts".into()));
        }
        Ok(Self { recipe, renderer, config, layer_ids, free_bytes: available_bytes })
    }
}

/// Samples of all prompts that the target answered; counts the conversations that ended early.
fn answered(
    split: Split<Prompt>,
    answers: &[Answer],
    settings: &Settings<'_>,
    shortened: &mut Counts,
) -> Result<Split<Sample>> {
    let Split { usable: prompts, rows_read, repaired, mut rejects } = split;
    let mut usable = Vec::with_capacity(answers.len());
    let of_prompt = answers.chunks(settings.recipe.prepare.samples_per_prompt);
    for (prompt, answers) in prompts.iter().zip(of_prompt) {
        for answer in answers {
            match Sample::from_answer(prompt, answer, settings) {
                Ok(sample) => {
                    if answer.turns.len() < prompt.turns() {
                        *shortened.entry(answer.end.kind()).or_default() += 1;
                    }
                    usable.push(sample);
                }
                Err(refusal) => rejects.add(answer.line, Some(answer.sample), refusal)?,
            }
        }
    }
    Ok(Split { usable, rows_read, repaired, rejects })
}

/// Upper bound of what answers to the prompts come to.
fn prompt_extent(prompts: &[Prompt], recipe: &Recipe) -> Extent {
    let mut extent = Extent::default();
    for prompt in prompts {
        let row = &prompt.conversation;
        let text = row.id.len().max(row.key.len()) + row.domain.as_ref().map_or(0, String::len);
        extent.add(recipe.prepare.samples_per_prompt as u64, prompt.tokens_at_most(&recipe.prepare), text);
    }
    extent
}

fn outcome(
    samples: Split<Sample>,
    manifest: &Manifest,
    shortened: Counts,
    new_tokens: u64,
    seconds: Seconds,
) -> PrepareOutcome {
    PrepareOutcome {
        rows_read: samples.rows_read,
        repaired: samples.repaired,
        rejected: samples.rejects.counts(),
        shortened,
        samples: manifest.samples,
        tokens: manifest.tokens,
        supervised_tokens: manifest.supervised_tokens,
        cut_answers: samples.usable.iter().filter(|sample| sample.is_cut).count() as u64,
        unsupervised_answers: samples.usable.iter().map(|sample| sample.unsupervised_answers as u64).sum(),
        new_tokens,
        bytes: manifest.shards.iter().map(|shard| shard.bytes).sum(),
        seconds,
    }
}

/// The error for data that holds the mask token.
fn mask_token_in_data(mask_token_id: u32, line: u64, at: usize) -> Error {
    Error::Recipe {
        origin: "and data do not fit".into(),
        problem: format!(
            "`draft.mask_token_id` is {mask_token_id}, which is token {at} of the sample from line {line}, allowed: a token \
             that never occurs in the data"
        ),
    }
}

/// Time between two points of a run.
struct Lap(Instant);

impl Lap {
    fn start() -> Self {
        Self(Instant::now())
    }

    /// Seconds since the last call.
    fn seconds(&mut self) -> f64 {
        let now = Instant::now();
        now.duration_since(std::mem::replace(&mut self.0, now)).as_secs_f64()
    }
}
