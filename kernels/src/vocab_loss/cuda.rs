//! The fused vocabulary loss on a CUDA device: gradients stay there, the terms of the rows come back to the host.

use std::sync::PoisonError;

use candle_core::op::BackpropOp;
use candle_core::{CudaStorage, Layout, Result, Shape, Storage, Tensor, bail};

use super::{Op, RowTerms};
use crate::cuda::{Cuda, Slice, cuda_storage};
use crate::device::vocab_loss::{Heads, LossCall, Row, forward};
use crate::device::{Backend, Matrix};

/// Gradients of the hidden rows, the latent rows and W2.
pub(super) type Gradients = [Slice; 3];

impl Op {
    /// Computes the terms and leaves the gradients in the state; the result is the loss.
    pub(super) fn on_device(
        &self,
        [h, m, w]: [&CudaStorage; 3],
        [hl, ml, wl]: [&Layout; 3],
    ) -> Result<(CudaStorage, Shape)> {
        const NAME: &str = "vocab-loss";
        let settings = &self.settings;
        if settings.draft_tokens.is_some() {
            bail!("vocab-loss: a draft vocabulary cannot be trained on a CUDA device");
        }
        if settings.soft_targets {
            bail!("vocab-loss: soft targets are not implemented on a CUDA device");
        }
        let weight = &settings.draft_head_weight;
        let (vocab, rank) = wl.shape().dims2()?;
        if weight.dims() != [vocab, hl.shape().dims2()?.1] || !weight.is_contiguous() || !wl.is_contiguous() {
            bail!("vocab-loss: contiguous draft head {:?} and w2 {:?} expected", weight.dims(), wl.dims());
        }
        let cuda = Cuda::of(h);
        let (head_storage, head_layout) = weight.storage_and_layout();
        let (target_storage, target_layout) = self.target_hidden.storage_and_layout();
        let head = cuda.start::<f32>(cuda_storage(NAME, &head_storage)?, head_layout)?;
        let target_hidden = cuda.rows(NAME, cuda_storage(NAME, &target_storage)?, target_layout)?;
        let (hidden, latent) = (cuda.rows(NAME, h, hl)?, cuda.rows(NAME, m, ml)?);
        let w2 = cuda.start::<f32>(w, wl)?;
        let head = Matrix::new(*head, vocab, hidden.cols);
        let heads = Heads { draft: head, target: head, w2: Matrix::new(*w2, vocab, rank) };
        let rows: Vec<Row> = settings
            .rows
            .iter()
            .map(|r| Row { row: r.row, target: r.target, label: r.label, ce: r.ce, tv: r.tv, kl: r.kl })
            .collect();
        let call = LossCall {
            rows: &rows,
            draft_tokens: None,
            kl_temperature: settings.kl_temperature,
            with_target: settings.with_target,
            chunk_rows: None,
        };
        let out = forward(&cuda, &call, &hidden, &latent, &target_hidden, &heads)?;
        let mut loss = 0f64;
        for (row, [ce, tv, kl]) in rows.iter().zip(&out.terms) {
            loss += f64::from(row.ce) * f64::from(*ce)
                + f64::from(row.tv) * f64::from(*tv)
                + f64::from(row.kl) * f64::from(*kl);
        }
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.terms = out.terms.iter().map(|&[ce, tv, kl]| RowTerms { ce, tv, kl, agrees: None }).collect();
        state.on_device = Some([out.hidden, out.latent, out.w2]);
        Ok((cuda.storage(cuda.upload(&[loss as f32])?), Shape::from(1)))
    }

    /// The gradients that [`Op::on_device`] left, times that of the loss.
    pub(super) fn device_gradients(&self, inputs: [&Tensor; 3], grad: &Tensor) -> Result<[Option<Tensor>; 3]> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(slices) = state.on_device.take() else { bail!("vocab-loss: the backward pass ran twice") };
        let cuda = Cuda::new(grad.device().as_cuda_device()?);
        let mut out = [const { None }; 3];
        for ((out, slice), input) in out.iter_mut().zip(slices).zip(inputs) {
            if input.elem_count() > 0 {
                let storage = Storage::Cuda(cuda.storage(slice));
                let gradient = Tensor::from_storage(storage, input.shape(), BackpropOp::none(), false);
                *out = Some(gradient.broadcast_mul(grad)?);
            }
        }
        Ok(out)
    }
}
