//! Reads the fields of a JSON request one by one. Whatever is wrong with a field is said by its name; a field that nobody
//! has read is refused, since ignoring it could give an answer to another question.

use std::ops::{Bound, RangeBounds, RangeInclusive};

use serde_json::{Map, Value};

use super::api_error::ApiError;

/// The fields of a request, or of an object in it.
#[derive(Debug)]
pub(super) struct Fields {
    /// Path of the object, with a final dot; empty for the request itself.
    prefix: String,
    fields: Map<String, Value>,
}

/// Result of reading a field.
pub(super) type Read<T> = Result<T, ApiError>;

impl Fields {
    /// Parses the body of a request.
    pub(super) fn parse(body: &[u8]) -> Read<Self> {
        match serde_json::from_slice(body) {
            Ok(Value::Object(fields)) => Ok(Self { prefix: String::new(), fields }),
            Ok(other) => Err(ApiError::bad(format!("the body is {}, expected an object", kind_of(&other)))),
            Err(error) => Err(ApiError::bad(format!("the body is not valid JSON: {error}"))),
        }
    }

    /// The fields of an object in the request.
    pub(super) fn of(path: &str, value: Value) -> Read<Self> {
        match value {
            Value::Object(fields) => Ok(Self { prefix: format!("{path}."), fields }),
            other => Err(wrong_type(path, "an object", &other)),
        }
    }

    fn path(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// Takes a field out; `null` counts as absent.
    pub(super) fn take(&mut self, name: &str) -> Option<Value> {
        self.fields.remove(name).filter(|value| !value.is_null())
    }

    /// A text.
    pub(super) fn text(&mut self, name: &str) -> Read<Option<String>> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(wrong_type(&self.path(name), "a string", &other)),
        }
    }

    /// True or false.
    pub(super) fn flag(&mut self, name: &str) -> Read<Option<bool>> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(flag)),
            Some(other) => Err(wrong_type(&self.path(name), "a boolean", &other)),
        }
    }

    /// A number in a range.
    pub(super) fn number(&mut self, name: &str, range: impl RangeBounds<f64>) -> Read<Option<f64>> {
        let Some(value) = self.take(name) else { return Ok(None) };
        number(&self.path(name), &value, range).map(Some)
    }

    /// A whole number in a range.
    pub(super) fn integer(&mut self, name: &str, range: RangeInclusive<i64>) -> Read<Option<i64>> {
        let Some(value) = self.take(name) else { return Ok(None) };
        integer(&self.path(name), &value, range).map(Some)
    }

    /// A text or a list of at most `most` texts, none of them empty.
    pub(super) fn texts(&mut self, name: &str, most: usize) -> Read<Vec<String>> {
        let path = self.path(name);
        let texts = match self.take(name) {
            None => Vec::new(),
            Some(Value::String(text)) => vec![text],
            Some(Value::Array(items)) if items.len() <= most => {
                let text = |(i, item)| match item {
                    Value::String(text) => Ok(text),
                    other => Err(wrong_type(&format!("{path}.{i}"), "a string", &other)),
                };
                items.into_iter().enumerate().map(text).collect::<Read<_>>()?
            }
            Some(Value::Array(items)) => {
                return Err(ApiError::field(
                    &path,
                    format!("`{path}` has {} entries, at most {most} are allowed", items.len()),
                ));
            }
            Some(other) => return Err(wrong_type(&path, "a string or a list of strings", &other)),
        };
        if texts.iter().any(String::is_empty) {
            return Err(ApiError::field(&path, format!("`{path}` holds an empty string")));
        }
        Ok(texts)
    }

    /// Ends the reading. Fields in `ignored` do not change an answer.
    pub(super) fn finish(self, ignored: &[&str]) -> Read<()> {
        match self.fields.into_iter().find(|(name, value)| !ignored.contains(&name.as_str()) && !value.is_null()) {
            None => Ok(()),
            Some((name, _)) => {
                let path = format!("{}{name}", self.prefix);
                Err(ApiError::field(&path, format!("unknown field `{path}`")).with_code("unknown_parameter"))
            }
        }
    }
}

