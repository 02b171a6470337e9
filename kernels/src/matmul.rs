//! Matrix products of f32, C = A·B or C += A·B, either factor transposed: training's linear layers and the vocabulary's loss.
//!
//! Blocks of B are packed into panels of 32 columns and blocks of A into contiguous rows, both small enough for the
//! second-level cache, and multiplied on the register tiles of the linear layers. Threads share the blocks of C. Every
//! element of C is one chain of multiply-adds over k = 0, 1, 2, …, so the result depends neither on how C is divided nor
//! on the number of threads. A small C of a long k is the sum of a fixed number of such chains, which threads share.

mod transpose;

use std::cell::RefCell;
use std::ops::Range;

use crate::linear::{Aligned, PANEL, tile_f32};
use crate::multiversion;
use crate::simd::{Level, level, prefetch};
use crate::threads::{self, Shared};
use transpose::transpose;

/// Most steps of k per block.
const DEPTH: usize = 384;
/// Most rows of A and columns of B per block, under a MiB each.
const MOST_ROWS: usize = 480;
const MOST_COLUMNS: usize = 640;
/// Rows of a register tile.
const TILE_ROWS: usize = 12;
/// Chains that k is divided into where it is longer than `LONG` times the sides of C, and C is small.
const CHAINS: usize = 8;
const LONG: usize = 8;
const SMALL: usize = 1 << 18;
/// Shares of a product with panels, so that threads of different speed end together.
const SHARES_PER_THREAD: usize = 8;
/// Multiply-adds below which a second thread costs more than it saves.
const SERIAL_WORK: usize = 1 << 16;

/// A row-major or transposed matrix inside a slice.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a> {
    data: &'a [f32],
    rows: usize,
    cols: usize,
    /// Elements from one row to the next, or from one column to the next of a transposed matrix.
    stride: usize,
    is_transposed: bool,
}

impl<'a> Matrix<'a> {
    /// Row-major `[rows, cols]`.
    pub(crate) fn new(data: &'a [f32], rows: usize, cols: usize) -> Self {
        assert!(data.len() >= rows * cols, "matrix of {rows} x {cols} in {} elements", data.len());
        Self { data, rows, cols, stride: cols, is_transposed: false }
    }

    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    pub(crate) fn cols(&self) -> usize {
        self.cols
    }

    /// The transposed view.
    pub(crate) fn t(self) -> Self {
        Self { rows: self.cols, cols: self.rows, is_transposed: !self.is_transposed, ..self }
    }

    /// Packs the part from (row, col) on into contiguous rows.
    fn pack_rows(&self, level: Level, (row, col): (usize, usize), rows: usize, cols: usize, to: &mut [f32]) {
        if self.is_transposed {
            return transpose(level, &self.data[col * self.stride + row..], self.stride, cols, rows, to, cols);
        }
        for (i, to) in to.chunks_exact_mut(cols).take(rows).enumerate() {
            let at = (row + i) * self.stride + col;
            to.copy_from_slice(&self.data[at..at + cols]);
            if i + 1 < rows {
                prefetch(&self.data[at + self.stride..at + self.stride + cols]);
            }
        }
    }

    /// Packs the part from (row, col) on into panels `[rows][32]`; columns past the last are left as they are.
    fn pack_panels(&self, level: Level, (row, col): (usize, usize), rows: usize, cols: usize, to: &mut [f32]) {
        if self.is_transposed {
            for (i, panel) in to.chunks_exact_mut(rows * PANEL).take(cols.div_ceil(PANEL)).enumerate() {
                let first = i * PANEL;
                let from = &self.data[(col + first) * self.stride + row..];
                transpose(level, from, self.stride, PANEL.min(cols - first), rows, panel, PANEL);
            }
            return;
        }
        deal_out(&self.data[row * self.stride + col..], self.stride, rows, cols, to);
    }
}

multiversion! {
    /// Rows of `cols` elements into panels `[rows][32]`.
    fn deal_out(from: &[f32], stride: usize, rows: usize, cols: usize, to: &mut [f32]) {
        for i in 0..rows {
            let row = &from[i * stride..i * stride + cols];
            let mut at = i * PANEL;
            let pieces = row.chunks_exact(PANEL);
            let rest = pieces.remainder();
            for piece in pieces {
                let piece: &[f32; PANEL] = piece.try_into().expect("pieces have this length");
                to[at..at + PANEL].copy_from_slice(piece);
                at += rows * PANEL;
            }
            if !rest.is_empty() {
                to[at..at + rest.len()].copy_from_slice(rest);
            }
        }
    }
}

/// out = a · b, or out += a · b; `out` is row-major `[a.rows, b.cols]`.
pub(crate) fn matmul(a: Matrix<'_>, b: Matrix<'_>, out: &mut [f32], add: bool) {
    product(level(), a, b, out, add);
}

