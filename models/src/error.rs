//! What can go wrong in this crate: one enum whose variants hold the facts, with advice kept apart in [`Error::hint`].

#[cfg(test)]
mod message_form;
#[cfg(test)]
mod messages;

use std::path::{Path, PathBuf};

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything this crate reports.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    // ---- files ----
    /// The operating system refused a file operation; the source names the path.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// A file that has to be JSON is not.
    #[error("cannot read `{}` as JSON", path.display())]
    Json {
        /// File that was read.
        path: PathBuf,
        /// Line and column of the fault.
        source: serde_json::Error,
    },
    /// A path holds no model in a layout that is understood.
    #[error("no model at `{}`: expected {expected}", path.display())]
    NotAModel {
        /// Folder or file that was asked for.
        path: PathBuf,
        /// What would have been accepted there.
        expected: &'static str,
    },

    // ---- configuration ----
    /// A field that has no default is absent.
    #[error("`{}` lacks the field `{field}`", path.display())]
    FieldMissing {
        /// File that was read.
        path: PathBuf,
        /// Field or metadata key.
        field: String,
    },
    /// A field holds a value that cannot be used.
    #[error("`{}`: field `{field}` is {found}, expected {expected}", path.display())]
    FieldValue {
        /// File that was read.
        path: PathBuf,
        /// Field or metadata key.
        field: String,
        /// The value, as written.
        found: String,
        /// Legal range or type.
        expected: String,
    },
    /// Two fields of a file that mean the same say different things.
    #[error("`{}`: `{left}` is {left_value}, but `{right}` is {right_value}", path.display())]
    FieldsDisagree {
        /// File that was read.
        path: Box<Path>,
        /// One field or metadata key.
        left: String,
        /// Its value, as written.
        left_value: String,
        /// The other one.
        right: String,
        /// Its value, as written.
        right_value: String,
    },
    /// A field asks for something that exists elsewhere but is not implemented here.
    #[error("`{}`: `{field}` is `{found}`, which is not supported, only {supported}", path.display())]
    Unsupported {
        /// File that was read.
        path: PathBuf,
        /// Field or metadata key.
        field: String,
        /// The value, as written.
        found: String,
        /// What is supported.
        supported: &'static str,
    },
    /// A drafter config does not say which block layout it was trained for.
    #[error("`{}`: architecture `{architecture}` without `sample_from_anchor` does not tell the block layout", path.display())]
    AmbiguousLayout {
        /// File that was read.
        path: PathBuf,
        /// First entry of `architectures`.
        architecture: String,
    },

    /// A folder holds no drafter checkpoint of a known layout, or one that fits several.
    #[error("`{}` is a drafter checkpoint of {}: found {found}", path.display(), fits_text(fits))]
    Layout {
        /// Checkpoint.
        path: PathBuf,
        /// Layouts that fit.
        fits: Vec<&'static str>,
        /// Architectures, keys and tensor names that tell.
        found: String,
    },
    /// A checkpoint format has no way to say something about the drafter.
    #[error("format `{format}` cannot hold this drafter: {problem}")]
    NotExpressible {
        /// Format that was asked for.
        format: &'static str,
        /// What it lacks, and why that matters.
        problem: String,
    },
    /// A checkpoint leaves a tensor to the target, and the target is not known.
    #[error("`{}` does not store `{tensor}`, it is the target's", path.display())]
    NotStored {
        /// Checkpoint.
        path: PathBuf,
        /// Name in the reference's layout.
        tensor: &'static str,
    },

    // ---- weights ----
    /// Four-bit precision was asked for, and the file's weights have more bits.
    #[error("`{}` holds no weights in 4 bits: none of the {layers} linear layers is of the form of Q4_0, Q4_1 or Q4_K", path.display())]
    NoFourBits {
        /// Checkpoint.
        path: PathBuf,
        /// Layers that were looked at.
        layers: usize,
    },
    /// A weight file is damaged, truncated or made to mislead.
    #[error("`{}` is corrupt at byte {offset} ({at}): {problem}", path.display())]
    Corrupt {
        /// File that was read.
        path: PathBuf,
        /// Position of the faulty field.
        offset: u64,
        /// Key, tensor or header part being read.
        at: String,
        /// Expected against found.
        problem: String,
    },
    /// A safetensors file has a faulty header.
    #[error("cannot read safetensors file `{}`", path.display())]
    Safetensors {
        /// File that was read or written.
        path: PathBuf,
        /// What the format's own reader found.
        source: Box<safetensors::SafeTensorError>,
    },
    /// A sharded checkpoint's index and its shards disagree about a tensor.
    #[error("`{}`: tensor `{tensor}`: {problem}", path.display())]
    ShardIndex {
        /// Index file or second shard.
        path: PathBuf,
        /// Tensor concerned.
        tensor: String,
        /// What disagrees.
        problem: String,
    },
    /// A tensor that the model needs is not in the checkpoint.
    #[error("`{}` lacks tensor `{tensor}` of shape {expected:?}", path.display())]
    TensorMissing {
        /// Checkpoint.
        path: PathBuf,
        /// Hugging Face name.
        tensor: String,
        /// Shape that the config implies.
        expected: Vec<usize>,
    },
    /// A tensor's shape contradicts the config.
    #[error("`{}`: tensor `{tensor}` has shape {found:?}, expected {expected:?}", path.display())]
    TensorShape {
        /// Checkpoint.
        path: PathBuf,
        /// Hugging Face name.
        tensor: String,
        /// Shape that the config implies.
        expected: Vec<usize>,
        /// Shape in the file.
        found: Vec<usize>,
    },
    /// A tensor is stored in a type that is not read.
    #[error("`{}`: tensor `{tensor}` is stored as {found}, expected {expected}", path.display())]
    TensorDtype {
        /// Checkpoint.
        path: PathBuf,
        /// Hugging Face or GGUF name.
        tensor: String,
        /// Stored type.
        found: String,
        /// Types that are read.
        expected: &'static str,
    },
    /// A tensor holds values that are not numbers, or infinite.
    #[error("`{}`: tensor `{tensor}` holds {}, the first at {}", path.display(), not_finite_text(*nan, *infinite), index_text(first))]
    WeightsNotFinite {
        /// File that holds the tensor.
        path: PathBuf,
        /// Its name in the file.
        tensor: String,
        /// Values that are not numbers.
        nan: usize,
        /// Infinite values.
        infinite: usize,
        /// Index of the first of either kind: row, column.
        first: Vec<usize>,
    },
    /// A tensor of whole numbers holds one that cannot be.
    #[error("`{}`: entry {entry} of tensor `{tensor}` is {found}, expected {expected}", path.display())]
    TensorEntry {
        /// Checkpoint.
        path: PathBuf,
        /// Hugging Face name.
        tensor: String,
        /// Index of the first one at fault.
        entry: usize,
        /// Its value and what it stands for.
        found: String,
        /// What it may be.
        expected: String,
    },
    /// The checkpoint holds tensors that the model did not ask for.
    #[error("`{}` holds {} tensors that the model does not use: `{}`", path.display(), tensors.len(), tensors.join("`, `"))]
    TensorsUnused {
        /// Checkpoint.
        path: PathBuf,
        /// All of them, sorted.
        tensors: Vec<String>,
    },

    // ---- computation ----
    /// More positions than a slot of a key/value cache can hold.
    #[error("slot {slot} of the key/value cache would hold {needed} positions, its capacity is {capacity}")]
    CacheFull {
        /// Slot concerned.
        slot: usize,
        /// Positions that it would have to hold.
        needed: usize,
        /// Positions that it can hold.
        capacity: usize,
    },
    /// A token id outside the embedding table.
    #[error("token {token} is outside the vocabulary of {vocab}")]
    TokenRange {
        /// The token.
        token: u32,
        /// Rows of the embedding table.
        vocab: usize,
    },
    /// A feature layer that does not exist or may not be used.
    #[error("target layer {layer} cannot be a feature layer of a target with {layers} layers")]
    LayerRange {
        /// Layer asked for.
        layer: i32,
        /// Layers of the target.
        layers: usize,
    },
    /// Parts of a batch that do not fit each other.
    #[error("batch does not fit: {0}")]
    Batch(String),
    /// A trainable parameter that the loss does not reach.
    #[error("parameter `{parameter}` has no gradient")]
    NoGradient {
        /// Its checkpoint name.
        parameter: String,
    },
    /// A loss or gradient that is infinite or not a number.
    #[error("{what} is not finite at step {step}")]
    NotFinite {
        /// Quantity concerned.
        what: String,
        /// Optimiser step, from 1.
        step: u64,
    },
    /// A rule of speculative decoding was broken.
    #[error(transparent)]
    Speculate(#[from] crate::speculate::SpeculateError),
    /// The tensor library failed.
    #[error("{context}")]
    Tensor {
        /// What was being computed.
        context: String,
        /// The library's own report.
        source: Box<candle_core::Error>,
    },
}

