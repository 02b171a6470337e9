//! Checkpoints in Hugging Face layout: a folder with `config.json` and `model.safetensors`, replaced as a whole or not at all.
//!
//! A drafter's tensors carry no prefix: `embed_tokens.weight`, `fc.weight`, `layers.0.self_attn.q_proj.weight`,
//! `markov_head.markov_w1.weight`, … Called by training, export and tests.

use std::borrow::Cow;
use std::collections::HashMap;
use std::ops::Deref;
use std::path::{Path, PathBuf};

use candle_core::{CpuStorage, DType, Device, Storage, Tensor};
use safetensors::{Dtype, View};
use serde_json::Value;

use crate::config::read_json;
use crate::error::{Error, Result};
use crate::weights::{SINGLE_FILE, Weights};

/// Writes `config.json` and `model.safetensors` as the folder `dir`, replacing one of that name.
///
/// # Errors
/// A tensor is not f32, f16, bf16, i64 or u8, two share a name, or the disk refuses; `dir` is then as it was.
pub fn save(dir: impl AsRef<Path>, config: &Value, tensors: &[(impl AsRef<str>, Tensor)]) -> Result<()> {
    replace_folder(dir, |folder| {
        write_json(&folder.join("config.json"), config)?;
        write_tensors(&folder.join(SINGLE_FILE), tensors)
    })
}

/// Reads a checkpoint's `config.json` and opens its weights; the model then takes each tensor strictly.
///
/// # Errors
/// A file is missing or damaged.
pub fn load(dir: impl AsRef<Path>, dtype: DType, device: &Device) -> Result<(Value, Weights)> {
    let mut dir = dir.as_ref().to_path_buf();
    if !dir.is_dir() {
        // A crash in the middle of an exchange leaves the last whole checkpoint here; the next save puts it back.
        dir = Some(beside(&dir, "previous")?)
            .filter(|aside| aside.is_dir())
            .ok_or(Error::NotAModel { path: dir, expected: "a checkpoint folder" })?;
    }
    Ok((read_json(&dir.join("config.json"))?, Weights::from_folder(dir, dtype, device)?))
}

/// Makes the folder `dir` out of what `write` puts into an empty folder beside it, so that a crash leaves either the old content or
/// the new one. Files are flushed to the disk before the exchange.
///
/// # Errors
/// `write` fails or the disk refuses; `dir` is then as it was.
pub fn replace_folder(dir: impl AsRef<Path>, write: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let dir = dir.as_ref();
    if dir.is_file() {
        return Err(Error::NotAModel { path: dir.into(), expected: "a folder, found a file" });
    }
    settle(dir)?;
    let fresh = beside(dir, "partial")?;
    let parent = dir.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    fs_err::create_dir_all(parent)?;
    if fresh.exists() {
        fs_err::remove_dir_all(&fresh)?;
    }
    fs_err::create_dir(&fresh)?;
    let swapped = write(&fresh).and_then(|()| {
        sync_folder(&fresh)?;
        exchange(&fresh, dir)
    });
    if swapped.is_err() {
        // The first error is the one to report; a leftover folder is removed by the next attempt.
        let _ = fs_err::remove_dir_all(&fresh);
    }
    swapped?;
    fs_err::File::open(parent)?.sync_all()?;
    Ok(())
}

/// Writes tensors as one safetensors file, flushed to the disk. The bytes depend on names and values only. U8 tensors are
/// flags and written as BOOL, a type that tensors in memory do not have.
///
/// # Errors
/// A tensor is not f32, f16, bf16, i64 or u8, two share a name, or the disk refuses.
pub fn write_tensors(path: &Path, tensors: &[(impl AsRef<str>, Tensor)]) -> Result<()> {
    let by_name = contiguous(path, tensors)?;
    write_views(path, views(&by_name))
}

/// Writes a safetensors file, flushed to the disk. The library makes the file for its owner's eyes alone; it gets the mode that any
/// new file of the process gets, or keeps that of the one it replaces.
pub(crate) fn write_views<S: AsRef<str> + Ord + std::fmt::Display>(
    path: &Path,
    views: impl IntoIterator<Item = (S, impl View)>,
) -> Result<()> {
    let (is_new, mode) = match fs_err::OpenOptions::new().write(true).create_new(true).open(path) {
        Ok(file) => (true, file.metadata()?.permissions()),
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
            (false, fs_err::metadata(path)?.permissions())
        }
        Err(error) => return Err(error.into()),
    };
    if let Err(source) = safetensors::serialize_to_file(views, Some(metadata()), path) {
        if is_new {
            // The first error is the one to report.
            _ = fs_err::remove_file(path);
        }
        return Err(Error::Safetensors { path: path.into(), source: Box::new(source) });
    }
    fs_err::set_permissions(path, mode)?;
    fs_err::OpenOptions::new().write(true).open(path)?.sync_all()?;
    Ok(())
}

