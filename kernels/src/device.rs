//! The device path of each operation, written once against [`Backend`]: which kernels it launches, with which tables.
//!
//! Two backends exist: a CUDA device (feature `cuda`) and the emulator of thread blocks that runs the same `.cu` files on
//! the CPU (feature `simt`, for tests on machines without a device). The operations' `cuda_fwd` methods call this.

use candle_core::Result;

pub mod attention;
pub mod elementwise;
pub mod linear;
pub mod rms_norm;
pub mod verify;
pub mod vocab_loss;

/// What a kernel needs from the machine that runs it.
pub trait Backend {
    /// Memory that kernels see.
    type Buffer<T: Element>;

    /// Memory with undefined contents.
    ///
    /// # Errors
    /// When there is not enough.
    fn alloc<T: Element>(&self, len: usize) -> Result<Self::Buffer<T>>;

    /// Memory full of zeros.
    ///
    /// # Errors
    /// When there is not enough.
    fn zeros<T: Element>(&self, len: usize) -> Result<Self::Buffer<T>>;

    /// Copies from the host.
    ///
    /// # Errors
    /// When there is not enough memory or the copy fails.
    fn upload<T: Element>(&self, data: &[T]) -> Result<Self::Buffer<T>>;

    /// Copies to the host and waits for it.
    ///
    /// # Errors
    /// When the copy, or a kernel before it, fails.
    fn download<T: Element>(&self, buffer: &Self::Buffer<T>) -> Result<Vec<T>>;

    /// Where a buffer starts.
    fn address<T: Element>(&self, buffer: &Self::Buffer<T>) -> u64;

    /// Starts `kernel` with the arguments it declares. A grid without blocks does nothing.
    ///
    /// # Errors
    /// When the kernel is unknown, the grid or an argument too large, or the launch fails.
    fn launch(&self, kernel: Kernel, grid: [usize; 3], threads: usize, args: &[Arg]) -> Result<()>;

    /// out = a · b, or out += a · b, all f32; `out` is contiguous `[a.rows, b.cols]`.
    ///
    /// # Errors
    /// When the inner dimensions differ or the product fails.
    fn matmul(&self, a: Matrix, b: Matrix, out: u64, add: bool) -> Result<()>;
}

/// A function of one of the `.cu` files.
#[derive(Debug, Clone, Copy)]
pub struct Kernel {
    /// Name of the file, without its ending.
    pub module: &'static str,
    /// Name of the function.
    pub function: &'static str,
}

/// An argument of a kernel.
#[derive(Debug, Clone, Copy)]
pub enum Arg {
    /// A pointer, from [`Backend::address`] or a [`View`].
    Address(u64),
    /// An `int`.
    Int(usize),
    /// A `float`.
    Float(f32),
}

impl From<u64> for Arg {
    fn from(address: u64) -> Self {
        Self::Address(address)
    }
}

impl From<usize> for Arg {
    fn from(value: usize) -> Self {
        Self::Int(value)
    }
}

impl From<f32> for Arg {
    fn from(value: f32) -> Self {
        Self::Float(value)
    }
}

/// The arguments of a launch: addresses, integers and floats in the kernel's order.
macro_rules! args {
    ($($value:expr),* $(,)?) => { [$($crate::device::Arg::from($value)),*] };
}
use args;

/// f32 rows in device memory: contiguous columns, any row stride.
#[derive(Debug, Clone, Copy)]
pub struct View {
    /// Address of the first element.
    pub address: u64,
    /// Elements from row to row.
    pub stride: usize,
    /// Number of rows.
    pub count: usize,
    /// Length of a row.
    pub cols: usize,
}

impl View {
    /// Contiguous rows.
    pub fn contiguous(address: u64, count: usize, cols: usize) -> Self {
        Self { address, stride: cols, count, cols }
    }
}

/// A row-major f32 matrix in device memory, or its transpose.
#[derive(Debug, Clone, Copy)]
pub struct Matrix {
    /// Address of the first element.
    pub address: u64,
    /// Rows of this view.
    pub rows: usize,
    /// Columns of this view.
    pub cols: usize,
    /// Elements from row to row of the matrix in memory.
    pub stride: usize,
    /// Whether the view is the transpose of what lies in memory.
    pub transposed: bool,
}

impl Matrix {
    /// The contiguous matrix `[rows, cols]`.
    pub fn new(address: u64, rows: usize, cols: usize) -> Self {
        Self { address, rows, cols, stride: cols, transposed: false }
    }

    /// The transpose.
    pub fn t(self) -> Self {
        Self { rows: self.cols, cols: self.rows, transposed: !self.transposed, ..self }
    }
}

/// A type that buffers hold.
#[cfg(feature = "cuda")]
pub trait Element:
    Copy
    + Default
    + candle_core::cuda_backend::cudarc::driver::DeviceRepr
    + candle_core::cuda_backend::cudarc::driver::ValidAsZeroBits
{
}

/// A type that buffers hold.
#[cfg(not(feature = "cuda"))]
pub trait Element: Copy + Default + 'static {}

impl Element for f32 {}
impl Element for f64 {}
impl Element for u32 {}
impl Element for half::bf16 {}
