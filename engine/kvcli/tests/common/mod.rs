//! The program as tests call it.

use std::process::{Command, Output, Stdio};

use serde_json::Value;

pub(crate) const SYSTEM: &str = "you answer questions from short documents .";
pub(crate) const A: &str = "alba is red . bora is same .";
pub(crate) const B: &str = "cedo is blue . dilan is small .";

/// Runs the program. A prompt in parts, which [`prompt`] joins, is cut at its separator.
pub(crate) fn kvc(args: &[&str]) -> Output {
    let in_parts = args[0] == "run" && args.iter().any(|arg| arg.contains("##"));
    let cut = if in_parts && !args.contains(&"--separator") { &["--separator", "##"][..] } else { &[] };
    Command::new(env!("CARGO_BIN_EXE_kvc")).args(args).args(cut).stdin(Stdio::null()).output().unwrap()
}

pub(crate) fn prompt(parts: &[&str]) -> String {
    parts.join("##")
}

pub(crate) fn json(args: &[&str]) -> Value {
    let output = kvc(&[&["run", "--json"], args].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("exactly one JSON object")
}

/// Checks that the command fails with `code`, prints `expected` on standard error, and nothing on standard
/// output.
pub(crate) fn fails(args: &[&str], code: i32, expected: &str) {
    let output = kvc(args);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{args:?}: {stderr}");
    assert!(stderr.contains(expected), "{args:?}: {stderr}");
    assert!(output.stdout.is_empty() && !stderr.contains("panicked"), "{args:?}");
}
