//! Breaks the text of control tokens inside content, and mends it after rendering.

use std::ops::Range;

use serde_json::Value;

use crate::conversation::Message;
use crate::error::Error;
use crate::tokenizer::Tokenizer;

/// A conversation whose control texts are broken: the sentinel stands after the first character of each.
pub(super) struct Marked {
    sentinel: char,
    pub(super) messages: Vec<Message>,
    pub(super) tools: Option<Value>,
}

/// Breaks all control texts; `None` if the conversation holds none.
pub(super) fn mark(
    tokenizer: &Tokenizer,
    template: &str,
    messages: &[Message],
    tools: Option<&Value>,
) -> Result<Option<Marked>, Error> {
    let mut strings = Vec::new();
    for message in messages {
        message_strings(message, &mut strings);
    }
    if let Some(tools) = tools {
        value_strings(tools, &mut strings);
    }
    if !strings.iter().any(|text| !breaks(tokenizer, text).is_empty()) {
        return Ok(None);
    }
    let specials = tokenizer.special_tokens().iter().map(|token| token.text.as_str());
    let mut texts: Vec<&str> = specials.chain([template]).collect();
    texts.extend(strings);
    let sentinel =
        noncharacters().find(|c| !texts.iter().any(|text| text.contains(*c))).ok_or(Error::NoSentinelLeft)?;
    let marked = |text: &str| insert(tokenizer, text, sentinel);
    Ok(Some(Marked {
        sentinel,
        messages: messages.iter().map(|message| map_message(message, &marked)).collect(),
        tools: tools.map(|tools| map_value(tools, &marked)),
    }))
}

impl Marked {
    /// Takes the sentinels out of a rendered text. Also returns the places in the new text where they were.
    pub(super) fn remove(&self, text: &str) -> (String, Vec<usize>) {
        let mut plain = String::with_capacity(text.len());
        let mut places = Vec::new();
        for (index, piece) in text.split(self.sentinel).enumerate() {
            if index > 0 {
                places.push(plain.len());
            }
            plain.push_str(piece);
        }
        (plain, places)
    }
}

/// Whether a match in the mended text was broken: a sentinel stood inside it or right after it.
pub(super) fn is_broken(places: &[usize], range: &Range<usize>) -> bool {
    let after = places.partition_point(|place| *place <= range.start);
    places.get(after).is_some_and(|place| *place <= range.end)
}

/// The characters that Unicode keeps free for uses inside a program.
fn noncharacters() -> impl Iterator<Item = char> {
    let planes = (0..=16_u32).flat_map(|plane| [plane << 16 | 0xfffe, plane << 16 | 0xffff]);
    (0xfdd0..=0xfdef).chain(planes).filter_map(char::from_u32)
}

/// Where to break a text: after the first character of each control text in it, overlapping ones included.
fn breaks(tokenizer: &Tokenizer, text: &str) -> Vec<usize> {
    let starts = text.char_indices().filter(|(at, _)| tokenizer.special_starts_at(text, *at));
    starts.map(|(at, c)| at + c.len_utf8()).collect()
}

fn insert(tokenizer: &Tokenizer, text: &str, sentinel: char) -> String {
    let mut out = String::with_capacity(text.len() + 8);
    let mut from = 0;
    for at in breaks(tokenizer, text) {
        out.push_str(&text[from..at]);
        out.push(sentinel);
        from = at;
    }
    out.push_str(&text[from..]);
    out
}

fn message_strings<'m>(message: &'m Message, out: &mut Vec<&'m str>) {
    out.push(&message.content);
    let optional = [&message.reasoning_content, &message.name, &message.tool_call_id];
    out.extend(optional.into_iter().flatten().map(String::as_str));
    if let Some(calls) = &message.tool_calls {
        value_strings(calls, out);
    }
}

fn value_strings<'v>(value: &'v Value, out: &mut Vec<&'v str>) {
    match value {
        Value::String(text) => out.push(text),
        Value::Array(list) => {
            for value in list {
                value_strings(value, out);
            }
        }
        Value::Object(map) => {
            for (key, value) in map {
                out.push(key);
                value_strings(value, out);
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

fn map_message(message: &Message, marked: &impl Fn(&str) -> String) -> Message {
    let optional = |text: &Option<String>| text.as_deref().map(marked);
    Message {
        role: message.role,
        content: marked(&message.content),
        reasoning_content: optional(&message.reasoning_content),
        tool_calls: message.tool_calls.as_ref().map(|calls| map_value(calls, marked)),
        name: optional(&message.name),
        tool_call_id: optional(&message.tool_call_id),
    }
}

fn map_value(value: &Value, marked: &impl Fn(&str) -> String) -> Value {
    match value {
        Value::String(text) => Value::String(marked(text)),
        Value::Array(list) => list.iter().map(|value| map_value(value, marked)).collect(),
        Value::Object(map) => map.iter().map(|(key, value)| (marked(key), map_value(value, marked))).collect(),
        other => other.clone(),
    }
}
