//! Values of JSON that span several lines: the elements of one array, and objects one after another as `jq` prints them.

use std::ops::Range;

use serde::de::IgnoredAny;

/// The line on which a value starts, from 1, and its bytes.
pub(super) type Value = (u64, Range<usize>);

/// The objects that a text consists of; `None` where it is anything else, or where the first of them is no JSON.
pub(super) fn objects(text: &[u8]) -> Option<Vec<Value>> {
    let mut found: Vec<Value> = Vec::new();
    let (mut depth, mut in_string, mut escaped) = (0_usize, false, false);
    let (mut line, mut start) = (1, (1, 0));
    for (index, &byte) in text.iter().enumerate() {
        if byte == b'\n' {
            line += 1;
        }
        if in_string {
            (in_string, escaped) = (escaped || byte != b'"', !escaped && byte == b'\\');
            continue;
        }
        match byte {
            b'{' if depth == 0 => (start, depth) = ((line, index), 1),
            _ if depth == 0 && byte.is_ascii_whitespace() => {}
            _ if depth == 0 => return None,
            b'"' => in_string = true,
            b'[' | b'{' => depth += 1,
            b']' | b'}' => {
                depth -= 1;
                if depth == 0 {
                    let range = start.1..index + 1;
                    if found.is_empty() {
                        serde_json::from_slice::<IgnoredAny>(&text[range.clone()]).ok()?;
                    }
                    found.push((start.0, range));
                }
            }
            _ => {}
        }
    }
    (depth == 0 && !found.is_empty()).then_some(found)
}

/// What a text that starts with `[` is.
pub(super) enum Array {
    /// Each element with the line on which it starts.
    Elements(Vec<Value>),
    /// The array has no end.
    Open,
    /// Something follows the array.
    MoreFollows,
}

/// Finds the elements of the array that a text starts with, without judging what is inside them.
pub(super) fn array_elements(text: &[u8]) -> Array {
    let mut elements = Vec::new();
    let (mut depth, mut in_string, mut escaped) = (0_usize, false, false);
    let (mut line, mut start) = (1, None);
    for (index, &byte) in text.iter().enumerate() {
        if byte == b'\n' {
            line += 1;
        }
        if in_string {
            (in_string, escaped) = (escaped || byte != b'"', !escaped && byte == b'\\');
            continue;
        }
        let closes = matches!(byte, b']' | b'}');
        if depth == 1 && (byte == b',' || closes) {
            if let Some((line, start)) = start.take() {
                elements.push((line, start..index));
            }
        } else if depth >= 1 && start.is_none() && !byte.is_ascii_whitespace() {
            start = Some((line, index));
        }
        match byte {
            b'"' => in_string = true,
            b'[' | b'{' => depth += 1,
            _ if closes => {
                depth = depth.saturating_sub(1);
                if depth == 0 {
                    let rest = text[index + 1..].trim_ascii();
                    return if rest.is_empty() { Array::Elements(elements) } else { Array::MoreFollows };
                }
            }
            _ => {}
        }
    }
    Array::Open
}
