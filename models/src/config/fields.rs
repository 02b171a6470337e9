//! Typed access to the fields of a JSON config, with errors that name file, field, value and what was expected.

use std::path::Path;

use serde_json::{Map, Value};

use crate::error::{Error, Result};

/// Largest size that a config may state; products of two fit 64 bits.
const MAX_SIZE: u64 = i32::MAX as u64;
/// Characters of a value that are shown in messages, and in those that compare two.
const SHORT: usize = 60;
const LONG: usize = 240;

/// The fields of one JSON object. A field that is `null` counts as absent.
#[derive(Clone, Copy)]
pub(super) struct Fields<'a> {
    pub(super) path: &'a Path,
    map: &'a Map<String, Value>,
    /// Dotted name of the object inside the file, empty at the top.
    prefix: &'static str,
}

impl<'a> Fields<'a> {
    pub(super) fn new(path: &'a Path, json: &'a Value) -> Result<Self> {
        let map = json.as_object().ok_or_else(|| Error::field(path, "(whole file)", kind(json), "an object"))?;
        Ok(Self { path, map, prefix: "" })
    }

    /// The object `name`, if there is one.
    pub(super) fn object(&self, name: &'static str) -> Result<Option<Self>> {
        let map = self.typed(name, "an object", Value::as_object)?;
        Ok(map.map(|map| Self { path: self.path, map, prefix: name }))
    }

    pub(super) fn get(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name).filter(|value| !value.is_null())
    }

    pub(super) fn keys(&self) -> impl Iterator<Item = &'a str> {
        self.map.iter().filter(|(_, value)| !value.is_null()).map(|(key, _)| key.as_str())
    }

    pub(super) fn size(&self, name: &str) -> Result<usize> {
        self.required(name, self.optional_size(name)?)
    }

    /// An integer from 1 to 2³¹ − 1.
    pub(super) fn optional_size(&self, name: &str) -> Result<Option<usize>> {
        self.typed(name, "an integer of at least 1", |value| {
            value.as_u64().filter(|n| (1..=MAX_SIZE).contains(n)).map(|n| n as usize)
        })
    }

    /// As [`optional_size`](Self::optional_size), with 0 allowed.
    pub(super) fn optional_count(&self, name: &str) -> Result<Option<usize>> {
        self.typed(name, "an integer of at least 0", |value| {
            value.as_u64().filter(|&n| n <= MAX_SIZE).map(|n| n as usize)
        })
    }

    pub(super) fn flag(&self, name: &str, default: bool) -> Result<bool> {
        Ok(self.optional_flag(name)?.unwrap_or(default))
    }

    pub(super) fn optional_flag(&self, name: &str) -> Result<Option<bool>> {
        self.typed(name, "true or false", Value::as_bool)
    }

    /// A finite number above 0.
    pub(super) fn positive(&self, name: &str) -> Result<Option<f64>> {
        self.typed(name, "a number above 0", |value| value.as_f64().filter(|&n| n.is_finite() && n > 0.0))
    }

    pub(super) fn string(&self, name: &str) -> Result<&'a str> {
        self.required(name, self.optional_string(name)?)
    }

    pub(super) fn optional_string(&self, name: &str) -> Result<Option<&'a str>> {
        self.typed(name, "a string", Value::as_str)
    }

    /// A list of strings, empty when absent.
    pub(super) fn strings(&self, name: &str) -> Result<Vec<&'a str>> {
        let list = self.typed(name, "a list of strings", |value| {
            value.as_array()?.iter().map(Value::as_str).collect::<Option<Vec<_>>>()
        })?;
        Ok(list.unwrap_or_default())
    }

    /// A list of integers.
    pub(super) fn integers(&self, name: &str) -> Result<Option<Vec<i64>>> {
        self.typed(name, "a list of integers", |value| value.as_array()?.iter().map(Value::as_i64).collect())
    }

    /// Token ids given as a number or a list, empty when absent.
    pub(super) fn ids(&self, name: &str) -> Result<Vec<u32>> {
        let ids = self.typed(name, "a token id or a list of them", |value| match value {
            Value::Array(list) => list.iter().map(id).collect(),
            one => id(one).map(|id| vec![id]),
        })?;
        Ok(ids.unwrap_or_default())
    }

    /// A token id; −1 is an old way to say that there is none.
    pub(super) fn optional_id(&self, name: &str) -> Result<Option<u32>> {
        if self.get(name).and_then(Value::as_i64) == Some(-1) {
            return Ok(None);
        }
        self.typed(name, "a token id", id)
    }

    pub(super) fn required<T>(&self, name: &str, value: Option<T>) -> Result<T> {
        value.ok_or_else(|| self.missing(name))
    }

    pub(super) fn missing(&self, name: &str) -> Error {
        Error::FieldMissing { path: self.path.into(), field: self.full_name(name) }
    }

    pub(super) fn bad(&self, name: &str, expected: impl Into<String>) -> Error {
        let found = self.map.get(name).map_or_else(|| "absent".into(), |value| describe(value, SHORT));
        Error::field(self.path, self.full_name(name), found, expected)
    }

    /// Of this object and another that may hold a field, the one that does. Where both do, they must say the same.
    pub(super) fn or_in(&self, other: Option<Self>, name: &str) -> Result<Self> {
        let Some(other) = other else { return Ok(*self) };
        match (self.get(name), other.get(name)) {
            (Some(here), Some(there)) if !is_same(here, there) => Err(other.disagrees(name, self, name)),
            (None, Some(_)) => Ok(other),
            _ => Ok(*self),
        }
    }

    /// A field that says another thing than a field of `other` in the same file.
    pub(super) fn disagrees(&self, name: &str, other: &Self, others: &str) -> Error {
        let value = |fields: &Self, name: &str| {
            fields.map.get(name).map_or_else(|| "absent".into(), |value| describe(value, LONG))
        };
        Error::FieldsDisagree {
            path: self.path.into(),
            left: self.full_name(name),
            left_value: value(self, name),
            right: other.full_name(others),
            right_value: value(other, others),
        }
    }

    pub(super) fn unsupported(&self, name: &str, found: impl Into<String>, supported: &'static str) -> Error {
        Error::Unsupported { path: self.path.into(), field: self.full_name(name), found: found.into(), supported }
    }

    fn full_name(&self, name: &str) -> String {
        if self.prefix.is_empty() { name.into() } else { format!("{}.{name}", self.prefix) }
    }

    fn typed<T>(&self, name: &str, expected: &str, convert: impl FnOnce(&'a Value) -> Option<T>) -> Result<Option<T>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        convert(value).map(Some).ok_or_else(|| self.bad(name, expected))
    }
}

/// Whether two values mean the same; numbers do where they are equal, however they are written.
pub(crate) fn is_same(left: &Value, right: &Value) -> bool {
    match (left, right) {
        (Value::Number(left), Value::Number(right)) => left == right || left.as_f64() == right.as_f64(),
        _ => left == right,
    }
}

fn id(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|id| id.try_into().ok())
}

fn describe(value: &Value, limit: usize) -> String {
    let text = value.to_string();
    if text.chars().count() <= limit { text } else { format!("{} of {} bytes", kind(value), text.len()) }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}
