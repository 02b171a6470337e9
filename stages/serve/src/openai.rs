//! The requests of the API, read and checked: what is to be generated, how, and in which form it is to be answered.
//!
//! Fields that change an answer are honoured or refused. Those in [`IGNORED`] do not change one.

use std::ops::Bound;
use std::sync::Arc;

use axum::http::StatusCode;
use deepspec_datasets::conversation::{Message, Role};
use deepspec_models::speculate::{Adjustments, SamplingParams};
use serde_json::Value;

use super::api_error::ApiError;
use super::fields::{Fields, Read, integer, number, wrong_type};

/// Fields of clients that have no effect on an answer.
const IGNORED: &[&str] = &[
    "metadata",
    "parallel_tool_calls",
    "prediction",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
];
/// Most texts that end an answer.
const MOST_STOPS: usize = 16;
/// Most answers to one prompt.
const MOST_CHOICES: i64 = 128;
/// Most likeliest tokens reported.
const MOST_LOGPROBS: i64 = 20;

/// What the prompt is.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Prompt {
    /// A conversation, for the chat template.
    Chat(Vec<Message>),
    /// A text; texts of control tokens in it are those tokens.
    Text(String),
    /// Tokens.
    Tokens(Vec<u32>),
}

/// Form of the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Text,
    /// `/generate`
    Simple,
}

/// A request, checked as far as that is possible without the model.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct ApiRequest {
    pub(super) form: Form,
    pub(super) model: Option<String>,
    pub(super) prompts: Vec<Prompt>,
    /// Answers to each prompt.
    pub(super) choices: usize,
    pub(super) sampling: SamplingParams,
    pub(super) adjustments: Adjustments,
    /// Given by the client: the answer can be asked for again.
    pub(super) seed: Option<u64>,
    pub(super) max_tokens: Option<usize>,
    pub(super) stop: Arc<[String]>,
    /// What the chat template is told of thinking; `None` leaves it to the server.
    pub(super) thinks: Option<bool>,
    pub(super) stop_token_ids: Vec<u32>,
    pub(super) ignores_eos: bool,
    pub(super) logprobs: Option<usize>,
    pub(super) streams: bool,
    pub(super) includes_usage: bool,
    /// Ours: tell of each round what was drafted and what became of it.
    pub(super) returns_rounds: bool,
}

impl ApiRequest {
    /// Reads a body.
    ///
    /// # Errors
    /// A refusal that names the field.
    pub(super) fn parse(form: Form, body: &[u8]) -> Read<Self> {
        let mut fields = Fields::parse(body)?;
        let prompts = match form {
            Form::Chat => vec![Prompt::Chat(messages(fields.take("messages"))?)],
            Form::Text | Form::Simple => prompts(fields.take("prompt"))?,
        };
        refuse_unsupported(form, &mut fields)?;
        let streams = fields.flag("stream")?.unwrap_or(false);
        let request = Self {
            form,
            model: fields.text("model")?,
            choices: choices(form, &mut fields)?,
            sampling: SamplingParams {
                temperature: fields.number("temperature", 0.0..=2.0)?.unwrap_or(1.0),
                top_k: fields.integer("top_k", -1..=i64::from(i32::MAX))?.unwrap_or(0).max(0) as usize,
                top_p: fields.number("top_p", (Bound::Excluded(0.0), Bound::Included(1.0)))?.unwrap_or(1.0),
                min_p: fields.number("min_p", 0.0..=1.0)?.unwrap_or(0.0),
            },
            adjustments: Adjustments {
                presence_penalty: fields.number("presence_penalty", -2.0..=2.0)?.unwrap_or(0.0) as f32,
                frequency_penalty: fields.number("frequency_penalty", -2.0..=2.0)?.unwrap_or(0.0) as f32,
                repetition_penalty: fields.number("repetition_penalty", 0.01..=100.0)?.unwrap_or(1.0) as f32,
                logit_bias: logit_bias(fields.take("logit_bias"))?,
            },
            seed: fields.integer("seed", i64::MIN..=i64::MAX)?.map(|seed| seed as u64),
            max_tokens: max_tokens(form, &mut fields)?,
            stop: fields.texts("stop", MOST_STOPS)?.into(),
            thinks: if form == Form::Chat { enable_thinking(&mut fields)? } else { None },
            stop_token_ids: match fields.take("stop_token_ids") {
                None => Vec::new(),
                Some(value) => token_ids("stop_token_ids", value)?,
            },
            ignores_eos: fields.flag("ignore_eos")?.unwrap_or(false),
            logprobs: logprobs(form, &mut fields)?,
            includes_usage: includes_usage(&mut fields, streams)?,
            streams,
            returns_rounds: fields.flag("return_rounds")?.unwrap_or(false),
            prompts,
        };
        fields.finish(IGNORED)?;
        Ok(request)
    }

