//! Standard error that is full or closed: the answer and the exit code are the same.
#![cfg(unix)]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use std::fs::File;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output, Stdio};

/// Runs the program with this standard error.
fn kvc(args: &[&str], stderr: Stdio) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvc"));
    command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(stderr);
    command.spawn().unwrap().wait_with_output().unwrap()
}

/// Returns a pipe that nothing reads.
fn broken_pipe() -> Stdio {
    let mut reader = Command::new("true").stdin(Stdio::piped()).spawn().unwrap();
    let pipe = reader.stdin.take().unwrap();
    reader.wait().unwrap();
    pipe.into()
}

#[test]
fn an_answer_does_not_depend_on_standard_error() {
    let asked = ["run", "-p", "alba is red . bora is blue . bora ?", "--profile"];
    let wrong = ["run", "--model", "/nowhere", "-p", "a"];
    let scored = ["bench", "serve", "--json", "--size", "1x64", "--requests", "3", "--prompt-tokens", "20"];
    let usual = |args: &[&str]| kvc(args, Stdio::null());
    let answer = usual(&asked);
    assert!(answer.status.success() && !answer.stdout.is_empty());
    let full = || Stdio::from(File::options().write(true).open("/dev/full").unwrap());
    for stderr in [full as fn() -> Stdio, broken_pipe] {
        let again = kvc(&asked, stderr());
        assert_eq!(
            (again.status, &again.stdout),
            (answer.status, &answer.stdout),
            "{:?}",
            again.status.signal()
        );
        assert_eq!(kvc(&wrong, stderr()).status.code(), Some(1));
        assert!(kvc(&scored, stderr()).status.success());
    }
}
