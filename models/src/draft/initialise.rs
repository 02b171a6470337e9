//! What a drafter starts from: random weights, the target's last layers, the target's bigram.
//!
//! Most users have hours, not clusters; a start from the target saves a good part of them.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};

use super::parameters::trainable_shapes;
use super::{DraftVocabulary, ParameterSource, Parameters};
use crate::config::{DraftConfig, MarkovHeadType};
use crate::error::{Error, Result};
use crate::speculate::{CounterRng, Stream};
use crate::weights::Weights;

/// Standard deviation of random weights.
const INIT_STD: f64 = 0.02;
/// Scale of the routed experts' outputs in a start from the target, of what they have in a random one.
const ROUTED_SCALE: f64 = 0.05;
/// Largest component of an rnn head's latent rows that start as the bigram's: tanh leaves 1 − 0.95² ≈ 10 % of the gradient there.
const LARGEST_LATENT: f32 = 0.95;
/// Rounds of subspace iteration for the bigram's factors.
const ITERATIONS: usize = 24;

/// Random weights: normal with standard deviation 0.02, norms 1, biases 0.
///
/// # Errors
/// When a tensor cannot be made.
pub fn random(config: &DraftConfig, seed: u64) -> Result<Parameters> {
    random_of(trainable_shapes(config), seed)
}

/// The same for tensors of any drafter.
pub(super) fn random_of(shapes: BTreeMap<String, Vec<usize>>, seed: u64) -> Result<Parameters> {
    let mut parameters = Parameters::default();
    for (number, (name, shape)) in shapes.into_iter().enumerate() {
        let count: usize = shape.iter().product();
        let values: Vec<f32> = if name.ends_with("norm.weight") {
            vec![1.0; count]
        } else if name.ends_with("bias") {
            vec![0.0; count]
        } else {
            let rng = CounterRng::new(seed, Stream::Init, number as u64);
            (0..count).map(|i| (rng.normal(i as u64) * INIT_STD) as f32).collect()
        };
        parameters.insert(name, &Tensor::from_vec(values, shape, &Device::Cpu)?)?;
    }
    Ok(parameters)
}

/// Replaces draft layers, `fc` and norms by the target's: draft layer i of n by target layer L − n + i, `fc` by the
/// selection of the last feature layer, `hidden_norm` by the last layer's input norm. With that feature being the output
/// of layer L − 2 and no q/k norm, the last draft layer's context keys and values equal the target's last layer's.
///
/// Where the MLPs are mixtures, the shared expert takes the target's MLP if it is as wide; the routed experts stay random, but small,
/// so that the start is nearly the target's layer. Without such a shared expert all of the MLP stays random.
///
/// # Errors
/// When the target lacks a tensor of the shape needed.
pub fn from_target_layers(parameters: &mut Parameters, config: &DraftConfig, target: &Weights) -> Result<()> {
    let layers = config.body.num_hidden_layers;
    let Some(first) = config.num_target_layers.checked_sub(layers) else {
        let target = config.num_target_layers;
        return Err(Error::Batch(format!("{layers} draft layers cannot start from the {target} layers of the target")));
    };
    let mut replaced = Vec::new();
    for (name, shape) in trainable_shapes(config) {
        let Some((layer, rest)) = name.strip_prefix("layers.").and_then(|rest| rest.split_once('.')) else { continue };
        let Ok(layer) = layer.parse::<usize>() else { continue };
        let mut source = format!("model.layers.{}.{rest}", first + layer);
        if config.moe.is_some() && rest.starts_with("mlp.") {
            if !config.shared_expert_fits_target() {
                continue;
            } else if let Some(part) = rest.strip_prefix("mlp.shared_expert.") {
                source = format!("model.layers.{}.mlp.{part}", first + layer);
            } else {
                if rest.starts_with("mlp.experts.") && rest.ends_with("down_proj.weight") {
                    let random = ParameterSource::Trainable(parameters).tensor(&name, &shape)?;
                    replaced.push((name, (random * ROUTED_SCALE)?.detach()));
                }
                continue;
            }
        }
        // Head norms that the target's family does not have stay at 1; nothing else may be missing.
        let is_head_norm = rest.ends_with("q_norm.weight") || rest.ends_with("k_norm.weight");
        if target.contains(&source) || !is_head_norm {
            replaced.push((name, target.get(&source, &shape)?));
        }
    }
    let hidden = config.body.hidden_size;
    let width = config.target_layer_ids.len() * hidden;
    let mut select = vec![0f32; hidden * width];
    for row in 0..hidden {
        select[row * width + width - hidden + row] = 1.0;
    }
    replaced.push(("fc.weight".into(), Tensor::from_vec(select, (hidden, width), &Device::Cpu)?));
    let norm = format!("model.layers.{}.input_layernorm.weight", config.num_target_layers - 1);
    replaced.push(("hidden_norm.weight".into(), target.get(&norm, &[hidden])?));
    replaced.push(("norm.weight".into(), target.get("model.norm.weight", &[hidden])?));
    for (name, value) in replaced {
        parameters.insert(name, &value)?;
    }
    Ok(())
}

