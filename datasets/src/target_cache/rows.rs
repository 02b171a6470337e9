//! Which rows of hidden states can be a target's: finite, of a size that training can compute with, and not all zeros. Used by the
//! writers and readers of both versions of the cache, so that no stage spreads or trains on rows that mean nothing.
//!
//! A row of zeros is what a hole in a file leaves; no decoder layer puts one out. The embedding (layer −1) may, for tokens that a
//! target was never trained on.

use half::bf16;

use super::error::CacheError;

/// Largest magnitude of a number: the sum of the squares of a million such numbers, which norms take, still fits f32. The largest
/// that known targets put out are near a hundred thousand.
pub const MAX_MAGNITUDE: f32 = 1e12;

/// Layer id of the embedding's output.
const EMBEDDING: i32 = -1;

/// Bits of a number without its sign, which are in the order of magnitudes; infinities and NaN come last.
const MAGNITUDE_BITS: u16 = 0x7fff;
/// Those of the largest bf16 that is at most [`MAX_MAGNITUDE`].
const MAX_BITS: u16 = (MAX_MAGNITUDE.to_bits() >> 16) as u16;

/// Checks the feature rows `[T, L·d]` and the last hidden rows `[T, d]` of a sample; both may be empty.
///
/// # Errors
/// [`CacheError::Sample`] with column, row, layer and number.
pub(super) fn check_rows(
    sample: u64,
    layer_ids: &[i32],
    hidden_size: usize,
    features: &[bf16],
    last_hidden: &[bf16],
) -> Result<(), CacheError> {
    let fault = |field, found, expected: &str| {
        Err(CacheError::Sample { shard: None, sample, field, found, expected: expected.to_owned() })
    };
    for (index, row) in features.chunks(hidden_size).enumerate() {
        let layer = layer_ids[index % layer_ids.len()];
        if let Some((found, expected)) = fault_of(row, layer == EMBEDDING) {
            let place = format!("{found} in row {} of layer {layer}", index / layer_ids.len());
            return fault("features", place, expected);
        }
    }
    for (index, row) in last_hidden.chunks(hidden_size).enumerate() {
        if let Some((found, expected)) = fault_of(row, false) {
            return fault("last_hidden", format!("{found} in row {index}"), expected);
        }
    }
    Ok(())
}

/// What a row holds that it must not, and what it should hold.
fn fault_of(row: &[bf16], may_be_zero: bool) -> Option<(String, &'static str)> {
    let magnitude = |value: &bf16| value.to_bits() & MAGNITUDE_BITS;
    // One pass without branches, which the compiler turns into wide instructions.
    let largest = row.iter().map(magnitude).fold(0, u16::max);
    if largest > MAX_BITS {
        let at = row.iter().position(|value| magnitude(value) > MAX_BITS).unwrap_or_default();
        let found = format!("has {} at number {at}", row[at]);
        return Some((found, "finite numbers of at most 1e12 in magnitude"));
    }
    (largest == 0 && !may_be_zero).then(|| ("has only zeros".to_owned(), "what the target computed"))
}
