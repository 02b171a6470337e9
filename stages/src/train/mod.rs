//! Training of drafters and what it records.

pub mod tensorboard;