fn product(level: Level, a: Matrix<'_>, b: Matrix<'_>, out: &mut [f32], add: bool) {
    assert_eq!(a.cols, b.rows, "inner dimensions");
    assert!(out.len() >= a.rows * b.cols, "output of {} x {} in {} elements", a.rows, b.cols, out.len());
    let out = &mut out[..a.rows * b.cols];
    if a.cols == 0 && !add {
        out.fill(0.0);
    }
    if out.is_empty() || a.cols == 0 {
        return;
    }
    if a.cols > LONG * a.rows.max(b.cols) && out.len() <= SMALL {
        let chain = a.cols.div_ceil(CHAINS);
        let mut parts = vec![0f32; CHAINS * out.len()];
        threads::for_each_chunk(&mut parts, out.len(), true, |i, part| {
            let ks = (i * chain).min(a.cols)..((i + 1) * chain).min(a.cols);
            let grid = Grid::new(a.rows, b.cols, 1);
            let part = Out { data: Shared::new(part.as_mut_ptr()), stride: b.cols };
            (0..grid.blocks()).for_each(|index| block(level, a, b, &ks, grid.block(index), false, &part));
        });
        if !add {
            out.fill(0.0);
        }
        parts.chunks_exact(out.len()).for_each(|part| out.iter_mut().zip(part).for_each(|(sum, part)| *sum += part));
        return;
    }
    let threads = if a.rows * a.cols * b.cols < SERIAL_WORK { 1 } else { threads::count() };
    let grid = Grid::new(a.rows, b.cols, threads);
    let out = Out { data: Shared::new(out.as_mut_ptr()), stride: b.cols };
    threads::run(grid.blocks(), |index| block(level, a, b, &(0..a.cols), grid.block(index), add, &out));
}

/// out = a · B + c · d, with B `[a.cols, d.cols]` as panels `[d.cols/32][a.cols][32]`. `a` and `c` are row-major; C is written
/// once, panel by panel, while each panel is in the cache.
pub(crate) fn matmul_panels(a: Matrix<'_>, panels: &[f32], c: Matrix<'_>, d: Matrix<'_>, out: &mut [f32]) {
    assert!(!a.is_transposed && !c.is_transposed && a.rows == c.rows && c.cols == d.rows, "shapes of both products");
    assert_eq!(panels.len(), d.cols.div_ceil(PANEL) * a.cols * PANEL, "panels of all columns");
    assert!(out.len() >= a.rows * d.cols, "output of {} x {} in {} elements", a.rows, d.cols, out.len());
    if a.rows == 0 || a.cols == 0 {
        return matmul(c, d, out, false);
    }
    let (level, count) = (level(), d.cols.div_ceil(PANEL));
    let shares = count.min(SHARES_PER_THREAD * threads::count());
    let out = Out { data: Shared::new(out.as_mut_ptr()), stride: d.cols };
    threads::run(shares, |share| {
        let mut panel_of_d = Aligned::zeros(d.rows * PANEL);
        for i in count * share / shares..count * (share + 1) / shares {
            let (col, width) = (i * PANEL, PANEL.min(d.cols - i * PANEL));
            let panel = &panels[i * a.cols * PANEL..(i + 1) * a.cols * PANEL];
            if d.rows == 0 {
                tiles(level, &[(a.data, panel)], a.rows, (0, col), width, false, &out);
            } else {
                d.pack_panels(level, (0, col), d.rows, width, &mut panel_of_d);
                tiles(level, &[(a.data, panel), (c.data, &panel_of_d)], a.rows, (0, col), width, false, &out);
            }
        }
    });
}

/// How C is divided into blocks of whole tiles and panels.
struct Grid {
    rows: usize,
    cols: usize,
    block_rows: usize,
    block_cols: usize,
}

/// Rows and columns of C.
struct Block {
    row: usize,
    rows: usize,
    col: usize,
    cols: usize,
}

impl Grid {
    /// As few blocks as fit the cache, a multiple of the number of threads along the longer side.
    fn new(rows: usize, cols: usize, threads: usize) -> Self {
        let (mut down, mut across) = (rows.div_ceil(MOST_ROWS).max(1), cols.div_ceil(MOST_COLUMNS).max(1));
        if rows > cols {
            down = down.next_multiple_of(threads);
        } else {
            across = across.next_multiple_of(threads);
        }
        let part = |whole: usize, parts: usize, unit: usize| whole.div_ceil(parts).next_multiple_of(unit).max(unit);
        Self { rows, cols, block_rows: part(rows, down, TILE_ROWS), block_cols: part(cols, across, PANEL) }
    }

    fn blocks(&self) -> usize {
        self.rows.div_ceil(self.block_rows) * self.cols.div_ceil(self.block_cols)
    }

