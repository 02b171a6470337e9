//! The hostile-safe part of the GGUF reader: header, metadata and tensor directory, out of the mapped bytes.
//!
//! Every read goes through [`Parser::take`] or [`Parser::count`], which compare with what is left of the file.

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::quantized::GgmlDType;

use super::{TensorInfo, Value};
use crate::error::{Error, Result};

/// Deepest nesting of arrays in the metadata.
const MAX_ARRAY_DEPTH: usize = 4;
/// Most array elements in one file, all arrays together: six times the largest vocabulary in use.
const MAX_ARRAY_ELEMENTS: u64 = 1 << 23;
/// Most dimensions of a tensor.
const MAX_DIMS: u32 = 4;
/// Alignment of tensor data where `general.alignment` is absent, in bytes.
const DEFAULT_ALIGNMENT: u64 = 32;
pub(super) type Directory = (BTreeMap<String, Value>, BTreeMap<String, TensorInfo>);

/// Parses everything before the tensor data; `path` is for messages.
pub(super) fn directory(path: &Path, bytes: &[u8]) -> Result<Directory> {
    Parser { path, bytes, position: 0, array_elements: 0 }.directory()
}

/// Cursor over the file's bytes.
struct Parser<'a> {
    path: &'a Path,
    bytes: &'a [u8],
    position: usize,
    array_elements: u64,
}

