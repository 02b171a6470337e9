//! How refusals of the API read: one request for each way of being wrong.

use super::api_error::ApiError;
use super::message_form::{NAME, PATH, faults, samples};
use super::openai::{ApiRequest, Form, far_too_long, too_long};

fn text(error: &ApiError) -> String {
    error.to_json()["error"]["message"].as_str().unwrap().to_owned()
}

/// A message that reads as the others do, and names the field that it blames.
fn check(error: &ApiError) {
    let message = text(error);
    assert!(faults(&message).is_empty(), "{:?}: {message}", faults(&message));
    if let Some(field) = error.to_json()["error"]["param"].as_str() {
        let is_of_prompt = ["prompt", "messages", "model", "n"].contains(&field);
        assert!(is_of_prompt || message.contains(&format!("`{field}`")), "`{field}` is not named: {message}");
    }
}

#[test]
fn every_refusal_of_the_server_reads_as_the_others_do() {
    for error in [
        ApiError::bad("there is nothing under this address"),
        ApiError::unknown_model("gpt-9", "tiny"),
        ApiError::unauthorized(),
        ApiError::overloaded(9, 1),
        ApiError::crowded(1 << 20, 1),
        ApiError::no_connection(),
        ApiError::stopping(),
        ApiError::internal("reading the request failed"),
        too_long(Form::Chat, 300, 5, 200),
        far_too_long(Form::Text, 300, 200),
    ] {
        check(&error);
    }
}

#[test]
fn every_refusal_of_a_field_reads_as_the_others_do() {
    let chats =
        ["{", "[1]", "{\"a\": \u{1}}", "{}", r#"{"messages": "hi"}"#, r#"{"messages": []}"#, r#"{"messages": [1]}"#];
    let messages = [
        r#"{"role": "robot", "content": ""}"#,
        r#"{"content": ""}"#,
        r#"{"role": "user"}"#,
        r#"{"role": "user", "content": 5}"#,
        r#"{"role": "user", "content": [5]}"#,
        r#"{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}"#,
        r#"{"role": "user", "content": [{"text": "a"}]}"#,
        r#"{"role": "user", "content": [{"type": "text"}]}"#,
        r#"{"role": "user", "content": "", "x": 1}"#,
        r#"{"role": "user", "content": "", "tool_calls": [{}]}"#,
    ];
    let fields = [
        r#""temperature": "hot""#,
        r#""temperature": 3"#,
        r#""top_p": 0"#,
        r#""n": 0"#,
        r#""n": 1.5"#,
        r#""max_tokens": -1"#,
        r#""max_tokens": 1, "max_completion_tokens": 2"#,
        r#""stop": [1]"#,
        r#""stop": """#,
        r#""stop": ["a","a","a","a","a","a","a","a","a","a","a","a","a","a","a","a","a"]"#,
        r#""logit_bias": {"x": 1}"#,
        r#""logit_bias": {"1": 101}"#,
        r#""logit_bias": [1]"#,
        r#""top_logprobs": 3"#,
        r#""stream_options": {}"#,
        r#""tools": [{}]"#,
        r#""response_format": {"type": "json_object"}"#,
        r#""tempratur": 1"#,
        r#""seed": 1.5"#,
        r#""stream": 1"#,
        r#""chat_template_kwargs": {"enable_thinking": 1}"#,
        r#""chat_template_kwargs": {"x": 1}"#,
        r#""model": 3"#,
        r#""stop_token_ids": 3"#,
        r#""stop_token_ids": [-1]"#,
        r#""stream": true, "stream_options": {"x": 1}"#,
    ];
    let prompts = ["1", "[]", "[-1]", "[1, \"a\"]", "[[1.5]]", "{}", "[true]"];
    let of_texts = [r#""best_of": 3"#, r#""echo": true"#, r#""suffix": "x""#, r#""logprobs": 99"#];
    let mut bodies: Vec<(Form, String)> = chats.iter().map(|body| (Form::Chat, (*body).to_owned())).collect();
    bodies.extend(messages.iter().map(|message| (Form::Chat, format!(r#"{{"messages": [{message}]}}"#))));
    let user = r#"{"role": "user", "content": "hi"}"#;
    bodies.extend(fields.iter().map(|field| (Form::Chat, format!(r#"{{"messages": [{user}], {field}}}"#))));
    bodies.extend(prompts.iter().map(|prompt| (Form::Text, format!(r#"{{"prompt": {prompt}}}"#))));
    bodies.extend(of_texts.iter().map(|field| (Form::Text, format!(r#"{{"prompt": "a", {field}}}"#))));
    bodies.push((Form::Simple, "{}".into()));
    for (form, body) in bodies {
        match ApiRequest::parse(form, body.as_bytes()) {
            Ok(_) => panic!("not refused: {body}"),
            Err(error) => check(&error),
        }
    }
}

#[test]
fn every_error_of_the_server_itself_reads_as_the_others_do() {
    use super::Error;

    super::message_form::check(samples! {Error:
        Error::Io(_) => (std::io::Error::other(format!("failed to open `{PATH}`")).into(), false),
        Error::Input(_) => (Error::Input(format!("cannot listen on `{NAME}`: it is taken")), false),
        Error::ApiKey { .. } => (super::ApiKey::new("").unwrap_err(), true),
        Error::Memory { .. } =>
            (Error::Memory { what: "caches".into(), needed: 9, available: 8, hint: "give less".into() }, true),
        Error::Invariant(_) => (Error::Invariant("the thread that serves connections panicked".into()), false),
    });
}
