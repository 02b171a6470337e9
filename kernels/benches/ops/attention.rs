//! Attention over caches and of draft blocks, and the operations on single rows around it.

use std::ops::Range;

use candle_core::Var;
use deepspec_kernels::attention::block::{BlockAttention, BlockSpan};
use deepspec_kernels::attention::ragged::{RaggedAttention, Segment, Visibility};
use deepspec_kernels::rope::RopeFrequencies;
use deepspec_kernels::{rms_norm, silu_mul};

use crate::{Bench, HEADS, HIDDEN, INTERMEDIATE, Work, random};

const CAPACITY: usize = 1024;
const CONTEXT: usize = 256;
const BLOCKS: usize = 64;
const BLOCK: usize = 7;

pub(crate) fn run(bench: &mut Bench<'_>) {
    let kv_width = HEADS.kv_heads * HEADS.head_dim;
    let (keys, values) = (random(1, kv_width, CAPACITY), random(2, CAPACITY, kv_width));
    for (name, start, len) in [("decode 1 row", 511, 1), ("verify 8 rows", 504, 8), ("prefill 512 rows", 0, 512)] {
        let attention = RaggedAttention {
            segments: [Segment { slot: 0, start, len }].into(),
            capacity: CAPACITY,
            heads: HEADS,
            visibility: Visibility::Causal,
            window: None,
        };
        let q = random(3, len, HEADS.heads * HEADS.head_dim);
        let seen: usize = (0..len).map(|row| start + row + 1).sum();
        bench.op(&format!("ragged attention {name}"), attention_work(seen, 1), || {
            attention.forward(&q, &keys, &values).unwrap()
        });
    }
    block_attention(bench);
    row_operations(bench);
}

/// Two products of a query row with each key it sees; the backward pass has five.
fn attention_work(seen: usize, products: usize) -> Work {
    Work::Flops(2 * products * 2 * seen * HEADS.heads * HEADS.head_dim)
}

fn block_attention(bench: &mut Bench<'_>) {
    let (kv_width, rows) = (HEADS.kv_heads * HEADS.head_dim, BLOCKS * BLOCK);
    let span = |i: usize| BlockSpan {
        context: 0..(i + 1) * (CONTEXT - BLOCK) / BLOCKS,
        rows: i * BLOCK..(i + 1) * BLOCK,
        sees_itself: true,
    };
    let blocks: Vec<BlockSpan> = (0..BLOCKS).map(span).collect();
    let seen: usize = blocks.iter().map(|block| BLOCK * (block.context.len() + BLOCK)).sum();
    let sequences: Vec<(Range<usize>, Vec<BlockSpan>)> = vec![(0..CONTEXT, blocks)];
    let attention = BlockAttention::new(sequences, HEADS).unwrap();
    let q = Var::from_tensor(&random(4, rows, HEADS.heads * HEADS.head_dim)).unwrap();
    let k = Var::from_tensor(&random(5, CONTEXT + rows, kv_width)).unwrap();
    let v = Var::from_tensor(&random(6, CONTEXT + rows, kv_width)).unwrap();
    bench.op("block attention forward", attention_work(seen, 1), || attention.forward(&q, &k, &v).unwrap());
    // Forward 2 products per key and row; backward computes the scores again and has four more.
    let both = Work::Flops(7 * 2 * seen * HEADS.heads * HEADS.head_dim);
    bench.op("block attention forward and backward", both, || {
        attention.forward(&q, &k, &v).unwrap().sum_all().unwrap().backward().unwrap()
    });
}

/// Operations that read rows once and write as many.
fn row_operations(bench: &mut Bench<'_>) {
    let angles = RopeFrequencies::plain(1e5, HEADS.head_dim, HEADS.head_dim);
    let norm = random(7, 1, HIDDEN).flatten_all().unwrap();
    for rows in [1, 512] {
        let x = random(8, rows, HIDDEN);
        let moved = Work::Bytes(2 * 4 * rows * HIDDEN);
        bench.op(&format!("rms_norm {rows} rows"), moved, || rms_norm(&x, &norm, 1e-5).unwrap());
        let angles = angles.at(&(0..rows).collect::<Vec<_>>());
        bench.op(&format!("rope {rows} rows"), moved, || angles.apply(&x).unwrap());
        let (gate, up) = (random(9, rows, INTERMEDIATE), random(10, rows, INTERMEDIATE));
        let moved = Work::Bytes(3 * 4 * rows * INTERMEDIATE);
        bench.op(&format!("silu_mul {rows} rows"), moved, || silu_mul(&gate, &up).unwrap());
    }
}
