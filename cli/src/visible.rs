//! Makes foreign text safe for a terminal: control, zero-width and bidirectional characters, which could move the cursor
//! or hide and reorder what is shown, are written as `\u{…}`.

use std::borrow::Cow;

/// Whether a terminal acts on the character instead of showing it.
fn is_hidden(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

/// A text of several lines: line breaks and tabs stay.
pub(crate) fn text(text: &str) -> Cow<'_, str> {
    escape(text, |c| is_hidden(c) && !matches!(c, '\n' | '\t'), |c| c.escape_unicode().to_string())
}

/// A text for one line: line breaks and tabs become `\n` and `\t`.
pub(crate) fn line(text: &str) -> Cow<'_, str> {
    escape(text, is_hidden, |c| match c {
        '\n' => "\\n".into(),
        '\t' => "\\t".into(),
        '\r' => "\\r".into(),
        _ => c.escape_unicode().to_string(),
    })
}

/// Serialised JSON: the characters that JSON lets through become its own escapes, so that it still means the same.
pub(crate) fn json(json: &str) -> Cow<'_, str> {
    let escaped = |c: char| match *c.encode_utf16(&mut [0; 2]) {
        [high, low] => format!("\\u{high:04x}\\u{low:04x}"),
        _ => format!("\\u{:04x}", u32::from(c)),
    };
    escape(json, |c| is_hidden(c) && c != '\n', escaped)
}

fn escape(text: &str, is_escaped: impl Fn(char) -> bool, escaped: impl Fn(char) -> String) -> Cow<'_, str> {
    if !text.contains(&is_escaped) {
        return Cow::Borrowed(text);
    }
    let mut result = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if is_escaped(c) { result.push_str(&escaped(c)) } else { result.push(c) }
    }
    Cow::Owned(result)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_what_a_terminal_would_act_on() {
        assert_eq!(text("a\x1b[31m\n\tb\u{202e}c\r"), "a\\u{1b}[31m\n\tb\\u{202e}c\\u{d}");
        assert_eq!(line("a\nb\t\u{200b}"), "a\\nb\\t\\u{200b}");
        assert_eq!(text("naïve 日本 👍"), "naïve 日本 👍");
    }

    #[test]
    fn json_keeps_its_meaning() {
        let value = serde_json::json!({ "a": "x\u{202e}\u{9b}\u{e0041}\n" });
        let shown = json(&serde_json::to_string_pretty(&value).unwrap()).into_owned();
        assert!(!shown.contains(['\u{202e}', '\u{9b}', '\u{e0041}']));
        assert_eq!(serde_json::from_str::<serde_json::Value>(&shown).unwrap(), value);
    }
}
