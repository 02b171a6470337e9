//! The target's hidden rows after single tokens, from which the Markov head can start.

use std::collections::BTreeMap;

use candle_core::Tensor;
use deepspec_datasets::conversation::{Message, Role};
use deepspec_datasets::target_cache::Reader;
use deepspec_models::draft::initialise::BigramRows;
use deepspec_models::target::NewTokens;

use crate::error::Result;
use crate::target_model::TargetModel;
use deepspec_engine::progress::{Context, Event};

/// Sequences run at once.
const SLOTS: usize = 64;

/// Runs the target over a short neutral context followed by each token that occurs in the data.
///
/// The context is a rendered greeting: alone, a first token would be an attention sink whose hidden row says nothing.
///
/// # Errors
/// When the target fails or the user interrupts; nothing is kept, as it takes seconds.
pub fn rows(cache: &Reader, model: &TargetModel, ctx: Context<'_>) -> Result<BigramRows> {
    let mut counts: BTreeMap<u32, u64> = BTreeMap::new();
    for i in 0..cache.len() {
        for &token in cache.tokens(i)?.0 {
            *counts.entry(token).or_default() += 1;
        }
    }
    let context = model.text.renderer.render_prompt(&[Message::new(Role::User, "Hello")], None)?;
    let tokens: Vec<u32> = counts.keys().copied().collect();
    let slots = SLOTS.min(tokens.len());
    let mut kv = model.target.new_cache(slots, context.len() + 1)?;
    for slot in 0..slots {
        model.target.forward(&mut kv, &[NewTokens { slot, tokens: &context }], &[])?;
    }
    let mut hidden = Vec::new();
    let total = tokens.len() as u64;
    ctx.reporter.event(Event::Started { task: "bigram", total, done: 0, unit: "tokens" });
    for (i, chunk) in tokens.chunks(slots).enumerate() {
        ctx.check_interrupt("nothing was lost, training had not begun")?;
        let batch: Vec<NewTokens<'_>> = chunk
            .iter()
            .enumerate()
            .map(|(slot, token)| NewTokens { slot, tokens: std::slice::from_ref(token) })
            .collect();
        hidden.push(model.target.forward(&mut kv, &batch, &[])?.hidden);
        for slot in 0..chunk.len() {
            kv.truncate(slot, context.len());
        }
        ctx.reporter.event(Event::Advanced { done: (i * slots + chunk.len()) as u64, detail: "" });
    }
    ctx.reporter.event(Event::Finished);
    let tokens = counts.into_iter().enumerate().map(|(row, (token, count))| (token, (row, count))).collect();
    Ok(BigramRows { tokens, hidden: Tensor::cat(&hidden, 0)? })
}
