//! Rotary position embedding with gradient, in the half-split order of Hugging Face checkpoints.
//!
//! For each head, (x_i, x_{i+n}) is rotated by the angle position · frequency_i, i < n = rotated/2; dimensions past
//! `rotated` are left alone (`partial_rotary_factor`). Angles are kept in f32 whatever the weights are stored in.

use std::sync::Arc;

#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor, bail};

use crate::multiversion;
use crate::rows::Rows;
use crate::threads;
#[cfg(feature = "cuda")]
use crate::{
    cuda::{Cuda, Uploaded},
    device,
};

/// Inverse frequencies of a model's rotary embedding.
#[derive(Debug, Clone)]
pub struct RopeFrequencies {
    inverse: Arc<[f32]>,
    head_dim: usize,
    /// What cosines and sines are multiplied by.
    scale: f64,
}

impl RopeFrequencies {
    /// Frequencies given one per rotated pair; `head_dim` is the whole head.
    pub fn new(inverse: Vec<f32>, head_dim: usize) -> Self {
        Self { inverse: inverse.into(), head_dim, scale: 1.0 }
    }

    /// The same with cosines and sines multiplied by `scale`, which scales the scores of rotated dimensions by its square.
    #[must_use]
    pub fn scaled(self, scale: f64) -> Self {
        Self { scale, ..self }
    }

    /// The plain frequencies θ^(−2i/rotated), i < rotated/2.
    pub fn plain(theta: f64, rotated: usize, head_dim: usize) -> Self {
        Self::new(
            (0..rotated / 2).map(|i| (1.0 / theta.powf((2 * i) as f64 / rotated as f64)) as f32).collect(),
            head_dim,
        )
    }

    /// Cosines and sines of the given positions.
    pub fn at(&self, positions: &[usize]) -> RopeAngles {
        let pairs = self.inverse.len();
        let mut cos = Vec::with_capacity(positions.len() * pairs);
        let mut sin = Vec::with_capacity(positions.len() * pairs);
        for &position in positions {
            for &frequency in self.inverse.iter() {
                // The product is rounded to f32 as in the reference implementations, the functions of it are not.
                let angle = f64::from(position as f32 * frequency);
                cos.push((angle.cos() * self.scale) as f32);
                sin.push((angle.sin() * self.scale) as f32);
            }
        }
        RopeAngles {
            cos: cos.into(),
            sin: sin.into(),
            pairs,
            head_dim: self.head_dim,
            inverse: false,
            #[cfg(feature = "cuda")]
            uploaded: Arc::default(),
        }
    }
}

/// Rotation of a list of rows, computed once and used by every layer.
#[derive(Debug, Clone)]
pub struct RopeAngles {
    cos: Arc<[f32]>,
    sin: Arc<[f32]>,
    pairs: usize,
    head_dim: usize,
    inverse: bool,
    /// Cosines and sines in device memory, copied there by the first layer.
    #[cfg(feature = "cuda")]
    uploaded: Arc<Uploaded>,
}

impl RopeAngles {
    /// Rotates each head of each row.
    ///
    /// # Shapes
    /// `[rows, heads · head_dim]` → same
    ///
    /// # Errors
    /// When the number of rows is not the number of positions or the width no whole number of heads.
    pub fn apply(&self, x: &Tensor) -> Result<Tensor> {
        x.apply_op1(self.clone())
    }

    fn check(&self, rows: usize, cols: usize) -> Result<()> {
        if rows * self.pairs != self.cos.len() || !cols.is_multiple_of(self.head_dim) {
            bail!(
                "rope for {} positions and heads of {} got {rows} rows of {cols}",
                self.cos.len() / self.pairs.max(1),
                self.head_dim,
            );
        }
        Ok(())
    }
}

multiversion! {
    /// Turns the pairs of each head by their angles, or back when `direction` is −1.
    fn turn_row(y: &mut [f32], cos: &[f32], sin: &[f32], direction: f32, head_dim: usize) {
        for head in y.chunks_exact_mut(head_dim) {
            let (low, high) = head.split_at_mut(cos.len());
            for ((a, b), (c, s)) in low.iter_mut().zip(high).zip(cos.iter().zip(sin)) {
                let s = direction * s;
                (*a, *b) = (*a * c - *b * s, *b * c + *a * s);
            }
        }
    }
}

impl CustomOp1 for RopeAngles {
    fn name(&self) -> &'static str {
        "rope"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let x = Rows::new(self.name(), storage, layout)?;
        self.check(x.count, x.cols)?;
        let direction = if self.inverse { -1.0 } else { 1.0 };
        let y = threads::new_rows(x.count, x.cols, x.count * x.cols >= threads::WORTH_SHARING, |row, y| {
            y.copy_from_slice(x.row(row));
            let pairs = row * self.pairs..(row + 1) * self.pairs;
            turn_row(y, &self.cos[pairs.clone()], &self.sin[pairs], direction, self.head_dim);
        });
        Ok((CpuStorage::F32(y), layout.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, storage: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let cuda = Cuda::of(storage);
        let x = cuda.rows(self.name(), storage, layout)?;
        self.check(x.count, x.cols)?;
        let angles = self.uploaded.on(&cuda, [&self.cos, &self.sin])?;
        let y = device::elementwise::rope(&cuda, &x, angles, self.head_dim, self.pairs, self.inverse)?;
        Ok((cuda.storage(y), layout.shape().clone()))
    }

    fn bwd(&self, _arg: &Tensor, _res: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let inverse = RopeAngles { inverse: !self.inverse, ..self.clone() };
        Ok(Some(inverse.apply(&grad.contiguous()?)?))
    }
}
