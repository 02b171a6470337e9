//! The answers of the API: what comes out of the engine, in the forms that clients read.

use deepspec_datasets::tokenizer::Tokenizer;
use deepspec_models::speculate::TokenLogprobs;
use serde_json::{Value, json};

use super::openai::Form;
use deepspec_engine::{FinishReason, RoundRecord, Update};

/// Log probability that JSON can hold for a token that cannot occur.
const IMPOSSIBLE: f64 = -9999.0;

/// Tokens counted for a client.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Usage {
    pub(super) prompt: usize,
    completion: usize,
    rounds: usize,
    drafted: usize,
    verified: usize,
    accepted: usize,
    committed: usize,
}

impl Usage {
    /// Takes in an update.
    pub(super) fn add(&mut self, update: &Update) {
        self.completion += update.tokens.len();
        if let Some(round) = &update.round {
            self.rounds += 1;
            self.drafted += round.block.len();
            self.verified += round.proposed;
            self.accepted += round.accepted;
            self.committed += round.committed;
        }
    }

    /// OpenAI's usage object; accepted and rejected draft tokens stand where it counts predicted ones.
    pub(super) fn to_json(self) -> Value {
        json!({
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "completion_tokens_details": {
                "accepted_prediction_tokens": self.accepted,
                "rejected_prediction_tokens": self.verified - self.accepted,
            },
        })
    }

    /// What speculation did, in our own words.
    pub(super) fn speculation(self) -> Value {
        let per_round = |count: usize| if self.rounds == 0 { 0.0 } else { count as f64 / self.rounds as f64 };
        json!({
            "rounds": self.rounds,
            "drafted_tokens": self.drafted,
            "verified_tokens": self.verified,
            "accepted_tokens": self.accepted,
            "tau": per_round(self.committed),
        })
    }
}

/// One answer as it grows.
#[derive(Debug, Clone, Default)]
pub(super) struct Answer {
    pub(super) text: String,
    reasoning: String,
    logprobs: Vec<TokenLogprobs>,
    finish: Option<(FinishReason, Option<String>)>,
    rounds: Vec<Value>,
}

impl Answer {
    /// Takes in an update; `rounds` are kept where the client wants them.
    pub(super) fn add(&mut self, update: &Update, tokenizer: &Tokenizer, returns_rounds: bool) {
        self.text.push_str(&update.text);
        self.reasoning.push_str(&update.reasoning);
        self.logprobs.extend(shown_logprobs(update).iter().cloned());
        if let Some(done) = &update.finished {
            self.finish = Some((done.reason, done.stop_text.clone()));
        }
        if let Some(round) = update.round.as_ref().filter(|_| returns_rounds) {
            self.rounds.push(round_json(round, update, tokenizer));
        }
    }

    /// Whether the answer is whole.
    pub(super) fn is_finished(&self) -> bool {
        self.finish.is_some()
    }

    /// The choice object of an answer that is whole.
    pub(super) fn choice(&self, form: Form, index: usize, wants_logprobs: bool, tokenizer: &Tokenizer) -> Value {
        let logprobs = wants_logprobs.then(|| logprobs_json(form, &self.logprobs, tokenizer, 0));
        let (reason, stop) = self.finish.clone().map_or((None, None), |(reason, stop)| (Some(reason.name()), stop));
        let mut choice = json!({
            "index": index, "logprobs": logprobs, "finish_reason": reason, "stop_reason": stop,
        });
        match form {
            Form::Chat => {
                choice["message"] = json!({ "role": "assistant", "content": self.text, "refusal": null });
                if !self.reasoning.is_empty() {
                    choice["message"]["reasoning_content"] = json!(self.reasoning);
                }
            }
            Form::Text | Form::Simple => choice["text"] = json!(self.text),
        }
        if !self.rounds.is_empty() {
            choice["rounds"] = json!(self.rounds);
        }
        choice
    }
}

