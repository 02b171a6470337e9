//! How far a precision is from f32 on real text: perplexity, top-1 agreement and divergence of the target's predictions.
//!
//! `precision_accuracy MODEL.gguf CONVERSATIONS.jsonl [ROWS]`: the rows' messages are joined and cut to 512 tokens.
#![expect(clippy::print_stdout, clippy::disallowed_methods, clippy::unwrap_used, reason = "a measuring tool")]

use candle_core::{DType, Device, Tensor};
use deepspec_models::config::TargetConfig;
use deepspec_models::linear::Precision;
use deepspec_models::speculate::argmax_first;
use deepspec_models::target::{NewTokens, Target};
use deepspec_models::weights::Weights;
use deepspec_stages::model_source::{ModelSourceConfig, load_text_side, resolve};
use deepspec_stages::recipe::Precision as StoredPrecision;
use deepspec_stages::target_model::natural_precision;
use serde_json::Value;

fn main() {
    let mut arguments = std::env::args().skip(1);
    let (model, texts) = (arguments.next().unwrap(), arguments.next().unwrap());
    let rows = arguments.next().map_or(64, |text| text.parse().unwrap());
    let source = ModelSourceConfig {
        cache_dir: "models".into(),
        hf_home: "models".into(),
        offline: true,
        python: "python3".into(),
    };
    let resolved = resolve(&model, &source).unwrap();
    let text = load_text_side(&resolved).unwrap();
    let tokenizer = text.renderer.tokenizer();
    let documents: Vec<Vec<u32>> = fs_err::read_to_string(texts)
        .unwrap()
        .lines()
        .take(rows)
        .map(|line| {
            let row: Value = serde_json::from_str(line).unwrap();
            let messages = row["conversations"].as_array().unwrap();
            let joined: Vec<&str> = messages.iter().filter_map(|m| m["content"].as_str()).collect();
            let mut ids = tokenizer.encode_raw(&joined.join("\n")).unwrap();
            ids.truncate(512);
            ids
        })
        .filter(|ids| ids.len() > 8)
        .collect();
    let load = |precision| {
        let weights = Weights::open(&resolved.path, DType::F32, &Device::Cpu).unwrap();
        Target::load(TargetConfig::open(&resolved.path).unwrap(), &weights, precision).unwrap()
    };
    let exact = load(Precision::F32);
    let mut others = vec![Precision::Bf16, Precision::Q8];
    others.extend((natural_precision(&resolved).unwrap() == StoredPrecision::Q4).then_some(Precision::Q4));
    let others: Vec<_> = others.into_iter().map(|precision| (precision, load(precision))).collect();
    let mut sums: Vec<Sums> = (0..=others.len()).map(|_| Sums::default()).collect();
    for ids in &documents {
        let reference = log_probabilities(&exact, ids);
        sums[0].add(&reference, &reference, ids);
        for (sums, (_, target)) in sums[1..].iter_mut().zip(&others) {
            sums.add(&log_probabilities(target, ids), &reference, ids);
        }
    }
    println!(
        "precision  perplexity  top-1 as f32  KL(f32 || it)   ({} documents, {} tokens)",
        documents.len(),
        sums[0].n
    );
    let names = std::iter::once("f32").chain(others.iter().map(|(precision, _)| precision.name()));
    for (name, sums) in names.zip(&sums) {
        let n = sums.n as f64;
        println!("{name:9} {:11.4} {:12.2}% {:14.6}", (sums.nll / n).exp(), 100.0 * sums.agree as f64 / n, sums.kl / n);
    }
}

#[derive(Default)]
struct Sums {
    nll: f64,
    kl: f64,
    agree: usize,
    n: usize,
}

impl Sums {
    fn add(&mut self, log_p: &[Vec<f32>], reference: &[Vec<f32>], ids: &[u32]) {
        for ((row, exact), &next) in log_p.iter().zip(reference).zip(&ids[1..]) {
            self.nll -= f64::from(row[next as usize]);
            self.kl += exact.iter().zip(row).map(|(e, r)| f64::from(e.exp()) * f64::from(e - r)).sum::<f64>();
            self.agree += usize::from(argmax_first(row).unwrap() == argmax_first(exact).unwrap());
            self.n += 1;
        }
    }
}

fn log_probabilities(target: &Target, ids: &[u32]) -> Vec<Vec<f32>> {
    let mut cache = target.new_cache(1, ids.len()).unwrap();
    let out = target.forward(&mut cache, &[NewTokens { slot: 0, tokens: ids }], &[]).unwrap();
    let rows: Vec<usize> = (0..ids.len() - 1).collect();
    let logits: Tensor = target.logits(&out.hidden, &rows).unwrap();
    let mut rows = logits.to_vec2::<f32>().unwrap();
    for row in &mut rows {
        let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let total: f64 = row.iter().map(|v| f64::from(v - largest).exp()).sum();
        let shift = largest + total.ln() as f32;
        for v in row.iter_mut() {
            *v -= shift;
        }
    }
    rows
}
