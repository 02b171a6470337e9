//! Target models, drafters, losses and the rules of speculative decoding: tensors in, tensors out.
//!
//! This crate reads weights and configurations, but no clock, environment, recipe or text.

pub mod checkpoint;
pub mod config;
pub mod draft;
pub mod error;
pub mod formats;
pub mod gguf;
pub mod kv_cache;
pub mod loss;
pub mod optimizer;
pub mod speculate;
pub mod target;
pub mod weights;

pub use deepspec_kernels::instruction_set;
pub use deepspec_kernels::linear;
pub use deepspec_kernels::memory::{keep_freed_memory, return_freed_memory};
pub use error::{Error, Result};
