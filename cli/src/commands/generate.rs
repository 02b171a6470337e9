//! `deepspec generate`: one prompt, answered on the terminal as the tokens come.

use std::io::Read as _;
use std::time::Instant;

use anyhow::Context as _;
use deepspec_datasets::conversation::{Message, Role};
use deepspec_datasets::tokenizer::{StreamDecoder, Tokenizer};
use deepspec_engine::progress::Context;
use deepspec_engine::{Finished, Request, RequestOptions, RoundRecord, TextOptions, Update};
use deepspec_models::speculate::{Adjustments, SamplingParams};
use owo_colors::OwoColorize as _;
use serde_json::json;

use super::decoding::Models;
use crate::args::GenerateArguments;
use crate::failure::Refusal;
use crate::printer::Printer;
use crate::visible;

/// Answers the prompt.
///
/// # Errors
/// When a model cannot be loaded or fails, or prompt and budget exceed what the target was made for.
pub(super) fn run(arguments: &GenerateArguments, printer: &Printer, context: Context<'_>) -> anyhow::Result<()> {
    let models = Models::load(&arguments.models, context)?;
    let request = request(arguments, &models)?;
    let capacity = request.prompt.len() + request.max_new_tokens;
    let longest = models.target.target.config().max_position_embeddings;
    if capacity > longest {
        let problem = format!(
            "{} prompt tokens and {} new ones exceed the {longest} positions of the target",
            request.prompt.len(),
            request.max_new_tokens
        );
        return Err(Refusal { problem, hint: Some("give a smaller `--max-new-tokens`".into()) }.into());
    }
    let mut engine = models.engine(1, capacity, context)?;
    let mut drafts = arguments.show_drafts.then(|| DraftView::new(models.target.text.tokenizer(), printer));
    let mut answer = String::new();
    let begun = Instant::now();
    let mut first = None;
    let done = engine.run([request], |update| {
        first.get_or_insert_with(|| begun.elapsed().as_secs_f64());
        answer.push_str(&update.text);
        let shown = match &mut drafts {
            Some(view) => view.show(update),
            None => visible::text(&update.text).into_owned(),
        };
        if !printer.wants_json() {
            printer.stream(&shown)?;
        }
        context.check_interrupt("the answer so far is on the screen")
    })?;
    if let Some(faults) = engine.drafter_faults() {
        context.warn(faults.message());
    }
    let done = done.into_iter().next().context("the engine ended without an answer")?;
    let (first_s, total_s) = (first.unwrap_or(0.0), begun.elapsed().as_secs_f64());
    if printer.wants_json() {
        return Ok(printer.data(&summary(&done, &answer, first_s, total_s).to_string())?);
    }
    printer.data("")?;
    printer.words(&stats_line(&done, first_s, total_s, engine.proposer_name()));
    Ok(())
}

fn request(arguments: &GenerateArguments, models: &Models) -> anyhow::Result<Request> {
    let mut prompt = arguments.prompt.clone();
    if prompt == "-" {
        prompt.clear();
        std::io::stdin().read_to_string(&mut prompt).context("cannot read the prompt from standard input")?;
    }
    let text = &models.target.text;
    let ids = if arguments.raw {
        text.tokenizer().encode_raw(&prompt)?
    } else {
        let mut messages: Vec<Message> = Vec::new();
        messages.extend(arguments.system.as_ref().map(|system| Message::new(Role::System, system)));
        messages.push(Message::new(Role::User, prompt));
        text.renderer.render_prompt(&messages, None)?
    };
    let sampling = &arguments.sampling;
    Ok(Request {
        id: 0,
        prompt: ids,
        sampling: SamplingParams {
            temperature: sampling.temperature,
            top_k: sampling.top_k,
            top_p: sampling.top_p,
            min_p: sampling.min_p,
        },
        seed: sampling.seed,
        max_new_tokens: sampling.max_new_tokens,
        stop_ids: text.stop_ids().into(),
        confidence_threshold: models.schedule.threshold(),
        options: RequestOptions {
            adjustments: Adjustments {
                presence_penalty: sampling.presence_penalty,
                frequency_penalty: sampling.frequency_penalty,
                repetition_penalty: sampling.repetition_penalty,
                logit_bias: Vec::new(),
            },
            text: Some(TextOptions {
                tokenizer: text.tokenizer().clone(),
                stop: sampling.stop.as_slice().into(),
                reasoning: None,
            }),
            ..RequestOptions::default()
        },
    })
}

