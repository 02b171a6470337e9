//! Bytes, text and tokens of deepspec: conversations from files, chat templates, tokenizers, loss masks, evaluation
//! prompts and the target cache. Knows no tensor and no device.
//!
//! The way of a row: [`jsonl`] reads it, [`conversation`] puts it in order, [`renderer`] turns it into token ids and a
//! loss mask by [`chat_template`] and [`tokenizer`]. [`benchmarks`] reads evaluation prompts.

pub mod benchmarks;
pub mod chat_template;
pub mod conversation;
mod error;
pub mod jsonl;
pub mod renderer;
pub mod target_cache;
pub mod tokenizer;

pub use error::Error;
