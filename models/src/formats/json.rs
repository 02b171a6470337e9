//! A `config.json` while it is turned from one layout into another: keys are taken out and put in, and what does not fit is an error
//! that names file, key and value.

use std::path::Path;

use serde_json::{Map, Value, json};

use crate::config::fields::is_same;
use crate::error::{Error, Result};

/// An object of a config. A key that is `null` counts as absent.
#[derive(Debug)]
pub(super) struct Json<'a> {
    pub(super) path: &'a Path,
    map: Map<String, Value>,
    /// Dotted name of the object inside the file with the dot, empty at the top.
    prefix: String,
}

impl<'a> Json<'a> {
    pub(super) fn new(path: &'a Path, value: &Value) -> Result<Self> {
        match value {
            Value::Object(map) => Ok(Self { path, map: map.clone(), prefix: String::new() }),
            other => Err(Error::field(path, "(whole file)", other, "an object")),
        }
    }

    /// The object `key`, taken out; an empty one where there is none.
    pub(super) fn take_object(&mut self, key: &str) -> Result<Self> {
        let map = match self.take(key) {
            None => Map::new(),
            Some(Value::Object(map)) => map,
            Some(other) => return Err(Error::field(self.path, self.full(key), other, "an object")),
        };
        Ok(Self { path: self.path, map, prefix: format!("{}{key}.", self.prefix) })
    }

    pub(super) fn get(&self, key: &str) -> Option<&Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    pub(super) fn take(&mut self, key: &str) -> Option<Value> {
        self.map.remove(key).filter(|value| !value.is_null())
    }

    /// Takes keys out that say nothing about the model.
    pub(super) fn drop(&mut self, keys: &[&str]) {
        for key in keys {
            self.map.remove(*key);
        }
    }

    pub(super) fn put(&mut self, key: &str, value: impl Into<Value>) {
        self.map.insert(key.into(), value.into());
    }

    /// Puts a value where there is none.
    pub(super) fn default(&mut self, key: &str, value: impl Into<Value>) {
        if self.get(key).is_none() {
            self.put(key, value);
        }
    }

    /// Moves keys of `inner` here. Where both have one, they must agree.
    pub(super) fn lift(&mut self, inner: &mut Self, keys: &[&str]) -> Result<()> {
        for key in keys {
            let Some(value) = inner.take(key) else { continue };
            match self.get(key) {
                Some(outer) if !is_same(outer, &value) => {
                    return Err(Error::FieldsDisagree {
                        path: self.path.into(),
                        left: self.full(key),
                        left_value: outer.to_string(),
                        right: inner.full(key),
                        right_value: value.to_string(),
                    });
                }
                _ => self.put(key, value),
            }
        }
        Ok(())
    }

    pub(super) fn size(&self, key: &str) -> Result<usize> {
        self.optional_size(key)?.ok_or_else(|| Error::FieldMissing { path: self.path.into(), field: self.full(key) })
    }

    pub(super) fn optional_size(&self, key: &str) -> Result<Option<usize>> {
        let read = |value: &Value| value.as_u64().filter(|n| (1..1 << 31).contains(n)).map(|n| n as usize);
        self.typed(key, "an integer of at least 1", read)
    }

    pub(super) fn flag(&self, key: &str) -> Result<Option<bool>> {
        self.typed(key, "true or false", Value::as_bool)
    }

    pub(super) fn text(&self, key: &str) -> Result<Option<String>> {
        self.typed(key, "a string", |value| value.as_str().map(Into::into))
    }

    pub(super) fn integers(&self, key: &str) -> Result<Option<Vec<i64>>> {
        self.typed(key, "a list of integers", |value| value.as_array()?.iter().map(Value::as_i64).collect())
    }

    /// Refuses a key that has another value than those that change nothing, and takes it out.
    pub(super) fn only(&mut self, key: &str, allowed: &[Value], supported: &'static str) -> Result<()> {
        match self.take(key) {
            Some(found) if !allowed.contains(&found) => {
                let (path, field) = (self.path.into(), self.full(key));
                Err(Error::Unsupported { path, field, found: found.to_string(), supported })
            }
            _ => Ok(()),
        }
    }

    /// States that no key is left.
    pub(super) fn finish(self) -> Result<()> {
        match self.map.iter().find(|(_, value)| !value.is_null()) {
            None => Ok(()),
            Some((key, value)) => Err(Error::Unsupported {
                path: self.path.into(),
                field: self.full(key),
                found: value.to_string(),
                supported: "the keys that its layout is known by",
            }),
        }
    }

    /// The first key that starts so, with its value.
    pub(super) fn starting_with(&self, start: &str) -> Option<(&str, &Value)> {
        let found = self.map.iter().find(|(key, value)| key.starts_with(start) && !value.is_null());
        found.map(|(key, value)| (key.as_str(), value))
    }

    pub(super) fn into_value(self) -> Value {
        Value::Object(self.map)
    }

    /// The layer ids of a key, in our convention.
    pub(super) fn take_layers(&mut self, key: &str, convention: super::LayerIds) -> Result<Option<Vec<i32>>> {
        let ids = self.integers(key)?;
        self.take(key);
        ids.map(|ids| convention.read(self.path, &self.full(key), &ids)).transpose()
    }

    /// Puts ids in a format's convention.
    pub(super) fn put_layers(&mut self, key: &str, convention: super::LayerIds, ids: &[i32]) {
        self.put(key, json!(convention.write(ids)));
    }

    /// As [`put_layers`](Self::put_layers), where other ids may stand already: they must be the same. `source` is the key that `ids`
    /// come from.
    pub(super) fn put_layers_once(
        &mut self,
        key: &str,
        convention: super::LayerIds,
        ids: &[i32],
        source: &str,
    ) -> Result<()> {
        let ours = json!(convention.write(ids));
        if let Some(other) = self.get(key).filter(|other| **other != ours) {
            return Err(Error::FieldsDisagree {
                path: self.path.into(),
                left: self.full(key),
                left_value: other.to_string(),
                right: source.into(),
                right_value: format!("{ours}, counted by the layers' outputs"),
            });
        }
        self.put(key, ours);
        Ok(())
    }

    /// Whether a config in the reference's layout is that of an Eagle3 drafter.
    pub(super) fn is_eagle3(&self) -> bool {
        let first = self.get("architectures").and_then(|names| names.as_array()?.first()?.as_str());
        first.is_some_and(|name| name.ends_with("Eagle3Model"))
    }

    pub(super) fn full(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }

    fn typed<T>(&self, key: &str, expected: &str, read: impl FnOnce(&Value) -> Option<T>) -> Result<Option<T>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| Error::field(self.path, self.full(key), value, expected))
    }
}