    /// Answers in all.
    pub(super) fn total(&self) -> usize {
        self.prompts.len() * self.choices
    }
}

fn messages(value: Option<Value>) -> Read<Vec<Message>> {
    let items = match value {
        Some(Value::Array(items)) => items,
        Some(other) => return Err(wrong_type("messages", "a list of messages", &other)),
        None => return Err(missing("messages")),
    };
    if items.is_empty() {
        return Err(ApiError::field("messages", "`messages` is empty, expected at least one message"));
    }
    items.into_iter().enumerate().map(|(i, item)| message(&format!("messages.{i}"), item)).collect()
}

fn message(path: &str, value: Value) -> Read<Message> {
    let mut fields = Fields::of(path, value)?;
    let name = format!("{path}.role");
    let role = match fields.text("role")?.as_deref() {
        Some("system" | "developer") => Role::System,
        Some("user") => Role::User,
        Some("assistant") => Role::Assistant,
        Some("tool") => Role::Tool,
        Some(other) => {
            let message = format!("`{name}` is `{other}`, expected system, developer, user, assistant or tool");
            return Err(ApiError::field(&name, message));
        }
        None => return Err(missing(&name)),
    };
    let tool_calls = match fields.take("tool_calls") {
        Some(Value::Array(calls)) if !calls.is_empty() && role == Role::Assistant => Some(Value::Array(calls)),
        None => None,
        Some(Value::Array(calls)) if calls.is_empty() => None,
        Some(other) => {
            return Err(wrong_type(&format!("{path}.tool_calls"), "a list of calls of an assistant", &other));
        }
    };
    let path_of_content = format!("{path}.content");
    let content = match fields.take("content") {
        Some(value) => content(&path_of_content, value)?,
        None if tool_calls.is_some() => String::new(),
        None => return Err(missing(&path_of_content)),
    };
    let mut message = Message { tool_calls, ..Message::new(role, content) };
    message.name = fields.text("name")?;
    message.tool_call_id = fields.text("tool_call_id")?;
    message.reasoning_content = fields.text("reasoning_content")?;
    // What clients send back of an earlier answer.
    fields.finish(&["annotations", "audio", "function_call", "refusal"])?;
    Ok(message)
}

/// A text, or parts of type text, which are joined.
fn content(path: &str, value: Value) -> Read<String> {
    let parts = match value {
        Value::String(text) => return Ok(text),
        Value::Array(parts) => parts,
        other => return Err(wrong_type(path, "a string or a list of text parts", &other)),
    };
    let mut text = String::new();
    for (i, part) in parts.into_iter().enumerate() {
        let path = format!("{path}.{i}");
        let mut fields = Fields::of(&path, part)?;
        let kind = fields.text("type")?;
        let path_of_type = format!("{path}.type");
        match kind.as_deref() {
            Some("text") => {}
            Some(other) => {
                let message = format!("`{path_of_type}` is `{other}`, expected `text`: this model reads nothing else");
                return Err(ApiError::field(&path_of_type, message));
            }
            None => return Err(missing(&path_of_type)),
        }
        text.push_str(&fields.text("text")?.ok_or_else(|| missing(&format!("{path}.text")))?);
        fields.finish(&["cache_control"])?;
    }
    Ok(text)
}