    fn block(&self, index: usize) -> Block {
        let down = self.rows.div_ceil(self.block_rows);
        let (row, col) = (index % down * self.block_rows, index / down * self.block_cols);
        let (rows, cols) = (self.block_rows.min(self.rows - row), self.block_cols.min(self.cols - col));
        Block { row, rows, col, cols }
    }
}

/// Packed blocks of a thread.
struct Scratch {
    a: Aligned<f32>,
    b: Aligned<f32>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::new(Scratch {
        a: Aligned::zeros(MOST_ROWS * DEPTH),
        b: Aligned::zeros(MOST_COLUMNS * DEPTH),
    });
}

/// Computes one block of C from the steps `ks` of k.
fn block(level: Level, a: Matrix<'_>, b: Matrix<'_>, ks: &Range<usize>, block: Block, add: bool, out: &Out) {
    SCRATCH.with_borrow_mut(|scratch| packed_block(level, a, b, ks, block, add, scratch, out));
}

fn packed_block(
    level: Level,
    a: Matrix<'_>,
    b: Matrix<'_>,
    ks: &Range<usize>,
    block: Block,
    add: bool,
    scratch: &mut Scratch,
    out: &Out,
) {
    let Block { row, rows, col, cols } = block;
    // Blocks of even depth.
    let depth = ks.len().div_ceil(ks.len().div_ceil(DEPTH).max(1)).max(1);
    for k in ks.clone().step_by(depth) {
        let depth = depth.min(ks.end - k);
        a.pack_rows(level, (row, k), rows, depth, &mut scratch.a);
        b.pack_panels(level, (k, col), depth, cols, &mut scratch.b);
        let adds = add || k > ks.start;
        for (i, panel) in scratch.b.chunks_exact(depth * PANEL).take(cols.div_ceil(PANEL)).enumerate() {
            let corner = (row, col + i * PANEL);
            tiles(level, &[(&scratch.a, panel)], rows, corner, PANEL.min(cols - i * PANEL), adds, out);
        }
    }
}

/// Rows from `corner` on and one panel's columns of C: the sum of the terms A·panel, each with contiguous rows of A, and of
/// what C holds when it `adds`.
fn tiles(
    level: Level,
    terms: &[(&[f32], &[f32])],
    rows: usize,
    (row, col): (usize, usize),
    width: usize,
    adds: bool,
    out: &Out,
) {
    let mut tile = [[0f32; PANEL]; TILE_ROWS];
    for first in (0..rows).step_by(TILE_ROWS) {
        let count = TILE_ROWS.min(rows - first);
        // SAFETY: the rows are inside a block of C that the caller gave to this thread alone.
        let mut places = std::array::from_fn::<_, TILE_ROWS, _>(|r| unsafe {
            out.part((row + first + r.min(count - 1), col), if r < count { width } else { 0 })
        });
        let (places, tile) = (&mut places[..count], &mut tile[..count]);
        if adds {
            read(places, tile);
            for r in first + count..rows.min(first + count + TILE_ROWS) {
                // SAFETY: as above.
                prefetch(unsafe { out.part((row + r, col), width) });
            }
        } else {
            tile.fill([0.0; PANEL]);
        }
        for (a, panel) in terms {
            let depth = panel.len() / PANEL;
            let slices: [&[f32]; TILE_ROWS] = std::array::from_fn(|r| {
                let r = first + r.min(count - 1);
                &a[r * depth..(r + 1) * depth]
            });
            tile_f32(level, panel, &slices[..count], tile);
        }
        write(tile, places);
    }
}

multiversion! {
    fn read(rows: &[&mut [f32]], tile: &mut [[f32; PANEL]]) {
        for (row, values) in rows.iter().zip(tile) {
            match <&[f32; PANEL]>::try_from(&**row) {
                Ok(row) => *values = *row,
                Err(_) => values[..row.len()].copy_from_slice(row),
            }
        }
    }
}

multiversion! {
    fn write(tile: &[[f32; PANEL]], rows: &mut [&mut [f32]]) {
        for (row, values) in rows.iter_mut().zip(tile) {
            if row.len() == PANEL {
                let row: &mut [f32; PANEL] = (&mut **row).try_into().expect("just checked");
                *row = *values;
            } else {
                row.copy_from_slice(&values[..row.len()]);
            }
        }
    }
}

/// C, of which threads read and write disjoint blocks.
struct Out {
    data: Shared<f32>,
    stride: usize,
}

