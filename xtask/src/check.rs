//! `cargo xtask check`: checks the code and the documents without running tests.

use std::process::{Command, Stdio};

use xtask::run::{self, Result, cargo, cargo_command, none_of, root};

use crate::{ci, deep, features, links, rooms, storeys};

/// The maximum number of lines per source file.
const MAX_LINES: usize = 600;

/// Two limits on lines: per source file of `xtask`, and in all of `xtask`.
const MAX_OF_XTASK: (usize, usize) = (300, 3_500);

/// Separate workspaces, each with its own lock file.
const BENCHES: [&str; 2] = ["proof/kvbench/block-pool/Cargo.toml", "proof/kvbench/instructions/Cargo.toml"];

/// The command that runs all steps. It is not a step itself.
const CI: &str = "cargo xtask ci";

/// One check.
type NamedCheck = fn() -> Result;

/// Runs every check, and reports all failures.
pub(crate) fn check() -> Result {
    let steps: [(&str, NamedCheck); 13] = [
        ("formatting", formatting),
        ("lock files", lock_files),
        ("lints", || {
            cargo("clippy --release --workspace --all-targets --all-features --quiet -- -D warnings")
        }),
        ("docs", docs),
        ("feature combinations", features::few),
        ("file sizes", file_sizes),
        ("the storeys of the workspace", storeys::check),
        ("the rooms of crates", || rooms::check(&tracked(&[".rs"])?)),
        ("the bound of kvcore", || rooms::bounds(&tracked(&[".rs"])?)),
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
    none_of("failed", &failed)?;
    println!("check: all {} passed", steps.len());
    Ok(())
}

fn formatting() -> Result {
    cargo("fmt --all --check")?;
    BENCHES.iter().try_for_each(|manifest| cargo(&format!("fmt --all --check --manifest-path {manifest}")))
}

/// Checks that every lock file is up to date.
fn lock_files() -> Result {
    BENCHES.iter().try_for_each(|manifest| {
        let args = format!("metadata --locked --format-version 1 --manifest-path {manifest}");
        let mut command = cargo_command(&args);
        run::run(command.stdout(Stdio::null()), &format!("cargo metadata --locked for {manifest}"))
    })
}

fn docs() -> Result {
    let mut command =
        cargo_command("doc --release --workspace --all-features --no-deps --quiet --document-private-items");
    command.env("RUSTDOCFLAGS", "-D warnings -A rustdoc::private_intra_doc_links");
    run::run(&mut command, "cargo doc")
}

/// Returns the tracked files that end in one of `endings`. Build output and scratch files are not tracked.
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
    let (mut long, mut of_xtask) = (Vec::new(), 0);
    for file in tracked(&[".rs", ".py"])? {
        let text = read(&file).unwrap_or_default();
        let lines = text.lines().count();
        let in_xtask = file.starts_with("xtask/");
        of_xtask += if in_xtask { lines } else { 0 };
        let most = if in_xtask { MAX_OF_XTASK.0 } else { MAX_LINES };
        // The length of a generated file depends on the C header that it is generated from.
        if lines > most && !text.starts_with("/* automatically generated") {
            long.push(format!("{file} has {lines} lines, more than {most}"));
        }
    }
    if of_xtask > MAX_OF_XTASK.1 {
        long.push(format!("xtask has {of_xtask} lines, more than {}", MAX_OF_XTASK.1));
    }
    none_of("too long", &long)
}

/// Checks that every row of `docs/features.md` names an existing test, and that the document does not
/// describe any feature as planned or unfinished.
fn features_have_tests() -> Result {
    const UNBUILT: [&str; 4] = ["planned", "todo", "not yet", "stub"];
    const ROWS: usize = 40;
    let name = "docs/features.md";
    let text = read(name)?;
    let lower = text.to_lowercase();
    if let Some(word) = UNBUILT.into_iter().find(|word| lower.contains(word)) {
        return Err(format!("{name} says {word:?}"));
    }
    let mut rows = 0;
    for (file, test) in tests_named(&text) {
        let source = read(file).map_err(|e| format!("{name}: {e}"))?;
        if !["(", "<"].iter().any(|next| source.contains(&format!("fn {test}{next}"))) {
            return Err(format!("{name}: {file} has no {test}"));
        }
        rows += 1;
    }
    if rows < ROWS { Err(format!("{name} has {rows} rows with tests, fewer than {ROWS}")) } else { Ok(()) }
}

/// Returns the tests that a Markdown file names as `` `file.rs::function` ``.
fn tests_named(markdown: &str) -> impl Iterator<Item = (&str, &str)> {
    let quoted = markdown.split('`').skip(1).step_by(2);
    quoted.filter_map(|text| {
        text.split_once(".rs::").map(|(_, test)| (&text[..text.len() - test.len() - 2], test))
    })
}

/// Checks that every command in a `sh` block of a document is exactly a step of CI or a slice of the deep
/// checks. The command that runs CI is also allowed.
fn commands_run() -> Result {
    let steps = ci::STEPS.iter().map(|step| step.command);
    let known: Vec<&str> = steps.chain(deep::SLICES.iter().map(|slice| slice.command)).chain([CI]).collect();
    let mut missing = Vec::new();
    for file in tracked(&[".md"])? {
        let text = read(&file)?;
        let unknown = commands(&text).filter(|command| !known.contains(command));
        missing.extend(unknown.map(|command| format!("{file}: {command}")));
    }
    none_of("neither a step of CI nor a slice of the deep checks", &missing)
}

/// Checks that the example in each crate's README is also in the crate's documentation, where it is compiled.
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
    none_of("examples that lib.rs does not have", &stray)
}

fn read(file: &str) -> Result<String> {
    run::read(&root().join(file))
}

/// Returns the commands in a Markdown file's shell blocks, without comments.
fn commands(markdown: &str) -> impl Iterator<Item = &str> {
    block_lines(markdown, "```sh").filter(|line| !line.is_empty() && !line.starts_with('#'))
}

/// Returns the lines of all code blocks that open with `fence`, without indentation.
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
