//! Training losses, one file per algorithm.

pub mod dspark;
pub mod eagle3;
