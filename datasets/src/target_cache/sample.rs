//! One sample and its form as an Arrow record batch of one row. The columns are described in
//! [`format`](super::format); the way back is `shard.rs`.

use std::collections::HashMap;
use std::sync::Arc;

use arrow_array::types::{ArrowPrimitiveType, UInt8Type, UInt16Type, UInt32Type};
use arrow_array::{ArrayRef, LargeListArray, LargeStringArray, PrimitiveArray, RecordBatch, UInt32Array, UInt64Array};
use arrow_buffer::{OffsetBuffer, ScalarBuffer};
use arrow_schema::{DataType, Field, Schema, SchemaRef};
use half::bf16;
use serde::Serialize;

use super::error::CacheError;
use super::format::{CacheMeta, MANIFEST_FILE, SCHEMA_KEY, VERSION};
use super::rows::check_rows;

/// One sample: T tokens and what the target computed for them. Borrowed from the caller when it is written, and from
/// the mapped file when it is read.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sample<'a> {
    /// Position in the data set, from 0.
    pub sample_id: u64,
    /// Id of the row the sample was made from.
    pub source_id: &'a str,
    /// Kind of data, may be empty.
    pub domain: &'a str,
    /// Tokens, `[T]`.
    pub input_ids: &'a [u32],
    /// 1 where the token is supervised, else 0, `[T]`.
    pub loss_mask: &'a [u8],
    /// Outputs of the feature layers, `[T, L·d]`; empty with storage `none`.
    pub features: &'a [bf16],
    /// Output of the final norm, `[T, d]`; empty with storage `none`.
    pub last_hidden: &'a [bf16],
}

impl Sample<'_> {
    /// Tokens whose loss mask is 1.
    pub fn supervised_tokens(&self) -> u64 {
        self.loss_mask.iter().map(|&mask| u64::from(mask)).sum()
    }

    /// Checksum of all columns.
    pub(super) fn crc32c(&self) -> u32 {
        let columns: [&[u8]; 7] = [
            &self.sample_id.to_le_bytes(),
            self.source_id.as_bytes(),
            self.domain.as_bytes(),
            bytemuck::cast_slice(self.input_ids),
            self.loss_mask,
            bytemuck::cast_slice(self.features),
            bytemuck::cast_slice(self.last_hidden),
        ];
        columns.iter().fold(0, |crc, column| crc32c::crc32c_append(crc, column))
    }

    /// Checks everything: lengths, tokens and mask, and that the rows can be a target's.
    pub(super) fn validate(&self, meta: &CacheMeta) -> Result<(), CacheError> {
        self.validate_shape(meta)?;
        self.validate_rows(meta)
    }

    /// Checks that the rows can be a target's.
    pub(super) fn validate_rows(&self, meta: &CacheMeta) -> Result<(), CacheError> {
        check_rows(self.sample_id, &meta.layer_ids, meta.hidden_size, self.features, self.last_hidden)
    }

    /// Checks lengths, tokens and mask against the description of the cache, without a look at the rows.
    pub(super) fn validate_shape(&self, meta: &CacheMeta) -> Result<(), CacheError> {
        let fault = |field, found: String, expected: String| {
            Err(CacheError::Sample { shard: None, sample: self.sample_id, field, found, expected })
        };
        let tokens = self.input_ids.len();
        if tokens == 0 || tokens > meta.max_length {
            return fault("input_ids", format!("has {tokens} tokens"), format!("1 to {}", meta.max_length));
        }
        if let Some(at) = self.input_ids.iter().position(|&id| id >= meta.vocab_size) {
            let found = format!("has id {} at position {at}", self.input_ids[at]);
            return fault("input_ids", found, format!("less than `vocab_size` {}", meta.vocab_size));
        }
        if let Some(at) = self.input_ids.iter().position(|&id| Some(id) == meta.mask_token_id) {
            let found = format!("has id {} at position {at}", self.input_ids[at]);
            return fault("input_ids", found, "data without the `mask_token_id`".to_owned());
        }
        if self.loss_mask.len() != tokens {
            return fault("loss_mask", format!("has {} entries", self.loss_mask.len()), tokens.to_string());
        }
        if let Some(at) = self.loss_mask.iter().position(|&mask| mask > 1) {
            return fault("loss_mask", format!("is {} at position {at}", self.loss_mask[at]), "0 or 1".to_owned());
        }
        let Some((features, last_hidden)) = meta.hidden_lens(tokens) else {
            return fault("features", "is too large for memory".to_owned(), "fewer tokens".to_owned());
        };
        for (field, found, expected) in
            [("features", self.features.len(), features), ("last_hidden", self.last_hidden.len(), last_hidden)]
        {
            if found != expected {
                return fault(field, format!("has {found} numbers"), expected.to_string());
            }
        }
        Ok(())
    }

    /// The record batch of one row that holds the sample.
    pub(super) fn to_record_batch(self, schema: &SchemaRef) -> Result<RecordBatch, CacheError> {
        let columns: Vec<ArrayRef> = vec![
            Arc::new(UInt64Array::from(vec![self.sample_id])),
            Arc::new(LargeStringArray::from(vec![self.source_id])),
            Arc::new(LargeStringArray::from(vec![self.domain])),
            list_of_one::<UInt32Type>(self.input_ids)?,
            list_of_one::<UInt8Type>(self.loss_mask)?,
            list_of_one::<UInt16Type>(bytemuck::cast_slice(self.features))?,
            list_of_one::<UInt16Type>(bytemuck::cast_slice(self.last_hidden))?,
            Arc::new(UInt32Array::from(vec![self.crc32c()])),
        ];
        Ok(RecordBatch::try_new(Arc::clone(schema), columns)?)
    }
}

fn list_of_one<T: ArrowPrimitiveType>(row: &[T::Native]) -> Result<ArrayRef, CacheError> {
    let values = PrimitiveArray::<T>::new(ScalarBuffer::from(row.to_vec()), None);
    let offsets = OffsetBuffer::from_lengths([row.len()]);
    Ok(Arc::new(LargeListArray::try_new(item(T::DATA_TYPE), offsets, Arc::new(values), None)?))
}

fn item(data_type: DataType) -> Arc<Field> {
    Arc::new(Field::new("item", data_type, false))
}

/// The Arrow schema of each shard of a cache.
pub(super) fn schema(meta: &CacheMeta) -> Result<SchemaRef, CacheError> {
    #[derive(Serialize)]
    struct Description<'a> {
        version: u32,
        meta: &'a CacheMeta,
    }
    let description = serde_json::to_string(&Description { version: VERSION, meta })
        .map_err(|source| CacheError::ManifestJson { path: MANIFEST_FILE.into(), source })?;
    let list = |name: &str, data_type| Field::new(name, DataType::LargeList(item(data_type)), false);
    let fields = vec![
        Field::new("sample_id", DataType::UInt64, false),
        Field::new("source_id", DataType::LargeUtf8, false),
        Field::new("domain", DataType::LargeUtf8, false),
        list("input_ids", DataType::UInt32),
        list("loss_mask", DataType::UInt8),
        list("features", DataType::UInt16),
        list("last_hidden", DataType::UInt16),
        Field::new("crc32c", DataType::UInt32, false),
    ];
    let metadata = HashMap::from([(SCHEMA_KEY.to_owned(), description)]);
    Ok(Arc::new(Schema::new_with_metadata(fields, metadata)))
}
