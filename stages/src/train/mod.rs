//! Training of a drafter on a target cache: [`Training`] reads top to bottom as the list of its steps.
//!
//! A run can be killed at any moment and goes on from its last checkpoint exactly: order of samples, anchors and weights
//! are functions of (seed, step), and a checkpoint holds weights, moments and the step.

pub mod acceptance;
pub mod batches;
pub mod bigram;
pub mod checkpoint;
mod diagnose;
pub mod ema;
pub mod log;
mod start;
pub mod step;
pub mod tensorboard;
pub mod vocabulary;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use candle_core::{DType, Tensor};
use deepspec_datasets::target_cache::{Expected, Reader};
use deepspec_models::config::{DraftConfig, DrafterConfig};
use deepspec_models::draft::{DraftVocabulary, ParameterSource, Parameters, eagle3, initialise};
use deepspec_models::linear::{Linear, Packed, Precision as Packing};
use deepspec_models::loss::dspark::LossHead;
use deepspec_models::optimizer::{AdamWConfig, Optimizer, Schedule};
use deepspec_models::target::Target;

use crate::drafter::{Drafter, describe, draft_config};
use crate::error::{Error, Result};
use crate::recipe::{LayersInit, MarkovInit, Precision, Recipe};
use crate::run_dir::RunDir;
use crate::target_model::TargetModel;
use acceptance::TrainAcceptance;
use batches::Batches;
use checkpoint::Checkpoints;
use deepspec_engine::progress::{Context, Event};
use ema::MovingAverage;
use log::{Pending, TrainLog};
use step::{Coefficients, Trained};
use vocabulary::Coverage;

/// What a training run ended with.
#[derive(Debug, Clone)]
pub struct TrainOutcome {
    /// Optimiser steps of the run.
    pub steps: u64,
    /// Step that this call started from.
    pub resumed_from: u64,
    /// Newest checkpoint.
    pub checkpoint: PathBuf,
    /// Metrics over the last stretch of steps.
    pub metrics: Vec<(String, f64)>,
    /// Seconds this call spent on steps.
    pub seconds: f64,
    /// Trainable parameters.
    pub parameters: usize,
    /// What the draft vocabulary covers, where there is one.
    pub coverage: Option<Coverage>,
}

/// Trains the drafter of a recipe on the run's cache, or goes on doing so.
///
/// # Errors
/// As [`Training::set_up`] and [`Training::run`].
pub fn run(recipe: &Recipe, run: &RunDir, model: &TargetModel, ctx: Context<'_>) -> Result<TrainOutcome> {
    Training::set_up(recipe, run, model, ctx)?.run(Some(&model.target), ctx)
}

/// A training run before its first step. It needs the target no more but for train-time acceptance, so whoever trains alone
/// without that can free the target first.
pub struct Training<'a> {
    recipe: &'a Recipe,
    run: &'a RunDir,
    cache: Reader,
    checkpoints: Checkpoints,
    parameters: Parameters,
    average: Option<MovingAverage>,
    optimizer: Optimizer,
    pending: Pending,
    drafter: Drafter,
    head: LossHead,
    frozen: Vec<(String, Tensor)>,
    coverage: Option<Coverage>,
}