/// The choice object of a part of a stream. `offset` is the length of the text before it, in characters.
pub(super) fn delta(
    form: Form,
    index: usize,
    update: &Update,
    wants: (bool, bool),
    tokenizer: &Tokenizer,
    offset: usize,
) -> Option<Value> {
    let (wants_logprobs, wants_rounds) = wants;
    let logprobs = shown_logprobs(update);
    let round = update.round.as_ref().filter(|_| wants_rounds);
    let has_text = !update.text.is_empty() || !update.reasoning.is_empty();
    if !has_text && logprobs.is_empty() && update.finished.is_none() && round.is_none() {
        return None;
    }
    let done = update.finished.as_ref();
    let mut choice = json!({
        "index": index,
        "logprobs": wants_logprobs.then(|| logprobs_json(form, logprobs, tokenizer, offset)),
        "finish_reason": done.map(|done| done.reason.name()),
    });
    match form {
        Form::Chat => choice["delta"] = chat_delta(&update.reasoning, &update.text),
        Form::Text | Form::Simple => choice["text"] = json!(update.text),
    }
    if let Some(stop) = done.and_then(|done| done.stop_text.as_ref()) {
        choice["stop_reason"] = json!(stop);
    }
    if let Some(round) = round {
        choice["round"] = round_json(round, update, tokenizer);
    }
    Some(choice)
}

/// The parts that there are: one step may end the reasoning and begin the answer.
fn chat_delta(reasoning: &str, text: &str) -> Value {
    let parts = [("reasoning_content", reasoning), ("content", text)];
    let present = parts.into_iter().filter(|(_, part)| !part.is_empty());
    Value::Object(present.map(|(name, part)| (name.to_owned(), json!(part))).collect())
}

/// Log probabilities without that of a final stop token, which has no text.
fn shown_logprobs(update: &Update) -> &[TokenLogprobs] {
    let ends_on_token =
        update.finished.as_ref().is_some_and(|done| done.reason == FinishReason::Stop && done.stop_text.is_none());
    &update.logprobs[..update.logprobs.len() - usize::from(ends_on_token && !update.logprobs.is_empty())]
}

fn logprobs_json(form: Form, logprobs: &[TokenLogprobs], tokenizer: &Tokenizer, offset: usize) -> Value {
    let text = |token: u32| String::from_utf8_lossy(tokenizer.token_bytes(token).unwrap_or_default()).into_owned();
    let number = |logprob: f32| f64::from(logprob).max(IMPOSSIBLE);
    if form == Form::Chat {
        let entry = |token: u32, logprob: f32| {
            let bytes = tokenizer.token_bytes(token).unwrap_or_default();
            json!({ "token": text(token), "logprob": number(logprob), "bytes": bytes })
        };
        let content = logprobs.iter().map(|found| {
            let mut token = entry(found.token, found.logprob);
            token["top_logprobs"] = found.top.iter().map(|&(token, logprob)| entry(token, logprob)).collect();
            token
        });
        return json!({ "content": content.collect::<Vec<_>>(), "refusal": null });
    }
    let mut at = offset;
    let offsets: Vec<usize> = logprobs
        .iter()
        .map(|found| {
            let start = at;
            at += text(found.token).chars().count();
            start
        })
        .collect();
    let top = |found: &TokenLogprobs| -> Value {
        let entries = found.top.iter().map(|&(token, logprob)| (text(token), json!(number(logprob))));
        Value::Object(entries.collect())
    };
    json!({
        "tokens": logprobs.iter().map(|found| text(found.token)).collect::<Vec<_>>(),
        "token_logprobs": logprobs.iter().map(|found| number(found.logprob)).collect::<Vec<_>>(),
        "top_logprobs": logprobs.iter().map(top).collect::<Vec<_>>(),
        "text_offset": offsets,
    })
}

/// A round as the live page draws it: each proposed token with its fate, then the target's own.
fn round_json(round: &RoundRecord, update: &Update, tokenizer: &Tokenizer) -> Value {
    let text = |token: u32| tokenizer.decode(&[token], false);
    let proposed = round.block.iter().enumerate().map(|(k, &token)| {
        let fate = match k {
            _ if k < round.accepted => "accepted",
            _ if k < round.proposed => "rejected",
            _ => "unverified",
        };
        let confidence = round.confidence_logits.get(k).map(|&logit| 1.0 / (1.0 + f64::from(-logit).exp()));
        json!({ "text": text(token), "fate": fate, "confidence": confidence })
    });
    let own = update.tokens.get(round.accepted).map(|&token| text(token));
    json!({ "proposed": proposed.collect::<Vec<_>>(), "own": own, "fallback": round.is_fallback })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is sent when one step ends the reasoning and begins the answer.
    #[test]
    fn a_part_may_hold_reasoning_and_answer() {
        assert_eq!(chat_delta("reason", "answer"), json!({ "reasoning_content": "reason", "content": "answer" }));
        assert_eq!(chat_delta("", "answer"), json!({ "content": "answer" }));
        assert_eq!(chat_delta("reason", ""), json!({ "reasoning_content": "reason" }));
        assert_eq!(chat_delta("", ""), json!({}));
    }
}
