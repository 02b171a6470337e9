//! The shapes in which rows come, each turned into a plain list of turns.

use serde_json::{Map, Value, json};

use super::reject::{RejectReason, kind, quoted};
use super::{Message, Repair, Role};

/// A message with the path that errors name it by.
pub(super) struct Turn {
    pub(super) field: String,
    pub(super) message: Message,
}

/// The turns of a row as written, not yet put in order.
pub(super) struct Shaped {
    pub(super) turns: Vec<Turn>,
    /// True where user turns in a row are separate questions rather than one that was sent in pieces.
    pub(super) separate_turns: bool,
}

type Row = Map<String, Value>;

/// Detects the shape of a row and reads its turns.
pub(super) fn read(row: &Row, repairs: &mut Vec<Repair>) -> Result<Shaped, RejectReason> {
    let present = |key: &str| row.get(key).filter(|value| !value.is_null());
    let together = |turns| Shaped { turns, separate_turns: false };
    for key in ["conversations", "messages"] {
        if let Some(list) = present(key) {
            return messages(list, key, repairs).map(together);
        }
    }
    if let Some(list) = row.get("body").and_then(|body| body.get("messages")) {
        return messages(list, "body.messages", repairs).map(together);
    }
    if let Some(list) = present("turns") {
        return eval_turns(list).map(|turns| Shaped { turns, separate_turns: true });
    }
    if present("instruction").is_some() {
        return alpaca(row, repairs).map(together);
    }
    for key in ["prompt", "question"] {
        if present(key).is_some() {
            return prompt(row, key).map(together);
        }
    }
    for key in ["conversations", "messages", "turns", "instruction", "prompt", "question"] {
        if row.contains_key(key) {
            return Err(RejectReason::MissingField { field: key.to_owned() });
        }
    }
    let keys: Vec<String> = row.keys().take(8).map(|key| quoted(key)).collect();
    Err(RejectReason::UnknownShape { keys: format!("[{}]", keys.join(", ")) })
}

/// The row's id exactly as spelled; strings without their quotes.
pub(super) fn exact_id(id: Option<&Value>) -> String {
    match id {
        None | Some(Value::Null) => String::new(),
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
    }
}

/// A field of the row, or of the request in a batch file.
fn of_request<'r>(row: &'r Row, key: &str) -> Option<&'r Value> {
    row.get(key).or_else(|| row.get("body").and_then(|body| body.get(key)))
}

/// Refuses fields of a request that would change what the model is asked and that no stage renders.
pub(super) fn check_rendered(row: &Row) -> Result<(), RejectReason> {
    let is_request = ["conversations", "messages", "body"].iter().any(|key| row.contains_key(*key));
    let is_given = |value: &Value| match value {
        Value::Null => false,
        Value::Array(list) => !list.is_empty(),
        Value::Object(map) => !map.is_empty(),
        Value::Bool(_) | Value::Number(_) | Value::String(_) => true,
    };
    let given = ["documents", "chat_template_kwargs"]
        .into_iter()
        .find(|field| is_request && of_request(row, field).is_some_and(is_given));
    given.map_or(Ok(()), |field| Err(RejectReason::NotRendered { field }))
}

/// The tool definitions of a row: a list, or a string that holds one; `functions` in the old form.
pub(super) fn tools(row: &Row, repairs: &mut Vec<Repair>) -> Result<Option<Value>, RejectReason> {
    let found = of_request(row, "tools");
    if found.is_none_or(Value::is_null)
        && let Some(Value::Array(functions)) = of_request(row, "functions")
        && !functions.is_empty()
    {
        repairs.push(Repair::LegacyFunctions);
        return Ok(Some(functions.iter().map(|one| json!({"type": "function", "function": one})).collect()));
    }
    let parsed = match found {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::String(text)) if text.trim().is_empty() => return Ok(None),
        Some(Value::String(text)) => serde_json::from_str(text).map_err(|_| RejectReason::InvalidToolUse {
            field: "tools".to_owned(),
            problem: "text that is not JSON",
        })?,
        Some(other) => other.clone(),
    };
    match &parsed {
        Value::Array(list) if list.is_empty() => Ok(None),
        Value::Array(_) => Ok(Some(parsed)),
        other => Err(wrong_type("tools", "a list", other)),
    }
}

