//! Reads conversations from a file of JSON lines, one row at a time.
//!
//! Lines end at `\n` only, since strings may hold other Unicode line breaks. A byte order mark, `\r\n`, blank lines
//! (counted in line numbers) and a missing last newline are fine. A file that is one JSON array, or objects that span several
//! lines each, is read too, value by value. A bad row never stops the file: it comes out as a [`Reject`] with its line. Memory is
//! bounded by the longest line, at most [`MAX_LINE_BYTES`] (for values over several lines, by the file, at most the same).

pub(crate) mod foreign;
mod spread;

use std::fmt::Write as _;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

use serde::de::IgnoredAny;
use serde_json::Value;
use sha2::{Digest, Sha256};

use self::spread::Array;

use crate::conversation::{Conversation, RejectReason, Repair};
use crate::error::Error;

/// Longest line, and largest file that is one JSON array, in bytes.
pub const MAX_LINE_BYTES: usize = 64 << 20;

/// One row of a file.
#[derive(Clone, Debug, PartialEq)]
pub enum Row {
    /// A row that can be used, and what was repaired in it.
    Conversation(Conversation, Vec<Repair>),
    /// A row that can't.
    Reject(Reject),
}

/// A row that can't be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reject {
    /// Line on which the row starts, from 1, blank lines counted.
    pub line: u64,
    /// Why.
    pub reason: RejectReason,
}

/// An open file of conversations; iterate over it to get the rows in order.
#[derive(Debug)]
pub struct ConversationFile {
    rows: Lines<Box<dyn BufRead + Send>>,
    elements: std::vec::IntoIter<(u64, Vec<u8>)>,
    failed: bool,
}

