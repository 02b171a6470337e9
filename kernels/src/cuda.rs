//! Backend for CUDA devices: modules loaded once per device, launches, cuBLAS products, and views of candle's storages.

use std::ops::Deref;
use std::sync::{Arc, OnceLock};

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::cublas::{result as cublas, sys::cublasOperation_t};
use candle_core::cuda_backend::cudarc::driver::{
    CudaSlice, CudaStream, DevicePtr, DevicePtrMut, LaunchConfig, PushKernelArg, SyncOnDrop,
};
use candle_core::cuda_backend::{CudaDType, DeviceId, WrapErr};
use candle_core::{CudaDevice, CudaStorage, Error, Layout, Result, Storage, bail};

use crate::device::{Arg, Backend, Element, Kernel, Matrix, View};
use crate::rows::RowLayout;

macro_rules! modules {
    ($($name:literal),*) => {
        &[$(($name, include_str!(concat!(env!("OUT_DIR"), "/", $name, ".ptx")))),*]
    };
}

/// Compiled `.cu` files by name.
const MODULES: &[(&str, &str)] =
    modules!["adamw", "block", "few_rows", "ragged", "rms_norm", "rope", "silu_mul", "verify", "vocab_loss"];

/// f32 memory of a device.
pub(crate) type Slice = CudaSlice<f32>;

/// A CUDA device and the stream that candle gives it.
#[derive(Debug, Clone)]
pub(crate) struct Cuda {
    device: CudaDevice,
    stream: Arc<CudaStream>,
}

/// An address with the promise that nothing frees or overwrites what lies there.
pub(crate) struct Guarded<'a, T> {
    value: T,
    _guard: SyncOnDrop<'a>,
}

impl<T> Deref for Guarded<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl Cuda {
    /// The backend of a storage's device.
    pub(crate) fn of(storage: &CudaStorage) -> Self {
        Self::new(storage.device())
    }

    /// The backend of a device.
    pub(crate) fn new(device: &CudaDevice) -> Self {
        Self { device: device.clone(), stream: device.cuda_stream() }
    }

    /// Address of the first element that `layout` shows.
    pub(crate) fn start<'a, T: CudaDType + 'a>(
        &'a self,
        storage: &'a CudaStorage,
        layout: &Layout,
    ) -> Result<Guarded<'a, u64>> {
        let (address, guard) = storage.as_cuda_slice::<T>()?.device_ptr(&self.stream);
        Ok(Guarded { value: address + (layout.start_offset() * size_of::<T>()) as u64, _guard: guard })
    }

    /// Address of the first element that `layout` shows, to be written.
    pub(crate) fn start_mut<'a, T: CudaDType + 'a>(
        &'a self,
        storage: &'a mut CudaStorage,
        layout: &Layout,
    ) -> Result<Guarded<'a, u64>> {
        let (address, guard) = T::as_cuda_slice_mut(storage)?.device_ptr_mut(&self.stream);
        Ok(Guarded { value: address + (layout.start_offset() * size_of::<T>()) as u64, _guard: guard })
    }

    /// f32 rows of a storage.
    pub(crate) fn rows<'a>(
        &'a self,
        op: &'static str,
        storage: &'a CudaStorage,
        layout: &Layout,
    ) -> Result<Guarded<'a, View>> {
        let RowLayout { stride, count, cols } = RowLayout::new(op, layout)?;
        let Guarded { value: address, _guard: guard } = self.start::<f32>(storage, layout)?;
        Ok(Guarded { value: View { address, stride, count, cols }, _guard: guard })
    }

    /// A buffer as a storage.
    pub(crate) fn storage<T: CudaDType>(&self, buffer: CudaSlice<T>) -> CudaStorage {
        T::wrap_cuda_slice(buffer, self.device.clone())
    }
}

/// Two tables of one length in the memory of the first device that asks for them.
#[derive(Debug, Default)]
pub(crate) struct Uploaded(OnceLock<(DeviceId, [Slice; 2])>);

impl Uploaded {
    /// Their addresses; copies them on the first call.
    pub(crate) fn on(&self, cuda: &Cuda, tables: [&[f32]; 2]) -> Result<[u64; 2]> {
        if self.0.get().is_none() {
            let copies = [cuda.upload(tables[0])?, cuda.upload(tables[1])?];
            // Whoever comes second drops its copy.
            drop(self.0.set((cuda.device.id(), copies)));
        }
        match self.0.get() {
            Some((device, [first, second])) if *device == cuda.device.id() => {
                Ok([cuda.address(first), cuda.address(second)])
            }
            _ => bail!("tables of one device used on another"),
        }
    }
}

