//! Which samples and anchors a step trains on: a function of (seed, step) alone.

use candle_core::{DType, Device, Tensor};
use deepspec_datasets::target_cache::{LayerColumns, Reader, Sample};
use deepspec_models::draft::dspark::TrainSequence;
use deepspec_models::loss::dspark::anchor_candidates;
use deepspec_models::speculate::{CounterRng, Stream};
use half::bf16;

use crate::error::{Error, Result};
use crate::recipe::TrainRecipe;

/// The batches of a run over a cache.
pub struct Batches<'a> {
    cache: &'a Reader,
    columns: LayerColumns,
    settings: &'a TrainRecipe,
    /// Samples that have an anchor.
    usable: Vec<u64>,
    /// Samples that have none and are left out.
    pub without_anchors: u64,
    /// Optimiser steps of the run.
    pub steps: u64,
}

/// One forward and backward pass.
pub struct MicroBatch<'a> {
    /// Numbers of the samples in the cache.
    pub samples: Vec<u64>,
    /// Samples with their anchors.
    pub sequences: Vec<TrainSequence<'a>>,
    /// Loss mask of each.
    pub loss_masks: Vec<&'a [u8]>,
    /// Target features `[Σ tokens, layers · hidden]`.
    pub features: Tensor,
    /// Final target hidden rows `[Σ tokens, hidden]`.
    pub target_hidden: Tensor,
}

impl<'a> Batches<'a> {
    /// Looks for samples with anchors and counts the steps. `columns` are those of the layers that the drafter reads.
    ///
    /// # Errors
    /// When no sample has an anchor or the cache is damaged.
    pub fn new(cache: &'a Reader, columns: LayerColumns, settings: &'a TrainRecipe) -> Result<Self> {
        let mut usable = Vec::new();
        for i in 0..cache.len() {
            if anchor_candidates(cache.tokens(i)?.1).is_empty() {
                // It is left out for what its mask says, so that has to be what was written.
                cache.sample(i)?;
            } else {
                usable.push(i);
            }
        }
        if usable.is_empty() {
            return Err(Error::Input("no sample of the cache has two supervised tokens in a row".into()));
        }
        let without_anchors = cache.len() - usable.len() as u64;
        let steps = match (settings.steps, settings.epochs) {
            (Some(steps), _) => steps,
            (None, Some(epochs)) => {
                ((epochs * usable.len() as f64) / settings.batch_size as f64).ceil().max(1.0) as u64
            }
            (None, None) => {
                return Err(Error::Recipe { origin: "train".into(), problem: "neither `steps` nor `epochs`".into() });
            }
        };
        Ok(Self { cache, columns, settings, usable, without_anchors, steps })
    }

    /// Samples in use.
    pub fn samples(&self) -> usize {
        self.usable.len()
    }

    /// The micro-batches of step `step`, counted from 0.
    ///
    /// # Errors
    /// When the cache is damaged.
    pub fn at(&self, step: u64) -> Result<Vec<MicroBatch<'a>>> {
        let first = step * self.settings.batch_size as u64;
        let numbers: Vec<u64> = (first..first + self.settings.batch_size as u64).collect();
        numbers.chunks(self.settings.micro_batch_size).map(|chunk| self.micro_batch(chunk)).collect()
    }

    /// The same samples and anchors, each alone.
    ///
    /// # Errors
    /// As [`Batches::at`].
    pub fn one_by_one(&self, step: u64) -> Result<Vec<MicroBatch<'a>>> {
        let first = step * self.settings.batch_size as u64;
        (first..first + self.settings.batch_size as u64).map(|number| self.micro_batch(&[number])).collect()
    }

    /// The cache that the samples are in.
    pub fn cache(&self) -> &'a Reader {
        self.cache
    }

    /// The sample with global number `number`: the run walks through one permutation of the samples per epoch.
    fn sample_index(&self, number: u64, order: &mut Option<(u64, Vec<u64>)>) -> u64 {
        let count = self.usable.len() as u64;
        let epoch = number / count;
        if order.as_ref().is_none_or(|(held, _)| *held != epoch) {
            let mut permutation = self.usable.clone();
            CounterRng::new(self.settings.seed, Stream::Shuffle, epoch).shuffle(&mut permutation);
            *order = Some((epoch, permutation));
        }
        order.as_ref().map_or(0, |(_, permutation)| permutation[(number % count) as usize])
    }

    fn micro_batch(&self, numbers: &[u64]) -> Result<MicroBatch<'a>> {
        let mut order = None;
        let mut samples = Vec::new();
        let mut batch_sequences = Vec::new();
        let mut loss_masks = Vec::new();
        let (mut features, mut target_hidden) = (Vec::<bf16>::new(), Vec::<bf16>::new());
        let mut rows = 0;
        for &number in numbers {
            let sample = self.sample_index(number, &mut order);
            samples.push(sample);
            let Sample { input_ids, loss_mask, features: f, last_hidden, .. } = self.cache.sample(sample)?;
            let candidates = anchor_candidates(loss_mask);
            let chosen = CounterRng::new(self.settings.seed, Stream::Anchors, number)
                .choose_sorted(candidates.len(), self.settings.num_anchors.min(candidates.len()));
            let anchors = chosen.into_iter().map(|i| Some(candidates[i])).collect();
            batch_sequences.push(TrainSequence { tokens: input_ids, anchors });
            loss_masks.push(loss_mask);
            self.columns.slices(f).for_each(|slice| features.extend_from_slice(slice));
            target_hidden.extend_from_slice(last_hidden);
            rows += input_ids.len();
        }
        let tensor = |data: Vec<bf16>| -> Result<Tensor> {
            let width = data.len() / rows.max(1);
            Ok(Tensor::from_vec(data, (rows, width), &Device::Cpu)?.to_dtype(DType::F32)?)
        };
        Ok(MicroBatch {
            samples,
            sequences: batch_sequences,
            loss_masks,
            features: tensor(features)?,
            target_hidden: tensor(target_hidden)?,
        })
    }
}
