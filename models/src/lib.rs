//! deepspec-models
