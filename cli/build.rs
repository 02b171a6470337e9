//! Tells the program which commit it is built from, where that is known.

use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=../.git/HEAD");
    println!("cargo::rerun-if-changed=../.git/refs/heads");
    let commit = Command::new("git").args(["rev-parse", "--short=12", "HEAD"]).output().ok();
    if let Some(output) = commit.filter(|output| output.status.success()) {
        println!("cargo::rustc-env=DEEPSPEC_COMMIT={}", String::from_utf8_lossy(&output.stdout).trim());
    }
}
