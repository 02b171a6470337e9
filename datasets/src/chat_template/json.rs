//! JSON in and out of templates: values that templates can walk, and text as Python's `json.dumps` writes it.

use std::fmt::Write as _;

use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind};

/// Options of `json.dumps`.
#[derive(Default)]
pub(super) struct Style {
    pub(super) indent: Option<usize>,
    pub(super) ensure_ascii: bool,
    pub(super) sort_keys: bool,
    /// Between items, and between key and value.
    pub(super) separators: Option<(String, String)>,
}

/// A JSON value as a template value, numbers as numbers.
pub(super) fn to_template(json: &serde_json::Value) -> Value {
    match json {
        serde_json::Value::Null => Value::from(()),
        serde_json::Value::Bool(value) => Value::from(*value),
        serde_json::Value::Number(number) => {
            // Read from the spelling, so that 1 stays an integer and 1.0 stays a float.
            let text = number.to_string();
            match text.parse::<i128>() {
                Ok(integer) => i64::try_from(integer).map_or_else(|_| Value::from(integer), Value::from),
                Err(_) => text.parse::<f64>().map_or_else(|_| Value::from(text.as_str()), Value::from),
            }
        }
        serde_json::Value::String(text) => Value::from(text.as_str()),
        serde_json::Value::Array(list) => list.iter().map(to_template).collect(),
        serde_json::Value::Object(map) => {
            Value::from_pairs(map.iter().map(|(key, value)| (key.as_str(), to_template(value))))
        }
    }
}

/// Writes a template value as JSON text.
pub(super) fn write(value: &Value, style: &Style) -> Result<String, Error> {
    let mut out = String::new();
    let (item, key) = match &style.separators {
        Some((item, key)) => (item.as_str(), key.as_str()),
        None if style.indent.is_some() => (",", ": "),
        None => (", ", ": "),
    };
    Writer { style, item, key, out: &mut out }.value(value, 0)?;
    Ok(out)
}

struct Writer<'a> {
    style: &'a Style,
    item: &'a str,
    key: &'a str,
    out: &'a mut String,
}

impl Writer<'_> {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > 128 {
            return Err(Error::new(ErrorKind::BadSerialization, "value nested more than 128 deep"));
        }
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number if value.is_integer() => self.out.push_str(&value.to_string()),
            ValueKind::Number => self.out.push_str(&python_float(f64::try_from(value.clone())?)),
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.list('[', ']', depth, &items, |writer, item| writer.value(item, depth + 1))?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.style.sort_keys {
                    keys.sort();
                }
                self.list('{', '}', depth, &keys, |writer, key| {
                    match key.as_str() {
                        Some(text) => writer.string(text),
                        None => writer.string(&key.to_string()),
                    }
                    writer.out.push_str(writer.key);
                    writer.value(&value.get_item(key)?, depth + 1)
                })?;
            }
            kind => {
                return Err(Error::new(ErrorKind::BadSerialization, format!("{kind} is not JSON serializable")));
            }
        }
        Ok(())
    }

    fn list(
        &mut self,
        open: char,
        close: char,
        depth: usize,
        items: &[Value],
        mut write: impl FnMut(&mut Self, &Value) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.out.push(open);
        for (index, item) in items.iter().enumerate() {
            if index > 0 {
                self.out.push_str(self.item);
            }
            self.new_line(depth + 1);
            write(self, item)?;
        }
        if !items.is_empty() {
            self.new_line(depth);
        }
        self.out.push(close);
        Ok(())
    }

    fn new_line(&mut self, depth: usize) {
        if let Some(indent) = self.style.indent {
            self.out.push('\n');
            self.out.extend(std::iter::repeat_n(' ', indent.min(64) * depth));
        }
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        for c in text.chars() {
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                c if c < ' ' || (self.style.ensure_ascii && c > '~') => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        write!(self.out, "\\u{unit:04x}").expect("writing to a string does not fail");
                    }
                }
                c => self.out.push(c),
            }
        }
        self.out.push('"');
    }
}

/// A float as Python's `repr` spells it.
fn python_float(value: f64) -> String {
    if value.is_nan() {
        return "NaN".to_owned();
    }
    if value.is_infinite() {
        return if value > 0.0 { "Infinity".to_owned() } else { "-Infinity".to_owned() };
    }
    // The shortest digits and the switch to exponents are those of Rust's debug form; the exponent is spelled otherwise.
    let text = format!("{value:?}");
    match text.split_once('e') {
        None => text,
        Some((digits, exponent)) => {
            let (sign, exponent) = exponent.strip_prefix('-').map_or(('+', exponent), |rest| ('-', rest));
            format!("{}e{sign}{exponent:0>2}", digits.strip_suffix(".0").unwrap_or(digits))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compact(json: &str) -> String {
        write(&to_template(&serde_json::from_str(json).unwrap()), &Style::default()).unwrap()
    }

    #[test]
    fn writes_what_python_writes() {
        assert_eq!(
            compact(r#"{"b":1,"a":[true,null,1.0,"<é\u0001'>"]}"#),
            r#"{"b": 1, "a": [true, null, 1.0, "<é\u0001'>"]}"#
        );
        assert_eq!(
            compact("[1e16,1e-5,0.0001,-2.5e300,123456789012345678]"),
            "[1e+16, 1e-05, 0.0001, -2.5e+300, 123456789012345678]"
        );
        assert_eq!(compact("[[],{}]"), "[[], {}]");
    }

    #[test]
    fn indents_as_python() {
        let value = to_template(&serde_json::json!({"a": [1], "b": {}}));
        let style = Style { indent: Some(2), ..Style::default() };
        assert_eq!(write(&value, &style).unwrap(), "{\n  \"a\": [\n    1\n  ],\n  \"b\": {}\n}");
    }

    #[test]
    fn escapes_all_but_ascii_on_request() {
        let style = Style { ensure_ascii: true, ..Style::default() };
        assert_eq!(write(&Value::from("é😀"), &style).unwrap(), r#""\u00e9\ud83d\ude00""#);
    }
}
