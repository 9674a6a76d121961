//! `cargo xtask check`: everything about the code that is not its behaviour.

use std::fs;
use std::process::{Command, Stdio};

use crate::run::{Result, cargo, cargo_command, root, run};
use crate::{ci, deep, features, links, rooms, storeys};

/// Longest source file.
const MAX_LINES: usize = 600;

/// Workspaces of their own, with lock files of their own.
const BENCHES: [&str; 2] = ["proof/kvbench/block-pool/Cargo.toml", "proof/kvbench/instructions/Cargo.toml"];

/// Command that runs all steps, and is none of them.
const CI: &str = "cargo xtask ci";

/// One check.
type NamedCheck = fn() -> Result;

/// Runs every check and reports all that failed.
pub(crate) fn check() -> Result {
    let steps: [(&str, NamedCheck); 12] = [
        ("formatting", formatting),
        ("lock files", lock_files),
        ("lints", || {
            cargo(&[
                "clippy",
                "--release",
                "--workspace",
                "--all-targets",
                "--all-features",
                "--quiet",
                "--",
                "-D",
                "warnings",
            ])
        }),
        ("docs", docs),
        ("feature combinations", features::few),
        ("file sizes", file_sizes),
        ("the storeys of the workspace", storeys::check),
        ("the rooms of kvcore", || rooms::check(&tracked(&[".rs"])?)),
        ("the documents' commands", commands_run),
        ("the crates' READMEs", crate_readmes),
        ("the features' tests", features_have_tests),
        ("the documents' links", || links::check(&tracked(&[""])?)),
    ];
    let mut failed = Vec::new();
    for (name, step) in steps {
        println!("check: {name}");
        if let Err(message) = step() {
            eprintln!("check: {name}: {message}");
            failed.push(name);
        }
    }
    if failed.is_empty() {
        println!("check: all {} passed", steps.len());
        Ok(())
    } else {
        Err(format!("failed: {}", failed.join(", ")))
    }
}

fn formatting() -> Result {
    cargo(&["fmt", "--all", "--check"])?;
    BENCHES.iter().try_for_each(|manifest| cargo(&["fmt", "--all", "--check", "--manifest-path", manifest]))
}

/// A dependency that a crate gained stands in every lock file.
fn lock_files() -> Result {
    BENCHES.iter().try_for_each(|manifest| {
        let mut command =
            cargo_command(&["metadata", "--locked", "--format-version", "1", "--manifest-path", manifest]);
        run(command.stdout(Stdio::null()), &format!("cargo metadata --locked for {manifest}"))
    })
}

fn docs() -> Result {
    let mut command = cargo_command(&[
        "doc",
        "--release",
        "--workspace",
        "--all-features",
        "--no-deps",
        "--quiet",
        "--document-private-items",
    ]);
    command.env("RUSTDOCFLAGS", "-D warnings -A rustdoc::private_intra_doc_links");
    run(&mut command, "cargo doc")
}

/// Files that git tracks, so that build output and scratch files do not count.
fn tracked(endings: &[&str]) -> Result<Vec<String>> {
    let output = Command::new("git")
        .args(["ls-files"])
        .current_dir(root())
        .output()
        .map_err(|e| format!("`git ls-files` cannot be run: {e}"))?;
    let files = String::from_utf8_lossy(&output.stdout).into_owned();
    Ok(files.lines().filter(|f| endings.iter().any(|e| f.ends_with(e))).map(str::to_owned).collect())
}

fn file_sizes() -> Result {
    let mut long = Vec::new();
    for file in tracked(&[".rs", ".py"])? {
        let text = fs::read_to_string(root().join(&file)).unwrap_or_default();
        // What bindgen writes is as long as its header asks.
        let lines = text.lines().count();
        if lines > MAX_LINES && !text.starts_with("/* automatically generated") {
            long.push(format!("{file} has {lines} lines"));
        }
    }
    if long.is_empty() { Ok(()) } else { Err(format!("more than {MAX_LINES} lines: {}", long.join(", "))) }
}