/// For the message of [`Error::WeightsNotFinite`].
fn not_finite_text(nan: usize, infinite: usize) -> String {
    match (nan, infinite) {
        (nan, 0) => format!("NaN ({nan} of its values)"),
        (0, infinite) => format!("infinity ({infinite} of its values)"),
        (nan, infinite) => format!("NaN and infinity ({nan} and {infinite} of its values)"),
    }
}

/// For the message of [`Error::WeightsNotFinite`].
fn index_text(index: &[usize]) -> String {
    match index {
        [row, column] => format!("row {row}, column {column}"),
        [entry] => format!("entry {entry}"),
        other => format!("index {other:?}"),
    }
}

/// For the message of [`Error::Layout`].
fn fits_text(fits: &[&str]) -> String {
    if fits.is_empty() { "no known layout".into() } else { format!("several layouts at once ({})", fits.join(", ")) }
}

impl From<candle_core::Error> for Error {
    fn from(source: candle_core::Error) -> Self {
        Self::Tensor { context: "tensor operation failed".into(), source: Box::new(source) }
    }
}

impl Error {
    /// For `map_err`: wraps an error of the tensor library with what was being computed.
    pub fn tensor(context: impl Into<String>) -> impl FnOnce(candle_core::Error) -> Self {
        let context = context.into();
        move |source| Self::Tensor { context, source: Box::new(source) }
    }

