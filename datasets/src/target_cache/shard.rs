//! Reads one shard through a memory map. The record batches have one row and one fixed schema, so their buffers are
//! located here directly: each offset and length is checked against the file before use, and no bytes are copied.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use arrow_ipc::convert::try_fb_to_schema;
use arrow_ipc::reader::read_footer_length;
use arrow_ipc::{Block, FieldNode, root_as_footer, root_as_message};
use arrow_schema::Schema;
use bytemuck::AnyBitPattern;
use memmap2::Mmap;

use super::error::CacheError;
use super::format::SCHEMA_KEY;
use super::sample::Sample;

/// Footer length and magic at the end of an Arrow file.
const TRAILER_BYTES: usize = 10;
/// Continuation marker and length before the header of a message.
const PREFIX_BYTES: usize = 8;

/// A shard mapped into memory, its footer checked.
#[derive(Debug)]
pub(super) struct Shard {
    path: PathBuf,
    map: Mmap,
    records: Vec<Record>,
    /// Samples that were read and found sound, so that each is checked once.
    verified: Vec<AtomicBool>,
}

/// Where one record batch lies in the file.
#[derive(Debug)]
struct Record {
    header: Range<usize>,
    body: Range<usize>,
}

/// A sample with the checksum stored beside it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stored<'a> {
    pub(super) sample: Sample<'a>,
    pub(super) crc32c: u32,
}

impl Shard {
    /// Maps the file and checks that its footer lists `samples` record batches of `schema`, all inside the file.
    pub(super) fn open(path: PathBuf, schema: &Schema, samples: u64) -> Result<Self, CacheError> {
        let file = fs_err::File::open(&path)?;
        // SAFETY: a shard gets its name once it is complete and is never changed in place afterwards, and the map is
        // read only. Truncating a file that is in use is outside what a process can defend against.
        let map = unsafe { Mmap::map(file.file()) }
            .map_err(|error| std::io::Error::new(error.kind(), format!("mapping `{}`: {error}", path.display())))?;
        let records = read_footer(&map, schema).map_err(|reason| CacheError::Shard { path: path.clone(), reason })?;
        if records.len() as u64 != samples {
            let reason = format!("it has {} record batches, expected {samples}", records.len());
            return Err(CacheError::Shard { path, reason });
        }
        let verified = records.iter().map(|_| AtomicBool::new(false)).collect();
        Ok(Self { path, map, records, verified })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the sample in record batch `row` was found sound before.
    pub(super) fn is_verified(&self, row: usize) -> bool {
        self.verified[row].load(Ordering::Relaxed)
    }

    /// Notes that the sample in record batch `row` is sound.
    pub(super) fn set_verified(&self, row: usize) {
        self.verified[row].store(true, Ordering::Relaxed);
    }

    pub(super) fn bytes(&self) -> u64 {
        self.map.len() as u64
    }

    /// Checksum of the whole file.
    pub(super) fn crc32c(&self) -> u32 {
        crc32c::crc32c(&self.map)
    }

    /// The sample in record batch `row`, which must be below the number given to [`Shard::open`].
    pub(super) fn read(&self, row: usize) -> Result<Stored<'_>, CacheError> {
        let record = &self.records[row];
        read_record(&self.map[record.header.clone()], &self.map[record.body.clone()]).map_err(|reason| {
            CacheError::Shard { path: self.path.clone(), reason: format!("record batch {row}: {reason}") }
        })
    }
}

/// Finds the record batches of a file, after a check of its schema.
fn read_footer(file: &[u8], schema: &Schema) -> Result<Vec<Record>, String> {
    let short = || format!("it ends too early, at {} bytes", file.len());
    let (rest, trailer) = file.split_last_chunk::<TRAILER_BYTES>().ok_or_else(short)?;
    let length = read_footer_length(*trailer).map_err(|error| error.to_string())?;
    let start = rest.len().checked_sub(length).ok_or_else(short)?;
    let footer = root_as_footer(&rest[start..]).map_err(|error| format!("unreadable footer: {error}"))?;

    let found = footer.schema().ok_or("the footer has no schema")?;
    let found = try_fb_to_schema(found).map_err(|error| format!("unreadable schema: {error}"))?;
    if found.fields() != schema.fields() {
        return Err(format!("its columns are {}, expected {}", names(&found), names(schema)));
    }
    if found.metadata().get(SCHEMA_KEY) != schema.metadata().get(SCHEMA_KEY) {
        return Err(format!("it belongs to another cache: `{SCHEMA_KEY}` in its schema differs from the manifest"));
    }
    let blocks = footer.recordBatches().ok_or("the footer lists no record batches")?;
    (blocks.iter().enumerate())
        .map(|(row, block)| locate(block, start).ok_or_else(|| format!("record batch {row} lies outside the file")))
        .collect()
}

fn names(schema: &Schema) -> String {
    let columns = schema.fields().iter().map(|field| format!("{}: {}", field.name(), field.data_type()));
    columns.collect::<Vec<_>>().join(", ")
}

