//! Turns the body of a request into requests of the engine: reads it, checks it against the model, and encodes its prompts.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher as _;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use deepspec_models::speculate::{SpeculateError, derived_seed};

use super::answer::Usage;
use super::api_error::ApiError;
use super::openai::{ApiRequest, Form, Prompt, far_too_long, too_long};
use super::routes::App;
use deepspec_engine::{Reasoning, Request, RequestOptions, TextOptions};

/// Tokens generated where a completion does not say how many.
const DEFAULT_TOKENS: usize = 16;
/// Answers that one request may ask for.
const MOST_ANSWERS: usize = 256;

/// What a request needs to be answered.
pub(super) struct Accepted {
    pub(super) api: ApiRequest,
    pub(super) requests: Vec<Request>,
    pub(super) usage: Usage,
}

/// Reads and checks a request and turns it into those of the engine.
pub(super) fn accept(app: &App, form: Form, body: &[u8]) -> Result<Accepted, ApiError> {
    let api = ApiRequest::parse(form, body)?;
    if let Some(name) = api.model.as_ref().filter(|name| **name != app.model_name) {
        return Err(ApiError::unknown_model(name, &app.model_name));
    }
    let most = MOST_ANSWERS.min(app.shared.most());
    if api.total() > most {
        return Err(ApiError::field("n", format!("{} answers are asked for, at most {most} are allowed", api.total())));
    }
    check_tokens(app, &api)?;
    let mut stop_ids = api.stop_token_ids.clone();
    if !api.ignores_eos {
        stop_ids.extend_from_slice(app.text.stop_ids());
    }
    let stop_ids: Arc<[u32]> = stop_ids.into();
    let (mut requests, mut usage) = (Vec::new(), Usage::default());
    for prompt in &api.prompts {
        let ids = tokens(app, form, prompt, api.thinks)?;
        let marks = app.reasoning.filter(|_| form == Form::Chat);
        let text = TextOptions {
            tokenizer: app.text.tokenizer().clone(),
            stop: api.stop.clone(),
            reasoning: marks.map(|marks| Reasoning { marks, is_open: app.text.opens_reasoning(&ids, marks) }),
        };
        let room = app.context.saturating_sub(ids.len());
        let new = match (api.max_tokens, form) {
            (Some(tokens), _) => tokens,
            (None, Form::Chat) => room.max(1),
            (None, Form::Text | Form::Simple) => DEFAULT_TOKENS.min(room.max(1)),
        };
        if new > room {
            return Err(too_long(form, ids.len(), new, app.context));
        }
        usage.prompt += ids.len();
        for _ in 0..api.choices {
            let number = requests.len() as u64;
            requests.push(Request {
                id: app.next_id.fetch_add(1, Ordering::Relaxed),
                prompt: ids.clone(),
                sampling: api.sampling,
                seed: api.seed.map_or_else(random_seed, |seed| derived_seed(seed, number)),
                max_new_tokens: new,
                stop_ids: stop_ids.clone(),
                confidence_threshold: app.threshold,
                options: RequestOptions {
                    adjustments: api.adjustments.clone(),
                    text: Some(text.clone()),
                    logprobs: api.logprobs,
                    is_reproducible: api.seed.is_some() && !api.sampling.is_greedy(),
                },
            });
        }
    }
    Ok(Accepted { api, requests, usage })
}

fn check_tokens(app: &App, api: &ApiRequest) -> Result<(), ApiError> {
    if let Some((token, _)) = api.adjustments.logit_bias.iter().find(|(token, _)| *token as usize >= app.vocab_size) {
        return Err(unknown_token("logit_bias", *token, app.vocab_size));
    }
    api.adjustments.validate(app.vocab_size).map_err(|error| {
        let field = if let SpeculateError::Parameter { field, .. } = error { field } else { "logit_bias" };
        ApiError::field(field, error.to_string())
    })?;
    match api.stop_token_ids.iter().find(|&&token| token as usize >= app.vocab_size) {
        Some(token) => Err(unknown_token("stop_token_ids", *token, app.vocab_size)),
        None => Ok(()),
    }
}

fn unknown_token(field: &str, token: u32, vocab_size: usize) -> ApiError {
    ApiError::field(field, format!("`{field}` has token {token}, which is outside the vocabulary of {vocab_size}"))
}

/// The tokens of a prompt; an empty text is the begin-of-text token, where the model has one. A text that cannot fit is
/// refused before it is encoded.
fn tokens(app: &App, form: Form, prompt: &Prompt, thinks: Option<bool>) -> Result<Vec<u32>, ApiError> {
    let refused = |field: &str, error: deepspec_datasets::Error| {
        let hint = error.hint().map_or_else(String::new, |hint| format!("; {hint}"));
        ApiError::field(field, format!("{error}{hint}"))
    };
    let fits = |fewest: usize| if fewest < app.context { Ok(()) } else { Err(far_too_long(form, fewest, app.context)) };
    let ids = match prompt {
        Prompt::Chat(messages) => {
            let renderer = match thinks {
                Some(_) => &app.text.renderer.clone().with_thinking(thinks),
                None => &app.text.renderer,
            };
            let text = renderer.prompt_text(messages, None).map_err(|error| refused("messages", error))?;
            fits(text.fewest_tokens())?;
            text.encode().map_err(|error| refused("messages", error))?
        }
        Prompt::Text(text) => {
            fits(app.text.tokenizer().fewest_tokens(text))?;
            app.text.tokenizer().encode_raw(text).map_err(|error| refused("prompt", error))?
        }
        Prompt::Tokens(ids) => {
            fits(ids.len())?;
            match ids.iter().find(|&&token| token as usize >= app.vocab_size) {
                Some(token) => return Err(unknown_token("prompt", *token, app.vocab_size)),
                None => ids.clone(),
            }
        }
    };
    match (ids.is_empty(), app.text.bos) {
        (false, _) => Ok(ids),
        (true, Some(bos)) => Ok(vec![bos]),
        (true, None) => Err(ApiError::field("prompt", "`prompt` has no tokens")),
    }
}

/// A seed that nobody knows in advance.
fn random_seed() -> u64 {
    RandomState::new().hash_one(0_u8)
}