    /// A field whose value cannot be used; see [`Error::FieldValue`].
    pub(crate) fn field(
        path: &Path,
        field: impl Into<String>,
        found: impl ToString,
        expected: impl Into<String>,
    ) -> Self {
        Self::FieldValue { path: path.into(), field: field.into(), found: found.to_string(), expected: expected.into() }
    }

    /// What the user can do about it, where something can be done.
    pub fn hint(&self) -> Option<String> {
        let hint = match self {
            Self::NotAModel { .. } => {
                "give a folder with config.json and *.safetensors, or a .gguf file; convert *.bin weights to safetensors first"
            }
            Self::AmbiguousLayout { .. } => {
                "add `sample_from_anchor` to its config.json: true when all `block_size` slots predict (anchor first), \
                 false when slot 0 is the known token (1+N)"
            }
            Self::Layout { .. } => {
                "layouts that are read: deepspec (the reference's), z-lab, speculators, SGLang, SpecForge and EAGLE-3 (`midlayer`)"
            }
            Self::NotExpressible { .. } => {
                "format `deepspec` holds every drafter; for engines train with `draft.qk_norm = true` and dense layers"
            }
            Self::NotStored { .. } => "name the target that the drafter was trained for",
            Self::NoFourBits { .. } => {
                "use precision q8, which rounds any weights to 8 bits, or a GGUF file in one of these formats"
            }
            Self::Json { .. } | Self::Corrupt { .. } | Self::Safetensors { .. } => "download or write the file again",
            Self::ShardIndex { .. } => "download all shards and the index from the same revision",
            Self::TensorMissing { .. } | Self::TensorShape { .. } | Self::TensorsUnused { .. } => {
                "check that config.json and the weights belong to the same checkpoint"
            }
            Self::WeightsNotFinite { .. } => {
                "the file is damaged or its training diverged: fetch it again, or take an earlier checkpoint"
            }
            Self::TensorEntry { .. } => "take the checkpoint's tensors from one and the same training run",
            Self::TensorDtype { .. } => "convert the checkpoint to one of the types named",
            Self::FieldMissing { .. } | Self::FieldValue { .. } => "correct the field or fetch the original file again",
            Self::FieldsDisagree { .. } => "keep the one that the weights were trained with, or let both say the same",
            Self::Unsupported { .. } => "use another model, or a conversion of this one that avoids it",
            Self::CacheFull { .. } => "raise the context capacity or shorten the prompt and the number of new tokens",
            Self::TokenRange { .. } => "check that tokenizer and model belong together",
            Self::LayerRange { .. } => {
                "feature layers run from -1 (the embedding) to the last but one; the last layer's raw output is not used"
            }
            Self::NotFinite { .. } => "lower the learning rate, or resume from an earlier checkpoint",
            Self::Speculate(error) => return error.hint(),
            Self::Batch(_) | Self::NoGradient { .. } | Self::Io(_) | Self::Tensor { .. } => {
                return None;
            }
        };
        Some(hint.into())
    }
}