impl Parser<'_> {
    fn directory(&mut self) -> Result<Directory> {
        let magic = self.take::<4>("magic")?;
        if &magic != b"GGUF" {
            return Err(self.corrupt(0, "magic", format!("expected `GGUF`, found `{}`", magic.escape_ascii())));
        }
        let version = self.u32("version")?;
        if !matches!(version, 2 | 3) {
            let big = if matches!(version.swap_bytes(), 2 | 3) { " (big endian)" } else { "" };
            return Err(self.corrupt(4, "version", format!("expected 2 or 3, found {version}{big}")));
        }
        let tensor_count = self.count("tensor count", 24)?;
        let value_count = self.count("metadata count", 13)?;

        let mut metadata = BTreeMap::new();
        for index in 0..value_count {
            let start = self.position;
            let key = self.string(&format!("metadata key {index}"))?;
            let kind = self.u32(&key)?;
            let value = self.value(&key, kind, 0)?;
            if metadata.insert(key.clone(), value).is_some() {
                return Err(self.corrupt(start, &key, "the key occurs twice"));
            }
        }
        let alignment = match metadata.get("general.alignment") {
            None => DEFAULT_ALIGNMENT,
            Some(&Value::Unsigned(n)) if n.is_power_of_two() && (8..=1 << 16).contains(&n) => n,
            Some(other) => {
                let expected = "a power of two from 8 to 65536";
                return Err(Error::field(self.path, "general.alignment", other.describe(), expected));
            }
        };

        let infos = (0..tensor_count).map(|index| self.tensor_info(index)).collect::<Result<Vec<_>>>()?;
        let data_start = (self.position as u64).next_multiple_of(alignment);
        let mut tensors = BTreeMap::new();
        for info in infos {
            let name = info.name.clone();
            let at = info.at;
            let info = self.locate(info, data_start, alignment)?;
            if tensors.insert(name.clone(), info).is_some() {
                return Err(self.corrupt(at, &name, "the tensor occurs twice"));
            }
        }
        self.check_overlap(&tensors)?;
        Ok((metadata, tensors))
    }

    fn tensor_info(&mut self, index: usize) -> Result<RawInfo> {
        let at = self.position;
        let name = self.string(&format!("tensor name {index}"))?;
        let dims_at = self.position;
        let dims = self.u32(&name)?;
        if !(1..=MAX_DIMS).contains(&dims) {
            return Err(self.corrupt(dims_at, &name, format!("{dims} dimensions, expected 1 to {MAX_DIMS}")));
        }
        let dims = (0..dims).map(|_| self.u64(&name)).collect::<Result<Vec<_>>>()?;
        let type_id = self.u32(&name)?;
        let offset = self.u64(&name)?;
        Ok(RawInfo { at, name, dims, type_id, offset })
    }

    /// Byte range of a tensor, checked against alignment, type and file length.
    fn locate(&self, raw: RawInfo, data_start: u64, alignment: u64) -> Result<TensorInfo> {
        let RawInfo { at, name, dims, type_id, offset } = raw;
        let fail = |problem: String| self.corrupt(at, &name, problem);
        if dims.contains(&0) {
            return Err(fail(format!("dimensions {dims:?}, expected none to be 0")));
        }
        let elements = dims.iter().try_fold(1u64, |product, &dim| product.checked_mul(dim));
        let elements = elements.ok_or_else(|| fail(format!("dimensions {dims:?} overflow")))?;
        if !offset.is_multiple_of(alignment) {
            return Err(fail(format!("data offset {offset}, expected a multiple of {alignment}")));
        }
        let dtype = block_type(type_id);
        let len = match dtype {
            Some(dtype) => {
                let block = dtype.block_size() as u64;
                if !dims[0].is_multiple_of(block) {
                    return Err(fail(format!("rows of {} values, expected whole blocks of {block}", dims[0])));
                }
                (elements / block).checked_mul(dtype.type_size() as u64)
            }
            // The size of an unknown type is unknown; reading the tensor is refused later, by name.
            None => Some(0),
        };
        let start = data_start.checked_add(offset);
        let end = start.zip(len).and_then(|(start, len)| start.checked_add(len));
        match start.zip(end) {
            Some((start, end)) if end <= self.bytes.len() as u64 => Ok(TensorInfo {
                shape: dims.iter().rev().map(|&dim| dim as usize).collect(),
                dtype,
                type_id,
                range: start as usize..end as usize,
            }),
            _ => Err(fail(format!(
                "its data needs {} at offset {offset} after {data_start}, the file has {} bytes",
                len.map_or_else(|| "more bytes than can be counted".into(), |len| format!("{len} bytes")),
                self.bytes.len()
            ))),
        }
    }

    fn check_overlap(&self, tensors: &BTreeMap<String, TensorInfo>) -> Result<()> {
        let mut ranges: Vec<_> = tensors.iter().map(|(name, info)| (&info.range, name)).collect();
        ranges.sort_by_key(|(range, _)| (range.start, range.end));
        for pair in ranges.windows(2) {
            let ((first, first_name), (second, second_name)) = (pair[0], pair[1]);
            if second.start < first.end {
                return Err(self.corrupt(
                    second.start,
                    second_name,
                    format!("its data overlaps that of `{first_name}`"),
                ));
            }
        }
        Ok(())
    }

    fn value(&mut self, key: &str, kind: u32, depth: usize) -> Result<Value> {
        let start = self.position;
        Ok(match kind {
            0 => Value::Unsigned(self.take::<1>(key)?[0].into()),
            1 => Value::Signed(i8::from_le_bytes(self.take(key)?).into()),
            2 => Value::Unsigned(u16::from_le_bytes(self.take(key)?).into()),
            3 => Value::Signed(i16::from_le_bytes(self.take(key)?).into()),
            4 => Value::Unsigned(self.u32(key)?.into()),
            5 => Value::Signed(i32::from_le_bytes(self.take(key)?).into()),
            6 => Value::F32(f32::from_le_bytes(self.take(key)?)),
            7 => match self.take::<1>(key)?[0] {
                0 => Value::Bool(false),
                1 => Value::Bool(true),
                other => return Err(self.corrupt(start, key, format!("expected a boolean of 0 or 1, found {other}"))),
            },
            8 => Value::String(self.string(key)?),
            9 => self.array(key, depth)?,
            10 => Value::Unsigned(self.u64(key)?),
            11 => Value::Signed(i64::from_le_bytes(self.take(key)?)),
            12 => Value::F64(f64::from_le_bytes(self.take(key)?)),
            other => return Err(self.corrupt(start, key, format!("expected a value type of 0 to 12, found {other}"))),
        })
    }

    fn array(&mut self, key: &str, depth: usize) -> Result<Value> {
        let start = self.position;
        if depth == MAX_ARRAY_DEPTH {
            return Err(self.corrupt(start, key, format!("arrays nested more than {MAX_ARRAY_DEPTH} deep")));
        }
        let kind = self.u32(key)?;
        let smallest = match kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            9 => 12,
            _ => 8,
        };
        let len = self.count(key, smallest)?;
        self.array_elements += len as u64;
        if self.array_elements > MAX_ARRAY_ELEMENTS {
            return Err(self.corrupt(start, key, format!("more than {MAX_ARRAY_ELEMENTS} array elements in the file")));
        }
        let mut values = Vec::with_capacity(len);
        for _ in 0..len {
            values.push(self.value(key, kind, depth + 1)?);
        }
        Ok(Value::Array(values))
    }

    fn string(&mut self, at: &str) -> Result<String> {
        let start = self.position;
        let len = self.count(at, 1)?;
        let bytes = &self.bytes[self.position..self.position + len];
        self.position += len;
        let text =
            std::str::from_utf8(bytes).map_err(|error| self.corrupt(start, at, format!("not UTF-8: {error}")))?;
        Ok(text.into())
    }

    /// A 64-bit count of things that take at least `smallest` bytes each and so must fit in the rest of the file.
    fn count(&mut self, at: &str, smallest: usize) -> Result<usize> {
        let start = self.position;
        let count = self.u64(at)?;
        let left = self.bytes.len() - self.position;
        if count > (left / smallest) as u64 {
            let problem = format!("{count} entries of at least {smallest} bytes, but {left} bytes are left");
            return Err(self.corrupt(start, at, problem));
        }
        Ok(count as usize)
    }

    fn u32(&mut self, at: &str) -> Result<u32> {
        self.take(at).map(u32::from_le_bytes)
    }

    fn u64(&mut self, at: &str) -> Result<u64> {
        self.take(at).map(u64::from_le_bytes)
    }

    fn take<const N: usize>(&mut self, at: &str) -> Result<[u8; N]> {
        let rest = &self.bytes[self.position..];
        let Some(taken) = rest.first_chunk::<N>() else {
            return Err(self.corrupt(self.position, at, format!("{N} bytes expected, but {} are left", rest.len())));
        };
        self.position += N;
        Ok(*taken)
    }

    fn corrupt(&self, offset: usize, at: &str, problem: impl Into<String>) -> Error {
        Error::Corrupt { path: self.path.into(), offset: offset as u64, at: at.into(), problem: problem.into() }
    }
}

/// A tensor's entry as stored.
struct RawInfo {
    at: usize,
    name: String,
    dims: Vec<u64>,
    type_id: u32,
    offset: u64,
}

fn block_type(id: u32) -> Option<GgmlDType> {
    Some(match id {
        0 => GgmlDType::F32,
        1 => GgmlDType::F16,
        2 => GgmlDType::Q4_0,
        3 => GgmlDType::Q4_1,
        6 => GgmlDType::Q5_0,
        7 => GgmlDType::Q5_1,
        8 => GgmlDType::Q8_0,
        10 => GgmlDType::Q2K,
        11 => GgmlDType::Q3K,
        12 => GgmlDType::Q4K,
        13 => GgmlDType::Q5K,
        14 => GgmlDType::Q6K,
        30 => GgmlDType::BF16,
        _ => return None,
    })
}
