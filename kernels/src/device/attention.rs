//! Attention on a device; the kernels are in `attention/ragged.cu` and `attention/block.cu`.

use std::ops::Range;

use candle_core::{Result, bail};

use super::{Backend, Kernel, View, args};
use crate::attention::HeadLayout;
use crate::attention::block::BlockSpan;
use crate::attention::ragged::{CacheSide, Segment};

/// Threads of a block, as compiled into the kernels.
const THREADS: usize = 128;
/// Keys per stretch with a softmax state of its own.
const SPLIT: usize = 256;
/// With fewer work items than this the stretches of long contexts are spread over blocks.
const FEW_ITEMS: usize = 128;

/// Rows of one call over caches, resolved to what the kernel needs.
#[derive(Debug)]
pub struct RaggedCall<'a> {
    /// Slot, position of the first row, number of rows of each segment, in row order.
    pub segments: &'a [Segment],
    /// Positions per slot.
    pub capacity: usize,
    /// Head sizes.
    pub heads: HeadLayout,
    /// Whether a row sees only positions up to its own.
    pub causal: bool,
    /// Positions in sight before the row (or the segment's start); `None` for all.
    pub window: Option<usize>,
}

/// Head width that the kernels are compiled for, and query vectors per block there and in the row pass of the gradient.
fn compiled(dim: usize, names: [&'static str; 4]) -> Result<(&'static str, usize, usize, usize)> {
    match dim {
        1..=32 => Ok((names[0], 16, 16, 32)),
        33..=64 => Ok((names[1], 16, 16, 32)),
        65..=128 => Ok((names[2], 16, 16, 32)),
        129..=256 => Ok((names[3], 8, 4, 16)),
        _ => bail!("attention kernels take heads of up to 256, found {dim}"),
    }
}

/// Attends over caches at `k` and `v`; see [`crate::attention::ragged::RaggedAttention::forward`], which has checked that
/// they hold the segments.
///
/// # Errors
/// When the query rows do not fit the segments, or a launch fails.
pub fn ragged<B: Backend>(backend: &B, call: &RaggedCall<'_>, q: &View, [k, v]: [u64; 2]) -> Result<B::Buffer<f32>> {
    let HeadLayout { heads, kv_heads, head_dim } = call.heads;
    let rows: usize = call.segments.iter().map(|s| s.len).sum();
    if q.count != rows || q.cols != heads * head_dim {
        bail!("attention of {rows} rows, {heads} heads of {head_dim} got q [{}, {}]", q.count, q.cols);
    }
    let group = call.heads.group();
    let names = ["ragged_attention_32", "ragged_attention_64", "ragged_attention_128", "ragged_attention_256"];
    let (function, queries, _, _) = compiled(head_dim, names)?;
    let (mut items, mut row, mut longest) = (Vec::new(), 0, 0);
    for segment in call.segments {
        for vector in (0..segment.len * group).step_by(queries) {
            items.extend([segment.slot, segment.start, segment.len, row, vector].map(|n| n as u32));
        }
        row += segment.len;
        longest = longest.max(segment.start + segment.len);
    }
    let y = backend.alloc::<f32>(rows * heads * head_dim)?;
    let count = items.len() / 5;
    let table = backend.upload(&items)?;
    let splits = longest.div_ceil(SPLIT);
    let spread = splits > 1 && count * kv_heads < FEW_ITEMS;
    let states = if spread { rows * heads * splits } else { 0 };
    let (parts, stats) = (backend.alloc::<f32>(states * head_dim)?, backend.alloc::<f32>(states * 2)?);
    let or_null = |address: u64| if spread { address } else { 0 };
    let args = args![
        q.address,
        q.stride,
        k,
        v,
        backend.address(&y),
        backend.address(&table),
        call.capacity,
        kv_heads,
        group,
        head_dim,
        call.heads.scale(),
        usize::from(call.causal),
        call.window.unwrap_or(i32::MAX as usize).min(i32::MAX as usize),
        or_null(backend.address(&parts)),
        or_null(backend.address(&stats)),
    ];
    let grid = [count, kv_heads, if spread { splits } else { 1 }];
    backend.launch(Kernel { module: "ragged", function }, grid, THREADS, &args)?;
    if spread {
        let args = args![backend.address(&parts), backend.address(&stats), backend.address(&y), splits, head_dim];
        let join = Kernel { module: "ragged", function: "ragged_attention_join" };
        backend.launch(join, [rows * heads, 1, 1], THREADS, &args)?;
    }
    Ok(y)
}

/// Writes rows of keys or values into the cache at `cache`, which the caller has checked to hold all segments.
///
/// # Errors
/// When the rows do not fit the segments, or a launch fails.
pub fn store<B: Backend>(backend: &B, call: &RaggedCall<'_>, side: CacheSide, rows: &View, cache: u64) -> Result<()> {
    let HeadLayout { kv_heads, head_dim, .. } = call.heads;
    let places_of = |s: &Segment| {
        let places = s.start..s.start + s.len;
        places.flat_map(|p| [s.slot as u32, (p % call.capacity) as u32]).collect::<Vec<_>>()
    };
    let places: Vec<u32> = call.segments.iter().flat_map(places_of).collect();
    if places.len() != 2 * rows.count || rows.cols != kv_heads * head_dim {
        bail!("cache write of [{}, {}] for {} rows", rows.count, rows.cols, places.len() / 2);
    }
    let table = backend.upload(&places)?;
    let args = args![rows.address, rows.stride, backend.address(&table), cache, call.capacity, kv_heads, head_dim];
    let function = if side == CacheSide::Keys { "store_keys" } else { "store_values" };
    backend.launch(Kernel { module: "ragged", function }, [rows.count, 1, 1], 128, &args)
}

/// Blocks of one sequence in a training pattern: its context rows, its block rows, its blocks.
#[derive(Debug, Clone, Copy)]
pub struct BlockSequence<'a> {
    /// Rows of the context.
    pub context: &'a Range<usize>,
    /// Rows among the block rows.
    pub rows: &'a Range<usize>,
    /// The blocks.
    pub blocks: &'a [BlockSpan],
}