/// Hidden rows that the target gives after single tokens, and how often each token occurs in the data.
#[derive(Debug)]
pub struct BigramRows {
    /// Token → row index of `hidden` and count.
    pub tokens: BTreeMap<u32, (usize, u64)>,
    /// Final normalised hidden rows `[n, hidden]`.
    pub hidden: Tensor,
}

/// Factors W1 `[vocab, rank]`, W2 `[draft vocab, rank]` with `W1[x] · W2[y]` ≈ logit(y after x) − mean over x.
///
/// The logits after x are h(x)·Eᵀ, E the rows that the draft tokens have in the target's `lm_head` (all of them without a
/// `vocabulary`), so their best approximation of rank r in the norm weighted by the
/// tokens' frequencies is found in `hidden` dimensions: with C = Σ_x f(x) (h−h̄)(h−h̄)ᵀ and G = Σ_y f(y) e eᵀ, U the leading
/// eigenvectors of C·G with Uᵀ G U = 1, W1 = (H − h̄) G U and W2 = E U. Tokens that do not occur have a zero row in W1.
///
/// # Errors
/// When shapes do not fit.
pub fn bigram_factors(
    rows: &BigramRows,
    lm_head: &Tensor,
    vocabulary: Option<&DraftVocabulary>,
    rank: usize,
) -> Result<(Tensor, Tensor)> {
    let (vocab, width) = lm_head.dims2()?;
    let lm_head = &vocabulary.map_or_else(|| Ok(lm_head.clone()), |vocabulary| vocabulary.rows_of(lm_head))?;
    let hidden: Vec<Vec<f32>> = rows.hidden.to_vec2()?;
    let head: Vec<f32> = lm_head.contiguous()?.flatten_all()?.to_vec1()?;
    let weight = |count: u64| ((count + 1) as f64).sqrt();
    let total: f64 = rows.tokens.values().map(|&(_, count)| weight(count)).sum();
    let mut mean = vec![0f64; width];
    for &(row, count) in rows.tokens.values() {
        for (m, h) in mean.iter_mut().zip(&hidden[row]) {
            *m += weight(count) / total * f64::from(*h);
        }
    }
    let centred: Vec<Vec<f32>> =
        hidden.iter().map(|row| row.iter().zip(&mean).map(|(h, m)| h - *m as f32).collect()).collect();
    let scatter = |rows: &mut dyn Iterator<Item = (&[f32], f64)>| -> Result<Tensor> {
        let scaled: Vec<f32> =
            rows.flat_map(|(row, w)| row.iter().map(move |v| v * w.sqrt() as f32).collect::<Vec<_>>()).collect();
        let scaled = Tensor::from_vec(scaled.clone(), (scaled.len() / width, width), &Device::Cpu)?;
        Ok(scaled.t()?.matmul(&scaled)?)
    };
    let c = scatter(&mut rows.tokens.values().map(|&(row, count)| (centred[row].as_slice(), weight(count))))?;
    let counts = |token: u32| rows.tokens.get(&token).map_or(0, |&(_, count)| count);
    let token = |y: usize| vocabulary.map_or(y as u32, |vocabulary| vocabulary.tokens()[y]);
    let g = scatter(&mut head.chunks_exact(width).enumerate().map(|(y, row)| (row, weight(counts(token(y))))))?;
    let u = leading_eigenvectors(&c, &g, rank)?;
    let gu = g.matmul(&u)?;
    let mut w1 = vec![0f32; vocab * rank];
    for (&token, &(row, _)) in &rows.tokens {
        let row = Tensor::from_slice(&centred[row], (1, width), &Device::Cpu)?;
        let latent: Vec<f32> = row.matmul(&gu)?.flatten_all()?.to_vec1()?;
        w1[token as usize * rank..(token as usize + 1) * rank].copy_from_slice(&latent);
    }
    let w2 = lm_head.matmul(&u)?;
    // The product is what matters; equal scales of both factors suit one learning rate.
    let scale = |t: &Tensor| -> Result<f64> { Ok(f64::from(t.sqr()?.mean_all()?.to_scalar::<f32>()?).sqrt()) };
    let w1 = Tensor::from_vec(w1, (vocab, rank), &Device::Cpu)?;
    let balance = (scale(&w2)? / scale(&w1)?.max(1e-12)).sqrt();
    Ok(((w1 * balance)?, (w2 / balance.max(1e-12))?))
}

