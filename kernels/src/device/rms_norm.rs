//! RMSNorm on a device; the kernels are in `rms_norm.cu`.

use candle_core::{Result, bail};

use super::{Backend, Kernel, View, args};

/// Threads per row, as compiled into the kernels.
const THREADS: usize = 256;
/// Rows per partial sum of the weight's gradient: fixed, so that the result does not depend on the device.
const ROWS_PER_PART: usize = 128;

fn kernel(function: &'static str) -> Kernel {
    Kernel { module: "rms_norm", function }
}

fn check(x: &View, weight: &View) -> Result<()> {
    if weight.count != 1 || weight.cols != x.cols {
        bail!("rms-norm weight has {} elements for rows of {}", weight.count * weight.cols, x.cols);
    }
    Ok(())
}

/// Normalised rows, contiguous.
///
/// # Errors
/// When the weight's length is not the row length or a launch fails.
pub fn forward<B: Backend>(backend: &B, x: &View, weight: &View, eps: f32) -> Result<B::Buffer<f32>> {
    check(x, weight)?;
    let y = backend.alloc::<f32>(x.count * x.cols)?;
    let args = args![x.address, x.stride, weight.address, backend.address(&y), x.cols, eps];
    backend.launch(kernel("rms_norm_forward"), [x.count, 1, 1], THREADS, &args)?;
    Ok(y)
}

/// Gradients: rows 0..n of the result are dx, row n is dw.
///
/// # Errors
/// When shapes differ or a launch fails.
pub fn backward<B: Backend>(backend: &B, x: &View, weight: &View, grad: &View, eps: f32) -> Result<B::Buffer<f32>> {
    check(x, weight)?;
    if (grad.count, grad.cols) != (x.count, x.cols) {
        bail!("rms-norm gradient is [{}, {}] for [{}, {}]", grad.count, grad.cols, x.count, x.cols);
    }
    let View { count, cols, .. } = *x;
    let out = backend.alloc::<f32>((count + 1) * cols)?;
    let row_scales = backend.alloc::<f32>(count)?;
    let scales = backend.address(&row_scales);
    let dx = backend.address(&out);
    let args = args![x.address, x.stride, weight.address, grad.address, grad.stride, dx, scales, cols, eps];
    backend.launch(kernel("rms_norm_backward"), [count, 1, 1], THREADS, &args)?;
    let parts_count = count.div_ceil(ROWS_PER_PART);
    let parts = backend.alloc::<f32>(parts_count * cols)?;
    let args = args![
        x.address,
        x.stride,
        grad.address,
        grad.stride,
        scales,
        backend.address(&parts),
        count,
        cols,
        ROWS_PER_PART
    ];
    let columns = cols.div_ceil(128);
    backend.launch(kernel("rms_norm_weight_parts"), [columns, parts_count, 1], 128, &args)?;
    let dweight = dx + (count * cols * size_of::<f32>()) as u64;
    let args = args![backend.address(&parts), dweight, parts_count, cols];
    backend.launch(kernel("rms_norm_weight_sum"), [columns, 1, 1], 128, &args)?;
    Ok(out)
}