impl Out {
    /// `len` elements from (row, col) on.
    ///
    /// # Safety
    /// They lie inside the matrix, and nothing else reads or writes them while the slice lives.
    unsafe fn part<'a>(&self, (row, col): (usize, usize), len: usize) -> &'a mut [f32] {
        // SAFETY: promised by the caller.
        unsafe { self.data.part(row * self.stride + col, len) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

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

    fn levels() -> Vec<Level> {
        let all = [Level::Avx512, Level::Avx2, Level::Portable];
        let best = all.iter().position(|&found| found == level()).unwrap();
        all[best..].to_vec()
    }

    fn matrix(data: &[f32], rows: usize, cols: usize, is_transposed: bool) -> Matrix<'_> {
        if is_transposed { Matrix::new(data, cols, rows).t() } else { Matrix::new(data, rows, cols) }
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(64) })]
        #[test]
        fn products_match_f64(
            seed in any::<u64>(), rows in 0usize..90, cols in 0usize..130, depth in 0usize..600,
            transposed in any::<[bool; 2]>(), add in any::<bool>(),
        ) {
            let (a, b, before) = (random(seed, rows * depth), random(seed ^ 1, depth * cols), random(seed ^ 2, rows * cols));
            let at = |data: &[f32], rows: usize, cols: usize, i: usize, j: usize, is_transposed: bool| {
                f64::from(if is_transposed { data[j * rows + i] } else { data[i * cols + j] })
            };
            for level in levels() {
                let mut out = before.clone();
                let (a_view, b_view) = (matrix(&a, rows, depth, transposed[0]), matrix(&b, depth, cols, transposed[1]));
                product(level, a_view, b_view, &mut out, add);
                for i in 0..rows {
                    for j in 0..cols {
                        let sum: f64 = (0..depth)
                            .map(|k| at(&a, rows, depth, i, k, transposed[0]) * at(&b, depth, cols, k, j, transposed[1]))
                            .sum();
                        let expected = sum + if add { f64::from(before[i * cols + j]) } else { 0.0 };
                        let found = f64::from(out[i * cols + j]);
                        prop_assert!((found - expected).abs() < 2e-4, "{:?} at ({}, {}): {} against {}", level, i, j, found, expected);
                    }
                }
            }
        }
    }

    #[test]
    fn panels_and_a_second_product() {
        for (rows, width, rank, cols) in [(25, 40, 7, 70), (3, 5, 0, 32), (13, 0, 4, 33)] {
            let (a, e, c, d) =
                (random(1, rows * width), random(2, cols * width), random(3, rows * rank), random(4, cols * rank));
            let mut panels = vec![0f32; cols.div_ceil(PANEL) * width * PANEL];
            for (i, &weight) in e.iter().enumerate() {
                let (col, k) = (i / width, i % width);
                panels[(col / PANEL * width + k) * PANEL + col % PANEL] = weight;
            }
            let mut out = vec![f32::NAN; rows * cols];
            let (c, d) = (Matrix::new(&c, rows, rank), Matrix::new(&d, cols, rank).t());
            matmul_panels(Matrix::new(&a, rows, width), &panels, c, d, &mut out);
            let mut expected = vec![0f32; rows * cols];
            matmul(Matrix::new(&a, rows, width), Matrix::new(&e, cols, width).t(), &mut expected, false);
            matmul(c, d, &mut expected, true);
            assert_eq!(out, expected);
        }
    }

    /// Shapes of more than one block either way, against the same product divided for other numbers of threads.
    #[test]
    fn the_division_into_blocks_changes_no_bit() {
        for (rows, depth, cols) in [(500, 300, 40), (30, 257, 1100), (13, 200, 33)] {
            let (a, b) = (random(1, rows * depth), random(2, depth * cols));
            let (a, b) = (Matrix::new(&a, rows, depth), Matrix::new(&b, depth, cols));
            let mut whole = vec![0f32; rows * cols];
            matmul(a, b, &mut whole, false);
            for threads in [1, 2, 3, 7] {
                let mut out = vec![0f32; rows * cols];
                let grid = Grid::new(rows, cols, threads);
                let target = Out { data: Shared::new(out.as_mut_ptr()), stride: cols };
                (0..grid.blocks()).for_each(|i| block(level(), a, b, &(0..depth), grid.block(i), false, &target));
                assert!(out == whole, "{rows} x {depth} x {cols} on {threads} threads");
            }
        }
    }

    #[test]
    fn transposes_and_adds() {
        let a = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        let b = [1.0, 0.0, 0.0, 1.0, 1.0, 1.0];
        let mut out = [0.0; 4];
        matmul(Matrix::new(&a, 2, 3), Matrix::new(&b, 3, 2), &mut out, false);
        assert_eq!(out, [4.0, 5.0, 10.0, 11.0]);
        matmul(Matrix::new(&a, 3, 2).t(), Matrix::new(&b, 3, 2), &mut out, true);
        assert_eq!(out, [4.0 + 1.0 + 5.0, 5.0 + 3.0 + 5.0, 10.0 + 2.0 + 6.0, 11.0 + 4.0 + 6.0]);
    }
}