fn prompts(value: Option<Value>) -> Read<Vec<Prompt>> {
    let items = match value {
        None => return Err(missing("prompt")),
        Some(Value::String(text)) => return Ok(vec![Prompt::Text(text)]),
        Some(Value::Array(items)) => items,
        Some(other) => return Err(wrong_type("prompt", "a string, a list of strings, or tokens", &other)),
    };
    match items.first() {
        None => Err(ApiError::field("prompt", "`prompt` is an empty list")),
        Some(Value::Number(_)) => Ok(vec![Prompt::Tokens(token_ids("prompt", Value::Array(items))?)]),
        Some(_) => {
            let prompt = |(i, item)| match item {
                Value::String(text) => Ok(Prompt::Text(text)),
                other => Ok(Prompt::Tokens(token_ids(&format!("prompt.{i}"), other)?)),
            };
            items.into_iter().enumerate().map(prompt).collect()
        }
    }
}

fn token_ids(path: &str, value: Value) -> Read<Vec<u32>> {
    let Value::Array(items) = value else { return Err(wrong_type(path, "a list of tokens", &value)) };
    let token = |(i, item)| Ok(integer(&format!("{path}.{i}"), item, 0..=i64::from(u32::MAX))? as u32);
    items.iter().enumerate().map(token).collect()
}

fn logit_bias(value: Option<Value>) -> Read<Vec<(u32, f32)>> {
    let entries = match value {
        None => return Ok(Vec::new()),
        Some(Value::Object(entries)) => entries,
        Some(other) => return Err(wrong_type("logit_bias", "an object of tokens and numbers", &other)),
    };
    let entry = |(token, bias): (&String, &Value)| {
        let path = format!("logit_bias.{token}");
        let token =
            token.parse().map_err(|_| ApiError::field(&path, format!("the key of `{path}` is not a token id")))?;
        Ok((token, number(&path, bias, -100.0..=100.0)? as f32))
    };
    entries.iter().map(entry).collect()
}

fn choices(form: Form, fields: &mut Fields) -> Read<usize> {
    let choices = fields.integer("n", 1..=MOST_CHOICES)?.unwrap_or(1);
    if form != Form::Chat {
        let best_of = fields.integer("best_of", 1..=MOST_CHOICES)?.unwrap_or(choices);
        if best_of != choices {
            let message = format!("`best_of` is {best_of} and `n` {choices}: all answers are returned, none is chosen");
            return Err(ApiError::field("best_of", message));
        }
    }
    Ok(choices as usize)
}

fn max_tokens(form: Form, fields: &mut Fields) -> Read<Option<usize>> {
    let range = 1..=i64::from(u32::MAX);
    let old = fields.integer("max_tokens", range.clone())?;
    let new = if form == Form::Chat { fields.integer("max_completion_tokens", range)? } else { None };
    match (old, new) {
        (Some(old), Some(new)) if old != new => {
            let message = format!("`max_tokens` is {old} and `max_completion_tokens` {new}: give one of them");
            Err(ApiError::field("max_tokens", message))
        }
        (old, new) => Ok(new.or(old).map(|tokens| tokens as usize)),
    }
}

fn logprobs(form: Form, fields: &mut Fields) -> Read<Option<usize>> {
    if form != Form::Chat {
        return Ok(fields.integer("logprobs", 0..=MOST_LOGPROBS)?.map(|top| top as usize));
    }
    let wanted = fields.flag("logprobs")?.unwrap_or(false);
    let top = fields.integer("top_logprobs", 0..=MOST_LOGPROBS)?;
    match (wanted, top) {
        (true, top) => Ok(Some(top.unwrap_or(0) as usize)),
        (false, Some(top)) if top > 0 => {
            Err(ApiError::field("top_logprobs", "`top_logprobs` is given without `logprobs: true`"))
        }
        (false, _) => Ok(None),
    }
}

/// The only argument that the chat template takes from a request.
fn enable_thinking(fields: &mut Fields) -> Read<Option<bool>> {
    let Some(value) = fields.take("chat_template_kwargs") else { return Ok(None) };
    let mut arguments = Fields::of("chat_template_kwargs", value)?;
    let thinks = arguments.flag("enable_thinking")?;
    arguments.finish(&[])?;
    Ok(thinks)
}

fn includes_usage(fields: &mut Fields, streams: bool) -> Read<bool> {
    let Some(value) = fields.take("stream_options") else { return Ok(false) };
    if !streams {
        return Err(ApiError::field("stream_options", "`stream_options` is given without `stream: true`"));
    }
    let mut options = Fields::of("stream_options", value)?;
    let includes = options.flag("include_usage")?.unwrap_or(false);
    options.finish(&["include_obfuscation"])?;
    Ok(includes)
}