/// A training pattern.
#[derive(Debug)]
pub struct BlockCall<'a> {
    /// Sequences in row order.
    pub sequences: Vec<BlockSequence<'a>>,
    /// Context rows of all sequences.
    pub context_rows: usize,
    /// Block rows of all sequences.
    pub block_rows: usize,
    /// Head sizes.
    pub heads: HeadLayout,
}

fn span(block: &BlockSpan) -> [u32; 5] {
    let own = if block.sees_itself { block.rows.len() } else { 0 };
    [block.context.start, block.context.len(), block.rows.start, block.rows.len(), own].map(|n| n as u32)
}

impl BlockCall<'_> {
    /// One entry per run of `queries` query vectors of a block.
    fn items(&self, queries: usize) -> Vec<u32> {
        let mut items = Vec::new();
        for block in self.sequences.iter().flat_map(|s| s.blocks) {
            for vector in (0..block.rows.len() * self.heads.group()).step_by(queries) {
                items.extend(span(block));
                items.push(vector as u32);
            }
        }
        items
    }

    /// Tiles of `keys` key rows with the spans that may see them, and the spans.
    fn key_tiles(&self, keys: usize) -> (Vec<u32>, Vec<u32>) {
        let (mut tiles, mut spans) = (Vec::new(), Vec::new());
        let mut number = 0;
        for sequence in &self.sequences {
            let first = number;
            number += sequence.blocks.len();
            spans.extend(sequence.blocks.iter().flat_map(span));
            let own = self.context_rows + sequence.rows.start..self.context_rows + sequence.rows.end;
            for range in [sequence.context.clone(), own] {
                for key in range.clone().step_by(keys) {
                    let count = keys.min(range.end - key);
                    tiles.extend([key, count, first, number - first].map(|n| n as u32));
                }
            }
        }
        (tiles, spans)
    }

    fn check(&self, q: &View, k: &View, v: &View) -> Result<()> {
        let shapes = [q, k, v].map(|rows| [rows.count, rows.cols]);
        self.heads.check("block attention", (self.block_rows, self.context_rows + self.block_rows), shapes)
    }
}

