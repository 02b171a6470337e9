//! Forward passes against plain f64 loops and gradients against finite differences, over random shapes.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::sync::Arc;

use candle_core::{Device, Result, Tensor, Var};
use deepspec_kernels::attention::HeadLayout;
use deepspec_kernels::attention::block::{BlockAttention, BlockSpan};
use deepspec_kernels::attention::ragged::{RaggedAttention, Segment, Visibility, cache_shapes};
use deepspec_kernels::attention::ttt::{StepKeys, TttAttention};
use deepspec_kernels::linear::{Packed, Precision};
use deepspec_kernels::rope::RopeFrequencies;
use deepspec_kernels::vocab_loss::{LossRow, VocabLoss};
use deepspec_kernels::{rms_norm, silu_mul};
use proptest::prelude::*;

/// Values in (−1, 1) from a seed.
fn random(seed: u64, n: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    (0..n)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}

fn tensor(seed: u64, rows: usize, cols: usize) -> Tensor {
    Tensor::from_vec(random(seed, rows * cols), (rows, cols), &Device::Cpu).unwrap()
}

fn values(t: &Tensor) -> Vec<f32> {
    t.flatten_all().unwrap().to_vec1().unwrap()
}

/// Compares the gradient of `loss` in every input with central differences at up to 20 entries of each.
fn check_gradients(inputs: &[Tensor], loss: impl Fn(&[Tensor]) -> Result<Tensor>) {
    let vars: Vec<Var> = inputs.iter().map(|t| Var::from_tensor(t).unwrap()).collect();
    let tensors: Vec<Tensor> = vars.iter().map(|v| v.as_tensor().clone()).collect();
    let scalar = |t: &[Tensor]| values(&loss(t).unwrap()).iter().map(|v| f64::from(*v)).sum::<f64>();
    let grads = loss(&tensors).unwrap().sum_all().unwrap().backward().unwrap();
    for (i, var) in vars.iter().enumerate() {
        let grad = values(grads.get(var).unwrap_or_else(|| panic!("input {i} has no gradient")));
        let base = values(var);
        let scale = grad.iter().fold(1e-3f32, |m, g| m.max(g.abs()));
        for probe in 0..20.min(base.len()) {
            let at = probe * 7919 % base.len();
            let difference = |h: f32| {
                let at_offset = |sign: f32| {
                    let mut moved = base.clone();
                    moved[at] += sign * h;
                    let mut tensors = tensors.clone();
                    tensors[i] = Tensor::from_vec(moved, var.shape(), &Device::Cpu).unwrap();
                    scalar(&tensors)
                };
                (at_offset(1.0) - at_offset(-1.0)) / (2.0 * f64::from(h))
            };
            let expected = difference(3e-3);
            let error = (f64::from(grad[at]) - expected).abs();
            assert!(
                error < 4e-2 * f64::from(scale),
                "input {i} entry {at}: gradient {}, differences {expected}",
                grad[at]
            );
        }
    }
}