/// A field, and when it asks for nothing.
type Rule<'a> = (&'a str, &'a dyn Fn(&Value) -> bool);

/// Refuses what this server does not do, unless the field says that it is not wanted.
fn refuse_unsupported(form: Form, fields: &mut Fields) -> Read<()> {
    let empty_list = |value: &Value| value.as_array().is_some_and(Vec::is_empty);
    let is_word = |word: &'static str| move |value: &Value| value.as_str() == Some(word);
    let text_format = |value: &Value| value.get("type").and_then(Value::as_str) == Some("text");
    let text_only = |value: &Value| value.as_array().is_some_and(|list| list.len() == 1 && list[0] == "text");
    let off = |value: &Value| value == &Value::Bool(false);
    let never = |_: &Value| false;
    let of_chat: [Rule<'_>; 8] = [
        ("tools", &empty_list),
        ("tool_choice", &is_word("none")),
        ("functions", &empty_list),
        ("function_call", &is_word("none")),
        ("response_format", &text_format),
        ("modalities", &text_only),
        ("audio", &never),
        ("web_search_options", &never),
    ];
    let of_text: [Rule<'_>; 2] = [("echo", &off), ("suffix", &is_word(""))];
    let rules: &[Rule<'_>] = if form == Form::Chat { &of_chat } else { &of_text };
    for (name, is_harmless) in rules {
        if let Some(value) = fields.take(name)
            && !is_harmless(&value)
        {
            let message = format!("`{name}` is not supported");
            return Err(ApiError::field(name, message).with_code("unsupported_parameter"));
        }
    }
    Ok(())
}

fn missing(name: &str) -> ApiError {
    ApiError::field(name, format!("`{name}` is missing")).with_code("missing_required_parameter")
}

/// Refuses a prompt that leaves no room in the context.
pub(super) fn too_long(form: Form, prompt: usize, new: usize, context: usize) -> ApiError {
    let field = if form == Form::Chat { "messages" } else { "prompt" };
    let message = format!(
        "this model's maximum context length is {context} tokens; {prompt} of the prompt and {new} to generate are {}",
        prompt + new
    );
    ApiError::field(field, message).with_status(StatusCode::BAD_REQUEST).with_code("context_length_exceeded")
}

/// Refuses a prompt that has too many tokens whatever they are.
pub(super) fn far_too_long(form: Form, fewest: usize, context: usize) -> ApiError {
    let field = if form == Form::Chat { "messages" } else { "prompt" };
    let message = format!("this model's maximum context length is {context} tokens; the prompt has at least {fewest}");
    ApiError::field(field, message).with_code("context_length_exceeded")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chat(rest: &str) -> Read<ApiRequest> {
        let body = format!(r#"{{"messages": [{{"role": "user", "content": "hi"}}]{rest}}}"#);
        ApiRequest::parse(Form::Chat, body.as_bytes())
    }

    fn param(result: Read<ApiRequest>) -> String {
        let error = result.unwrap_err();
        assert_eq!(error.status, StatusCode::BAD_REQUEST);
        error.to_json()["error"]["param"].as_str().unwrap_or("none").to_owned()
    }

    #[test]
    fn defaults_are_those_of_the_api() {
        let request = chat("").unwrap();
        assert_eq!(request.prompts, [Prompt::Chat(vec![Message::new(Role::User, "hi")])]);
        assert_eq!(request.sampling, SamplingParams::default());
        assert!(request.adjustments.is_none() && request.seed.is_none() && request.max_tokens.is_none());
        assert_eq!((request.choices, request.streams, request.logprobs), (1, false, None));
    }

    #[test]
    fn every_field_is_read() {
        let request = chat(
            r#", "temperature": 0, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": -3, "n": 2, "stop": ["a", "b"],
            "max_completion_tokens": 7, "presence_penalty": 1, "frequency_penalty": -2, "repetition_penalty": 1.1,
            "logit_bias": {"5": -100}, "logprobs": true, "top_logprobs": 3, "stream": true, "model": "m",
            "stream_options": {"include_usage": true}, "user": "me", "tools": [], "response_format": {"type": "text"},
            "return_rounds": true, "ignore_eos": true, "chat_template_kwargs": {"enable_thinking": true}, "stop_token_ids": [9], "metadata": {"a": "b"}"#,
        )
        .unwrap();
        let sampling = SamplingParams { temperature: 0.0, top_k: 5, top_p: 0.9, min_p: 0.1 };
        assert_eq!((request.sampling, request.seed, request.choices), (sampling, Some(-3_i64 as u64), 2));
        assert_eq!((request.stop.len(), request.max_tokens, request.logprobs), (2, Some(7), Some(3)));
        assert_eq!(request.adjustments.logit_bias, [(5, -100.0)]);
        assert_eq!(request.thinks, Some(true));
        assert!(request.streams && request.includes_usage && request.returns_rounds && request.ignores_eos);
    }

    #[test]
    fn what_is_wrong_is_refused_by_name() {
        for (rest, name) in [
            (r#", "temperature": "hot""#, "temperature"),
            (r#", "temperature": 3"#, "temperature"),
            (r#", "top_p": 0"#, "top_p"),
            (r#", "n": 0"#, "n"),
            (r#", "max_tokens": -1"#, "max_tokens"),
            (r#", "max_tokens": 1, "max_completion_tokens": 2"#, "max_tokens"),
            (r#", "stop": [1]"#, "stop.0"),
            (r#", "stop": """#, "stop"),
            (r#", "logit_bias": {"x": 1}"#, "logit_bias.x"),
            (r#", "logit_bias": {"1": 101}"#, "logit_bias.1"),
            (r#", "top_logprobs": 3"#, "top_logprobs"),
            (r#", "stream_options": {}"#, "stream_options"),
            (r#", "tools": [{}]"#, "tools"),
            (r#", "response_format": {"type": "json_object"}"#, "response_format"),
            (r#", "tempratur": 1"#, "tempratur"),
            (r#", "seed": 1.5"#, "seed"),
            (r#", "stream": 1"#, "stream"),
            (r#", "chat_template_kwargs": {"enable_thinking": 1}"#, "chat_template_kwargs.enable_thinking"),
            (r#", "chat_template_kwargs": {"x": 1}"#, "chat_template_kwargs.x"),
        ] {
            assert_eq!(param(chat(rest)), name, "{rest}");
        }
        for (body, name) in [
            ("{}", "messages"),
            (r#"{"messages": "hi"}"#, "messages"),
            (r#"{"messages": []}"#, "messages"),
            (r#"{"messages": [1]}"#, "messages.0"),
            (r#"{"messages": [{"role": "robot", "content": ""}]}"#, "messages.0.role"),
            (r#"{"messages": [{"role": "user"}]}"#, "messages.0.content"),
            (r#"{"messages": [{"role": "assistant", "tool_calls": []}]}"#, "messages.0.content"),
            (r#"{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}"#, "messages.0.content.0.type"),
            (r#"{"messages": [{"role": "user", "content": "", "x": 1}]}"#, "messages.0.x"),
        ] {
            assert_eq!(param(ApiRequest::parse(Form::Chat, body.as_bytes())), name, "{body}");
        }
    }

    #[test]
    fn prompts_come_in_four_forms() {
        let read = |prompt: &str| {
            ApiRequest::parse(Form::Text, format!(r#"{{"prompt": {prompt}}}"#).as_bytes()).map(|r| r.prompts)
        };
        assert_eq!(read(r#""a""#).unwrap(), [Prompt::Text("a".into())]);
        assert_eq!(read(r#"["a", "b"]"#).unwrap(), [Prompt::Text("a".into()), Prompt::Text("b".into())]);
        assert_eq!(read("[1, 2]").unwrap(), [Prompt::Tokens(vec![1, 2])]);
        assert_eq!(read("[[1], [2]]").unwrap(), [Prompt::Tokens(vec![1]), Prompt::Tokens(vec![2])]);
        for wrong in ["1", "[]", "[-1]", "[1, \"a\"]", "[[1.5]]", "{}"] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
        let best_of = ApiRequest::parse(Form::Text, br#"{"prompt": "a", "best_of": 3}"#);
        assert_eq!(param(best_of), "best_of");
    }
}
