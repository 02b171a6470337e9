//! Steps of training a drafter for the given target, on inputs that are functions of the shape alone.
//!
//! Target features and hidden rows are random numbers of the size that a target gives, since times do not depend on their
//! values. Whoever wants to check another implementation gets weights and inputs with [`Training::dump`].

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use deepspec_models::config::{DraftConfig, DrafterConfig, MarkovHeadType, TargetConfig};
use deepspec_models::draft::dspark::TrainSequence;
use deepspec_models::draft::{ParameterSource, Parameters, initialise};
use deepspec_models::linear::{Packed, Precision as Packing};
use deepspec_models::loss::dspark::{LossHead, LossWeights};
use deepspec_models::loss::router::RouterWeights;
use deepspec_models::optimizer::{AdamWConfig, Optimizer};
use deepspec_models::speculate::{CounterRng, Stream};
use deepspec_models::target::TargetEnds;
use deepspec_models::weights::Weights;
use deepspec_stages::drafter::Drafter;
use deepspec_stages::train::batches::MicroBatch;
use deepspec_stages::train::step::{self, Coefficients, Trained};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{Result, timed};

/// Learning rate of all steps.
const LR: f64 = 1e-4;
/// DSpark's loss as in the paper.
const WEIGHTS: LossWeights =
    LossWeights { ce: 0.1, tv: 0.9, kl: 0.0, kl_temperature: 1.0, confidence: 1.0, decay_gamma: Some(4.0) };
/// AdamW without decay, gradients clipped to norm 1.
const ADAMW: AdamWConfig = AdamWConfig { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0, max_grad_norm: 1.0 };

/// Size of a training step.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(crate) struct Shape {
    /// Blocks.
    anchors: usize,
    /// Slots per block.
    slots: usize,
    /// Tokens of the vocabulary: the target's output head is cut to as many.
    vocab: usize,
    /// Draft layers.
    draft_layers: usize,
    /// Rank of the Markov head.
    markov_rank: usize,
    /// Target layers that give features.
    target_layers: Vec<i32>,
}

/// A drafter in training.
pub(crate) struct Training {
    shape: Shape,
    tokens: Vec<u32>,
    anchors: Vec<usize>,
    features: Tensor,
    target_hidden: Tensor,
    inverse_frequencies: Vec<f32>,
    parameters: Parameters,
    drafter: Drafter,
    embed_tokens: Tensor,
    head: LossHead,
    optimizer: Optimizer,
}

impl Training {
    pub(crate) fn new(model: &Path, shape: Shape, context: &[u32]) -> Result<Self> {
        let target = TargetConfig::open(model)?;
        let weights = Weights::open(model, DType::F32, &Device::Cpu)?;
        let ends = TargetEnds::load(&target, &weights)?;
        if shape.vocab > target.vocab_size || shape.anchors == 0 || context.len() <= shape.slots {
            return Err(format!("{shape:?} with a context of {} tokens", context.len()).into());
        }
        let lm_head = ends.lm_head.narrow(0, 0, shape.vocab)?.contiguous()?;
        let embed_tokens = ends.embed_tokens.narrow(0, 0, shape.vocab)?.contiguous()?;
        let (rows, hidden) = (context.len(), target.hidden_size);
        let config = draft_config(&target, &shape);
        let parameters = initialise::random(&config, 1)?;
        let packed = Packed::new(&[&lm_head.flatten_all()?.to_vec1::<f32>()?], hidden, None, Packing::F32)?;
        // Every block has all its labels inside the sequence.
        let last = rows - 1 - shape.slots;
        Ok(Self {
            tokens: context.iter().map(|token| token % shape.vocab as u32).collect(),
            anchors: (0..shape.anchors).map(|i| (i + 1) * last / shape.anchors).collect(),
            features: random(1, rows, hidden * shape.target_layers.len())?,
            target_hidden: random(2, rows, hidden)?,
            inverse_frequencies: config.body.rope.inverse_frequencies(config.body.head_dim),
            optimizer: Optimizer::new(ADAMW, &parameters),
            drafter: Drafter::new(
                DrafterConfig::Block(config),
                embed_tokens.clone(),
                ParameterSource::Trainable(&parameters),
            )?,
            head: LossHead::new(&lm_head, Arc::new(packed), None)?,
            embed_tokens,
            parameters,
            shape,
        })
    }

