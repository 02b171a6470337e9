//! Measures deepspec for comparisons with other engines: `bench_worker MODEL.gguf`.
//!
//! Reads one JSON request a line from standard input and answers each with one line, so that a driver can take turns
//! between engines; `scripts/bench_peers` is that driver. With `--table` it prints what a target step costs for 1 … 32
//! rows and a prefill, per precision, next to the rate at which it reads the weights.
#![expect(clippy::print_stdout, clippy::disallowed_methods, reason = "a measuring tool")]

mod decoding;
mod table;
mod training;

use std::error::Error;
use std::io::BufRead;
use std::path::{Path, PathBuf};
use std::time::Instant;

use deepspec_datasets::conversation::{Message, Role};
use deepspec_engine::TextSide;
use deepspec_models::gguf::Gguf;
use deepspec_stages::model_source::{ResolvedModel, load_text_side};
use deepspec_stages::recipe::Precision;
use serde::Deserialize;
use serde_json::{Value, json};

use decoding::Targets;
use training::{Shape, Training};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// What a driver may ask for.
#[derive(Deserialize)]
#[serde(tag = "op", rename_all = "lowercase")]
enum Request {
    /// Precisions, instruction set, threads.
    Info,
    /// Tokens of a text as it stands.
    Tokenize { text: String },
    /// Tokens of a chat with one question, up to the place where the answer begins.
    Render { text: String },
    /// The likeliest continuation of some tokens.
    Continue { precision: Precision, tokens: Vec<u32>, count: usize },
    /// Steps of `rows` new tokens after `context`, with logits for all of them.
    Rows { precision: Precision, context: Vec<u32>, rows: Vec<u32>, repeats: usize },
    /// Prompts, with logits for the last token.
    Prefill { precision: Precision, tokens: Vec<u32>, repeats: usize },
    /// Passes over sequences, `batch` at a time, that keep what a target cache holds.
    Prepare { precision: Precision, sequences: Vec<Vec<u32>>, batch: usize, layers: Vec<i32>, repeats: usize },
    /// Steps of training a drafter.
    Train {
        #[serde(flatten)]
        shape: Shape,
        context: Vec<u32>,
        repeats: usize,
    },
    /// Writes weights and inputs with which the training steps of that shape begin.
    Dump {
        #[serde(flatten)]
        shape: Shape,
        context: Vec<u32>,
        path: PathBuf,
    },
}

struct Worker {
    model: PathBuf,
    targets: Targets,
    text: Option<TextSide>,
    training: Option<Training>,
}

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let model = PathBuf::from(arguments.next().ok_or("usage: bench_worker MODEL.gguf [--table]")?);
    let is_table = match arguments.next().as_deref() {
        None => false,
        Some("--table") => true,
        Some(other) => return Err(format!("`{other}`: the only option is `--table`").into()),
    };
    deepspec_models::keep_freed_memory();
    let mut outcome = Ok(());
    // Inside the pool, as the program itself runs.
    rayon::scope(|_| {
        outcome = if is_table { table::print(&model) } else { serve(model) }.map_err(|error| error.to_string());
    });
    Ok(outcome?)
}

fn serve(model: PathBuf) -> Result<()> {
    let targets = Targets::new(model.clone());
    let mut worker = Worker { model, targets, text: None, training: None };
    for line in std::io::stdin().lock().lines() {
        let answer = serde_json::from_str(&line?).map_err(Into::into).and_then(|request| worker.answer(request));
        println!("{}", answer.unwrap_or_else(|error| json!({ "error": error.to_string() })));
    }
    Ok(())
}

impl Worker {
    fn answer(&mut self, request: Request) -> Result<Value> {
        Ok(match request {
            Request::Info => json!({
                "version": env!("CARGO_PKG_VERSION"),
                "precisions": precisions(&self.model)?,
                "kernels": deepspec_models::instruction_set(),
                "threads": rayon::current_num_threads(),
            }),
            Request::Tokenize { text } => json!({ "tokens": self.text()?.tokenizer().encode_text(&text)? }),
            Request::Render { text } => {
                let side = self.text()?;
                let tokens = side.renderer.render_prompt(&[Message::new(Role::User, &text)], None)?;
                json!({ "tokens": tokens, "stop_ids": side.stop_ids() })
            }
            Request::Continue { precision, tokens, count } => {
                json!({ "tokens": self.targets.get(precision)?.continuation(&tokens, count)? })
            }
            Request::Rows { precision, context, rows, repeats } => {
                seconds(&self.targets.get(precision)?.steps(&context, &rows, repeats)?)
            }
            Request::Prefill { precision, tokens, repeats } => {
                seconds(&self.targets.get(precision)?.prefills(&tokens, repeats)?)
            }
            Request::Prepare { precision, sequences, batch, layers, repeats } => {
                seconds(&self.targets.get(precision)?.captures(&sequences, batch, &layers, repeats)?)
            }
            Request::Train { shape, context, repeats } => self.training(shape, &context)?.steps(repeats)?,
            Request::Dump { shape, context, path } => self.training(shape, &context)?.dump(&path)?,
        })
    }

    fn text(&mut self) -> Result<&TextSide> {
        let side = match self.text.take() {
            Some(side) => side,
            None => load_text_side(&ResolvedModel { path: self.model.clone(), name: String::new() })?,
        };
        Ok(self.text.insert(side))
    }

    /// The training run of that shape; another one is dropped first.
    fn training(&mut self, shape: Shape, context: &[u32]) -> Result<&mut Training> {
        let training = match self.training.take().filter(|training| training.shape() == shape) {
            Some(training) => training,
            None => Training::new(&self.model, shape, context)?,
        };
        Ok(self.training.insert(training))
    }
}

/// Names of the precisions that the model can be held in.
fn precisions(model: &Path) -> Result<Vec<&'static str>> {
    let mut names = vec!["f32", "bf16", "q8"];
    if Gguf::open(model)?.is_four_bit() {
        names.push("q4");
    }
    Ok(names)
}

fn seconds(times: &[f64]) -> Value {
    json!({ "seconds": times })
}

/// Runs `f` and tells how long it took, in seconds.
fn timed<T>(f: impl FnOnce() -> Result<T>) -> Result<(f64, T)> {
    let start = Instant::now();
    let value = f()?;
    Ok((start.elapsed().as_secs_f64(), value))
}