fn wrong_type(field: impl Into<String>, expected: &'static str, found: &Value) -> RejectReason {
    RejectReason::WrongType { field: field.into(), expected, found: kind(found) }
}

fn list<'v>(value: &'v Value, field: &str) -> Result<&'v [Value], RejectReason> {
    value.as_array().map(Vec::as_slice).ok_or_else(|| wrong_type(field, "a list", value))
}

fn text<'v>(value: &'v Value, field: &str) -> Result<&'v str, RejectReason> {
    value.as_str().ok_or_else(|| wrong_type(field, "text", value))
}

/// A text that may be missing or null.
fn optional_text(row: &Row, key: &str, field: &str) -> Result<Option<String>, RejectReason> {
    match row.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => text(value, &format!("{field}{key}")).map(|text| Some(text.to_owned())),
    }
}

fn turn(field: impl Into<String>, role: Role, content: impl Into<String>) -> Turn {
    Turn { field: field.into(), message: Message::new(role, content) }
}

fn eval_turns(value: &Value) -> Result<Vec<Turn>, RejectReason> {
    let read = |(index, value)| {
        let field = format!("turns[{index}]");
        text(value, &field).map(|text| turn(&field, Role::User, text))
    };
    list(value, "turns")?.iter().enumerate().map(read).collect()
}

fn alpaca(row: &Row, repairs: &mut Vec<Repair>) -> Result<Vec<Turn>, RejectReason> {
    let mut turns = Vec::new();
    if let Some(system) = optional_text(row, "system", "")?.filter(|text| !text.is_empty()) {
        turns.push(turn("system", Role::System, system));
    }
    if let Some(history) = row.get("history").filter(|history| !history.is_null()) {
        for (index, pair) in list(history, "history")?.iter().enumerate() {
            let field = format!("history[{index}]");
            let [question, answer] = list(pair, &field)? else {
                return Err(wrong_type(field, "a list of question and answer", pair));
            };
            turns.push(turn(&field, Role::User, text(question, &field)?));
            turns.push(turn(&field, Role::Assistant, text(answer, &field)?));
        }
    }
    let instruction = optional_text(row, "instruction", "")?.unwrap_or_default();
    let input = optional_text(row, "input", "")?.filter(|input| !matches!(input.trim(), "" | "<noinput>"));
    let question = match input {
        None => instruction,
        Some(input) if instruction.trim().is_empty() => {
            repairs.push(Repair::EmptyInstruction);
            input
        }
        Some(input) => format!("{instruction}\n\n{input}"),
    };
    turns.push(turn("instruction", Role::User, question));
    if let Some(output) = optional_text(row, "output", "")? {
        turns.push(turn("output", Role::Assistant, output));
    }
    Ok(turns)
}

fn prompt(row: &Row, key: &str) -> Result<Vec<Turn>, RejectReason> {
    let question = optional_text(row, key, "")?.unwrap_or_default();
    let mut turns = vec![turn(key, Role::User, question)];
    for key in ["completion", "response"] {
        if let Some(answer) = optional_text(row, key, "")? {
            turns.push(turn(key, Role::Assistant, answer));
            break;
        }
    }
    Ok(turns)
}

fn messages(value: &Value, key: &str, repairs: &mut Vec<Repair>) -> Result<Vec<Turn>, RejectReason> {
    let mut turns = Vec::new();
    for (index, value) in list(value, key)?.iter().enumerate() {
        let field = format!("{key}[{index}]");
        let Value::Object(row) = value else {
            return Err(wrong_type(field, "a message object", value));
        };
        turns.push(message(row, field, repairs)?);
    }
    Ok(turns)
}

