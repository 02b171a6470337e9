//! Backend that runs the `.cu` kernels on the CPU, one emulated block after the other (feature `simt`, for tests).

use std::ffi::{CString, c_char, c_int, c_void};
use std::sync::{Mutex, PoisonError};

use candle_core::{Result, bail};

use crate::device::{Arg, Backend, Element, Kernel, Matrix, View};

/// The emulator.
#[derive(Debug, Clone, Copy, Default)]
pub struct Simt;

/// Elements on each side of a buffer that no kernel may touch.
const FENCE: usize = 64;
/// Fences are NaN, so that a kernel that reads them is seen, too.
const FENCE_BYTE: u8 = 0xff;

/// Host memory with a fence on both sides.
#[derive(Debug)]
pub struct Buffer<T> {
    data: Vec<T>,
    len: usize,
}

impl Simt {
    /// A view of rows in host memory.
    pub fn view(data: &[f32], cols: usize) -> View {
        View::contiguous(data.as_ptr() as u64, data.len() / cols.max(1), cols)
    }
}

impl Buffer<f32> {
    /// Its rows.
    pub fn rows(&self, cols: usize) -> View {
        Simt::view(&self.data[FENCE..FENCE + self.len], cols)
    }
}

fn bytes_of<T: Element>(value: T) -> Vec<u8> {
    let start = std::ptr::from_ref(&value).cast::<u8>();
    // SAFETY: elements are plain numbers, so every byte of one is initialised.
    (0..size_of::<T>()).map(|i| unsafe { *start.add(i) }).collect()
}

impl<T: Element> Buffer<T> {
    fn filled(len: usize, byte: u8) -> Self {
        let mut data = vec![T::default(); len + 2 * FENCE];
        let bytes = data.len() * size_of::<T>();
        // SAFETY: the vector owns these bytes, and every bit pattern is a number.
        unsafe { std::ptr::write_bytes(data.as_mut_ptr().cast::<u8>(), byte, bytes) };
        Self { data, len }
    }

    fn fenced(data: &[T]) -> Self {
        let mut buffer = Self::filled(data.len(), FENCE_BYTE);
        buffer.data[FENCE..FENCE + data.len()].copy_from_slice(data);
        buffer
    }

    fn check(&self) -> Result<()> {
        let (before, rest) = self.data.split_at(FENCE);
        let damaged = |part: &[T]| part.iter().any(|&value| bytes_of(value).iter().any(|&byte| byte != FENCE_BYTE));
        if damaged(before) || damaged(&rest[self.len..]) {
            bail!("a kernel wrote outside a buffer of {} elements", self.len);
        }
        Ok(())
    }
}

unsafe extern "C" {
    fn simt_launch(
        name: *const c_char,
        arguments: *const c_char,
        grid: *const u32,
        threads: *const u32,
        args: *mut *mut c_void,
    ) -> c_int;
}

/// The emulator has one block, so one launch at a time.
static LAUNCH: Mutex<()> = Mutex::new(());

impl Backend for Simt {
    type Buffer<T: Element> = Buffer<T>;

    /// Filled with NaN, so that an element no kernel wrote is seen.
    fn alloc<T: Element>(&self, len: usize) -> Result<Buffer<T>> {
        Ok(Buffer::filled(len, FENCE_BYTE))
    }

    fn zeros<T: Element>(&self, len: usize) -> Result<Buffer<T>> {
        Ok(Buffer::fenced(&vec![T::default(); len]))
    }

    fn upload<T: Element>(&self, data: &[T]) -> Result<Buffer<T>> {
        Ok(Buffer::fenced(data))
    }

    fn download<T: Element>(&self, buffer: &Buffer<T>) -> Result<Vec<T>> {
        buffer.check()?;
        Ok(buffer.data[FENCE..FENCE + buffer.len].to_vec())
    }

    fn address<T: Element>(&self, buffer: &Buffer<T>) -> u64 {
        buffer.data[FENCE..].as_ptr() as u64
    }

    fn launch(&self, kernel: Kernel, grid: [usize; 3], threads: usize, args: &[Arg]) -> Result<()> {
        let (mut words, mut letters) = (Vec::with_capacity(args.len()), String::new());
        for arg in args {
            let (word, letter) = match *arg {
                Arg::Address(address) => (address, 'p'),
                Arg::Int(value) => (u64::from(i32::try_from(value).map_err(candle_core::Error::wrap)? as u32), 'i'),
                Arg::Float(value) => (u64::from(value.to_bits()), 'f'),
            };
            words.push(word);
            letters.push(letter);
        }
        let mut pointers: Vec<*mut c_void> = words.iter_mut().map(|word| std::ptr::from_mut(word).cast()).collect();
        let grid = grid.map(|n| n as u32);
        let name = CString::new(kernel.function).map_err(candle_core::Error::wrap)?;
        let arguments = CString::new(letters.clone()).map_err(candle_core::Error::wrap)?;
        let _one = LAUNCH.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the emulator checks name and argument types; the addresses come from live buffers of this backend, and a
        // kernel that leaves them is the error the fences look for.
        let status = unsafe {
            simt_launch(
                name.as_ptr(),
                arguments.as_ptr(),
                grid.as_ptr(),
                [threads as u32, 1, 1].as_ptr(),
                pointers.as_mut_ptr(),
            )
        };
        match status {
            0 => Ok(()),
            1 => bail!("no kernel `{}`", kernel.function),
            _ => bail!("kernel `{}` does not take the arguments ({letters})", kernel.function),
        }
    }

    fn matmul(&self, a: Matrix, b: Matrix, out: u64, add: bool) -> Result<()> {
        if a.cols != b.rows {
            bail!("product of [{}, {}] and [{}, {}]", a.rows, a.cols, b.rows, b.cols);
        }
        let at = |m: &Matrix, row: usize, col: usize| {
            let offset = if m.transposed { col * m.stride + row } else { row * m.stride + col };
            // SAFETY: matrices are made from live buffers of this backend with these dimensions.
            f64::from(unsafe { *(m.address as *const f32).add(offset) })
        };
        for row in 0..a.rows {
            for col in 0..b.cols {
                let sum: f64 = (0..a.cols).map(|k| at(&a, row, k) * at(&b, k, col)).sum();
                // SAFETY: `out` is a live buffer of a.rows · b.cols elements.
                let value = unsafe { &mut *(out as *mut f32).add(row * b.cols + col) };
                *value = if add { *value } else { 0.0 } + sum as f32;
            }
        }
        Ok(())
    }
}
