//! Numerical operations of deepspec: numbers only, no model, file or configuration.
//!
//! One folder or file per operation, holding its documentation, CPU path and gradient. Operations are candle custom
//! operations, so they take part in autograd where they define a backward pass. candle's own fused RMSNorm, RoPE and
//! softmax have none and would silently stop gradients; nothing here calls them.

pub mod adamw;
pub mod attention;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(any(feature = "cuda", feature = "simt"))]
#[doc(hidden)]
pub mod device;
pub mod linear;
pub mod logit_row;
mod matmul;
pub mod memory;
mod rms_norm;
pub mod rope;
mod rows;
mod silu_mul;
#[doc(hidden)]
pub mod simd;
#[cfg(feature = "simt")]
#[doc(hidden)]
pub mod simt;
mod threads;
pub mod verify;
pub mod vocab_loss;

/// Instruction sets that the kernels use on this machine: for floats, then for integers.
pub fn instruction_set() -> String {
    format!("{}/{}", simd::level().name(), linear::int_level())
}

pub use rms_norm::{add_rms_norm, rms_norm};
pub use silu_mul::silu_mul;
