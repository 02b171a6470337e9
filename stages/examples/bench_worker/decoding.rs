//! Steps of a target: decoding, verification, prefill, capture of hidden states.

use std::collections::HashMap;
use std::path::PathBuf;

use candle_core::{DType, Device};
use deepspec_models::config::TargetConfig;
use deepspec_models::kv_cache::KvCache;
use deepspec_models::target::{NewTokens, Target};
use deepspec_models::weights::Weights;
use deepspec_stages::recipe::Precision;
use deepspec_stages::target_model::packing;

use super::{Result, timed};

/// Positions of the cache that single sequences are measured in.
const CAPACITY: usize = 1024;

/// One model in the precisions that were asked for so far.
pub(crate) struct Targets {
    model: PathBuf,
    loaded: HashMap<String, Session>,
}

impl Targets {
    pub(crate) fn new(model: PathBuf) -> Self {
        Self { model, loaded: HashMap::new() }
    }

    pub(crate) fn get(&mut self, precision: Precision) -> Result<&mut Session> {
        let name = format!("{precision:?}");
        let session = match self.loaded.remove(&name) {
            Some(session) => session,
            None => Session::load(&self.model, precision)?,
        };
        Ok(self.loaded.entry(name).or_insert(session))
    }
}

/// A target with a cache for one sequence.
pub(crate) struct Session {
    pub(crate) target: Target,
    cache: KvCache,
}

impl Session {
    pub(crate) fn load(model: &PathBuf, precision: Precision) -> Result<Self> {
        let weights = Weights::open(model, DType::F32, &Device::Cpu)?;
        let target = Target::load(TargetConfig::open(model)?, &weights, packing(precision))?;
        Ok(Self { cache: target.new_cache(1, CAPACITY)?, target })
    }

    /// Seconds per step of `rows` after `context`; the first step, which warms up, is not among them.
    pub(crate) fn steps(&mut self, context: &[u32], rows: &[u32], repeats: usize) -> Result<Vec<f64>> {
        let all: Vec<usize> = (0..rows.len()).collect();
        self.cache.truncate(0, 0);
        self.target.forward(&mut self.cache, &[NewTokens { slot: 0, tokens: context }], &[])?;
        let step = |_| {
            self.cache.truncate(0, context.len());
            let (time, _) = timed(|| {
                let out = self.target.forward(&mut self.cache, &[NewTokens { slot: 0, tokens: rows }], &[])?;
                Ok(self.target.logits(&out.hidden, &all)?)
            })?;
            Ok(time)
        };
        without_first((0..=repeats).map(step))
    }

    /// Seconds per prefill of `tokens`, with the last row's logits; the first is not among them.
    pub(crate) fn prefills(&mut self, tokens: &[u32], repeats: usize) -> Result<Vec<f64>> {
        let prefill = |_| {
            self.cache.truncate(0, 0);
            let (time, _) = timed(|| {
                let out = self.target.forward(&mut self.cache, &[NewTokens { slot: 0, tokens }], &[])?;
                Ok(self.target.logits(&out.hidden, &[tokens.len() - 1])?)
            })?;
            Ok(time)
        };
        without_first((0..=repeats).map(prefill))
    }

    /// Seconds per pass over all sequences, `batch` at a time, that keeps the outputs of `layers` and the final hidden rows;
    /// the first is not among them.
    pub(crate) fn captures(
        &mut self,
        sequences: &[Vec<u32>],
        batch: usize,
        layers: &[i32],
        repeats: usize,
    ) -> Result<Vec<f64>> {
        let longest = sequences.iter().map(Vec::len).max().unwrap_or(0);
        let mut cache = self.target.new_cache(batch.min(sequences.len()), longest)?;
        let pass = |_| {
            let (time, ()) = timed(|| {
                for batch in sequences.chunks(batch.max(1)) {
                    let new: Vec<NewTokens<'_>> =
                        batch.iter().enumerate().map(|(slot, tokens)| NewTokens { slot, tokens }).collect();
                    (0..batch.len()).for_each(|slot| cache.truncate(slot, 0));
                    self.target.forward(&mut cache, &new, layers)?;
                }
                Ok(())
            })?;
            Ok(time)
        };
        without_first((0..=repeats).map(pass))
    }

    /// The `count` tokens that follow `tokens` when the likeliest is taken each time.
    pub(crate) fn continuation(&mut self, tokens: &[u32], count: usize) -> Result<Vec<u32>> {
        self.cache.truncate(0, 0);
        let mut found = Vec::new();
        let mut new = tokens.to_vec();
        while found.len() < count {
            let out = self.target.forward(&mut self.cache, &[NewTokens { slot: 0, tokens: &new }], &[])?;
            let logits: Vec<f32> = self.target.logits(&out.hidden, &[new.len() - 1])?.flatten_all()?.to_vec1()?;
            let best = (0..logits.len()).fold(0, |best, i| if logits[i] > logits[best] { i } else { best });
            new = vec![best as u32];
            found.push(best as u32);
        }
        Ok(found)
    }
}

fn without_first(times: impl Iterator<Item = Result<f64>>) -> Result<Vec<f64>> {
    let mut times: Vec<f64> = times.collect::<Result<_>>()?;
    times.remove(0);
    Ok(times)
}
