//! What a training run leaves behind besides checkpoints: the step line, metrics as JSON lines, TensorBoard events.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use deepspec_models::config::{DraftConfig, DrafterConfig, Eagle3Config, MarkovHeadType, TargetConfig};
use deepspec_models::linear::{Linear, Precision};
use deepspec_models::loss::dspark::LossWeights;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::acceptance::Measured;
use super::step::Sums;
use super::tensorboard::EventWriter;
use crate::error::{Error, Result};
use crate::run_dir::{Journal, RunDir, read_journal, write_atomic};

/// Sums since the last line; part of a checkpoint, so that a resumed run writes the same lines.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Pending {
    sums: Option<Sums>,
    steps: u64,
}

/// Writer of all logs of a run.
pub struct TrainLog {
    metrics: Journal,
    events: EventWriter,
    total: u64,
    confidence: bool,
    pending: Pending,
    tokens: usize,
    steps_timed: u64,
    spent: Duration,
    first_step: u64,
    begun: Instant,
    flops_per_row: f64,
    peak_flops: f64,
    last: Vec<(String, f64)>,
}

impl TrainLog {
    /// Opens the logs of a run and drops what an interrupted run wrote after the step it goes on from.
    ///
    /// # Errors
    /// When the disk refuses or an event file is damaged.
    pub fn open(run: &RunDir, resumed_from: u64, pending: Pending, total: u64, config: &DrafterConfig) -> Result<Self> {
        let path = run.metrics();
        let mut last = Vec::new();
        if path.is_file() {
            let records: Vec<Value> = read_journal(&path)?;
            let kept: Vec<Value> =
                records.into_iter().filter(|r| r["step"].as_u64().is_some_and(|step| step <= resumed_from)).collect();
            let mut text = String::new();
            if let Some(Value::Object(fields)) = kept.last() {
                last = fields.iter().filter_map(|(name, value)| Some((name.clone(), value.as_f64()?))).collect();
            }
            for record in kept {
                text.push_str(&record.to_string());
                text.push('\n');
            }
            write_atomic(&path, text.as_bytes())?;
        }
        let folder = run.tensorboard();
        fs_err::create_dir_all(&folder)?;
        let events = match EventWriter::latest_in(&folder)? {
            Some(file) => EventWriter::resume(&file, resumed_from)?,
            None => EventWriter::create(&folder, now())?,
        };
        Ok(Self {
            metrics: Journal::open(&path, 1)?,
            events,
            total,
            confidence: matches!(config, DrafterConfig::Block(config) if config.enable_confidence_head),
            pending,
            tokens: 0,
            steps_timed: 0,
            spent: Duration::ZERO,
            first_step: resumed_from,
            begun: Instant::now(),
            flops_per_row: flops_per_row(config),
            peak_flops: peak_flops()?,
            last,
        })
    }

    /// What has been counted since the last line.
    pub fn pending(&self) -> &Pending {
        &self.pending
    }

    /// Counts a step towards the next line.
    pub fn count(&mut self, sums: Sums, tokens: usize, time: Duration) {
        match (&mut self.pending.sums, sums) {
            (Some(Sums::Block(pending)), Sums::Block(sums)) => pending.add(&sums),
            (Some(Sums::Eagle3(pending)), Sums::Eagle3(sums)) => pending.add(&sums),
            (pending, sums) => *pending = Some(sums),
        }
        self.pending.steps += 1;
        self.steps_timed += 1;
        self.tokens += tokens;
        self.spent += time;
    }

    /// Writes the metrics since the last call, and the acceptance where it was measured, and returns the step line.
    ///
    /// # Errors
    /// When the disk refuses.
    pub fn write(
        &mut self,
        step: u64,
        weights: &LossWeights,
        lr: f64,
        grad_norm: f64,
        measured: Option<Measured>,
    ) -> Result<String> {
        let Pending { sums: Some(sums), steps } = std::mem::take(&mut self.pending) else {
            return Err(Error::Invariant("a line of the log without a step".into()));
        };
        let seconds = self.spent.as_secs_f64().max(1e-9);
        let step_ms = seconds * 1e3 / self.steps_timed.max(1) as f64;
        let mut metrics = sums.metrics(weights, self.confidence, steps);
        // After a resume the sums may hold steps that this process did not time.
        let timed = self.steps_timed as f64 / steps.max(1) as f64;
        let mfu = sums.rows() * timed * self.flops_per_row / seconds / self.peak_flops;
        metrics.push(("lr".into(), lr));
        metrics.push(("grad_norm".into(), grad_norm));
        metrics.push(("tokens_per_s".into(), self.tokens as f64 / seconds));
        metrics.push(("step_ms".into(), step_ms));
        metrics.push(("mfu".into(), mfu));
        if let Some(Measured { tau, accept_at_1 }) = measured {
            metrics.extend([("decode_tau".into(), tau), ("decode_accept@1".into(), accept_at_1)]);
        }
        let mut record = Map::new();
        record.insert("step".into(), json!(step));
        for (name, value) in &metrics {
            record.insert(name.clone(), json!(value));
            self.events.scalar(&format!("train/{name}"), step, *value as f32, now())?;
        }
        self.metrics.append(&Value::Object(record))?;
        self.events.flush()?;
        let tokens_per_s = self.tokens as f64 / seconds;
        let mut line = self.line(step, metrics[0].1, sums.tau(), lr, step_ms, tokens_per_s, mfu);
        if let Some(Measured { tau, accept_at_1 }) = measured {
            line.push_str(&format!(" | decode tau {tau:.2}, accept@1 {accept_at_1:.2}"));
        }
        self.last = metrics;
        (self.steps_timed, self.tokens, self.spent) = (0, 0, Duration::ZERO);
        Ok(line)
    }

