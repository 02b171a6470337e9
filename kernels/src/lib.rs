//! deepspec-kernels