    pub(crate) fn shape(&self) -> Shape {
        self.shape.clone()
    }

    /// Runs steps and tells their times, losses and gradient norms, and the most memory the process has had.
    pub(crate) fn steps(&mut self, repeats: usize) -> Result<Value> {
        let mask = vec![1u8; self.tokens.len()];
        let (mut seconds, mut losses, mut norms) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..repeats {
            let anchors = self.anchors.iter().copied().map(Some).collect();
            let batch = [MicroBatch {
                samples: vec![0],
                sequences: vec![TrainSequence { tokens: &self.tokens, anchors }],
                loss_masks: vec![&mask],
                features: self.features.clone(),
                target_hidden: self.target_hidden.clone(),
            }];
            let Self { drafter, parameters, head, optimizer, .. } = self;
            let trained = Trained { drafter, parameters, head };
            let coefficients = Coefficients { weights: WEIGHTS, routers: RouterWeights::default() };
            let (time, done) = timed(|| Ok(step::run(trained, &coefficients, optimizer, &batch, LR, true)?))?;
            seconds.push(time);
            losses.push(done.sums.loss());
            norms.push(done.grad_norm);
        }
        Ok(json!({
            "seconds": seconds,
            "losses": losses,
            "grad_norms": norms,
            "parameters": self.parameters.elements(),
            "peak_bytes": peak_bytes()?,
        }))
    }

    /// Writes all tensors by name and answers with the numbers that go with them.
    pub(crate) fn dump(&self, path: &Path) -> Result<Value> {
        let ids = |values: Vec<u32>| Tensor::new(values, &Device::Cpu);
        let anchors = self.anchors.iter().map(|&anchor| anchor as u32).collect();
        let mut tensors: HashMap<String, Tensor> =
            self.parameters.iter().map(|(name, var)| (name.to_owned(), var.as_tensor().clone())).collect();
        for (name, tensor) in [
            ("embed_tokens.weight", self.embed_tokens.clone()),
            ("lm_head.weight", self.head.weight().clone()),
            ("input.tokens", ids(self.tokens.clone())?),
            ("input.anchors", ids(anchors)?),
            ("input.features", self.features.clone()),
            ("input.target_hidden", self.target_hidden.clone()),
            ("input.inverse_frequencies", Tensor::new(self.inverse_frequencies.as_slice(), &Device::Cpu)?),
        ] {
            tensors.insert(name.into(), tensor);
        }
        candle_core::safetensors::save(&tensors, path)?;
        let Drafter::Block(drafter) = &self.drafter else { return Err("expected a block drafter".into()) };
        let config = drafter.config();
        Ok(json!({
            "hidden": config.body.hidden_size,
            "intermediate": config.body.intermediate_size,
            "heads": config.body.num_attention_heads,
            "kv_heads": config.body.num_key_value_heads,
            "head_dim": config.body.head_dim,
            "rms_norm_eps": config.body.rms_norm_eps,
            "mask_token_id": config.mask_token_id,
            "lr": LR,
        }))
    }
}

fn draft_config(target: &TargetConfig, shape: &Shape) -> DraftConfig {
    DraftConfig {
        body: TargetConfig { vocab_size: shape.vocab, ..DraftConfig::body_of(target, shape.draft_layers) },
        num_target_layers: target.num_hidden_layers,
        block_size: shape.slots,
        mask_token_id: 15,
        target_layer_ids: shape.target_layers.clone(),
        num_anchors: shape.anchors,
        enable_confidence_head: true,
        confidence_head_with_markov: true,
        markov_rank: shape.markov_rank,
        markov_head_type: Some(MarkovHeadType::Vanilla),
        sample_from_anchor: true,
        sliding_window: None,
        moe: None,
        draft_vocab_size: None,
    }
}

/// Normal numbers.
fn random(number: u64, rows: usize, cols: usize) -> Result<Tensor> {
    let rng = CounterRng::new(7, Stream::Init, number);
    let values: Vec<f32> = (0..rows * cols).map(|i| rng.normal(i as u64) as f32).collect();
    Ok(Tensor::from_vec(values, (rows, cols), &Device::Cpu)?)
}

/// Largest resident memory of this process so far.
fn peak_bytes() -> Result<u64> {
    let status = fs_err::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).ok_or("the system tells no VmHWM")?;
    Ok(line.trim().trim_end_matches(" kB").parse::<u64>()? << 10)
}