/// Starts the Markov head from the bigram's factors W1 `[vocab, rank]` and W2 `[draft vocab, rank]`. Whatever the form, the bias
/// of a slot is then `W2 · W1[x]` exactly, and every tensor still has a gradient:
///
/// * gated: `gate_proj` is 0, so that every gate is ½, and W1 is doubled.
/// * rnn: `out` is the embedding, and W1 holds atanh of the scaled factor, so that tanh(out) undoes it; W2 takes the scale.
///   Gate and candidate stay as they are.
///
/// # Errors
/// When shapes do not fit.
pub fn markov_from_bigram(parameters: &mut Parameters, config: &DraftConfig, w1: &Tensor, w2: &Tensor) -> Result<()> {
    let (rank, hidden) = (config.markov_rank, config.body.hidden_size);
    let (w1, w2) = match config.markov_head_type {
        None => return Err(Error::Batch("a drafter without a Markov head cannot start from a bigram".into())),
        Some(MarkovHeadType::Vanilla) => (w1.clone(), w2.clone()),
        Some(MarkovHeadType::Gated) => {
            let gate = Tensor::zeros((rank, hidden + rank), DType::F32, &Device::Cpu)?;
            parameters.insert("markov_head.gate_proj.weight", &gate)?;
            ((w1 * 2.0)?, w2.clone())
        }
        Some(MarkovHeadType::Rnn) => {
            let name = "markov_head.joint_proj.weight";
            let joint = parameters.get(name).ok_or_else(|| Error::Batch(format!("no parameter `{name}`")))?;
            let zeros = |width| Tensor::zeros((rank, width), DType::F32, &Device::Cpu);
            let out = Tensor::cat(&[&zeros(rank)?, &Tensor::eye(rank, DType::F32, &Device::Cpu)?, &zeros(hidden)?], 1)?;
            let joint = Tensor::cat(&[&joint.narrow(0, 0, 2 * rank)?, &out], 0)?;
            parameters.insert(name, &joint)?;
            let values: Vec<f32> = w1.flatten_all()?.to_vec1()?;
            let largest = values.iter().fold(LARGEST_LATENT, |largest, value| largest.max(value.abs()));
            let scale = LARGEST_LATENT / largest;
            let latent = values.iter().map(|value| (value * scale).atanh()).collect();
            (Tensor::from_vec(latent, w1.shape(), &Device::Cpu)?, (w2 / f64::from(scale))?)
        }
    };
    parameters.insert("markov_head.markov_w1.weight", &w1)?;
    parameters.insert("markov_head.markov_w2.weight", &w2)
}

/// Leading eigenvectors U of C·G, normalised so that Uᵀ G U = 1, by subspace iteration with Gram–Schmidt in the G norm.
fn leading_eigenvectors(c: &Tensor, g: &Tensor, rank: usize) -> Result<Tensor> {
    let (width, _) = c.dims2()?;
    let rng = CounterRng::new(0, Stream::Init, u64::MAX);
    let start: Vec<f32> = (0..width * rank).map(|i| rng.normal(i as u64) as f32).collect();
    let mut u = Tensor::from_vec(start, (width, rank), &Device::Cpu)?;
    for _ in 0..ITERATIONS {
        u = orthonormal(&c.matmul(&g.matmul(&u)?)?, g)?;
    }
    Ok(u)
}

fn norm(v: &[f64]) -> f64 {
    v.iter().map(|x| x * x).sum::<f64>().sqrt()
}