impl ConversationFile {
    /// Opens a file and looks at its first bytes.
    ///
    /// # Errors
    /// [`Error::Read`], [`Error::UnsupportedFormat`] for formats told by their first bytes, [`Error::NoRows`] for a
    /// file that is empty or blank, and the two array errors.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, Error> {
        let path = path.as_ref();
        let file = fs_err::File::open(path)?;
        Self::from_reader(Box::new(BufReader::with_capacity(1 << 16, file)), path)
    }

    /// Reads rows from memory, `name` standing for the path in messages.
    ///
    /// # Errors
    /// As [`ConversationFile::open`].
    pub fn from_bytes(bytes: impl Into<Vec<u8>>, name: &str) -> Result<Self, Error> {
        Self::from_reader(Box::new(io::Cursor::new(bytes.into())), Path::new(name))
    }

    fn from_reader(mut reader: Box<dyn BufRead + Send>, path: &Path) -> Result<Self, Error> {
        let start = peek(&mut reader)?;
        let unsupported = |(format, convert)| Err(Error::UnsupportedFormat { path: path.to_owned(), format, convert });
        if let Some(found) = foreign::by_magic(&start) {
            return unsupported(found);
        }
        let text = start.strip_prefix(BYTE_ORDER_MARK).unwrap_or(&start);
        let skipped = start.len() - text.len();
        let is_array = text.trim_ascii_start().starts_with(b"[");
        let mut reader: Box<dyn BufRead + Send> = Box::new(io::Cursor::new(start[skipped..].to_vec()).chain(reader));
        if is_array {
            let mut whole = Vec::new();
            reader.by_ref().take(MAX_LINE_BYTES as u64 + 1).read_to_end(&mut whole)?;
            if whole.len() > MAX_LINE_BYTES {
                return Err(Error::ArrayTooLarge { path: path.to_owned(), limit_bytes: MAX_LINE_BYTES });
            }
            match spread::array_elements(&whole) {
                Array::Elements(ranges) if ranges.is_empty() => return Err(Error::NoRows { path: path.to_owned() }),
                Array::Elements(ranges) => {
                    let first = ranges.first().map_or(&[][..], |(_, range)| &whole[range.clone()]);
                    if let Some(found) = parse(first).err().and_then(|_| foreign::by_text(first)) {
                        return unsupported(found);
                    }
                    return Ok(Self::of_values(&whole, ranges));
                }
                Array::Open => {
                    let line = whole.split(|byte| *byte == b'\n').find(|line| !line.trim_ascii().is_empty());
                    return match line.and_then(foreign::by_text) {
                        Some(found) => unsupported(found),
                        None => Err(Error::ArrayNotClosed { path: path.to_owned() }),
                    };
                }
                // A line that happens to be an array, with more lines after it.
                Array::MoreFollows => reader = Box::new(io::Cursor::new(whole)),
            }
        } else {
            let head = first_line(&mut reader)?;
            let line = head.trim_ascii();
            match serde_json::from_slice::<IgnoredAny>(line) {
                Ok(_) => reader = Box::new(io::Cursor::new(head).chain(reader)),
                // An object that goes on in the next line, unless the line is torn.
                Err(error) if error.is_eof() && line.starts_with(b"{") => {
                    let mut whole = head;
                    let room = MAX_LINE_BYTES.saturating_sub(whole.len());
                    reader.by_ref().take(room as u64 + 1).read_to_end(&mut whole)?;
                    let fits = whole.len() <= MAX_LINE_BYTES;
                    if let Some(ranges) = fits.then(|| spread::objects(&whole)).flatten() {
                        return Ok(Self::of_values(&whole, ranges));
                    }
                    reader = Box::new(io::Cursor::new(whole).chain(reader));
                }
                Err(_) => {
                    if let Some(found) = foreign::by_text(line) {
                        return unsupported(found);
                    }
                    reader = Box::new(io::Cursor::new(head).chain(reader));
                }
            }
        }
        let mut rows = Lines::new(reader);
        rows.fill_pending()?;
        if rows.pending.is_none() {
            return Err(Error::NoRows { path: path.to_owned() });
        }
        Ok(ConversationFile { rows, elements: Vec::new().into_iter(), failed: false })
    }

    /// The rows of a file that is held whole.
    fn of_values(whole: &[u8], ranges: Vec<spread::Value>) -> Self {
        let elements: Vec<_> = ranges.into_iter().map(|(line, range)| (line, whole[range].to_vec())).collect();
        let rows = Lines::new(Box::new(io::empty()) as Box<dyn BufRead + Send>);
        ConversationFile { rows, elements: elements.into_iter(), failed: false }
    }
}

impl Iterator for ConversationFile {
    type Item = Result<Row, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.failed {
            return None;
        }
        if let Some((line, bytes)) = self.elements.next() {
            return Some(Ok(read_row(line, &bytes)));
        }
        if let Err(error) = self.rows.fill_pending() {
            self.failed = true;
            return Some(Err(error.into()));
        }
        match self.rows.pending.take()? {
            (line, Some(bytes)) => Some(Ok(read_row(line, &bytes))),
            (line, None) => {
                let reason = RejectReason::LineTooLong { limit_bytes: MAX_LINE_BYTES };
                Some(Ok(Row::Reject(Reject { line, reason })))
            }
        }
    }
}

/// The key of a sample: the first 16 hex digits of SHA-256 over the line number (8 bytes, little endian) and the bytes of
/// the row without its line end. Stable between runs, and apart for equal rows on different lines.
pub fn sample_key(line: u64, row: &[u8]) -> String {
    let mut hash = Sha256::new();
    hash.update(line.to_le_bytes());
    hash.update(row);
    let mut key = hex(&hash.finalize());
    key.truncate(16);
    key
}

/// Bytes as lower-case hex digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").expect("writing to a string does not fail");
        text
    })
}

fn read_row(line: u64, bytes: &[u8]) -> Row {
    let parsed = parse(bytes).and_then(|row| Conversation::from_json(line, sample_key(line, bytes), &row));
    match parsed {
        Ok((conversation, repairs)) => Row::Conversation(conversation, repairs),
        Err(reason) => Row::Reject(Reject { line, reason }),
    }
}

