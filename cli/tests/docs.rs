//! What the documents say stays true: commands and keys exist, links and paths resolve, functions are where the walk says, texts
//! stay short, and nothing refers to documents that a reader does not have.

#![expect(clippy::unwrap_used, reason = "a failed step fails the test; clippy knows only `#[test]` functions as tests")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use deepspec_stages::recipe::Recipe;

/// Most words of a document.
const LONGEST: [(&str, usize); 2] = [("README.md", 900), ("ARCHITECTURE.md", 1200)];
/// Most words of a row of the leaderboard.
const LONGEST_ROW: usize = 25;
/// Longest line outside tables and code, in characters.
const LONGEST_LINE: usize = 120;
/// First parts of the paths that documents name.
const FOLDERS: [&str; 9] =
    ["cli/", "stages/", "models/", "kernels/", "datasets/", "recipes/", "scripts/", "results/", "docs/"];
/// Folders of the crates.
const CRATES: [&str; 7] = ["cli", "stages", "stages/engine", "stages/serve", "models", "kernels", "datasets"];
/// Sections of a recipe.
const SECTIONS: [&str; 7] = ["target.", "data.", "prepare.", "draft.", "init.", "train.", "eval."];
/// Recipe that keys are looked up in.
const RECIPE: &str = "dspark/smollm2_135m";
/// Flags of programs that are not ours.
const FOREIGN_FLAGS: [&str; 2] = ["--features", "--path"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("this crate is in the workspace's folder").to_owned()
}

/// A document with its path from the root.
struct Document {
    name: String,
    text: String,
}

/// A line with its number; `code` is the language of the fenced block that it stands in.
struct Line<'a> {
    number: usize,
    text: &'a str,
    code: Option<&'a str>,
}

impl Document {
    fn read(name: &str) -> Self {
        Self { name: name.to_owned(), text: fs_err::read_to_string(root().join(name)).unwrap() }
    }

    fn lines(&self) -> Vec<Line<'_>> {
        let mut code = None;
        let mut lines = Vec::new();
        for (index, text) in self.text.lines().enumerate() {
            if let Some(language) = text.trim_start().strip_prefix("```") {
                code = if code.is_some() { None } else { Some(language) };
                continue;
            }
            lines.push(Line { number: index + 1, text, code });
        }
        assert!(code.is_none(), "{} ends inside a code block", self.name);
        lines
    }

    /// Pieces of inline code with their lines.
    fn inline_code(&self) -> Vec<(usize, &str)> {
        let prose = self.lines().into_iter().filter(|line| line.code.is_none());
        prose.flat_map(|line| line.text.split('`').skip(1).step_by(2).map(move |piece| (line.number, piece))).collect()
    }

    /// Commands of the shell blocks with their lines; lines that go on are joined, comments are left out.
    fn commands(&self) -> Vec<(usize, Vec<String>)> {
        let mut commands = Vec::new();
        let mut open = String::new();
        for line in self.lines().into_iter().filter(|line| line.code == Some("sh")) {
            if let Some(part) = line.text.strip_suffix('\\') {
                open.push_str(part);
                continue;
            }
            let words = words(&(std::mem::take(&mut open) + line.text));
            if !words.is_empty() {
                commands.push((line.number, words));
            }
        }
        commands
    }
}

