//! deepspec
fn main() {}
