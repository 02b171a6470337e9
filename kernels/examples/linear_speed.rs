//! GFLOP/s of the packed linear layer.
use std::time::Instant;
use candle_core::{Device, Tensor};
use deepspec_kernels::linear::{Linear, Precision};
fn main() {
    rayon::scope(|_| {
        for (n, k) in [(960usize, 576usize), (576, 576), (3072, 576), (576, 1536), (49152, 576)] {
            let w = Tensor::randn(0f32, 1.0, (n, k), &Device::Cpu).unwrap();
            for p in [Precision::F32, Precision::Bf16] {
                let l = Linear::frozen(&[&w], None, p).unwrap();
                for m in [1usize, 4, 8, 12, 16, 96, 512] {
                    let x = Tensor::randn(0f32, 1.0, (m, k), &Device::Cpu).unwrap();
                    let mut best = f64::MAX;
                    for _ in 0..8 {
                        let t = Instant::now();
                        let _ = l.forward(&x).unwrap();
                        best = best.min(t.elapsed().as_secs_f64());
                    }
                    print!("[{n}x{k} {p:?}] m={m}: {:.3} ms {:.0} GF/s {:.1} GB/s | ", best * 1e3, 2.0 * (m * n * k) as f64 / best / 1e9, l.bytes() as f64 / best / 1e9);
                }
                println!();
            }
        }
    });
}
