//! Drafters: the DSpark family with its Markov heads (DFlash is its recipe without heads), and Eagle3.

pub mod backbone;
pub mod confidence_head;
pub mod context;
pub mod dspark;
pub mod eagle3;
mod gated_head;
pub mod initialise;
pub mod markov_head;
pub mod mlp;
pub mod moe;
pub mod parallel_linear;
pub mod parameters;
mod rnn_head;
pub mod vocabulary;

pub use dspark::DSpark;
pub use eagle3::Eagle3;
pub use parameters::{ParameterSource, Parameters, trainable_shapes};
pub use vocabulary::DraftVocabulary;
