//! The shape of the workspace: which crate may depend on which, and what every source file looks like.
//!
//! Manifests and lock file are read as they lie there, without cargo's resolution: that would want the packages of every platform,
//! and a machine that has only just built the project has those of its own.

#![expect(clippy::unwrap_used, reason = "a failed step fails the test; clippy knows only `#[test]` functions as tests")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use toml::{Table, Value};

/// Folders of the crates.
const FOLDERS: [&str; 7] = ["cli", "stages", "stages/engine", "stages/serve", "models", "kernels", "datasets"];
/// Crates in order from the top, each with the crates that it may use.
const ALLOWED: [(&str, &[&str]); 7] = [
    ("deepspec", &["deepspec-stages", "deepspec-serve", "deepspec-engine", "deepspec-models", "deepspec-datasets"]),
    ("deepspec-stages", &["deepspec-engine", "deepspec-models", "deepspec-datasets"]),
    ("deepspec-serve", &["deepspec-engine", "deepspec-models", "deepspec-datasets"]),
    // Texts that end a sequence, and text as it becomes certain, need a tokenizer.
    ("deepspec-engine", &["deepspec-models", "deepspec-datasets"]),
    ("deepspec-models", &["deepspec-kernels"]),
    ("deepspec-datasets", &[]),
    ("deepspec-kernels", &[]),
];
/// Packages of the server.
const NETWORK: [&str; 6] = ["axum", "futures-util", "http-body-util", "hyper", "hyper-util", "tokio"];
/// The crate that may use them, and its folder that does.
const SERVER: (&str, &str) = ("deepspec-serve", "stages/serve/");
/// Helpers that the tests of several crates take in.
const FIXTURES: &str = "stages/tests/common/";
/// Longest line of a source file, in characters. rustfmt keeps code shorter; it leaves long texts alone.
const LONGEST_LINE: usize = 200;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("this crate is in the workspace's folder").to_owned()
}

fn table(path: impl AsRef<Path>) -> Table {
    fs_err::read_to_string(root().join(path)).unwrap().parse().unwrap()
}

/// A crate of the workspace as its manifest describes it.
struct Member {
    name: String,
    folder: String,
    /// Real names of the packages that it depends on, whether to build, to run or to test, on whatever platform.
    packages: BTreeSet<String>,
    /// The same as (name in the manifest, whether for tests and benches alone).
    declared: BTreeSet<(String, bool)>,
}

impl Member {
    /// Reads a manifest; `shared` is `[workspace.dependencies]`.
    fn parse(folder: &str, manifest: &Table, shared: &Table) -> Self {
        let name = manifest["package"]["name"].as_str().unwrap().to_owned();
        let mut found = Self { name, folder: folder.into(), packages: BTreeSet::new(), declared: BTreeSet::new() };
        let platforms = manifest.get("target").and_then(Value::as_table);
        let platforms = platforms.into_iter().flat_map(Table::values).filter_map(Value::as_table);
        for table in [manifest].into_iter().chain(platforms) {
            for kind in ["dependencies", "build-dependencies", "dev-dependencies"] {
                for (name, entry) in table.get(kind).and_then(Value::as_table).into_iter().flatten() {
                    let is_inherited = entry.get("workspace").and_then(Value::as_bool) == Some(true);
                    let entry = if is_inherited { &shared[name] } else { entry };
                    let package = entry.get("package").and_then(Value::as_str).unwrap_or(name);
                    found.packages.insert(package.to_owned());
                    found.declared.insert((name.clone(), kind == "dev-dependencies"));
                }
            }
        }
        found
    }
}

/// The crates that the workspace's manifest lists.
fn members() -> Vec<Member> {
    let manifest = table("Cargo.toml");
    let shared = manifest["workspace"]["dependencies"].as_table().unwrap();
    let folders = manifest["workspace"]["members"].as_array().unwrap().iter().map(|folder| folder.as_str().unwrap());
    folders.map(|folder| Member::parse(folder, &table(Path::new(folder).join("Cargo.toml")), shared)).collect()
}

/// Dependencies that point to the side or upwards.
fn forbidden_edges(members: &[Member]) -> Vec<String> {
    let allowed = BTreeMap::from(ALLOWED);
    let mut faults = Vec::new();
    for member in members {
        let within = member.packages.iter().filter(|package| allowed.contains_key(package.as_str()));
        let wrong = within.filter(|package| !allowed[member.name.as_str()].contains(&package.as_str()));
        faults.extend(wrong.map(|package| format!("{} must not depend on {package}", member.name)));
        let network = member.packages.iter().filter(|package| NETWORK.contains(&package.as_str()));
        let network = network.filter(|_| member.name != SERVER.0);
        faults.extend(network.map(|package| format!("{} must not use the network: {package}", member.name)));
    }
    faults
}

