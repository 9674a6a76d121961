//! `kvc completions`: scripts for shells.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use std::io::Write;
use std::process::{Command, Stdio};

use rstest::rstest;

use common::{fails, kvc};

#[allow(dead_code, reason = "other suites use the rest")]
mod common;

#[rstest]
#[case("bash", "complete -F _kvc")]
#[case("zsh", "#compdef kvc")]
#[case("fish", "complete -c kvc")]
fn a_script_knows_every_command_and_option(#[case] shell: &str, #[case] words: &str) {
    let output = kvc(&["completions", shell]);
    let script = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && script.contains(words), "{script}");
    for known in ["run", "tune", "doctor", "completions", "answer-schema", "kv-memory"] {
        assert!(script.contains(known), "{known}");
    }
}

#[test]
fn bash_completes_a_command_with_the_script() {
    let script = String::from_utf8(kvc(&["completions", "bash"]).stdout).unwrap();
    let ask =
        "COMP_WORDS=(kvc run --answer-s) COMP_CWORD=2; _kvc kvc --answer-s run; echo \"${COMPREPLY[@]}\"\n";
    let mut bash = Command::new("bash").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    bash.stdin.take().unwrap().write_all((script + "\n" + ask).as_bytes()).unwrap();
    let output = bash.wait_with_output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "--answer-schema");
}

#[test]
fn an_unknown_shell_is_an_error() {
    fails(&["completions", "tcl"], 2, "possible values");
}