/// Shows what became of drafted tokens.
struct DraftView {
    tokenizer: Tokenizer,
    /// Committed tokens may share a character.
    decoder: StreamDecoder,
    has_colours: bool,
}

impl DraftView {
    fn new(tokenizer: &Tokenizer, printer: &Printer) -> Self {
        let has_colours = printer.colours_data();
        Self { tokenizer: tokenizer.clone(), decoder: tokenizer.stream_decoder(false), has_colours }
    }

    /// The tokens of an update: accepted ones, then rejected ones, then the target's own.
    fn show(&mut self, update: &Update) -> String {
        let accepted = update.round.as_ref().map_or(0, |round| round.accepted);
        let rejected = update.round.as_ref().map_or(&[][..], rejected);
        let mut shown = String::new();
        for (i, &token) in update.tokens.iter().enumerate() {
            if i == accepted {
                shown.push_str(&self.rejected(rejected));
            }
            let text = visible::text(&self.decoder.push(token)).into_owned();
            shown.push_str(&match (i < accepted, self.has_colours) {
                (false, _) => text,
                (true, true) => text.green().to_string(),
                (true, false) => format!("+{text}"),
            });
        }
        shown
    }

    fn rejected(&self, tokens: &[u32]) -> String {
        if tokens.is_empty() {
            return String::new();
        }
        let text = visible::line(&self.tokenizer.decode(tokens, false)).into_owned();
        if self.has_colours { text.red().strikethrough().to_string() } else { format!("[-{text}-]") }
    }
}

/// Verified tokens that were not accepted.
fn rejected(round: &RoundRecord) -> &[u32] {
    round.block.get(round.accepted..round.proposed).unwrap_or_default()
}

fn tokens_per_s(done: &Finished, first_s: f64, total_s: f64) -> f64 {
    let (tokens, seconds) = (done.output.len().saturating_sub(1) as f64, total_s - first_s);
    if tokens > 0.0 && seconds > 0.0 { tokens / seconds } else { 0.0 }
}

fn stats_line(done: &Finished, first_s: f64, total_s: f64, proposer: &str) -> String {
    let stats = done.stats();
    format!(
        "{} prompt tokens, {} new ones ({}) | first after {:.0} ms | {:.1} tok/s | {proposer}: tau {:.2}, {:.2} of {:.2} \
         drafted tokens verified per round, {:.0} % of them accepted",
        done.request.prompt.len(),
        done.output.len(),
        done.reason.name(),
        1e3 * first_s,
        tokens_per_s(done, first_s, total_s),
        stats.tau,
        stats.avg_verify_len,
        stats.avg_draft_len,
        100.0 * stats.draft_accept_rate,
    )
}

fn summary(done: &Finished, answer: &str, first_s: f64, total_s: f64) -> serde_json::Value {
    let stats = done.stats();
    json!({
        "text": answer,
        "tokens": done.output,
        "finish_reason": done.reason.name(),
        "stop_text": done.stop_text,
        "prompt_tokens": done.request.prompt.len(),
        "first_token_s": first_s,
        "tokens_per_s": tokens_per_s(done, first_s, total_s),
        "tau": stats.tau,
        "avg_draft_len": stats.avg_draft_len,
        "avg_verify_len": stats.avg_verify_len,
        "draft_accept_rate": stats.draft_accept_rate,
        "rollback_count": stats.rollback_count,
        "fallback_rounds": stats.fallback_rounds,
    })
}