/// Header and body of a block that ends at or before `end`.
fn locate(block: &Block, end: usize) -> Option<Record> {
    let start = usize::try_from(block.offset()).ok()?;
    let body = start.checked_add(usize::try_from(block.metaDataLength()).ok()?)?;
    let body_end = body.checked_add(usize::try_from(block.bodyLength()).ok()?)?;
    let header = start.checked_add(PREFIX_BYTES)?;
    (header <= body && body_end <= end).then_some(Record { header: header..body, body: body..body_end })
}

fn read_record<'a>(header: &[u8], body: &'a [u8]) -> Result<Stored<'a>, String> {
    let message = root_as_message(header).map_err(|error| format!("unreadable header: {error}"))?;
    let batch = message.header_as_record_batch().ok_or("its header is not that of a record batch")?;
    if batch.compression().is_some() {
        return Err("it is compressed, expected plain buffers".to_owned());
    }
    let mut columns = Columns {
        nodes: batch.nodes().ok_or("its header has no nodes")?.iter(),
        buffers: batch.buffers().ok_or("its header has no buffers")?.iter(),
        body,
    };
    let sample = Sample {
        sample_id: columns.number("sample_id")?,
        source_id: columns.text("source_id")?,
        domain: columns.text("domain")?,
        input_ids: columns.list("input_ids")?,
        loss_mask: columns.list("loss_mask")?,
        features: columns.list("features")?,
        last_hidden: columns.list("last_hidden")?,
    };
    Ok(Stored { sample, crc32c: columns.number("crc32c")? })
}

/// Walks the nodes and buffers of a record batch of one row, column by column, in the order of the schema.
struct Columns<'a, N, B> {
    nodes: N,
    buffers: B,
    body: &'a [u8],
}

impl<'a, 'h, N, B> Columns<'a, N, B>
where
    N: Iterator<Item = &'h FieldNode>,
    B: Iterator<Item = &'h arrow_ipc::Buffer>,
{
    fn number<T: AnyBitPattern>(&mut self, column: &str) -> Result<T, String> {
        self.node(column, 1)?;
        self.buffer(column)?;
        let [number] = *self.values::<T>(column, 1)? else { return Err(format!("`{column}` is not one number")) };
        Ok(number)
    }

    fn text(&mut self, column: &str) -> Result<&'a str, String> {
        self.node(column, 1)?;
        let len = self.row_len(column)?;
        std::str::from_utf8(self.values(column, len)?).map_err(|error| format!("`{column}`: {error}"))
    }

    fn list<T: AnyBitPattern>(&mut self, column: &str) -> Result<&'a [T], String> {
        self.node(column, 1)?;
        let len = self.row_len(column)?;
        self.node(column, len)?;
        self.buffer(column)?;
        self.values(column, len)
    }

    /// Takes the next node, which must have `len` values, none of them null.
    fn node(&mut self, column: &str, len: usize) -> Result<(), String> {
        let node = self.nodes.next().ok_or_else(|| format!("`{column}` has no node"))?;
        if usize::try_from(node.length()) != Ok(len) || node.null_count() != 0 {
            let (found, nulls) = (node.length(), node.null_count());
            return Err(format!("`{column}` has {found} values and {nulls} nulls, expected {len} and 0"));
        }
        Ok(())
    }

    /// Takes the validity and offset buffers of a column of variable length, and returns the length of its one row.
    fn row_len(&mut self, column: &str) -> Result<usize, String> {
        self.buffer(column)?;
        match *self.values::<i64>(column, 2)? {
            [0, len] => usize::try_from(len).map_err(|_| format!("`{column}` has length {len}")),
            ref offsets => Err(format!("`{column}` has offsets {offsets:?}, expected them to start at 0")),
        }
    }

    /// Takes the next buffer as `len` values.
    fn values<T: AnyBitPattern>(&mut self, column: &str, len: usize) -> Result<&'a [T], String> {
        let buffer = self.buffer(column)?;
        if len == 0 {
            return Ok(&[]);
        }
        let bytes = len.checked_mul(size_of::<T>()).and_then(|bytes| buffer.get(..bytes)).ok_or_else(|| {
            format!("`{column}` has {} bytes, too few for {len} values of {} bytes", buffer.len(), size_of::<T>())
        })?;
        bytemuck::try_cast_slice(bytes).map_err(|error| format!("`{column}` cannot be read in place: {error}"))
    }

    /// Takes the next buffer as bytes.
    fn buffer(&mut self, column: &str) -> Result<&'a [u8], String> {
        let buffer = self.buffers.next().ok_or_else(|| format!("`{column}` has no buffer"))?;
        let range = || {
            let start = usize::try_from(buffer.offset()).ok()?;
            let end = start.checked_add(usize::try_from(buffer.length()).ok()?)?;
            self.body.get(start..end)
        };
        range().ok_or_else(|| format!("`{column}` lies outside the record batch"))
    }
}