impl<'a> Training<'a> {
    /// Checks that everything belongs together, builds the drafter and reads its start or the run's newest checkpoint.
    ///
    /// # Errors
    /// The cache is missing or belongs to another target or recipe; a checkpoint is damaged; the user asks to stop.
    pub fn set_up(recipe: &'a Recipe, run: &'a RunDir, model: &TargetModel, ctx: Context<'_>) -> Result<Self> {
        ctx.reporter.event(Event::Stage("train"));
        let config = draft_config(recipe, model.target.config())?;
        let cache = Reader::open(&run.training_cache()?)?;
        cache.expect_matches(&Expected {
            target: &model.name,
            target_fingerprint: &model.fingerprint,
            layer_ids: config.target_layer_ids(),
            hidden_size: config.body().hidden_size,
            tokenizer_hash: model.text.tokenizer().hash(),
        })?;
        if let (DrafterConfig::Block(block), Some(prepared)) = (&config, cache.meta().mask_token_id)
            && prepared != block.mask_token_id
        {
            return Err(Error::Mismatch {
                what: "mask_token_id".into(),
                left: format!("{prepared} in the cache"),
                right: format!("{} in the recipe", block.mask_token_id),
                hint: Some("prepare the cache again, in another run folder".into()),
            });
        }
        let (vocabulary, coverage) =
            vocabulary::build(config.draft_vocab_size(), model.target.config(), &cache)?.unzip();
        if let Some(coverage) = &coverage {
            ctx.note(format!("draft vocabulary: {coverage}"));
        }
        let embed_tokens = model.target.embed_tokens().to_dtype(DType::F32)?;
        let lm_head = output_head(model, &embed_tokens)?;
        let head = loss_head(&lm_head, recipe, model, vocabulary)?;
        let checkpoints = Checkpoints::new(run.checkpoints(), recipe.train.keep_checkpoints);
        checkpoints.remove_leftovers()?;
        let latest = checkpoints.latest()?;
        let mut parameters = match &latest {
            Some(found) => checkpoint::parameters(found, &config, head.vocabulary())?,
            None => initial_parameters(recipe, &config, &cache, model, &lm_head, head.vocabulary(), ctx)?,
        };
        let settings = AdamWConfig {
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: recipe.train.weight_decay,
            max_grad_norm: recipe.train.max_grad_norm,
        };
        let mut optimizer = Optimizer::new(settings, &parameters);
        let (mut pending, mut average) = (Pending::default(), None);
        if let Some(found) = &latest {
            let (log, trained) = checkpoint::restore(found, &mut optimizer, recipe.train.ema.map(|_| &parameters))?;
            pending = log;
            if let (Some(decay), Some(trained)) = (recipe.train.ema, trained) {
                average = Some(MovingAverage::new(decay, std::mem::replace(&mut parameters, trained)));
            }
        } else if let Some(decay) = recipe.train.ema {
            average = Some(MovingAverage::of(decay, &parameters)?);
        }
        let frozen = checkpoint::frozen(&embed_tokens, &head)?;
        let drafter = Drafter::new(config, embed_tokens, ParameterSource::Trainable(&parameters))?;
        Ok(Self {
            recipe,
            run,
            cache,
            checkpoints,
            parameters,
            average,
            optimizer,
            pending,
            drafter,
            head,
            frozen,
            coverage,
        })
    }