    /// Metrics of the last line.
    pub fn last(&self) -> &[(String, f64)] {
        &self.last
    }

    fn line(&self, step: u64, loss: f64, tau: f64, lr: f64, step_ms: f64, tokens_per_s: f64, mfu: f64) -> String {
        let per_step = self.begun.elapsed().as_secs_f64() / (step - self.first_step).max(1) as f64;
        let left = Duration::from_secs_f64(per_step * (self.total - step) as f64);
        format!(
            "step {step:05}/{:05} | loss {loss:.4} | tau {tau:.2} | lr {lr:.1e} | {step_ms:.0} ms | {:.1}k tok/s | mfu {:.0} % | eta {}",
            self.total,
            tokens_per_s / 1e3,
            mfu * 100.0,
            short(left),
        )
    }
}

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64())
}

fn short(time: Duration) -> String {
    let seconds = time.as_secs();
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m{:02}s", seconds / 60, seconds % 60),
        _ => format!("{}h{:02}m", seconds / 3600, seconds / 60 % 60),
    }
}

/// Floating-point operations of one supervised row, forward and backward, attention left out.
fn flops_per_row(config: &DrafterConfig) -> f64 {
    match config {
        DrafterConfig::Block(config) => flops_per_block_row(config),
        DrafterConfig::Eagle3(config) => flops_per_eagle3_row(config),
    }
}

/// 6 per weight that a row meets in the backbone and the Markov head, 2 + 2 per weight of the drafter's frozen head, and 2 of the target's for its distribution.
fn flops_per_block_row(config: &DraftConfig) -> f64 {
    let body = &config.body;
    let mlp = config.moe.as_ref().map_or_else(|| dense_mlp(body), |moe| moe.active_weights(body.hidden_size));
    let layer = attention(body, body.hidden_size) + mlp;
    let (draft_vocab, vocab) = (config.draft_vocab(), body.vocab_size);
    let rank = config.markov_rank;
    let markov = match config.markov_head_type {
        None | Some(MarkovHeadType::Vanilla) => draft_vocab * rank,
        Some(MarkovHeadType::Gated) => draft_vocab * rank + rank * (body.hidden_size + rank),
        Some(MarkovHeadType::Rnn) => draft_vocab * rank + 3 * rank * (body.hidden_size + 2 * rank),
    };
    let heads = (4 * draft_vocab + 2 * vocab) * body.hidden_size;
    (6 * (layer * body.num_hidden_layers + markov) + heads) as f64
}

/// The same for a step of training-time test; `fc` and the target's distribution serve all steps of a row.
fn flops_per_eagle3_row(config: &Eagle3Config) -> f64 {
    let body = &config.body;
    let layer = attention(body, 2 * body.hidden_size) + dense_mlp(body);
    let fc = body.hidden_size * body.hidden_size * config.target_layer_ids.len();
    let once = (6 * fc + 2 * body.vocab_size * body.hidden_size) as f64 / config.ttt_length as f64;
    (6 * layer + 4 * config.draft_vocab() * body.hidden_size) as f64 + once
}

/// Weights of an attention whose q, k and v projections take `inputs`.
fn attention(body: &TargetConfig, inputs: usize) -> usize {
    let width = body.num_attention_heads * body.head_dim;
    let kv = body.num_key_value_heads * body.head_dim;
    inputs * (width + 2 * kv) + body.hidden_size * width
}

/// Weights of an MLP like the target's.
fn dense_mlp(body: &TargetConfig) -> usize {
    3 * body.hidden_size * body.intermediate_size
}

/// Floating-point operations per second of this machine's f32 kernel, measured once: what `mfu` is relative to.
fn peak_flops() -> Result<f64> {
    let device = candle_core::Device::Cpu;
    let (rows, inputs, outputs) = (96, 512, 4096);
    let weight = candle_core::Tensor::ones((outputs, inputs), candle_core::DType::F32, &device)?;
    let layer = Linear::frozen(&[&weight], None, Precision::F32)?;
    let x = candle_core::Tensor::ones((rows, inputs), candle_core::DType::F32, &device)?;
    let mut best = f64::INFINITY;
    for _ in 0..8 {
        let begun = Instant::now();
        layer.forward(&x)?;
        best = best.min(begun.elapsed().as_secs_f64());
    }
    Ok((2 * rows * inputs * outputs) as f64 / best)
}