/// The CUDA storage of a tensor, for operations that carry one beside their arguments.
pub(crate) fn cuda_storage<'a>(op: &'static str, storage: &'a Storage) -> Result<&'a CudaStorage> {
    match storage {
        Storage::Cuda(storage) => Ok(storage),
        _ => bail!("{op}: expected a tensor on the CUDA device of the others"),
    }
}

fn int(value: usize, what: &'static str) -> Result<i32> {
    i32::try_from(value).map_err(|_| Error::Msg(format!("{what} of {value} is too large for a kernel")))
}

impl Backend for Cuda {
    type Buffer<T: Element> = CudaSlice<T>;

    fn alloc<T: Element>(&self, len: usize) -> Result<CudaSlice<T>> {
        // SAFETY: a buffer is written by the kernel it is made for before anything reads it.
        unsafe { self.device.alloc::<T>(len.max(1)) }
    }

    fn zeros<T: Element>(&self, len: usize) -> Result<CudaSlice<T>> {
        self.device.alloc_zeros::<T>(len.max(1))
    }

    fn upload<T: Element>(&self, data: &[T]) -> Result<CudaSlice<T>> {
        if data.is_empty() { self.zeros(1) } else { self.stream.clone_htod(data).w() }
    }

    fn download<T: Element>(&self, buffer: &CudaSlice<T>) -> Result<Vec<T>> {
        self.stream.clone_dtoh(buffer).w()
    }

    fn address<T: Element>(&self, buffer: &CudaSlice<T>) -> u64 {
        buffer.device_ptr(&self.stream).0
    }

    fn launch(&self, kernel: Kernel, grid: [usize; 3], threads: usize, args: &[Arg]) -> Result<()> {
        if grid.contains(&0) {
            return Ok(());
        }
        if grid[1].max(grid[2]) > 65_535 {
            bail!("grid {grid:?} of kernel `{}` is too large", kernel.function);
        }
        let Some((module, ptx)) = MODULES.iter().find(|(name, _)| *name == kernel.module) else {
            bail!("no CUDA module `{}`", kernel.module)
        };
        let function = self.device.get_or_load_custom_func(kernel.function, &format!("deepspec_{module}"), ptx)?;
        let mut ints = Vec::with_capacity(args.len());
        for arg in args {
            ints.push(if let Arg::Int(value) = arg { int(*value, "an argument")? } else { 0 });
        }
        let mut builder = function.builder();
        for (arg, int) in args.iter().zip(&ints) {
            match arg {
                Arg::Address(address) => builder.arg(address),
                Arg::Int(_) => builder.arg(int),
                Arg::Float(value) => builder.arg(value),
            };
        }
        let config = LaunchConfig {
            grid_dim: (int(grid[0], "a grid")? as u32, grid[1] as u32, grid[2] as u32),
            block_dim: (threads as u32, 1, 1),
            shared_mem_bytes: 0,
        };
        // SAFETY: the device functions of this crate pass what their kernels declare (checked by the emulator's tests), with
        // addresses of buffers that live until the launch is queued; frees are queued behind it.
        unsafe { builder.launch(config) }.w()?;
        Ok(())
    }

    fn matmul(&self, a: Matrix, b: Matrix, out: u64, add: bool) -> Result<()> {
        if a.cols != b.rows {
            bail!("product of [{}, {}] and [{}, {}]", a.rows, a.cols, b.rows, b.cols);
        }
        if a.rows == 0 || b.cols == 0 || a.cols == 0 {
            return Ok(());
        }
        let side = |m: &Matrix| {
            if m.transposed { cublasOperation_t::CUBLAS_OP_T } else { cublasOperation_t::CUBLAS_OP_N }
        };
        let handle = self.device.cublas_handle();
        let (alpha, beta) = (1f32, if add { 1f32 } else { 0f32 });
        // cuBLAS is column-major: it computes outᵀ = bᵀ · aᵀ.
        // SAFETY: the matrices lie in live buffers with these dimensions, and `out` holds a.rows · b.cols elements.
        unsafe {
            cublas::sgemm(
                *handle.handle(),
                side(&b),
                side(&a),
                int(b.cols, "a matrix")?,
                int(a.rows, "a matrix")?,
                int(a.cols, "a matrix")?,
                &raw const alpha,
                b.address as *const f32,
                int(b.stride, "a matrix")?,
                a.address as *const f32,
                int(a.stride, "a matrix")?,
                &raw const beta,
                out as *mut f32,
                int(b.cols, "a matrix")?,
            )
        }
        .w()
    }
}
