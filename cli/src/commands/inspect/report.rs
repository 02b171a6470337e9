//! What `inspect` found, as sections in order, and its two renderings: text for people and JSON.
//!
//! Keys are the same in both. All text in a report may be foreign; it is made visible where it is rendered.

use comfy_table::{CellAlignment, Table, presets};
use owo_colors::OwoColorize as _;
use serde_json::{Map, Value, json};

use crate::failure;
use crate::visible;

/// Rows of a table that are shown unless all are asked for.
const ROWS_SHOWN: usize = 24;
/// Characters of a value that are shown.
const CHARACTERS_SHOWN: usize = 120;
/// Brackets of supervised text where there are no colours.
const MARKS: [char; 2] = ['⟦', '⟧'];

/// What was found.
#[derive(Debug)]
pub(crate) struct Report {
    kind: &'static str,
    sections: Vec<(&'static str, Section)>,
    problems: Vec<Problem>,
}

#[derive(Debug)]
enum Section {
    Facts(Map<String, Value>),
    Table { columns: Vec<&'static str>, rows: Vec<Vec<Value>> },
    Spans(Vec<Span>),
    Messages(Vec<(String, String)>),
}

#[derive(Debug)]
struct Problem {
    message: String,
    hint: Option<String>,
}

/// A stretch of a sample's text.
#[derive(Debug)]
pub(crate) struct Span {
    /// Whether the loss is taken on it.
    pub supervised: bool,
    /// Decoded text, or token ids.
    pub text: String,
}

impl Report {
    /// An empty report on a path of the given kind.
    pub(crate) fn new(kind: &'static str) -> Self {
        Self { kind, sections: Vec::new(), problems: Vec::new() }
    }

    /// Adds a section of named values; `facts` is a JSON object.
    pub(crate) fn facts(&mut self, title: &'static str, facts: Value) {
        let Value::Object(facts) = facts else { unreachable!("facts are written as an object") };
        self.sections.push((title, Section::Facts(facts)));
    }

    /// Adds a table; each row has one value per column. Nothing is added without rows.
    pub(crate) fn table(&mut self, title: &'static str, columns: &[&'static str], rows: Vec<Vec<Value>>) {
        if !rows.is_empty() {
            self.sections.push((title, Section::Table { columns: columns.into(), rows }));
        }
    }

    /// Adds text of which some is supervised.
    pub(crate) fn spans(&mut self, title: &'static str, spans: Vec<Span>) {
        self.sections.push((title, Section::Spans(spans)));
    }

    /// Adds messages: speaker and content.
    pub(crate) fn messages(&mut self, title: &'static str, messages: Vec<(String, String)>) {
        self.sections.push((title, Section::Messages(messages)));
    }

    /// Adds something that is wrong.
    pub(crate) fn problem(&mut self, error: impl Into<anyhow::Error>) {
        let error = error.into();
        self.problems.push(Problem { message: failure::words(&error), hint: failure::hint(&error) });
    }

    /// Keeps a result's value; its error becomes a problem.
    pub(crate) fn ok<T, E: Into<anyhow::Error>>(&mut self, result: Result<T, E>) -> Option<T> {
        result.map_err(|error| self.problem(error)).ok()
    }

    /// How much is wrong.
    pub(crate) fn problem_count(&self) -> usize {
        self.problems.len()
    }

    /// The report as indented JSON, safe for a terminal.
    ///
    /// # Errors
    /// A value cannot be serialised.
    pub(crate) fn to_json(&self) -> serde_json::Result<String> {
        let mut json = Map::from_iter([("kind".to_owned(), json!(self.kind))]);
        for (title, section) in &self.sections {
            json.insert((*title).to_owned(), section.to_json());
        }
        let problems = self.problems.iter().map(|problem| json!({ "message": problem.message, "hint": problem.hint }));
        json.insert("problems".to_owned(), problems.collect());
        Ok(visible::json(&serde_json::to_string_pretty(&json)?).into_owned())
    }

    /// The report as lines for people. Without `whole`, long tables are cut.
    pub(crate) fn to_text(&self, colours: bool, whole: bool) -> String {
        let mut lines = vec![self.kind.replace('_', " ").bold().to_string()];
        for (title, section) in &self.sections {
            lines.push(String::new());
            lines.push(title.replace('_', " ").bold().to_string());
            section.add_text(&mut lines, colours, whole);
        }
        if !self.problems.is_empty() {
            lines.push(String::new());
            lines.push("problems".red().bold().to_string());
        }
        for Problem { message, hint } in &self.problems {
            lines.push(format!("  {}", visible::line(message)));
            lines.extend(hint.iter().map(|hint| format!("    hint: {}", visible::line(hint))));
        }
        lines.join("\n")
    }
}

impl Section {
    fn to_json(&self) -> Value {
        match self {
            Self::Facts(facts) => Value::Object(facts.clone()),
            Self::Table { columns, rows } => {
                let row = |row: &Vec<Value>| -> Value {
                    columns.iter().map(|column| (*column).to_owned()).zip(row.iter().cloned()).collect()
                };
                rows.iter().map(row).collect()
            }
            Self::Spans(spans) => {
                spans.iter().map(|span| json!({ "supervised": span.supervised, "text": span.text })).collect()
            }
            Self::Messages(messages) => {
                messages.iter().map(|(role, content)| json!({ "role": role, "content": content })).collect()
            }
        }
    }

