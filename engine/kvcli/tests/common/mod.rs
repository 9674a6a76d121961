//! Helpers that run the program in tests.

use std::process::{Command, Output, Stdio};

use serde_json::Value;

pub(crate) const SYSTEM: &str = "you answer questions from short documents .";
pub(crate) const A: &str = "alba is red . bora is same .";
pub(crate) const B: &str = "cedo is blue . dilan is small .";

/// Runs the program with these arguments alone.
pub(crate) fn plain(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_kvc")).args(args).stdin(Stdio::null()).output().unwrap()
}

/// Runs the program. A prompt in parts, which [`prompt`] joins, is cut at its separator.
pub(crate) fn kvc(args: &[&str]) -> Output {
    let in_parts = args[0] == "run" && args.iter().any(|arg| arg.contains("##"));
    let cut = if in_parts && !args.contains(&"--separator") { &["--separator", "##"][..] } else { &[] };
    plain(&[args, cut].concat())
}

pub(crate) fn prompt(parts: &[&str]) -> String {
    parts.join("##")
}

pub(crate) fn json(args: &[&str]) -> Value {
    run_json(&[&["run", "--json"], args].concat())
}

/// Returns the JSON that a command prints.
pub(crate) fn run_json(args: &[&str]) -> Value {
    let output = kvc(args);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("exactly one JSON object")
}

/// Checks that the command fails with `code`, prints `expected` on standard error, and nothing on standard
/// output.
pub(crate) fn fails(args: &[&str], code: i32, expected: &str) {
    assert_fails(args, &kvc(args), code, &[expected]);
}

/// Checks that a run of the program failed as [`fails`] does, with several expected strings.
pub(crate) fn assert_fails(args: &[&str], output: &Output, code: i32, expected: &[&str]) {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{args:?}: {stderr}");
    assert!(expected.iter().all(|text| stderr.contains(text)), "{args:?}: {stderr}");
    assert!(output.stdout.is_empty() && !stderr.contains("panicked"), "{args:?}");
}