fn parse(bytes: &[u8]) -> Result<Value, RejectReason> {
    let text = str::from_utf8(bytes).map_err(|error| RejectReason::NotUtf8 { byte: error.valid_up_to() })?;
    serde_json::from_str(text).map_err(|error| {
        let message = error.to_string();
        if message.contains("surrogate") || message.contains("hex escape") {
            return RejectReason::LoneSurrogate { column: error.column() };
        }
        if foreign::is_python(text.trim()) {
            return RejectReason::PythonLiteral { column: error.column() };
        }
        let message = message.split(" at line ").next().unwrap_or_default().to_owned();
        RejectReason::InvalidJson { column: error.column(), message }
    })
}

const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// Reads up to eight bytes, enough to tell formats apart, plus what follows up to the first byte that is not blank.
fn peek(reader: &mut impl BufRead) -> io::Result<Vec<u8>> {
    let mut start = Vec::new();
    reader.by_ref().take(8).read_to_end(&mut start)?;
    let mut blank = start.strip_prefix(BYTE_ORDER_MARK).unwrap_or(&start).trim_ascii_start().is_empty();
    while blank && start.len() < MAX_LINE_BYTES {
        let Some(first) = reader.fill_buf()?.first().copied() else { break };
        start.push(first);
        reader.consume(1);
        blank = first.is_ascii_whitespace();
    }
    Ok(start)
}

/// Everything up to the end of the first line that is not blank, at most a little more than [`MAX_LINE_BYTES`].
fn first_line(reader: &mut impl BufRead) -> io::Result<Vec<u8>> {
    let mut head = Vec::new();
    loop {
        let before = head.len();
        reader.by_ref().take(MAX_LINE_BYTES as u64 + 1).read_until(b'\n', &mut head)?;
        if head.len() == before || !head[before..].trim_ascii().is_empty() || head.len() > MAX_LINE_BYTES {
            return Ok(head);
        }
    }
}

/// Lines that are not blank, with their numbers.
struct Lines<R> {
    reader: R,
    line: u64,
    /// The next row; without bytes where the line was too long.
    pending: Option<(u64, Option<Vec<u8>>)>,
}

impl<R> std::fmt::Debug for Lines<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lines").field("line", &self.line).finish_non_exhaustive()
    }
}

impl<R: BufRead> Lines<R> {
    fn new(reader: R) -> Self {
        Lines { reader, line: 0, pending: None }
    }

    /// Reads up to the next row, or to the end of the file.
    fn fill_pending(&mut self) -> io::Result<()> {
        while self.pending.is_none() {
            let mut bytes = Vec::new();
            let limit = MAX_LINE_BYTES as u64 + 1;
            let count = self.reader.by_ref().take(limit).read_until(b'\n', &mut bytes)?;
            if count == 0 {
                return Ok(());
            }
            self.line += 1;
            if bytes.last() == Some(&b'\n') {
                bytes.pop();
                if bytes.last() == Some(&b'\r') {
                    bytes.pop();
                }
            } else if bytes.len() > MAX_LINE_BYTES {
                self.skip_line()?;
                self.pending = Some((self.line, None));
                return Ok(());
            }
            if !bytes.trim_ascii().is_empty() {
                self.pending = Some((self.line, Some(bytes)));
            }
        }
        Ok(())
    }

    fn skip_line(&mut self) -> io::Result<()> {
        loop {
            let buffer = self.reader.fill_buf()?;
            let newline = buffer.iter().position(|byte| *byte == b'\n');
            let count = newline.map_or(buffer.len(), |index| index + 1);
            self.reader.consume(count);
            if newline.is_some() || count == 0 {
                return Ok(());
            }
        }
    }
}

/// Used where a path is only a name.
pub(crate) fn file_stem(path: &Path) -> String {
    path.file_stem().unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
}