/// One message in either spelling: `role`/`content` or `from`/`value`.
fn message(row: &Row, field: String, repairs: &mut Vec<Repair>) -> Result<Turn, RejectReason> {
    let (role_key, content_key) =
        if row.contains_key("from") && !row.contains_key("role") { ("from", "value") } else { ("role", "content") };
    let role_field = format!("{field}.{role_key}");
    let name = match row.get(role_key) {
        None | Some(Value::Null) => return Err(RejectReason::MissingField { field: role_field }),
        Some(value) => text(value, &role_field)?,
    };
    let (role, is_call) = role(name, role_field, repairs)?;
    let content_field = format!("{field}.{content_key}");
    let content = match row.get(content_key) {
        None | Some(Value::Null) if role == Role::Assistant => String::new(),
        None => return Err(RejectReason::MissingField { field: content_field }),
        Some(value) => content(value, &content_field)?,
    };
    let prefix = format!("{field}.");
    let mut message = Message::new(role, content);
    message.reasoning_content = optional_text(row, "reasoning_content", &prefix)?.filter(|text| !text.is_empty());
    message.name = optional_text(row, "name", &prefix)?;
    message.tool_call_id = optional_text(row, "tool_call_id", &prefix)?;
    let old_call = row.get("function_call").filter(|call| !call.is_null());
    match row.get("tool_calls") {
        Some(Value::Array(calls)) if !calls.is_empty() => message.tool_calls = Some(Value::Array(calls.clone())),
        None | Some(Value::Null | Value::Array(_)) => {
            if let Some(call) = old_call {
                repairs.push(Repair::LegacyFunctionCall);
                message.tool_calls = Some(json!([{"type": "function", "function": call}]));
            }
        }
        Some(other) => return Err(wrong_type(format!("{prefix}tool_calls"), "a list", other)),
    }
    if is_call {
        let call: Value = serde_json::from_str(&message.content).map_err(|_| RejectReason::InvalidToolUse {
            field: content_field,
            problem: "a function call that is not JSON",
        })?;
        message.tool_calls = Some(json!([{"type": "function", "function": call}]));
        message.content.clear();
    }
    Ok(Turn { field, message })
}

/// Maps a role name; the flag says that the content is a function call.
fn role(name: &str, field: String, repairs: &mut Vec<Repair>) -> Result<(Role, bool), RejectReason> {
    let lower = name.to_ascii_lowercase();
    let (role, is_call) = match lower.as_str() {
        "system" => (Role::System, false),
        "developer" => {
            repairs.push(Repair::DeveloperAsSystem);
            (Role::System, false)
        }
        "user" | "human" => (Role::User, false),
        "assistant" | "gpt" | "chatgpt" | "bing" | "model" => (Role::Assistant, false),
        "function_call" => (Role::Assistant, true),
        "tool" | "function" | "observation" => (Role::Tool, false),
        _ => return Err(RejectReason::UnknownRole { field, role: quoted(name) }),
    };
    if lower != name {
        repairs.push(Repair::RoleInCapitals);
    }
    Ok((role, is_call))
}

/// Text, or a list of text parts joined as they are.
fn content(value: &Value, field: &str) -> Result<String, RejectReason> {
    let Value::Array(parts) = value else {
        return text(value, field).map(str::to_owned);
    };
    let mut joined = String::new();
    for (index, part) in parts.iter().enumerate() {
        let field = format!("{field}[{index}]");
        let Value::Object(part) = part else {
            return Err(wrong_type(field, "a content part object", part));
        };
        match part.get("type").and_then(Value::as_str) {
            Some("text" | "input_text" | "output_text") => {}
            other => {
                return Err(RejectReason::UnsupportedPart { field, kind: quoted(other.unwrap_or("(none)")) });
            }
        }
        let field = format!("{field}.text");
        match part.get("text") {
            None => return Err(RejectReason::MissingField { field }),
            Some(value) => joined.push_str(text(value, &field)?),
        }
    }
    Ok(joined)
}
