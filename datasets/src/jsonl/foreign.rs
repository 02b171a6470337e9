//! Formats that are not read, told by their first bytes or their first line, each with a way to turn it into JSON lines.

/// Column names by which the first line of a table is known.
const COLUMNS: [&str; 14] = [
    "prompt",
    "question",
    "instruction",
    "input",
    "output",
    "answer",
    "response",
    "completion",
    "messages",
    "conversations",
    "turns",
    "text",
    "chosen",
    "rejected",
];

/// The way out of Python literals.
pub(crate) const PYTHON_LITERALS: &str = "turn each row into JSON: python3 -c 'import ast, json, sys; [print(json.dumps(row)) for line in sys.stdin \
    if line.strip() for value in [ast.literal_eval(line)] for row in (value if isinstance(value, list) else [value])]' < FILE > data.jsonl";
const COMMAS: &str = "turn its rows into JSON: python3 -c 'import csv, json, sys; [print(json.dumps(row)) for row in \
    csv.DictReader(sys.stdin)]' < FILE > data.jsonl";
const SEMICOLONS: &str = "turn its rows into JSON: python3 -c 'import csv, json, sys; [print(json.dumps(row)) for row in \
    csv.DictReader(sys.stdin, delimiter=\";\")]' < FILE > data.jsonl";
const TABS: &str = "turn its rows into JSON: python3 -c 'import csv, json, sys; [print(json.dumps(row)) for row in \
    csv.DictReader(sys.stdin, delimiter=\"\\t\")]' < FILE > data.jsonl";

/// Tells what a row that is no JSON was written as, by its first bytes; with how to convert it.
pub(super) fn by_text(line: &[u8]) -> Option<(&'static str, &'static str)> {
    let text = str::from_utf8(line).ok()?.trim();
    if is_python(text) {
        return Some(("text of Python literals (single quotes)", PYTHON_LITERALS));
    }
    if text.starts_with(['{', '[']) {
        return None;
    }
    let tables = [
        ('\t', "a table of tab-separated values (TSV)", TABS),
        (',', "a table of comma-separated values (CSV)", COMMAS),
        (';', "a table of semicolon-separated values (CSV)", SEMICOLONS),
    ];
    tables.into_iter().find(|(separator, ..)| is_header(text, *separator)).map(|(_, format, convert)| (format, convert))
}

/// Whether a text that is no JSON starts as a dict or a list of dicts of Python does, or holds its constants as values.
pub(super) fn is_python(text: &str) -> bool {
    let inner = text.trim_start_matches(['[', '{', '(', ' ']);
    let starts = text.starts_with(['{', '[']) && inner.len() < text.len() && inner.starts_with('\'');
    let constants = [": None", ": True", ": False"];
    starts || (text.starts_with(['{', '[']) && constants.iter().any(|constant| text.contains(constant)))
}

/// Whether a line names columns, one of which is known.
fn is_header(text: &str, separator: char) -> bool {
    let mut names = text.split(separator).map(|name| name.trim().trim_matches('"').to_ascii_lowercase());
    (separator == ',' || text.contains(separator)) && names.any(|name| COLUMNS.contains(&name.as_str()))
}

/// Tells formats that are no JSON text by their first bytes; with how to convert them.
pub(super) fn by_magic(start: &[u8]) -> Option<(&'static str, &'static str)> {
    const PYTHON: &str = "convert it: python3 -c \"import datasets as d; d.load_dataset('FORMAT', data_files='FILE')\
                          ['train'].to_json('data.jsonl')\" with FORMAT parquet or arrow";
    const UTF16: &str = "convert it: iconv -f UTF-16 -t UTF-8 FILE > data.jsonl";
    let magics: [(&[u8], &str, &str); 12] = [
        (b"\x1f\x8b", "gzip data", "unpack it: gzip -dc FILE > data.jsonl"),
        (b"\x28\xb5\x2f\xfd", "Zstandard data", "unpack it: zstd -dc FILE > data.jsonl"),
        (b"\xfd7zXZ\0", "xz data", "unpack it: xz -dc FILE > data.jsonl"),
        (b"BZh", "bzip2 data", "unpack it: bzip2 -dc FILE > data.jsonl"),
        (b"PK\x03\x04", "a zip archive", "unpack it: unzip -p FILE > data.jsonl"),
        (b"PAR1", "a Parquet file", PYTHON),
        (b"ARROW1", "an Arrow IPC file", PYTHON),
        (b"\xff\xff\xff\xff", "an Arrow IPC stream", PYTHON),
        (b"\xff\xfe", "UTF-16 text", UTF16),
        (b"\xfe\xff", "UTF-16 text", UTF16),
        (b"{\0", "UTF-16 text without byte order mark", "convert it: iconv -f UTF-16LE -t UTF-8 FILE > data.jsonl"),
        (b"\0{", "UTF-16 text without byte order mark", "convert it: iconv -f UTF-16BE -t UTF-8 FILE > data.jsonl"),
    ];
    magics.iter().find(|(magic, ..)| start.starts_with(magic)).map(|&(_, format, convert)| (format, convert))
}