/// Every row of `docs/features.md` names a test that exists, and none says that something is missing.
fn features_have_tests() -> Result {
    const UNBUILT: [&str; 4] = ["planned", "todo", "not yet", "stub"];
    const ROWS: usize = 40;
    let name = "docs/features.md";
    let text = fs::read_to_string(root().join(name)).map_err(|e| format!("{name}: {e}"))?;
    let lower = text.to_lowercase();
    if let Some(word) = UNBUILT.into_iter().find(|word| lower.contains(word)) {
        return Err(format!("{name} says {word:?}"));
    }
    let mut rows = 0;
    for (file, test) in tests_named(&text) {
        let path = root().join(file);
        let source = fs::read_to_string(&path).map_err(|e| format!("{name}: {file}: {e}"))?;
        if !source.contains(&format!("fn {test}(")) {
            return Err(format!("{name}: {file} has no {test}"));
        }
        rows += 1;
    }
    if rows < ROWS { Err(format!("{name} has {rows} rows with tests, fewer than {ROWS}")) } else { Ok(()) }
}

/// Names of tests that stand as `` `file.rs::function` `` in a Markdown text.
fn tests_named(markdown: &str) -> impl Iterator<Item = (&str, &str)> {
    let quoted = markdown.split('`').skip(1).step_by(2);
    quoted.filter_map(|text| {
        text.split_once(".rs::").map(|(_, test)| (&text[..text.len() - test.len() - 2], test))
    })
}

/// Checks that every command in a `sh` block of a document is a step of CI or a slice of the deep checks, as the document
/// writes it. The script that CI starts with has no step of its own.
fn commands_run() -> Result {
    let steps = ci::STEPS.iter().map(|step| step.command);
    let known: Vec<&str> = steps.chain(deep::SLICES.iter().map(|slice| slice.command)).chain([CI]).collect();
    let mut missing = Vec::new();
    for file in tracked(&[".md"])? {
        let text = read(&file)?;
        let unknown = commands(&text).filter(|command| !known.contains(command));
        missing.extend(unknown.map(|command| format!("{file}: {command}")));
    }
    if missing.is_empty() {
        Ok(())
    } else {
        Err(format!("neither a step of CI nor a slice of the deep checks: {}", missing.join("; ")))
    }
}

/// Checks that the example of each crate's README stands in the documentation of the crate too, where it is compiled and
/// run.
fn crate_readmes() -> Result {
    let mut stray = Vec::new();
    for file in tracked(&["README.md"])?
        .into_iter()
        .filter(|file| root().join(file.replace("README.md", "src/lib.rs")).exists())
    {
        let readme = read(&file)?;
        let example: Vec<&str> = block_lines(&readme, "```rust").collect();
        if example.is_empty() {
            continue;
        }
        let library = read(&file.replace("README.md", "src/lib.rs"))?;
        let docs = library.lines().filter_map(|line| line.strip_prefix("//!"));
        let shown: Vec<&str> = docs.map(str::trim).filter(|line| !line.starts_with("# ")).collect();
        if !shown.windows(example.len()).any(|lines| lines == example) {
            stray.push(file);
        }
    }
    if stray.is_empty() {
        Ok(())
    } else {
        Err(format!("examples that lib.rs does not have: {}", stray.join(", ")))
    }
}

fn read(file: &str) -> Result<String> {
    fs::read_to_string(root().join(file)).map_err(|e| format!("{file}: {e}"))
}

/// Returns the lines of the shell blocks of a Markdown text that are no comments.
fn commands(markdown: &str) -> impl Iterator<Item = &str> {
    block_lines(markdown, "```sh").filter(|line| !line.is_empty() && !line.starts_with('#'))
}

/// Returns the lines of the blocks of a Markdown text that open with `fence`, without indentation.
fn block_lines<'a>(markdown: &'a str, fence: &'static str) -> impl Iterator<Item = &'a str> {
    let mut inside = false;
    markdown.lines().map(str::trim).filter(move |line| {
        if line.starts_with("```") {
            inside = *line == fence;
            return false;
        }
        inside
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_are_named_by_file_and_function() {
        let text = "| a `B::c` | `x/tests/y.rs::works` |\n| b | `z/src/w.rs::fails` |";
        assert_eq!(
            tests_named(text).collect::<Vec<_>>(),
            [("x/tests/y.rs", "works"), ("z/src/w.rs", "fails")]
        );
    }

    #[test]
    fn commands_are_lines_of_shell_blocks() {
        let text = "a\n```sh\n# comment\ncargo x\n```\n```rust\nlet a;\n```\n```sh\nkvc y\n```\n";
        assert_eq!(commands(text).collect::<Vec<_>>(), ["cargo x", "kvc y"]);
    }
}