/// Every `.rs` file of the crates with its path from the root.
fn sources() -> Vec<(String, String)> {
    // A crate inside another one's folder is reached with it.
    let mut folders: Vec<PathBuf> =
        FOLDERS.iter().filter(|name| !name.contains('/')).map(|name| root().join(name)).collect();
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

/// Whether a text names a crate: as a path, in a `use` or an attribute.
fn names_crate(text: &str, package: &str) -> bool {
    let name = package.replace('-', "_");
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    text.match_indices(&name).any(|(at, _)| {
        let (before, after) = (&text[..at], &text[at + name.len()..]);
        !before.ends_with(is_word) && !after.starts_with(is_word)
    })
}

#[test]
fn crates_depend_downwards_only() {
    let members = members();
    let names: BTreeSet<&str> = members.iter().map(|member| member.name.as_str()).collect();
    assert_eq!(names, ALLOWED.iter().map(|(name, _)| *name).collect(), "a new crate needs its place in the order");
    assert_eq!(members.iter().map(|member| member.folder.as_str()).collect::<Vec<_>>(), FOLDERS);
    assert!(members.iter().all(|member| member.packages.len() >= 4), "the manifests were understood");
    none(forbidden_edges(&members));
}

#[test]
fn an_edge_upwards_is_seen_in_every_part_of_a_manifest() {
    let shared =
        "deepspec-stages = { path = \"stages\" }\nengine = { path = \"stages\", package = \"deepspec-stages\" }";
    let shared: Table = shared.parse().unwrap();
    let faults = |part: &str| {
        let manifest = format!("[package]\nname = \"deepspec-models\"\n{part}").parse().unwrap();
        forbidden_edges(&[Member::parse("models", &manifest, &shared)])
    };
    for part in [
        "[dependencies]\ndeepspec-stages.workspace = true",
        "[dependencies]\nengine.workspace = true",
        "[dependencies]\nengine = { path = \"../stages\", package = \"deepspec-stages\" }",
        "[build-dependencies]\ndeepspec-stages = { path = \"../stages\" }",
        "[dev-dependencies]\ndeepspec-stages = { workspace = true, features = [\"hub\"] }",
        "[target.'cfg(unix)'.dependencies]\ndeepspec-stages.workspace = true",
    ] {
        assert_eq!(faults(part), ["deepspec-models must not depend on deepspec-stages"], "{part}");
    }
    assert_eq!(faults("[dev-dependencies]\ntokio = \"1\""), ["deepspec-models must not use the network: tokio"]);
    assert_eq!(faults("[dependencies]\ndeepspec-kernels = { path = \"../kernels\" }"), Vec::<String>::new());
}

#[test]
fn only_the_server_knows_the_network() {
    let mut users = BTreeSet::new();
    let mut faults = Vec::new();
    for (name, text) in sources() {
        // A crate is used by a path or a `use`; words in prose and texts are none.
        let used = NETWORK.map(|package| package.replace('-', "_"));
        for package in used.iter().filter(|used| text.contains(&format!("{used}::"))) {
            users.insert(package.clone());
            if !name.starts_with(SERVER.1) {
                faults.push(format!("{name} uses {package}, which belongs to {}", SERVER.1));
            }
        }
    }
    assert!(users.len() > 3, "the server's uses were found: {users:?}");
    none(faults);
}

#[test]
fn datasets_knows_no_tensor_library() {
    let lock = table("Cargo.lock");
    let mut uses: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for package in lock["package"].as_array().unwrap() {
        // An entry is a name, with a version behind it where the lock file has several.
        let dependencies = package.get("dependencies").and_then(Value::as_array).into_iter().flatten();
        let dependencies = dependencies.map(|entry| entry.as_str().unwrap().split(' ').next().unwrap());
        uses.entry(package["name"].as_str().unwrap()).or_default().extend(dependencies);
    }
    let mut open = vec!["deepspec-datasets"];
    let mut seen = BTreeSet::from(["deepspec-datasets"]);
    while let Some(package) = open.pop() {
        open.extend(uses[package].iter().filter(|package| seen.insert(package)));
    }
    assert!(seen.len() > 20, "the dependencies of datasets were followed");
    let tensors = seen.iter().filter(|name| name.starts_with("candle"));
    none(tensors.map(|name| format!("datasets depends on {name}")).collect());
}

#[test]
fn every_dependency_is_used() {
    let sources = sources();
    let members = members();
    let mut faults = Vec::new();
    for member in &members {
        for (name, is_for_tests) in &member.declared {
            let is_reached = |path: &str| {
                let within = path.strip_prefix(&member.folder).and_then(|path| path.strip_prefix('/'));
                within.is_some_and(|path| *is_for_tests || path.starts_with("src/") || path == "build.rs")
                    || (*is_for_tests && path.starts_with(FIXTURES))
            };
            if !sources.iter().any(|(path, text)| is_reached(path) && names_crate(text, name)) {
                faults.push(format!("no source of {} names its dependency {name}", member.name));
            }
        }
    }
    let manifest = table("Cargo.toml");
    let declared: BTreeSet<&str> =
        members.iter().flat_map(|member| &member.declared).map(|(name, _)| name.as_str()).collect();
    let shared = manifest["workspace"]["dependencies"].as_table().unwrap().keys();
    let unused = shared.filter(|name| !declared.contains(name.as_str()));
    faults.extend(unused.map(|name| format!("no crate takes {name} from the workspace's dependencies")));
    none(faults);
}

#[test]
fn a_crate_is_named_by_its_whole_name_only() {
    assert!(names_crate("use serde_json::json;", "serde-json") && names_crate("let x = half::bf16::ONE;", "half"));
    assert!(!names_crate("use serde_json::json;", "serde") && !names_crate("behalf::of", "half"));
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
        for folder in FOLDERS {
            let is_named = text.contains(&format!("{folder}/")) || text.contains(&format!("`{folder}`"));
            faults.extend((!is_named).then(|| format!("{document} does not name `{folder}`")));
        }
    }
    none(faults);
}