/// Attends; see [`crate::attention::block::BlockAttention::forward`].
///
/// # Errors
/// When shapes do not fit the pattern or a launch fails.
pub fn block<B: Backend>(backend: &B, call: &BlockCall<'_>, q: &View, k: &View, v: &View) -> Result<B::Buffer<f32>> {
    call.check(q, k, v)?;
    let HeadLayout { heads, kv_heads, head_dim } = call.heads;
    let names = ["block_attention_32", "block_attention_64", "block_attention_128", "block_attention_256"];
    let (function, queries, _, _) = compiled(head_dim, names)?;
    let items = call.items(queries);
    let table = backend.upload(&items)?;
    let y = backend.alloc::<f32>(call.block_rows * heads * head_dim)?;
    let args = args![
        q.address,
        q.stride,
        k.address,
        k.stride,
        v.address,
        v.stride,
        backend.address(&y),
        backend.address(&table),
        call.context_rows,
        kv_heads,
        call.heads.group(),
        head_dim,
        call.heads.scale(),
    ];
    backend.launch(Kernel { module: "block", function }, [items.len() / 6, kv_heads, 1], THREADS, &args)?;
    Ok(y)
}

/// Gradients of q, k and v, one after the other.
///
/// # Errors
/// When shapes do not fit the pattern or a launch fails.
pub fn block_backward<B: Backend>(
    backend: &B,
    call: &BlockCall<'_>,
    q: &View,
    k: &View,
    v: &View,
    grad: &View,
) -> Result<B::Buffer<f32>> {
    call.check(q, k, v)?;
    if (grad.count, grad.cols) != (q.count, q.cols) {
        bail!("block attention gradient is [{}, {}] for [{}, {}]", grad.count, grad.cols, q.count, q.cols);
    }
    let HeadLayout { heads, kv_heads, head_dim } = call.heads;
    let (nq, nk) = (call.block_rows * heads * head_dim, (call.context_rows + call.block_rows) * kv_heads * head_dim);
    let out = backend.alloc::<f32>(nq + 2 * nk)?;
    let dq = backend.address(&out);
    let dk = dq + (nq * size_of::<f32>()) as u64;
    let dv = dk + (nk * size_of::<f32>()) as u64;
    let stats = backend.alloc::<f32>(3 * call.block_rows * heads)?;

    let names =
        ["block_attention_rows_32", "block_attention_rows_64", "block_attention_rows_128", "block_attention_rows_256"];
    let (function, _, queries, _) = compiled(head_dim, names)?;
    let items = call.items(queries);
    let table = backend.upload(&items)?;
    let args = args![
        q.address,
        q.stride,
        k.address,
        k.stride,
        v.address,
        v.stride,
        grad.address,
        grad.stride,
        dq,
        backend.address(&stats),
        backend.address(&table),
        call.context_rows,
        kv_heads,
        call.heads.group(),
        head_dim,
        call.heads.scale(),
    ];
    backend.launch(Kernel { module: "block", function }, [items.len() / 6, kv_heads, 1], THREADS, &args)?;

    let names =
        ["block_attention_keys_32", "block_attention_keys_64", "block_attention_keys_128", "block_attention_keys_256"];
    let (function, _, _, keys) = compiled(head_dim, names)?;
    let (tiles, spans) = call.key_tiles(keys);
    let (tile_table, span_table) = (backend.upload(&tiles)?, backend.upload(&spans)?);
    let args = args![
        q.address,
        q.stride,
        k.address,
        k.stride,
        v.address,
        v.stride,
        grad.address,
        grad.stride,
        backend.address(&stats),
        dk,
        dv,
        backend.address(&tile_table),
        backend.address(&span_table),
        call.context_rows,
        kv_heads,
        call.heads.group(),
        head_dim,
        call.heads.scale(),
    ];
    backend.launch(Kernel { module: "block", function }, [tiles.len() / 4, kv_heads, 1], THREADS, &args)?;
    Ok(out)
}