/// Σ y · c with fixed random c, so that every output matters differently.
fn weighted(y: &Tensor) -> Result<Tensor> {
    let c = Tensor::from_vec(random(99, y.elem_count()), y.shape(), &Device::Cpu)?;
    (y * c)?.sum_all()
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(16) })]

    #[test]
    fn rms_norm_forward_and_gradient(seed in any::<u64>(), rows in 1usize..70, cols in 2usize..40) {
        let (x, w) = (tensor(seed, rows, cols), tensor(seed ^ 5, 1, cols).reshape(cols).unwrap());
        let y = values(&rms_norm(&x, &w, 1e-5).unwrap());
        let (xs, ws) = (values(&x), values(&w));
        for r in 0..rows {
            let row = &xs[r * cols..(r + 1) * cols];
            let mean = row.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / cols as f64;
            for c in 0..cols {
                let expected = f64::from(row[c]) / (mean + 1e-5).sqrt() * f64::from(ws[c]);
                prop_assert!((f64::from(y[r * cols + c]) - expected).abs() < 1e-5);
            }
        }
        check_gradients(&[x, w], |t| weighted(&rms_norm(&t[0], &t[1], 1e-5)?));
    }

    #[test]
    fn silu_mul_forward_and_gradient(seed in any::<u64>(), rows in 1usize..9, cols in 1usize..40) {
        let (g, u) = ((tensor(seed, rows, cols) * 4.0).unwrap(), tensor(seed ^ 5, rows, cols));
        let y = values(&silu_mul(&g, &u).unwrap());
        for ((y, g), u) in y.iter().zip(values(&g)).zip(values(&u)) {
            let expected = f64::from(g) / (1.0 + (-f64::from(g)).exp()) * f64::from(u);
            prop_assert!((f64::from(*y) - expected).abs() < 1e-5);
        }
        check_gradients(&[g, u], |t| weighted(&silu_mul(&t[0], &t[1])?));
    }

    #[test]
    fn rope_keeps_norms_and_has_a_gradient(seed in any::<u64>(), rows in 1usize..9, heads in 1usize..4, pairs in 1usize..9, rest in 0usize..3) {
        let dim = 2 * pairs + 2 * rest;
        let frequencies = RopeFrequencies::plain(10_000.0, 2 * pairs, dim);
        let positions: Vec<usize> = (0..rows).map(|i| i * 37 + 3).collect();
        let angles = frequencies.at(&positions);
        let x = tensor(seed, rows, heads * dim);
        let (xs, y) = (values(&x), values(&angles.apply(&x).unwrap()));
        for (a, b) in xs.chunks(dim).zip(y.chunks(dim)) {
            let norm = |v: &[f32]| v.iter().map(|v| v * v).sum::<f32>();
            prop_assert!((norm(a) - norm(b)).abs() < 1e-4);
            prop_assert_eq!(&a[2 * pairs..], &b[2 * pairs..]);
        }
        check_gradients(&[x], |t| weighted(&angles.apply(&t[0])?));
    }

    #[test]
    fn block_attention_forward_and_gradient(seed in any::<u64>(), kv_heads in 1usize..3, group in 1usize..4, dim in 1usize..20, size in 1usize..5) {
        let heads = HeadLayout { heads: kv_heads * group, kv_heads, head_dim: dim };
        let span = |context, first: usize, sees_itself| BlockSpan { context, rows: first * size..(first + 1) * size, sees_itself };
        let sequences = vec![
            (0..7, vec![span(0..3, 0, true), span(2..6, 1, true), span(0..0, 2, false)]),
            (7..9, vec![span(7..7, 3, true), span(7..9, 4, true)]),
        ];
        let blocks: Vec<BlockSpan> = sequences.iter().flat_map(|(_, b)| b.clone()).collect();
        let (context, rows) = (9, 5 * size);
        let pattern = BlockAttention::new(sequences, heads).unwrap();
        let keys = |seed| tensor(seed, context + rows, kv_heads * dim);
        let (q, k, v) = (tensor(seed, rows, heads.heads * dim), keys(seed ^ 1), keys(seed ^ 2));
        let y = values(&pattern.forward(&q, &k, &v).unwrap());
        let (qs, ks, vs) = (values(&q), values(&k), values(&v));
        for block in &blocks {
            for row in block.rows.clone() {
                let keys: Vec<usize> = block.context.clone().chain(block.rows.clone().filter(|_| block.sees_itself).map(|r| context + r)).collect();
                for head in 0..heads.heads {
                    let kv = head / group;
                    let at = |data: &[f32], r: usize, width: usize, h: usize, d: usize| f64::from(data[r * width + h * dim + d]);
                    let dot = |key: usize| {
                        let term = |d| at(&qs, row, heads.heads * dim, head, d) * at(&ks, key, kv_heads * dim, kv, d);
                        (0..dim).map(term).sum::<f64>() / (dim as f64).sqrt()
                    };
                    let scores: Vec<f64> = keys.iter().map(|&key| dot(key)).collect();
                    let total: f64 = scores.iter().map(|s| s.exp()).sum();
                    for d in 0..dim {
                        let expected: f64 = keys.iter().zip(&scores).map(|(&key, s)| s.exp() / total * at(&vs, key, kv_heads * dim, kv, d)).sum();
                        let got = f64::from(y[row * heads.heads * dim + head * dim + d]);
                        prop_assert!((got - expected).abs() < 1e-5, "row {} head {}: {} against {}", row, head, got, expected);
                    }
                }
            }
        }
        check_gradients(&[q, k, v], |t| weighted(&pattern.forward(&t[0], &t[1], &t[2])?));
    }

    #[test]
    fn ttt_attention_forward_and_gradient(
        seed in any::<u64>(), lengths in prop::collection::vec(0usize..7, 1..4), steps in 1usize..5, fewer in any::<u64>(),
        kv_heads in 1usize..3, group in 1usize..4, dim in 1usize..20,
    ) {
        let heads = HeadLayout { heads: kv_heads * group, kv_heads, head_dim: dim };
        let count: usize = lengths.iter().sum();
        // Some rows go on; the later keys first hold all of them.
        let rows: Vec<usize> = (0..count).filter(|row| fewer >> row & 1 == 1).collect();
        prop_assume!(!rows.is_empty());
        let pattern = TttAttention::new(&lengths, heads);
        let q = tensor(seed, rows.len(), heads.heads * dim);
        let side = |side: u64| -> Vec<Tensor> {
            (0..steps).map(|step| tensor(seed ^ ((side << 8) + step as u64 + 1), count, kv_heads * dim)).collect()
        };
        let (keys, values_of) = (side(1), side(2));
        let run = |t: &[Tensor]| {
            let mut held = StepKeys::default();
            for step in 0..steps {
                held.push(t[1 + step].clone(), t[1 + steps + step].clone());
            }
            held.narrow(&rows)?;
            pattern.forward(&t[0], &rows, &held)
        };
        let inputs = [vec![q.clone()], keys.clone(), values_of.clone()].concat();
        let y = values(&run(&inputs).unwrap());
        let (qs, width) = (values(&q), heads.heads * dim);
        let [ks, vs] = [&keys, &values_of].map(|side| side.iter().map(values).collect::<Vec<_>>());
        for (place, &row) in rows.iter().enumerate() {
            let starts = lengths.iter().scan(0, |end, len| { *end += len; Some(*end - len) });
            let first = starts.filter(|start| *start <= row).max().unwrap();
            // (step, row) of every visible key.
            let seen: Vec<(usize, usize)> = (first..=row).map(|r| (0, r)).chain((1..steps).map(|s| (s, row))).collect();
            for head in 0..heads.heads {
                let at = |data: &[Vec<f32>], (s, r): (usize, usize), d| f64::from(data[s][(r * kv_heads + head / group) * dim + d]);
                let dot = |key| (0..dim).map(|d| f64::from(qs[place * width + head * dim + d]) * at(&ks, key, d)).sum::<f64>();
                let scores: Vec<f64> = seen.iter().map(|&key| dot(key) / (dim as f64).sqrt()).collect();
                let total: f64 = scores.iter().map(|s| s.exp()).sum();
                for d in 0..dim {
                    let expected: f64 = seen.iter().zip(&scores).map(|(&key, s)| s.exp() / total * at(&vs, key, d)).sum();
                    let got = f64::from(y[place * width + head * dim + d]);
                    prop_assert!((got - expected).abs() < 1e-5, "row {} head {}: {} against {}", row, head, got, expected);
                }
            }
        }
        check_gradients(&inputs, |t| weighted(&run(t)?));
    }

    #[test]
    fn ragged_attention_sees_its_cache_and_nothing_else(
        seed in any::<u64>(), past in prop::array::uniform2(0usize..90), new in prop::array::uniform2(1usize..9),
        kv_heads in 1usize..3, group in prop::sample::select(vec![1usize, 2, 3, 5, 14]), dim in 1usize..70,
        window in prop::option::of(1usize..40), causal in any::<bool>(),
    ) {
        let heads = HeadLayout { heads: kv_heads * group, kv_heads, head_dim: dim };
        let capacity = 99;
        let [k_cache, v_cache] = cache_shapes(3, capacity, heads).map(|(rows, cols)| tensor(seed, rows, cols));
        let slots = [2, 0];
        let attention = |segments: Vec<Segment>| {
            let visibility = if causal { Visibility::Causal } else { Visibility::WholeSegment };
            RaggedAttention { segments: segments.into(), capacity, heads, visibility, window }
        };
        let segment = |i: usize, start, len| Segment { slot: slots[i], start, len };
        // What a slot holds comes in two calls, so that the second must leave the first alone.
        let totals = [past[0] + new[0], past[1] + new[1]];
        let [k, v] = [0, 1].map(|side| totals.map(|n| tensor(seed ^ (2 + side + n as u64 * 8), n, kv_heads * dim)));
        for from_to in [[0, past[0], 0, past[1]], [past[0], totals[0], past[1], totals[1]]] {
            let [a, b, c, d] = from_to;
            let rows = |t: &[Tensor; 2]| Tensor::cat(&[t[0].narrow(0, a, b - a).unwrap(), t[1].narrow(0, c, d - c).unwrap()], 0).unwrap();
            attention(vec![segment(0, a, b - a), segment(1, c, d - c)]).store(&rows(&k), &rows(&v), &k_cache, &v_cache).unwrap();
        }
        let q = tensor(seed ^ 4, new[0] + new[1], heads.heads * dim);
        let op = attention(vec![segment(0, past[0], new[0]), segment(1, past[1], new[1])]);
        let y = values(&op.forward(&q, &k_cache, &v_cache).unwrap());
        let (qs, width) = (values(&q), heads.heads * dim);
        let mut row = 0;
        for (i, (k, v)) in k.iter().zip(&v).enumerate() {
            let (ks, vs) = (values(k), values(v));
            for position in past[i]..totals[i] {
                let first = |seen: usize| window.map_or(0, |w| seen.saturating_sub(w));
                let seen = if causal { first(position + 1)..position + 1 } else { first(past[i])..totals[i] };
                for head in 0..heads.heads {
                    let at = |data: &[f32], p: usize, d: usize| f64::from(data[(p * kv_heads + head / group) * dim + d]);
                    let dot = |p| (0..dim).map(|d| f64::from(qs[row * width + head * dim + d]) * at(&ks, p, d)).sum::<f64>();
                    let scores: Vec<f64> = seen.clone().map(|p| dot(p) / (dim as f64).sqrt()).collect();
                    let total: f64 = scores.iter().map(|s| s.exp()).sum();
                    for d in 0..dim {
                        let expected: f64 = seen.clone().zip(&scores).map(|(p, s)| s.exp() / total * at(&vs, p, d)).sum();
                        let got = f64::from(y[row * width + head * dim + d]);
                        prop_assert!((got - expected).abs() < 1e-5, "row {}: {} against {}", row, got, expected);
                    }
                }
                // A causal row's result depends neither on the other segment nor on the rows that come with it.
                if causal {
                    let alone = attention(vec![segment(i, position, 1)]);
                    let y_alone = values(&alone.forward(&q.narrow(0, row, 1).unwrap(), &k_cache, &v_cache).unwrap());
                    prop_assert_eq!(&y[row * width..(row + 1) * width], &y_alone[..]);
                }
                row += 1;
            }
        }
        let alone = attention(vec![segment(1, past[1], new[1])]);
        let y_alone = values(&alone.forward(&q.narrow(0, new[0], new[1]).unwrap(), &k_cache, &v_cache).unwrap());
        prop_assert_eq!(&y[new[0] * width..], &y_alone[..]);
    }

    #[test]
    fn vocab_loss_matches_f64_and_finite_differences(
        seed in any::<u64>(), rank in 0usize..4, kl_temperature in prop::sample::select(vec![1.0f32, 2.0]),
        with_target in any::<bool>(), every in 0usize..5,
    ) {
        let (vocab, width, count, positions) = (37, 6, 5, 4);
        // Every n-th token is the drafter's; 0 stands for no map.
        let tokens: Vec<u32> = (0..vocab as u32).step_by(every.max(1)).collect();
        let target_head = tensor(seed, vocab, width);
        let head = target_head.index_select(&Tensor::new(tokens.as_slice(), &Device::Cpu).unwrap(), 0).unwrap();
        let hidden = (tensor(seed ^ 1, count, width) * 2.0).unwrap();
        let latent = tensor(seed ^ 2, count, rank);
        let w2 = tensor(seed ^ 3, tokens.len(), rank);
        let target = (tensor(seed ^ 4, positions, width) * 2.0).unwrap();
        let label = |row: usize| tokens.binary_search(&((row * 11 % vocab) as u32)).ok().map(|at| at as u32);
        let rows: Vec<LossRow> = [(0, 3), (1, 0), (3, 3), (4, 1)].iter().map(|&(row, target)| {
            let side = if with_target { 1.0 } else { 0.0 };
            LossRow { row, target, label: label(row), ce: 0.3 + row as f32 * 0.1, tv: 0.7 * side, kl: 0.4 * side }
        }).collect();
        let packed = |t: &Tensor| Arc::new(Packed::new(&[&values(t)], width, None, Precision::F32).unwrap());
        let (target_packed, draft_packed) = (packed(&target_head), packed(&head));
        let run = |t: &[Tensor]| VocabLoss {
            target_head: target_packed.clone(), draft_head: draft_packed.clone(), draft_head_weight: head.clone(),
            draft_tokens: (every > 0).then(|| tokens.clone().into()), rows: rows.clone(), kl_temperature, with_target, soft_targets: false,
        }.forward(&t[0], &t[1], &t[2], &target);
        let inputs = [hidden.clone(), latent.clone(), w2.clone()];
        let out = run(&inputs).unwrap();
        let (e, h, m, w, th) = (values(&target_head), values(&hidden), values(&latent), values(&w2), values(&target));
        let softmax = |logits: &[f64], t: f64| -> Vec<f64> {
            let total: f64 = logits.iter().map(|u| (u / t).exp()).sum();
            logits.iter().map(|u| (u / t).exp() / total).collect()
        };
        let mut expected_loss = 0.0;
        for (row, terms) in rows.iter().zip(&out.terms) {
            let product = |x: &[f32], at: usize, v: usize| (0..width).map(|d| f64::from(x[at * width + d]) * f64::from(e[v * width + d])).sum::<f64>();
            let bias = |v: usize| (0..rank).map(|d| f64::from(m[row.row * rank + d]) * f64::from(w[v * rank + d])).sum::<f64>();
            let u: Vec<f64> = tokens.iter().enumerate().map(|(i, &v)| product(&h, row.row, v as usize) + bias(i)).collect();
            let t: Vec<f64> = (0..vocab).map(|v| product(&th, row.target, v)).collect();
            // Over the target's vocabulary: what the drafter lacks has probability 0.
            let spread = |p: &[f64]| -> Vec<f64> {
                let mut full = vec![0.0; vocab];
                tokens.iter().zip(p).for_each(|(&v, p)| full[v as usize] = *p);
                full
            };
            let (p, q) = (softmax(&u, 1.0), softmax(&t, 1.0));
            let ce = row.label.map_or(0.0, |label| -p[label as usize].ln());
            prop_assert!((f64::from(terms.ce) - ce).abs() < 1e-4);
            expected_loss += f64::from(row.ce) * ce;
            if with_target {
                let tv: f64 = spread(&p).iter().zip(&q).map(|(p, q)| (p - q).abs()).sum();
                let (pt, qt) = (spread(&softmax(&u, f64::from(kl_temperature))), softmax(&t, f64::from(kl_temperature)));
                let kl: f64 = pt.iter().zip(&qt).filter(|(p, _)| **p > 0.0).map(|(p, q)| q * (q / p).ln()).sum();
                prop_assert!((f64::from(terms.tv) - tv).abs() < 1e-4);
                prop_assert!((f64::from(terms.kl) - kl).abs() < 1e-4);
                expected_loss += f64::from(row.tv) * tv + f64::from(row.kl) * kl;
            }
        }
        prop_assert!((f64::from(values(&out.loss)[0]) - expected_loss).abs() < 1e-4 * expected_loss.abs().max(1.0));
        let checked = if rank == 0 { 1 } else { 3 };
        check_gradients(&inputs[..checked], |t| {
            let mut all = inputs.to_vec();
            all[..checked].clone_from_slice(t);
            Ok(run(&all)?.loss)
        });
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(16) })]

    #[test]
    fn soft_targets_match_f64_and_finite_differences(seed in any::<u64>(), every in 0usize..4, tv in prop::sample::select(vec![0f32, 0.5])) {
        let (vocab, width, count, positions) = (29, 5, 6, 4);
        // Every n-th token is the drafter's; 0 stands for no map.
        let tokens: Vec<u32> = (0..vocab as u32).step_by(every.max(1)).collect();
        let target_head = tensor(seed, vocab, width);
        let head = target_head.index_select(&Tensor::new(tokens.as_slice(), &Device::Cpu).unwrap(), 0).unwrap();
        let [hidden, target] = [(1, count), (2, positions)].map(|(n, rows)| (tensor(seed ^ n, rows, width) * 2.0).unwrap());
        let rows: Vec<LossRow> = (0..count)
            .map(|row| LossRow { row, target: row * 5 % positions, label: None, ce: 0.0, tv, kl: 0.3 + row as f32 * 0.1 })
            .collect();
        let packed = |t: &Tensor| Arc::new(Packed::new(&[&values(t)], width, None, Precision::F32).unwrap());
        let (target_packed, draft_packed) = (packed(&target_head), packed(&head));
        let [latent, w2] = [count, tokens.len()].map(|rows| Tensor::zeros((rows, 0), candle_core::DType::F32, &Device::Cpu).unwrap());
        let run = |t: &[Tensor]| VocabLoss {
            target_head: target_packed.clone(), draft_head: draft_packed.clone(), draft_head_weight: head.clone(),
            draft_tokens: (every > 0).then(|| tokens.clone().into()), rows: rows.clone(), kl_temperature: 1.0,
            with_target: true, soft_targets: true,
        }.forward(&t[0], &latent, &w2, &target);
        let out = run(std::slice::from_ref(&hidden)).unwrap();
        let (e, h, th) = (values(&target_head), values(&hidden), values(&target));
        let logits = |x: &[f32], row: usize| -> Vec<f64> {
            let at = |v: usize| (0..width).map(|d| f64::from(x[row * width + d]) * f64::from(e[v * width + d])).sum();
            (0..vocab).map(at).collect()
        };
        let softmax = |logits: &[f64]| -> Vec<f64> {
            let total: f64 = logits.iter().map(|u| u.exp()).sum();
            logits.iter().map(|u| u.exp() / total).collect()
        };
        let best = |row: &[f64]| (0..row.len()).max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap();
        let mut expected_loss = 0.0;
        for (row, terms) in rows.iter().zip(&out.terms) {
            let (u, t) = (logits(&h, row.row), logits(&th, row.target));
            let draft = |all: &[f64]| -> Vec<f64> { tokens.iter().map(|&v| all[v as usize]).collect() };
            let (p, q, whole) = (softmax(&draft(&u)), softmax(&draft(&t)), softmax(&t));
            let covered = tokens.binary_search(&(best(&t) as u32)).ok();
            let soft: f64 = if covered.is_some() { p.iter().zip(&q).map(|(p, q)| -q * p.ln()).sum() } else { 0.0 };
            prop_assert!((f64::from(terms.kl) - soft).abs() < 1e-4, "{} against {}", terms.kl, soft);
            prop_assert_eq!(terms.agrees, covered.map(|top| top == best(&p)));
            let missing = 1.0 - draft(&whole).iter().sum::<f64>();
            let distance: f64 = missing + p.iter().zip(draft(&whole)).map(|(p, q)| (p - q).abs()).sum::<f64>();
            prop_assert!((f64::from(terms.tv) - distance).abs() < 1e-4);
            expected_loss += f64::from(row.kl) * soft + f64::from(row.tv) * distance;
        }
        prop_assert!((f64::from(values(&out.loss)[0]) - expected_loss).abs() < 1e-4 * expected_loss.abs().max(1.0));
        check_gradients(&[hidden], |t| Ok(run(t)?.loss));
    }
}

