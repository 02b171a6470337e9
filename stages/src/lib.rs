//! What the commands do: prepare, train, eval, export, quickstart.
//!
//! Each stage takes a [`recipe::Recipe`], a run folder and a [`Context`](deepspec_engine::progress::Context), and returns a typed outcome. Nothing
//! here prints, exits or reads the environment.

pub mod calibration;
pub mod drafter;
pub mod error;
pub mod eval;
pub mod export;
pub mod model_source;
pub mod prepare;
pub mod quickstart;
pub mod recipe;
pub mod run_dir;
pub mod sps_profile;
pub mod target_model;
pub mod train;

pub use error::{Error, Fault, Result};
