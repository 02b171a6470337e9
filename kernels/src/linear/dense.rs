//! The trainable linear layer in host memory: y = x Wᵀ and its two gradients, dx = g W and dW = gᵀ x.

use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor, bail};

use crate::matmul::{Matrix, matmul};

/// Which of the two matrices are transposed in a product A·B.
struct Product {
    name: &'static str,
    transposes_a: bool,
    transposes_b: bool,
}

const FORWARD: Product = Product { name: "linear", transposes_a: false, transposes_b: true };
const OF_INPUT: Product = Product { name: "linear-backward-input", transposes_a: false, transposes_b: false };
const OF_WEIGHT: Product = Product { name: "linear-backward-weight", transposes_a: true, transposes_b: false };

/// x Wᵀ of contiguous `[rows, in]` and `[out, in]`, with gradients to both.
pub(super) fn forward(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    x.contiguous()?.apply_op2(&weight.contiguous()?, FORWARD)
}

impl CustomOp2 for Product {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(&self, a: &CpuStorage, al: &Layout, b: &CpuStorage, bl: &Layout) -> Result<(CpuStorage, Shape)> {
        let (a, b) = (matrix(self.name, a, al, self.transposes_a)?, matrix(self.name, b, bl, self.transposes_b)?);
        if a.cols() != b.rows() {
            bail!("{}: shapes {:?} and {:?}", self.name, al.dims(), bl.dims());
        }
        let mut out = vec![0f32; a.rows() * b.cols()];
        matmul(a, b, &mut out, false);
        Ok((CpuStorage::F32(out), Shape::from((a.rows(), b.cols()))))
    }

    fn bwd(&self, x: &Tensor, weight: &Tensor, _y: &Tensor, grad: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let grad = grad.contiguous()?;
        let dx = x.track_op().then(|| grad.apply_op2_no_bwd(weight, &OF_INPUT)).transpose()?;
        let dw = weight.track_op().then(|| grad.apply_op2_no_bwd(x, &OF_WEIGHT)).transpose()?;
        Ok((dx, dw))
    }
}

fn matrix<'a>(op: &str, storage: &'a CpuStorage, layout: &Layout, transposes: bool) -> Result<Matrix<'a>> {
    let (rows, cols) = layout.shape().dims2()?;
    let Some((start, end)) = layout.contiguous_offsets() else {
        bail!("{op}: expected contiguous matrices, found strides {:?} for {:?}", layout.stride(), layout.dims());
    };
    let matrix = Matrix::new(&storage.as_slice::<f32>()?[start..end], rows, cols);
    Ok(if transposes { matrix.t() } else { matrix })
}
