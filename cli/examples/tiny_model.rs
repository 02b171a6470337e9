//! Writes the tiny golden target of the tests as a model folder, for checks whose subject is not the model:
//! `cargo run --release --package deepspec --example tiny_model -- DIR`.
#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "a helper of scripts fails as tests do")]

use std::path::Path;

#[path = "../tests/tiny_model/mod.rs"]
mod tiny_model;

fn main() {
    let parent = std::env::args_os().nth(1).expect("the folder to make `model` in");
    println!("{}", tiny_model::model_folder(Path::new(&parent)).display());
}