    fn add_text(&self, lines: &mut Vec<String>, colours: bool, whole: bool) {
        match self {
            Self::Facts(facts) => {
                let width = facts.keys().map(|key| key.chars().count()).max().unwrap_or(0);
                for (key, value) in facts {
                    lines.push(format!("  {:<width$}  {}", visible::line(key), shown(key, value)));
                }
            }
            Self::Table { columns, rows } => add_table(lines, columns, rows, whole),
            Self::Spans(spans) => lines.push(spans.iter().map(|span| marked(span, colours)).collect()),
            Self::Messages(messages) => {
                for (role, content) in messages {
                    lines.push(format!("  {}", format_args!("{}:", visible::line(role)).bold()));
                    lines.push(visible::text(content).into_owned());
                }
            }
        }
    }
}

fn add_table(lines: &mut Vec<String>, columns: &[&'static str], rows: &[Vec<Value>], whole: bool) {
    let shown_rows = if whole { rows.len() } else { rows.len().min(ROWS_SHOWN) };
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(columns.iter().copied());
    for row in &rows[..shown_rows] {
        table.add_row(columns.iter().zip(row).map(|(column, value)| shown(column, value)));
    }
    for (index, value) in rows.first().into_iter().flatten().enumerate() {
        if let (Value::Number(_), Some(column)) = (value, table.column_mut(index)) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    lines.extend(table.trim_fmt().lines().map(|line| format!(" {line}")));
    if shown_rows < rows.len() {
        lines.push(format!("  … {} more rows, shown with --verbose", rows.len() - shown_rows));
    }
}

/// A value in a line of its own; sizes are also told in a readable unit.
fn shown(key: &str, value: &Value) -> String {
    let text = match value {
        Value::Null => "-".to_owned(),
        Value::String(text) => text.clone(),
        Value::Number(number) if key.ends_with("bytes") => match number.as_u64() {
            Some(bytes) if bytes >= 1024 => format!("{bytes} ({})", indicatif::HumanBytes(bytes)),
            _ => number.to_string(),
        },
        other => other.to_string(),
    };
    let length = text.chars().count();
    let cut = if length > CHARACTERS_SHOWN {
        let start: String = text.chars().take(CHARACTERS_SHOWN).collect();
        format!("{start}… ({length} characters)")
    } else {
        text
    };
    visible::line(&cut).into_owned()
}

/// A span in green or dim, or in brackets; brackets of the text itself are escaped then.
fn marked(span: &Span, colours: bool) -> String {
    let text = visible::text(&span.text);
    match (colours, span.supervised) {
        (true, true) => text.green().to_string(),
        (true, false) => text.dimmed().to_string(),
        (false, supervised) => {
            let escape = |c: char| if MARKS.contains(&c) { c.escape_unicode().to_string() } else { c.to_string() };
            let text: String = text.chars().map(escape).collect();
            if supervised { format!("{}{text}{}", MARKS[0], MARKS[1]) } else { text }
        }
    }
}

/// Number of parts in a whole as percent with one decimal; 0 of nothing.
pub(crate) fn percent(parts: u64, whole: u64) -> f64 {
    (parts as f64 / whole.max(1) as f64 * 1000.0).round() / 10.0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        let mut report = Report::new("test_kind");
        report.facts("facts", json!({ "total_bytes": 2048, "name": "a\x1b[2Jb\u{202e}" }));
        report.table("rows", &["id", "text"], (0..30).map(|i| vec![json!(i), json!(format!("row{i}"))]).collect());
        let span = |supervised, text: &str| Span { supervised, text: text.into() };
        report.spans("text", vec![span(false, "ask ⟦x⟧ "), span(true, "tell\n")]);
        report.problem(anyhow::anyhow!("broken"));
        report
    }

    #[test]
    fn text_is_safe_and_marked() {
        let text = anstream::adapter::strip_str(&report().to_text(false, false)).to_string();
        assert!(text.contains("2048 (2.00 KiB)"), "{text}");
        assert!(text.contains("a\\u{1b}[2Jb\\u{202e}"), "{text}");
        assert!(text.contains("ask \\u{27e6}x\\u{27e7} ⟦tell\n⟧"), "{text}");
        assert!(text.contains("… 6 more rows") && !text.contains("row24"), "{text}");
        assert!(report().to_text(false, true).contains("row29"));
        let coloured = report().to_text(true, false);
        assert!(coloured.contains("\x1b[32mtell\n\x1b[39m") && coloured.contains("\x1b[2mask ⟦x⟧ "), "{coloured:?}");
    }

    #[test]
    fn json_holds_everything() {
        let json = report().to_json().unwrap();
        assert!(!json.contains(['\x1b', '\u{202e}']));
        let json: Value = serde_json::from_str(&json).unwrap();
        assert_eq!(json["facts"]["name"], "a\x1b[2Jb\u{202e}");
        assert_eq!(json["rows"][29], json!({ "id": 29, "text": "row29" }));
        assert_eq!(json["text"][1], json!({ "supervised": true, "text": "tell\n" }));
        assert_eq!(json["problems"], json!([{ "message": "broken", "hint": null }]));
    }

    #[test]
    fn percent_has_one_decimal() {
        assert_eq!(percent(1, 3), 33.3);
        assert_eq!(percent(0, 0), 0.0);
    }
}