fn orthonormal(u: &Tensor, g: &Tensor) -> Result<Tensor> {
    let (width, rank) = u.dims2()?;
    let columns: Vec<Vec<f32>> = u.t()?.contiguous()?.to_vec2()?;
    let g: Vec<Vec<f32>> = g.to_vec2()?;
    let mut basis: Vec<Vec<f64>> = Vec::with_capacity(rank);
    let mut images: Vec<Vec<f64>> = Vec::with_capacity(rank); // G · basis
    for column in columns {
        let largest = column.iter().fold(1e-30f32, |m, v| m.max(v.abs()));
        let mut v: Vec<f64> = column.iter().map(|x| f64::from(x / largest)).collect();
        let before = norm(&v);
        for _ in 0..2 {
            for (b, image) in basis.iter().zip(&images) {
                let along: f64 = v.iter().zip(image).map(|(a, b)| a * b).sum();
                v.iter_mut().zip(b).for_each(|(v, b)| *v -= along * b);
            }
        }
        if norm(&v) < 1e-9 * before {
            // Nothing new in this direction: the factors have a lower rank.
            v.fill(0.0);
        }
        let image: Vec<f64> = g.iter().map(|row| row.iter().zip(&v).map(|(g, v)| f64::from(*g) * v).sum()).collect();
        let length = v.iter().zip(&image).map(|(a, b)| a * b).sum::<f64>().max(1e-30).sqrt();
        basis.push(v.into_iter().map(|x| x / length).collect());
        images.push(image.into_iter().map(|x| x / length).collect());
    }
    let flat: Vec<f32> = (0..width).flat_map(|row| basis.iter().map(move |b| b[row] as f32)).collect();
    Ok(Tensor::from_vec(flat, (width, rank), &Device::Cpu)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_rank_factors_reproduce_the_bigram() {
        let (vocab, width) = (23, 6);
        let value = |seed: u64, i: usize| CounterRng::new(seed, Stream::Init, 0).normal(i as u64) as f32;
        let head: Vec<f32> = (0..vocab * width).map(|i| value(1, i)).collect();
        let head = Tensor::from_vec(head, (vocab, width), &Device::Cpu).unwrap();
        let hidden: Vec<f32> = (0..vocab * width).map(|i| value(2, i)).collect();
        let hidden = Tensor::from_vec(hidden, (vocab, width), &Device::Cpu).unwrap();
        let tokens = (0..vocab).map(|x| (x as u32, (x, 4))).collect();
        let rows = BigramRows { tokens, hidden: hidden.clone() };
        let (w1, w2) = bigram_factors(&rows, &head, None, width).unwrap();
        let got: Vec<Vec<f32>> = w1.matmul(&w2.t().unwrap()).unwrap().to_vec2().unwrap();
        let centred = hidden.broadcast_sub(&hidden.mean(0).unwrap()).unwrap();
        let expected: Vec<Vec<f32>> = centred.matmul(&head.t().unwrap()).unwrap().to_vec2().unwrap();
        for (g, e) in got.iter().flatten().zip(expected.iter().flatten()) {
            assert!((g - e).abs() < 1e-2, "{g} against {e}");
        }
        let (w1, w2) = bigram_factors(&rows, &head, None, 3).unwrap();
        let low: Vec<Vec<f32>> = w1.matmul(&w2.t().unwrap()).unwrap().to_vec2().unwrap();
        let error = |m: &[Vec<f32>]| -> f32 {
            m.iter().flatten().zip(expected.iter().flatten()).map(|(a, b)| (a - b).powi(2)).sum()
        };
        let size: f32 = expected.iter().flatten().map(|e| e * e).sum();
        assert!(error(&low) < 0.6 * size, "rank 3 leaves {} of {size}", error(&low));

        // Of a part of the tokens: their columns of the same bigram.
        let counts: Vec<u64> = (0..vocab as u64).map(|y| u64::from(y % 3 == 1)).collect();
        let part = DraftVocabulary::most_frequent(&counts, &[], 8).unwrap();
        let (w1, w2) = bigram_factors(&rows, &head, Some(&part), width).unwrap();
        assert_eq!((w1.dims(), w2.dims()), (&[vocab, width][..], &[8, width][..]));
        let got: Vec<Vec<f32>> = w1.matmul(&w2.t().unwrap()).unwrap().to_vec2().unwrap();
        for (got, expected) in got.iter().zip(&expected) {
            for (g, &y) in got.iter().zip(part.tokens().iter()) {
                assert!((g - expected[y as usize]).abs() < 1e-2, "{g} against {}", expected[y as usize]);
            }
        }
    }
}