    /// Trains to the end of the recipe. `target` is needed where the recipe wants train-time acceptance.
    ///
    /// # Errors
    /// The loss is not finite; the disk refuses; [`Error::Interrupted`] after a checkpoint when the user asks to stop.
    pub fn run(self, target: Option<&Target>, ctx: Context<'_>) -> Result<TrainOutcome> {
        let Self { recipe, drafter, parameters, mut average, head, mut optimizer, .. } = self;
        let columns = self.cache.columns(drafter.target_layer_ids())?;
        let batches = Batches::new(&self.cache, columns, &recipe.train)?;
        let mut acceptance = TrainAcceptance::new(recipe, target, &self.cache)?;
        if batches.without_anchors > 0 {
            let count = batches.without_anchors;
            ctx.warn(format!("{count} samples have no two supervised tokens in a row and are not used"));
        }
        let schedule = Schedule::new(recipe.train.lr, batches.steps, recipe.train.warmup_ratio);
        let resumed_from = optimizer.step_count();
        let config = drafter.config();
        ctx.note(describe(&config));
        let anchors = match config {
            DrafterConfig::Block(_) => format!(", {} anchors each", recipe.train.num_anchors),
            DrafterConfig::Eagle3(_) => String::new(),
        };
        ctx.note(format!(
            "{} samples, {} tokens; {} steps of {} sequences{anchors}; {:.1} M trainable parameters",
            batches.samples(),
            self.cache.manifest().tokens,
            batches.steps,
            recipe.train.batch_size,
            parameters.elements() as f64 / 1e6,
        ));
        if resumed_from > 0 {
            ctx.note(format!("going on from step {resumed_from}"));
        }
        let mut log = TrainLog::open(self.run, resumed_from, self.pending, batches.steps, &config)?;
        let started = Instant::now();
        ctx.reporter.event(Event::Started { task: "train", total: batches.steps, done: resumed_from, unit: "steps" });
        let save = |step: u64, average: Option<&MovingAverage>, optimizer: &Optimizer, log: &TrainLog| {
            let (saved, trained) =
                average.map_or((&parameters, None), |average| (average.parameters(), Some(&parameters)));
            self.checkpoints.save(step, &config, saved, trained, &self.frozen, optimizer, log.pending())
        };
        for step in resumed_from..batches.steps {
            let begun = Instant::now();
            let lr = schedule.at(step);
            let phase = recipe.train.phase_at(step, batches.steps).ok_or_else(|| Error::Recipe {
                origin: "train.phases".into(),
                problem: format!("no phase covers step {step} of {}", batches.steps),
            })?;
            let weights = step::loss_weights(phase, recipe.train.loss_decay_gamma);
            let coefficients = Coefficients { weights, routers: step::router_weights(&recipe.train) };
            let number = step + 1;
            let measured = acceptance.as_mut().filter(|acceptance| acceptance.is_due(number));
            let is_logged = number % recipe.train.log_every == 0 || number == batches.steps || measured.is_some();
            let batch = batches.at(step)?;
            let trained = Trained { drafter: &drafter, parameters: &parameters, head: &head };
            let done = step::run(trained, &coefficients, &mut optimizer, &batch, lr, is_logged)
                .map_err(|error| diagnose::explain(error, trained, &coefficients, &batches, step))?;
            if let Some(average) = &mut average {
                average.update(&parameters, optimizer.step_count())?;
            }
            log.count(done.sums, done.tokens, begun.elapsed());
            let measured = measured.map(|acceptance| {
                let saved = average.as_ref().map_or(&parameters, MovingAverage::parameters);
                let tensors = checkpoint::tensors(saved, &self.frozen);
                acceptance.measure(number, &config, &tensors, ctx)
            });
            if is_logged {
                let line = log.write(number, &weights, lr, done.grad_norm, measured.transpose()?)?;
                ctx.reporter.event(Event::Line(&line));
            }
            ctx.reporter.event(Event::Advanced { done: number, detail: "" });
            let stop = ctx.interrupt.is_set();
            if number % recipe.train.checkpoint_every == 0 || number == batches.steps || stop {
                save(number, average.as_ref(), &optimizer, &log)?;
            }
            if stop && number < batches.steps {
                return Err(Error::Interrupted { safe: "a checkpoint has been written" });
            }
        }
        ctx.reporter.event(Event::Finished);
        let checkpoint = match self.checkpoints.latest()? {
            Some(found) => found.folder,
            None => return Err(Error::Invariant("training left no checkpoint".into())),
        };
        Ok(TrainOutcome {
            steps: batches.steps,
            resumed_from,
            checkpoint,
            metrics: log.last().to_vec(),
            seconds: started.elapsed().as_secs_f64(),
            parameters: parameters.elements(),
            coverage: self.coverage,
        })
    }
}

/// The target's output head `[vocab, hidden]`: its embedding where the two are tied.
fn output_head(model: &TargetModel, embed_tokens: &Tensor) -> Result<Tensor> {
    let config = model.target.config();
    if config.tie_word_embeddings {
        return Ok(embed_tokens.clone());
    }
    Ok(model.weights()?.get("lm_head.weight", &[config.vocab_size, config.hidden_size])?)
}

