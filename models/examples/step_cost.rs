//! Prints what one target forward costs for 1 … 32 rows and for a prefill, next to the bytes it has to read.
#![expect(clippy::print_stdout, clippy::disallowed_methods, clippy::unwrap_used, reason = "a measuring tool")]

use std::sync::Arc;
use std::time::Instant;

use candle_core::{DType, Device};
use deepspec_kernels::linear::Precision;
use deepspec_models::config::TargetConfig;
use deepspec_models::gguf::Gguf;
use deepspec_models::target::{NewTokens, Target};
use deepspec_models::weights::Weights;

fn main() {
    rayon::scope(|_| measure());
}

fn measure() {
    let path = std::env::args().nth(1).unwrap();
    let gguf = Arc::new(Gguf::open(path).unwrap());
    let wanted = std::env::args().nth(3);
    for precision in [Precision::F32, Precision::Bf16, Precision::Q8] {
        if wanted.as_ref().is_some_and(|w| w != precision.name()) {
            continue;
        }
        let weights = Weights::from_gguf(gguf.clone(), DType::F32, &Device::Cpu).unwrap();
        let target = Target::load(TargetConfig::from_gguf(&gguf).unwrap(), &weights, precision).unwrap();
        let bytes = target.weight_bytes() as f64;
        println!("{precision:?}: {:.0} MB of weights", bytes / 1e6);
        let mut cache = target.new_cache(1, 1024).unwrap();
        let prompt: Vec<u32> = (0..256).map(|i| 1000 + i * 37 % 4000).collect();
        target.forward(&mut cache, &[NewTokens { slot: 0, tokens: &prompt }], &[]).unwrap();
        let only: Option<usize> = std::env::args().nth(2).and_then(|text| text.parse().ok()).filter(|&rows| rows > 0);
        for rows in
            [1usize, 2, 4, 6, 8, 12, 16, 32, 512].into_iter().filter(|rows| only.is_none_or(|only| only == *rows))
        {
            let tokens = vec![77u32; rows];
            let mut times = Vec::new();
            let all: Vec<usize> = if rows == 512 { vec![511] } else { (0..rows).collect() };
            for _ in 0..if rows == 512 { 5 } else { 25 } {
                let start = Instant::now();
                let out = target.forward(&mut cache, &[NewTokens { slot: 0, tokens: &tokens }], &[]).unwrap();
                target.logits(&out.hidden, &all).unwrap();
                times.push(start.elapsed().as_secs_f64());
                cache.truncate(0, 256);
            }
            times.sort_by(f64::total_cmp);
            let median = times[times.len() / 2];
            println!(
                "{rows:4} rows {:7.2} ms (min {:.2}) {:7.1} tok/s  {:5.1} GB/s of weights",
                median * 1e3,
                times[0] * 1e3,
                rows as f64 / median,
                bytes / median / 1e9
            );
        }
    }
}
