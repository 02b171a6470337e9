//! Drafters: the DSpark family (DFlash is its recipe without heads).

pub mod backbone;
pub mod confidence_head;
pub mod context;
pub mod dspark;
pub mod initialise;
pub mod markov_head;
pub mod parameters;

pub use dspark::DSpark;
pub use parameters::{ParameterSource, Parameters, trainable_shapes};
