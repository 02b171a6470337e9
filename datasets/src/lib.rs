//! deepspec-datasets