/// The weights of a checkpoint with these tensors, without one on the disk: what reading it back would give.
///
/// # Errors
/// As [`write_tensors`].
pub fn in_memory(name: &str, tensors: &[(impl AsRef<str>, Tensor)]) -> Result<Weights> {
    let by_name = contiguous(Path::new(name), tensors)?;
    let bytes = safetensors::serialize(views(&by_name), Some(metadata()))
        .map_err(|source| Error::Safetensors { path: name.into(), source: Box::new(source) })?;
    Weights::from_bytes(name, bytes, DType::F32, &Device::Cpu)
}

fn contiguous<'a>(path: &Path, tensors: &'a [(impl AsRef<str>, Tensor)]) -> Result<HashMap<&'a str, Tensor>> {
    let mut by_name = HashMap::new();
    for (name, tensor) in tensors {
        let name = name.as_ref();
        if !matches!(tensor.dtype(), DType::F32 | DType::F16 | DType::BF16 | DType::I64 | DType::U8) {
            return Err(Error::TensorDtype {
                path: path.into(),
                tensor: name.into(),
                found: format!("{:?}", tensor.dtype()),
                expected: "F32, F16, BF16, I64 or U8",
            });
        }
        let tensor = tensor
            .to_device(&Device::Cpu)
            .and_then(|tensor| tensor.contiguous())
            .map_err(Error::tensor(format!("cannot fetch tensor `{name}`")))?;
        if by_name.insert(name, tensor).is_some() {
            let problem = "is given twice".into();
            return Err(Error::ShardIndex { path: path.into(), tensor: name.into(), problem });
        }
    }
    Ok(by_name)
}

fn views<'a>(by_name: &'a HashMap<&'a str, Tensor>) -> impl Iterator<Item = (&'a &'a str, impl View)> {
    by_name.iter().map(|(name, tensor)| (name, Stored { tensor, storage: tensor.storage_and_layout().0 }))
}

fn metadata() -> HashMap<String, String> {
    HashMap::from([("format".to_string(), "pt".to_string())])
}

/// A contiguous tensor as a file holds it, with its storage held for reading.
struct Stored<'a, S> {
    tensor: &'a Tensor,
    storage: S,
}

impl<S: Deref<Target = Storage>> View for Stored<'_, S> {
    fn dtype(&self) -> Dtype {
        match self.tensor.dtype() {
            DType::U8 => Dtype::BOOL,
            dtype => dtype.into(),
        }
    }

    fn shape(&self) -> &[usize] {
        self.tensor.dims()
    }

    fn data(&self) -> Cow<'_, [u8]> {
        // The large tensors of a checkpoint are f32: those go into the file from where they lie.
        match (&*self.storage, self.tensor.layout().contiguous_offsets()) {
            (Storage::Cpu(CpuStorage::F32(values)), Some((from, to))) => {
                Cow::Borrowed(bytemuck::cast_slice(&values[from..to]))
            }
            _ => View::data(self.tensor),
        }
    }

    fn data_len(&self) -> usize {
        self.tensor.elem_count() * self.tensor.dtype().size_in_bytes()
    }
}

/// Writes indented JSON with a final newline, flushed to the disk.
///
/// # Errors
/// The disk refuses.
pub fn write_json(path: &Path, json: &Value) -> Result<()> {
    let mut file = fs_err::File::create(path)?;
    std::io::Write::write_all(&mut file, format!("{json:#}\n").as_bytes())?;
    file.sync_all()?;
    Ok(())
}

/// Puts `fresh` in the place of `dir`. There is no portable exchange of two folders, so the old one steps aside first.
fn exchange(fresh: &Path, dir: &Path) -> Result<()> {
    let aside = beside(dir, "previous")?;
    let replaces = dir.exists();
    if replaces {
        fs_err::rename(dir, &aside)?;
    }
    if let Err(error) = fs_err::rename(fresh, dir) {
        settle(dir)?;
        return Err(error.into());
    }
    if replaces {
        fs_err::remove_dir_all(&aside)?;
    }
    Ok(())
}

/// Ends an exchange that a crash cut short: the folder that stepped aside comes back, unless its successor is there.
fn settle(dir: &Path) -> Result<()> {
    let aside = beside(dir, "previous")?;
    match (aside.is_dir(), dir.exists()) {
        (true, true) => fs_err::remove_dir_all(&aside)?,
        (true, false) => fs_err::rename(&aside, dir)?,
        (false, _) => {}
    }
    Ok(())
}

/// `.<name>.<suffix>` in the same folder.
fn beside(dir: &Path, suffix: &str) -> Result<PathBuf> {
    let name =
        dir.file_name().ok_or_else(|| Error::NotAModel { path: dir.into(), expected: "a folder with a name" })?;
    Ok(dir.with_file_name(format!(".{}.{suffix}", name.to_string_lossy())))
}

fn sync_folder(folder: &Path) -> Result<()> {
    Ok(fs_err::File::open(folder)?.sync_all()?)
}
