//! Speed of the operations at the shapes of SmolLM2-135M, each beside what this machine can do at most.
//!
//! At the start two peaks are measured with all threads: multiply-adds of f32 in registers, and a streaming read of
//! 256 MB. Each operation then gives GFLOP/s where arithmetic bounds it and GB/s where reading does, and its share of
//! the peak; activations stay in the cache from call to call, so theirs may exceed it.
//! `cargo bench -p deepspec-kernels --bench ops -- NAME` runs the operations whose name contains NAME.
#![expect(clippy::print_stdout, clippy::unwrap_used, reason = "a measuring tool")]

mod attention;
mod linear;
mod machine;
mod training;

use std::time::{Duration, Instant};

use candle_core::{Device, Tensor};
use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion, Throughput};
use deepspec_kernels::attention::HeadLayout;

use machine::Peak;

const HIDDEN: usize = 576;
const INTERMEDIATE: usize = 1536;
const VOCAB: usize = 49_152;
const HEADS: HeadLayout = HeadLayout { heads: 9, kv_heads: 3, head_dim: 64 };

/// What an operation does at least, by which its speed is told.
#[derive(Clone, Copy)]
enum Work {
    Flops(usize),
    Bytes(usize),
}

/// Operations under way and the machine they are held against.
struct Bench<'a> {
    group: BenchmarkGroup<'a, WallTime>,
    peak: Peak,
}

impl Bench<'_> {
    /// Times `op` and prints its rate beside the peak.
    fn op<T>(&mut self, name: &str, work: Work, mut op: impl FnMut() -> T) {
        let amount = match work {
            Work::Flops(amount) | Work::Bytes(amount) => amount,
        };
        let mut best = Duration::MAX;
        self.group.throughput(match work {
            Work::Flops(flops) => Throughput::Elements(flops as u64),
            Work::Bytes(bytes) => Throughput::BytesDecimal(bytes as u64),
        });
        self.group.bench_function(name, |bencher| {
            bencher.iter_custom(|iterations| {
                let start = Instant::now();
                for _ in 0..iterations {
                    std::hint::black_box(op());
                }
                let elapsed = start.elapsed();
                best = best.min(elapsed / iterations as u32);
                elapsed
            });
        });
        if best == Duration::MAX {
            return; // left out by the filter
        }
        let rate = amount as f64 / best.as_secs_f64() / 1e9;
        let (unit, peak) = match work {
            Work::Flops(_) => ("GFLOP/s", self.peak.gflops),
            Work::Bytes(_) => ("GB/s", self.peak.gigabytes_per_s),
        };
        println!("  {name}: {rate:.1} {unit}, {:.0} % of {peak:.0}", 100.0 * rate / peak);
    }
}

/// Values in (−1, 1) that depend on the seed.
fn random(seed: u64, rows: usize, cols: usize) -> Tensor {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let values: Vec<f32> = (0..rows * cols)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect();
    Tensor::from_vec(values, (rows, cols), &Device::Cpu).unwrap()
}

fn main() {
    // Inside the pool, as the program itself runs.
    rayon::scope(|_| {
        let mut criterion = Criterion::default().without_plots().configure_from_args();
        let peak = Peak::measure();
        println!("peak: {:.0} GFLOP/s f32, {:.1} GB/s of reading", peak.gflops, peak.gigabytes_per_s);
        let mut group = criterion.benchmark_group("ops");
        group.sample_size(10).warm_up_time(Duration::from_millis(150)).measurement_time(Duration::from_millis(600));
        let mut bench = Bench { group, peak };
        linear::run(&mut bench);
        attention::run(&mut bench);
        training::run(&mut bench);
        bench.group.finish();
    });
}
