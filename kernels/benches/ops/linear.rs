//! Linear layers of the model in each precision: few rows are bound by reading weights, many by arithmetic.
//!
//! A model's step finds no layer's weights in the cache, so few rows go through as many copies of a layer as memory's peak
//! was measured with.

use candle_core::Device;
use candle_core::quantized::{GgmlDType, QTensor};
use deepspec_kernels::linear::{Linear, Precision};

use crate::machine::READ_BYTES;
use crate::{Bench, HIDDEN, INTERMEDIATE, VOCAB, Work, random};

const PRECISIONS: [Precision; 4] = [Precision::F32, Precision::Bf16, Precision::Q8, Precision::Q4];
const SHAPES: [(&str, usize, usize); 5] = [
    ("qkv", HIDDEN, 960),
    ("o", HIDDEN, HIDDEN),
    ("gate_up", HIDDEN, 2 * INTERMEDIATE),
    ("down", INTERMEDIATE, HIDDEN),
    ("lm_head", HIDDEN, VOCAB),
];
const ROWS: [usize; 5] = [1, 4, 8, 16, 512];
/// Fewer rows than this are told in GB/s.
const ARITHMETIC_ROWS: usize = 16;

pub(crate) fn run(bench: &mut Bench<'_>) {
    for (name, inputs, outputs) in SHAPES {
        // Values that four bits hold, for all precisions.
        let weight = QTensor::quantize(&random(1, outputs, inputs), GgmlDType::Q4_1).unwrap();
        let weight = weight.dequantize(&Device::Cpu).unwrap();
        for precision in PRECISIONS {
            let precision_name = precision.name();
            let layer = || Linear::frozen(&[&weight], None, precision).unwrap();
            let mut layers = vec![layer()];
            let bytes = layers[0].bytes();
            layers.extend((1..READ_BYTES.div_ceil(bytes)).map(|_| layer()));
            // The output head is never asked for a whole prompt.
            for rows in ROWS.into_iter().filter(|&rows| rows < 512 || outputs < VOCAB) {
                let x = random(2, rows, inputs);
                let work =
                    if rows < ARITHMETIC_ROWS { Work::Bytes(bytes) } else { Work::Flops(2 * rows * inputs * outputs) };
                let mut turns = (0..layers.len()).cycle();
                bench.op(&format!("linear {name} {precision_name} {rows} rows"), work, || {
                    layers[turns.next().unwrap()].forward(&x).unwrap()
                });
            }
        }
    }
}
