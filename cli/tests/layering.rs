//! The shape of the workspace: which crate may depend on which, and what every source file looks like.

#![expect(clippy::unwrap_used, reason = "a failed step fails the test; clippy knows only `#[test]` functions as tests")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use cargo_metadata::{Metadata, MetadataCommand, PackageId};

/// Crates in order from the top, each with the crates that it may use.
const ALLOWED: [(&str, &[&str]); 5] = [
    ("deepspec", &["deepspec-stages", "deepspec-models", "deepspec-datasets"]),
    ("deepspec-stages", &["deepspec-models", "deepspec-datasets"]),
    ("deepspec-models", &["deepspec-kernels"]),
    ("deepspec-datasets", &[]),
    ("deepspec-kernels", &[]),
];
/// Longest line of a source file, in characters. rustfmt keeps code shorter; it leaves long texts alone.
const LONGEST_LINE: usize = 200;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("this crate is in the workspace's folder").to_owned()
}

fn metadata() -> Metadata {
    let mut command = MetadataCommand::new();
    command.manifest_path(root().join("Cargo.toml")).other_options(["--offline".to_owned()]);
    command.exec().expect("cargo metadata runs in this workspace")
}

/// Every `.rs` file of the crates with its path from the root.
fn sources() -> Vec<(String, String)> {
    let mut folders: Vec<PathBuf> =
        ["cli", "stages", "models", "kernels", "datasets"].map(|name| root().join(name)).into();
    let mut sources = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in fs_err::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() && !path.ends_with("target") {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let name = path.strip_prefix(root()).unwrap().display().to_string();
                sources.push((name, fs_err::read_to_string(path).unwrap()));
            }
        }
    }
    sources
}

/// Fails with all faults at once.
fn none(faults: Vec<String>) {
    assert!(faults.is_empty(), "\n{}", faults.join("\n"));
}

#[test]
fn crates_depend_downwards_only() {
    let metadata = metadata();
    let allowed = BTreeMap::from(ALLOWED);
    let members: BTreeSet<&str> = metadata.workspace_packages().iter().map(|package| package.name.as_str()).collect();
    assert_eq!(members, allowed.keys().copied().collect(), "a new crate needs its place in the order");
    let mut faults = Vec::new();
    for package in metadata.workspace_packages() {
        let within = package.dependencies.iter().filter(|dependency| members.contains(dependency.name.as_str()));
        for dependency in
            within.filter(|dependency| !allowed[package.name.as_str()].contains(&dependency.name.as_str()))
        {
            faults.push(format!("{} must not depend on {}", package.name, dependency.name));
        }
    }
    none(faults);
}

#[test]
fn datasets_knows_no_tensor_library() {
    let metadata = metadata();
    let resolve = metadata.resolve.as_ref().expect("metadata was asked for with dependencies");
    let id = |name: &str| metadata.packages.iter().find(|package| package.name == name).map(|package| &package.id);
    let mut open: Vec<&PackageId> = vec![id("deepspec-datasets").expect("datasets is a member")];
    let mut seen: BTreeSet<&PackageId> = open.iter().copied().collect();
    while let Some(package) = open.pop() {
        let node = &resolve[package];
        open.extend(node.dependencies.iter().filter(|dependency| seen.insert(dependency)));
    }
    assert!(seen.len() > 20, "the dependencies of datasets were followed");
    let names = seen.iter().map(|package| metadata[package].name.as_str());
    none(names.filter(|name| name.starts_with("candle")).map(|name| format!("datasets depends on {name}")).collect());
}

#[test]
fn sources_say_what_they_are_for() {
    let faults = sources().into_iter().filter(|(_, text)| !text.starts_with("//! "));
    none(faults.map(|(name, _)| format!("{name} does not open with `//! `")).collect());
}

#[test]
fn sources_hold_no_stubs() {
    let stubs = [concat!("to", "do!("), concat!("unimple", "mented!(")];
    let mut faults = Vec::new();
    for (name, text) in sources() {
        faults.extend(stubs.iter().filter(|stub| text.contains(*stub)).map(|stub| format!("{name} holds `{stub}`")));
    }
    none(faults);
}

#[test]
fn lines_fit_a_screen() {
    let mut faults = Vec::new();
    for (name, text) in sources() {
        let long = text.lines().enumerate().filter(|(_, line)| line.chars().count() > LONGEST_LINE);
        faults.extend(long.map(|(index, _)| format!("{name}:{} is longer than {LONGEST_LINE} characters", index + 1)));
    }
    none(faults);
}

#[test]
fn documents_name_every_crate() {
    let mut faults = Vec::new();
    for document in ["README.md", "ARCHITECTURE.md"] {
        let Ok(text) = fs_err::read_to_string(root().join(document)) else {
            println!("skipped: there is no {document}");
            continue;
        };
        for folder in ["cli", "stages", "models", "kernels", "datasets"] {
            let is_named = text.contains(&format!("{folder}/")) || text.contains(&format!("`{folder}`"));
            faults.extend((!is_named).then(|| format!("{document} does not name `{folder}`")));
        }
    }
    none(faults);
}
