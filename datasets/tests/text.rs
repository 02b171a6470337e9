//! Tests of the text side through its public interface: rows, tokenizer, templates, renderer, evaluation sets.
#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests fail and speak as tests do")]

#[path = "text/conversations.rs"]
mod conversations;
#[path = "text/environment.rs"]
mod environment;
#[path = "text/eval_sets.rs"]
mod eval_sets;
#[path = "text/formats.rs"]
mod formats;
#[path = "text/invisible.rs"]
mod invisible;
#[path = "text/messy.rs"]
mod messy;
#[path = "text/raw.rs"]
mod raw;
#[path = "text/rendering.rs"]
mod rendering;
#[path = "text/templates.rs"]
mod templates;
#[path = "text/tokens.rs"]
mod tokens;
#[path = "text/vocabulary.rs"]
mod vocabulary;
