//! One command of a longer run: runs it in a shell, times it and records its outcome.

use std::process::{Command, Stdio};

use xtask::run::{self, STRICT, root};

use crate::clock::{Seconds, timed};

/// Outcome of a command.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct CommandOutcome {
    /// The command.
    pub(crate) name: String,
    pub(crate) seconds: Seconds,
    pub(crate) passed: bool,
    /// The last line that the command printed.
    pub(crate) last_line: String,
}

/// Runs a command in a shell in the workspace root, with [`STRICT`] set. Prints its name, its output and its
/// time.
pub(crate) fn run(command: &str) -> CommandOutcome {
    println!("\n── {command}");
    let mut shell = Command::new("sh");
    shell.args(["-c", command]).current_dir(root()).env(STRICT, "1").stdin(Stdio::null());
    let mut last_line = String::new();
    let (result, seconds) = timed(|| {
        run::lines(&mut shell, command, |line| {
            println!("{line}");
            if !line.trim().is_empty() {
                line.clone_into(&mut last_line);
            }
        })
    });
    let passed = result.unwrap_or_else(|error| {
        eprintln!("{error}");
        false
    });
    println!("── {command}: {}, {seconds}", word(passed));
    CommandOutcome { name: command.to_owned(), seconds, passed, last_line }
}

/// Returns the word for an outcome.
pub(crate) fn word(passed: bool) -> &'static str {
    if passed { "passed" } else { "FAILED" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outcome_has_the_last_line_and_the_exit_status() {
        let good = run("echo a && echo b && echo");
        assert_eq!((good.passed, good.last_line.as_str()), (true, "b"));
        let bad = run("echo c && exit 3");
        assert_eq!((bad.passed, bad.last_line.as_str()), (false, "c"));
    }

    #[test]
    fn a_command_knows_that_nothing_may_be_skipped() {
        assert_eq!(run(&format!("echo ${STRICT}")).last_line, "1");
    }
}