/// The loss and its gradients over more rows than a chunk holds of the large vocabulary, with and without a map.
#[test]
fn a_map_of_all_tokens_changes_no_bit_and_a_bad_one_is_refused() {
    let (vocab, width, rank, count) = (300, 12, 3, 600);
    let head = tensor(1, vocab, width);
    let inputs = [tensor(2, count, width), tensor(3, count, rank), tensor(4, vocab, rank)];
    let target = (tensor(5, count, width) * 3.0).unwrap();
    let packed = Arc::new(Packed::new(&[&values(&head)], width, None, Precision::F32).unwrap());
    let run = |draft_tokens: Option<Vec<u32>>, kl_temperature: f32| {
        let rows = (0..count)
            .map(|row| {
                let label = Some((row * 7 % vocab) as u32);
                LossRow { row, target: row / 2, label, ce: 0.1, tv: 0.2, kl: 0.3 }
            })
            .collect();
        let vars: Vec<Var> = inputs.iter().map(|t| Var::from_tensor(t).unwrap()).collect();
        let loss = VocabLoss {
            target_head: packed.clone(),
            draft_head: packed.clone(),
            draft_head_weight: head.clone(),
            draft_tokens: draft_tokens.map(Into::into),
            rows,
            kl_temperature,
            with_target: true,
            soft_targets: false,
        };
        let out = loss.forward(&vars[0], &vars[1], &vars[2], &target)?;
        let grads = out.loss.backward()?;
        let grads: Vec<Vec<f32>> = vars.iter().map(|var| values(grads.get(var).unwrap())).collect();
        candle_core::Result::Ok((values(&out.loss), out.terms, grads))
    };
    let all: Vec<u32> = (0..vocab as u32).collect();
    for temperature in [1.0, 2.0] {
        assert!(run(None, temperature).unwrap() == run(Some(all.clone()), temperature).unwrap(), "{temperature}");
    }
    let mut swapped = all.clone();
    swapped.swap(3, 4);
    let mut outside = all.clone();
    outside[vocab - 1] = vocab as u32;
    for tokens in [swapped, outside, all[1..].to_vec()] {
        let error = run(Some(tokens), 1.0).unwrap_err().to_string();
        assert!(error.contains("300 draft tokens do not map"), "{error}");
    }
}