/// The target's output head, packed in f32 whatever the target decodes with: gradients want full precision. A target that
/// decodes with f32 lends its own.
fn loss_head(
    lm_head: &Tensor,
    recipe: &Recipe,
    model: &TargetModel,
    vocabulary: Option<DraftVocabulary>,
) -> Result<LossHead> {
    let packed = match model.target.lm_head() {
        Linear::Frozen { weight } if recipe.target.precision == Precision::F32 => weight.clone(),
        _ => {
            let (_, inputs) = lm_head.dims2()?;
            let data: Vec<f32> = lm_head.flatten_all()?.to_vec1()?;
            Arc::new(Packed::new(&[&data], inputs, None, Packing::F32)?)
        }
    };
    Ok(LossHead::new(lm_head, packed, vocabulary)?)
}

fn initial_parameters(
    recipe: &Recipe,
    config: &DrafterConfig,
    cache: &Reader,
    model: &TargetModel,
    lm_head: &Tensor,
    vocabulary: Option<&DraftVocabulary>,
    ctx: Context<'_>,
) -> Result<Parameters> {
    if let Some(from) = &recipe.init.from {
        ctx.note(format!("starting from checkpoint `{}`", from.display()));
        let start = crate::drafter::open(from, model)?;
        let saved = DrafterConfig::from_json(&from.join("config.json"), &start.config)?;
        start::check(from, &saved, &start.weights, config, vocabulary)?;
        if saved.proposals() != config.proposals() {
            let (there, here) = (saved.proposals(), config.proposals());
            ctx.note(format!("the checkpoint was trained for {there} proposals, the recipe wants {here}"));
        }
        return checkpoint::read_parameters(&start.weights, config, vocabulary);
    }
    match config {
        DrafterConfig::Block(config) => initial_block(recipe, config, cache, model, lm_head, vocabulary, ctx),
        DrafterConfig::Eagle3(config) => {
            let mut parameters = eagle3::initialise::random(config, recipe.train.seed)?;
            if recipe.init.layers == LayersInit::Target {
                eagle3::initialise::from_target_layers(&mut parameters, config, &model.weights()?)?;
                ctx.note("the layer, fc and norm start as the target's last layer");
            }
            Ok(parameters)
        }
    }
}

fn initial_block(
    recipe: &Recipe,
    config: &DraftConfig,
    cache: &Reader,
    model: &TargetModel,
    lm_head: &Tensor,
    vocabulary: Option<&DraftVocabulary>,
    ctx: Context<'_>,
) -> Result<Parameters> {
    let mut parameters = initialise::random(config, recipe.train.seed)?;
    if recipe.init.layers == LayersInit::Target {
        initialise::from_target_layers(&mut parameters, config, &model.weights()?)?;
        let random = if config.moe.is_none() {
            ""
        } else if config.shared_expert_fits_target() {
            "; routed experts start random and small"
        } else {
            "; MLPs start random, having no shared expert as wide as the target's MLP"
        };
        ctx.note(format!("draft layers, fc and norms start as the target's last layers{random}"));
    }
    if recipe.init.markov == MarkovInit::Bigram && config.markov_rank > 0 {
        let rows = bigram::rows(cache, model, ctx)?;
        let (w1, w2) = initialise::bigram_factors(&rows, lm_head, vocabulary, config.markov_rank)?;
        initialise::markov_from_bigram(&mut parameters, config, &w1, &w2)?;
        ctx.note(format!(
            "the Markov head starts as the target's bigram over {} tokens of the data",
            rows.tokens.len()
        ));
    }
    Ok(parameters)
}

/// Folder of the newest checkpoint of a run, if there is one.
///
/// # Errors
/// When the folder cannot be read.
pub fn latest_checkpoint(run: &RunDir) -> Result<Option<PathBuf>> {
    newest_checkpoint(run.checkpoints())
}

/// The newest in a folder of checkpoints, if there is one; a run that trains may go on meanwhile.
///
/// # Errors
/// When the folder cannot be read.
pub fn newest_checkpoint(folder: impl Into<PathBuf>) -> Result<Option<PathBuf>> {
    Ok(Checkpoints::new(folder.into(), 1).latest()?.map(|found| found.folder))
}
