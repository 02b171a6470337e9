//! deepspec-stages
