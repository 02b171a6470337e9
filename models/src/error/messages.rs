//! How the messages of this crate read, over every variant: a new one is in no arm here, and does not compile without.

use std::io;
use std::path::PathBuf;

use super::Error;
use super::message_form::{NAME, PATH, check, faults, samples};
use crate::speculate::SpeculateError;

fn path() -> PathBuf {
    PATH.into()
}

#[test]
fn every_message_reads_as_the_others_do() {
    let text = || NAME.to_owned();
    let json = || serde_json::from_str::<u32>("{").unwrap_err();
    check(samples! {Error:
        Error::Io(_) => (io::Error::new(io::ErrorKind::NotFound, format!("failed to open file `{PATH}`")).into(), false),
        Error::Json { .. } => (Error::Json { path: path(), source: json() }, true),
        Error::NotAModel { .. } => (Error::NotAModel { path: path(), expected: "a folder with `config.json`" }, true),
        Error::FieldMissing { .. } => (Error::FieldMissing { path: path(), field: text() }, true),
        Error::FieldValue { .. } => (Error::field(&path(), text(), "12", "at most 3"), true),
        Error::FieldsDisagree { .. } => ({
            let (left, left_value, right, right_value) = (text(), "1e4".into(), text(), "1e6".into());
            Error::FieldsDisagree { path: path().into(), left, left_value, right, right_value }
        }, true),
        Error::Unsupported { .. } =>
            (Error::Unsupported { path: path(), field: text(), found: text(), supported: "`silu`" }, true),
        Error::AmbiguousLayout { .. } => (Error::AmbiguousLayout { path: path(), architecture: text() }, true),
        Error::Layout { .. } => (Error::Layout { path: path(), fits: vec!["z-lab", "SGLang"], found: "keys `a`".into() }, true),
        Error::NotExpressible { .. } => (Error::NotExpressible { format: NAME, problem: "it has no experts".into() }, true),
        Error::NotStored { .. } => (Error::NotStored { path: path(), tensor: NAME }, true),
        Error::NoFourBits { .. } => (Error::NoFourBits { path: path(), layers: 7 }, true),
        Error::Corrupt { .. } =>
            (Error::Corrupt { path: path(), offset: 8, at: "magic".into(), problem: "expected `GGUF`".into() }, true),
        Error::Safetensors { .. } => ({
            let source = Box::new(safetensors::SafeTensorError::HeaderTooSmall);
            Error::Safetensors { path: path(), source }
        }, true),
        Error::ShardIndex { .. } =>
            (Error::ShardIndex { path: path(), tensor: text(), problem: "is in no shard".into() }, true),
        Error::TensorMissing { .. } => (Error::TensorMissing { path: path(), tensor: text(), expected: vec![2, 3] }, true),
        Error::TensorShape { .. } =>
            (Error::TensorShape { path: path(), tensor: text(), expected: vec![2, 3], found: vec![3] }, true),
        Error::TensorDtype { .. } =>
            (Error::TensorDtype { path: path(), tensor: text(), found: "F64".into(), expected: "F32 or BF16" }, true),
        Error::WeightsNotFinite { .. } =>
            (Error::WeightsNotFinite { path: path(), tensor: text(), nan: 3, infinite: 1, first: vec![2, 5] }, true),
        Error::TensorEntry { .. } => ({
            let (found, expected) = ("9, for token 9".into(), "at most 8".into());
            Error::TensorEntry { path: path(), tensor: text(), entry: 4, found, expected }
        }, true),
        Error::TensorsUnused { .. } => (Error::TensorsUnused { path: path(), tensors: vec![text(), text()] }, true),
        Error::CacheFull { .. } => (Error::CacheFull { slot: 1, needed: 9, capacity: 8 }, true),
        Error::TokenRange { .. } => (Error::TokenRange { token: 9, vocab: 8 }, true),
        Error::LayerRange { .. } => (Error::LayerRange { layer: 30, layers: 30 }, true),
        Error::Batch(_) => (Error::Batch("3 sequences with 2 loss masks".into()), false),
        Error::NoGradient { .. } => (Error::NoGradient { parameter: text() }, false),
        Error::NotFinite { .. } => (Error::NotFinite { what: "the loss".into(), step: 7 }, true),
        Error::Speculate(_) => (SpeculateError::NanConfidence { position: 0 }.into(), true),
        Error::Tensor { .. } => (Error::tensor("attention failed")(candle_core::Error::Msg("x".into())), false),
    });
}

#[test]
fn every_message_about_speculation_reads_as_the_others_do() {
    check(samples! {SpeculateError:
        SpeculateError::Parameter { .. } =>
            (SpeculateError::Parameter { field: NAME, value: -1.0, expected: "a number from 0 to 1" }, true),
        SpeculateError::EmptyRow => (SpeculateError::EmptyRow, false),
        SpeculateError::NanLogit { .. } => (SpeculateError::NanLogit { token: 3 }, true),
        SpeculateError::InfiniteMaximum { .. } => (SpeculateError::InfiniteMaximum { value: f32::NEG_INFINITY }, true),
        SpeculateError::NotADistribution { .. } => (SpeculateError::NotADistribution { sum: 2.0, smallest: f32::NAN }, false),
        SpeculateError::BlockShape { .. } =>
            (SpeculateError::BlockShape { tokens: 4, what: "the number of rows", found: 3, expected: 5 }, false),
        SpeculateError::UnknownToken { .. } =>
            (SpeculateError::UnknownToken { token: 9, position: 0, vocab_size: 8 }, true),
        SpeculateError::TemperatureCount { .. } => (SpeculateError::TemperatureCount { found: 3, expected: 4 }, true),
        SpeculateError::Temperature { .. } => (SpeculateError::Temperature { position: 2, value: -0.5 }, true),
        SpeculateError::NanConfidence { .. } => (SpeculateError::NanConfidence { position: 2 }, true),
        SpeculateError::Confidence { .. } => (SpeculateError::Confidence { position: 2, value: f32::INFINITY }, true),
        SpeculateError::TooFewBlocks { .. } => (SpeculateError::TooFewBlocks { position: 2, found: 3, needed: 9 }, true),
    });
}

#[test]
fn the_check_finds_what_it_is_for() {
    for (text, count) in [
        ("cannot read `/folder/file.gguf`: 3 tensors", 0),
        ("Cannot read it", 1),
        ("cannot read it.", 1),
        ("its data needs Some(552960) bytes", 1),
        ("expected \\\"GGUF\\\"", 1),
        ("cannot read /folder/file.gguf", 1),
        ("", 1),
    ] {
        assert_eq!(faults(text).len(), count, "{text}: {:?}", faults(text));
    }
}