/// The words of a shell command, without what follows a comment sign.
fn words(command: &str) -> Vec<String> {
    let (mut words, mut word, mut quote) = (Vec::new(), None::<String>, None);
    for c in command.chars() {
        match (quote, c) {
            (Some(open), _) if c == open => quote = None,
            (None, '"' | '\'') => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (None, '#') if word.is_none() => break,
            (None, _) if c.is_whitespace() => words.extend(word.take()),
            _ => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    words
}

/// All documents that are written by hand.
fn documents() -> Vec<Document> {
    let mut names: Vec<String> =
        ["README.md", "ARCHITECTURE.md", "CHANGELOG.md", "recipes/README.md", "results/README.md", "results/LOG.md"]
            .map(str::to_owned)
            .into();
    for entry in fs_err::read_dir(root().join("docs")).unwrap() {
        names.push(format!("docs/{}", entry.unwrap().file_name().to_string_lossy()));
    }
    names.sort();
    assert!(names.len() > 12, "the folder of documents was read");
    names.iter().map(|name| Document::read(name)).collect()
}

/// Fails with all faults at once.
fn none(faults: Vec<String>) {
    assert!(faults.is_empty(), "\n{}", faults.join("\n"));
}

/// Runs the program with arguments that end in `--help`: it refuses unknown flags and bad values that come before.
fn help(arguments: &[String]) -> std::process::Output {
    Command::new(assert_cmd::cargo::cargo_bin!("deepspec")).args(arguments).arg("--help").output().unwrap()
}

/// The arguments of a command of ours.
fn our_arguments(words: &[String]) -> Option<&[String]> {
    match words[0].as_str() {
        "deepspec" => Some(&words[1..]),
        "cargo" if words.starts_with(&["cargo", "run", "--release", "--"].map(str::to_owned)) => Some(&words[4..]),
        _ => None,
    }
}

/// Whether a recipe has a key: what is wrong with an assignment is then the value, if anything.
fn is_key(key: &str) -> bool {
    let error = Recipe::open(RECIPE, &[format!("{key}=none")]).err().map(|error| error.to_string());
    error.is_none_or(|error| !error.contains("there is no key"))
}

#[test]
fn commands_parse() {
    let mut faults = Vec::new();
    let mut count = 0;
    for document in documents() {
        for (line, words) in document.commands() {
            let Some(arguments) = our_arguments(&words) else { continue };
            count += 1;
            let output = help(arguments);
            if !output.status.success() {
                let problem = String::from_utf8_lossy(&output.stderr);
                faults.push(format!("{}:{line}: {}\n{problem}", document.name, words.join(" ")));
            }
        }
    }
    assert!(count > 30, "{count} commands were found");
    none(faults);
}

#[test]
fn packages_and_examples_exist() {
    let package = |name: &str| {
        let line = format!("name = \"{name}\"");
        let folder = CRATES.iter().map(|folder| root().join(folder));
        folder.into_iter().find(|folder| {
            fs_err::read_to_string(folder.join("Cargo.toml")).unwrap().lines().any(|found| found == line)
        })
    };
    let mut faults = Vec::new();
    for document in documents() {
        for (line, words) in document.commands().into_iter().filter(|(_, words)| words[0] == "cargo") {
            let after = |flag: &str| words.iter().skip_while(|word| *word != flag).nth(1).map(String::as_str);
            let Some(name) = after("-p") else { continue };
            let here = format!("{}:{line}", document.name);
            match (package(name), after("--example")) {
                (None, _) => faults.push(format!("{here}: there is no package {name}")),
                (Some(folder), Some(example)) => {
                    let files = [format!("examples/{example}.rs"), format!("examples/{example}/main.rs")];
                    if !files.iter().any(|file| folder.join(file).is_file()) {
                        faults.push(format!("{here}: {name} has no example {example}"));
                    }
                }
                (Some(_), None) => {}
            }
        }
    }
    none(faults);
}

#[test]
fn assignments_fit_their_recipe() {
    let mut faults = Vec::new();
    for document in documents() {
        for (line, words) in document.commands() {
            let after = |flag: &str| {
                let pairs = words.iter().zip(words.iter().skip(1));
                pairs.filter(|(word, _)| *word == flag).map(|(_, value)| value.clone()).collect::<Vec<String>>()
            };
            let (recipe, assignments) = (after("--recipe").pop(), after("--set"));
            if our_arguments(&words).is_none() || (recipe.is_none() && assignments.is_empty()) {
                continue;
            }
            let recipe = recipe.unwrap_or_else(|| RECIPE.to_owned());
            if let Err(error) = Recipe::open(&recipe, &assignments) {
                faults.push(format!("{}:{line}: {error}", document.name));
            }
        }
    }
    none(faults);
}

#[test]
fn scripts_have_the_flags_that_are_shown() {
    let mut faults = Vec::new();
    for document in documents() {
        for (line, words) in document.commands().into_iter().filter(|(_, words)| words[0].starts_with("scripts/")) {
            let script = fs_err::read_to_string(root().join(&words[0])).unwrap();
            let unknown = words.iter().filter(|word| word.starts_with("--") && !script.contains(word.as_str()));
            faults.extend(unknown.map(|flag| format!("{}:{line}: {} has no {flag}", document.name, words[0])));
        }
    }
    none(faults);
}

#[test]
fn flags_and_keys_in_prose_exist() {
    let commands = ["quickstart", "prepare", "train", "eval", "generate", "serve", "export", "inspect"];
    let mut known = String::new();
    for command in commands {
        known += &String::from_utf8(help(&[command.to_owned()]).stdout).unwrap();
    }
    for entry in fs_err::read_dir(root().join("scripts")).unwrap() {
        let path = entry.unwrap().path();
        if path.is_file() {
            known += &fs_err::read_to_string(path).unwrap();
        }
    }
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    let known: BTreeSet<&str> = known.split(|c| !is_word(c)).filter(|word| word.starts_with("--")).collect();
    assert!(known.len() > 50, "help texts and scripts were read");
    let mut faults = Vec::new();
    for document in documents().into_iter().filter(|document| document.name != "results/LOG.md") {
        for (line, code) in document.inline_code() {
            let flags = code.split(|c| !is_word(c)).filter(|word| word.starts_with("--") && word.len() > 2);
            let unknown = flags.filter(|flag| !known.contains(flag) && !FOREIGN_FLAGS.contains(flag));
            faults.extend(unknown.map(|flag| format!("{}:{line}: there is no {flag}", document.name)));
            let key = code.split([' ', '=']).find(|word| SECTIONS.iter().any(|section| word.starts_with(section)));
            let key = key.filter(|key| key.chars().all(|c| c.is_ascii_lowercase() || "._".contains(c)));
            let is_file = |key: &str| [".rs", ".toml", ".md", ".json"].iter().any(|suffix| key.ends_with(suffix));
            if let Some(key) = key.filter(|key| !is_file(key) && !key.ends_with(['.', '_']) && !is_key(key)) {
                faults.push(format!("{}:{line}: a recipe has no key `{key}`", document.name));
            }
        }
    }
    none(faults);
}

/// The name by which a heading is linked to.
fn anchor(heading: &str) -> String {
    let kept = |c: char| match c {
        ' ' => Some('-'),
        _ if c.is_alphanumeric() || "-_".contains(c) => Some(c.to_ascii_lowercase()),
        _ => None,
    };
    heading.trim_start_matches('#').trim().chars().filter_map(kept).collect()
}

/// Targets of a line's links.
fn links(line: &str) -> impl Iterator<Item = &str> {
    line.split("](").skip(1).filter_map(|rest| rest.split(')').next())
}

#[test]
fn links_resolve() {
    let mut faults = Vec::new();
    for document in documents() {
        let folder = root().join(&document.name).parent().expect("a document lies in a folder").to_owned();
        for line in document.lines().iter().filter(|line| line.code.is_none()) {
            for link in links(line.text).filter(|link| !link.contains("://")) {
                let (path, section) = link.split_once('#').unwrap_or((link, ""));
                let target = if path.is_empty() { root().join(&document.name) } else { folder.join(path) };
                let here = format!("{}:{}", document.name, line.number);
                if !target.exists() {
                    faults.push(format!("{here}: there is no {link}"));
                } else if !section.is_empty() {
                    let text = fs_err::read_to_string(target).unwrap();
                    if !text.lines().any(|line| line.starts_with('#') && anchor(line) == section) {
                        faults.push(format!("{here}: {path} has no section {section}"));
                    }
                }
            }
        }
    }
    none(faults);
}

#[test]
fn paths_in_prose_exist() {
    let mut faults = Vec::new();
    for document in documents().into_iter().filter(|document| document.name != "results/LOG.md") {
        for (line, code) in document.inline_code() {
            let path = code.split(' ').next().unwrap_or_default();
            if FOLDERS.iter().any(|folder| path.starts_with(folder)) && !root().join(path).exists() {
                faults.push(format!("{}:{line}: there is no {path}", document.name));
            }
        }
    }
    none(faults);
}

#[test]
fn the_walk_names_functions_that_are_there() {
    let mut faults = Vec::new();
    let mut steps = 0;
    let walk = Document::read("docs/walk.md");
    for line in walk.lines() {
        let cells: Vec<&str> = line.text.split(" | ").collect();
        let [step, file, function, _] = cells[..] else { continue };
        let (Some(path), Some(function)) = (links(file).next(), function.split('`').nth(1)) else { continue };
        steps += 1;
        let source = fs_err::read_to_string(root().join("docs").join(path)).unwrap_or_default();
        if !["(", "<"].iter().any(|end| source.contains(&format!("fn {function}{end}"))) {
            faults.push(format!("{step}: {path} has no function {function}"));
        }
    }
    assert!(steps > 25, "{steps} steps were found");
    none(faults);
}

#[test]
fn tables_are_whole() {
    let mut faults = Vec::new();
    let cells = |row: &str| row.replace("\\|", "").matches('|').count();
    for document in documents() {
        let mut above: Vec<&str> = Vec::new();
        for line in document.lines() {
            if line.code.is_some() || !line.text.starts_with('|') {
                above.clear();
                continue;
            }
            let is_rule = line.text.chars().all(|c| "|-: ".contains(c));
            let wrong = match above.as_slice() {
                [] => is_rule,
                [header] => !is_rule || cells(header) != cells(line.text),
                [header, ..] => cells(header) != cells(line.text),
            };
            faults.extend(wrong.then(|| format!("{}:{} does not fit its table", document.name, line.number)));
            above.push(line.text);
        }
    }
    none(faults);
}

#[test]
fn documents_stay_short() {
    let mut faults = Vec::new();
    for (name, most) in LONGEST {
        let count = Document::read(name).text.split_whitespace().count();
        faults.extend((count > most).then(|| format!("{name} has {count} words, at most {most} are allowed")));
    }
    let board = Document::read("results/README.md");
    for line in board.lines().iter().filter(|line| line.text.starts_with('|')) {
        let shown: String =
            line.text.split("](").map(|part| part.split_once(')').map_or(part, |(_, rest)| rest)).collect();
        let count = shown.split_whitespace().filter(|word| word.chars().any(char::is_alphanumeric)).count();
        let number = line.number;
        faults.extend((count > LONGEST_ROW).then(|| format!("results/README.md:{number} has {count} words")));
    }
    for document in documents() {
        let prose = document.lines().into_iter().filter(|line| line.code.is_none() && !line.text.starts_with('|'));
        let long = prose.filter(|line| line.text.chars().count() > LONGEST_LINE);
        faults.extend(long.map(|line| format!("{}:{} is longer than {LONGEST_LINE}", document.name, line.number)));
    }
    none(faults);
}

/// Whether a text names a section, an item or a file of a document that is not in the repository.
fn is_foreign(line: &str) -> bool {
    let texts = [concat!("SP", "EC §"), concat!("SP", "EC.md"), concat!("STY", "LE.md"), concat!("users", ".md")];
    let numbered = |start: &str| {
        let mut rest = line.split(start).skip(1);
        rest.any(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
    };
    let items =
        [concat!("ase", " A"), concat!("ase", " B"), concat!("ases", " A"), concat!("TO", "P "), "fn a", "fn b"];
    texts.iter().any(|text| line.contains(text)) || items.iter().any(|start| numbered(start))
}

#[test]
fn nothing_refers_to_documents_that_are_not_here() {
    assert!(is_foreign(concat!("/// Ca", "se A7: three tokens")) && is_foreign(concat!("fn a", "9_the_first()")));
    let mut folders: Vec<PathBuf> =
        ["cli", "stages", "models", "kernels", "datasets", "scripts", "docs"].map(|name| root().join(name)).into();
    let mut files: Vec<PathBuf> = documents().iter().map(|document| root().join(&document.name)).collect();
    while let Some(folder) = folders.pop() {
        for entry in fs_err::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let suffix = path.extension().and_then(|suffix| suffix.to_str()).unwrap_or_default();
            if path.is_dir() && !path.ends_with("target") {
                folders.push(path);
            } else if ["rs", "md", "sh", "py", "cu", "cuh"].contains(&suffix) {
                files.push(path);
            }
        }
    }
    assert!(files.len() > 200, "the sources were read");
    let mut faults = Vec::new();
    for file in files {
        let text = fs_err::read_to_string(&file).unwrap();
        let found = text.lines().enumerate().filter(|(_, line)| is_foreign(line));
        faults.extend(found.map(|(index, line)| format!("{}:{}: {}", file.display(), index + 1, line.trim())));
    }
    none(faults);
}