/// A value that is to be a number in a range.
pub(super) fn number(path: &str, value: &Value, range: impl RangeBounds<f64>) -> Read<f64> {
    let Value::Number(found) = value else { return Err(wrong_type(path, "a number", value)) };
    match found.as_f64().filter(|found| range.contains(found)) {
        Some(found) => Ok(found),
        None => Err(out_of_range(path, &found.to_string(), &range)),
    }
}

/// A value that is to be a whole number in a range; `2.0` counts as one.
pub(super) fn integer(path: &str, value: &Value, range: RangeInclusive<i64>) -> Read<i64> {
    let Value::Number(found) = value else { return Err(wrong_type(path, "a whole number", value)) };
    let whole = || found.as_f64().filter(|f| f.fract() == 0.0 && f.abs() < 9e15).map(|f| f as i64);
    match found.as_i64().or_else(whole) {
        Some(found) if range.contains(&found) => Ok(found),
        None if found.as_f64().is_some_and(|f| f.fract() != 0.0) => Err(wrong_type(path, "a whole number", value)),
        _ => Err(out_of_range(path, &found.to_string(), &range)),
    }
}

/// A field has another type than it should.
pub(super) fn wrong_type(path: &str, expected: &str, found: &Value) -> ApiError {
    ApiError::field(path, format!("`{path}` is {}, expected {expected}", kind_of(found))).with_code("invalid_type")
}

fn out_of_range<T: std::fmt::Display>(path: &str, found: &str, range: &impl RangeBounds<T>) -> ApiError {
    let low = match range.start_bound() {
        Bound::Included(low) => format!(" from {low}"),
        Bound::Excluded(low) => format!(" above {low}"),
        Bound::Unbounded => String::new(),
    };
    let high = match range.end_bound() {
        Bound::Included(high) => format!(" to {high}"),
        Bound::Excluded(high) => format!(" below {high}"),
        Bound::Unbounded => String::new(),
    };
    let message = format!("`{path}` is {found}, expected a number{low}{high}");
    ApiError::field(path, message).with_code("out_of_range")
}

fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(json: &str) -> Fields {
        Fields::parse(json.as_bytes()).unwrap()
    }

    fn message<T: std::fmt::Debug>(result: Read<T>) -> String {
        result.unwrap_err().to_json()["error"]["message"].as_str().unwrap().to_owned()
    }

    #[test]
    fn what_is_wrong_is_said_by_name() {
        let mut wrong = fields(r#"{"a": "x", "b": 3, "c": 1.5, "d": [1], "e": 9e999, "f": ["x", ""], "g": 1}"#);
        assert!(message(wrong.number("a", 0.0..=1.0)).contains("`a` is a string, expected a number"));
        assert!(message(wrong.number("b", 0.0..=1.0)).contains("`b` is 3, expected a number from 0 to 1"));
        assert!(message(wrong.integer("c", 0..=9)).contains("`c` is a number, expected a whole number"));
        assert!(message(wrong.texts("d", 4)).contains("`d.0` is a number, expected a string"));
        assert!(message(wrong.integer("e", 0..=9)).contains("expected a number from 0 to 9"));
        assert!(message(wrong.texts("f", 4)).contains("empty"));
        assert!(message(wrong.finish(&[])).contains("unknown field `g`"));
        assert!(message(Fields::parse(b"[1]")).contains("a list"));
        assert!(message(Fields::parse(b"{\"a\": \xff}")).contains("not valid JSON"));
    }

    #[test]
    fn what_is_right_is_read() {
        let mut right = fields(r#"{"a": 2.0, "b": null, "c": "x", "d": ["y", "z"], "e": true, "user": "u"}"#);
        assert_eq!(right.integer("a", 0..=9).unwrap(), Some(2));
        assert_eq!(right.number("b", 0.0..=1.0).unwrap(), None);
        assert_eq!(right.texts("c", 4).unwrap(), ["x"]);
        assert_eq!(right.texts("d", 4).unwrap(), ["y", "z"]);
        assert_eq!(right.flag("e").unwrap(), Some(true));
        assert_eq!(right.text("f").unwrap(), None);
        assert!(right.finish(&["user"]).is_ok());
    }
}
