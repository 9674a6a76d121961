//! One command of a longer run: started as the README writes it, timed, and its outcome.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use crate::clock::{Seconds, timed};
use crate::run::{STRICT, root};

/// Outcome of a command.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Outcome {
    /// The command.
    pub(crate) name: String,
    pub(crate) seconds: Seconds,
    pub(crate) passed: bool,
    /// The last line of its output.
    pub(crate) last_line: String,
}

/// Runs a command by the shell in the root of the workspace, where nothing that is required may be skipped. Prints
/// its name, its output, and its seconds.
pub(crate) fn run(command: &str) -> Outcome {
    println!("\n── {command}");
    let (result, seconds) = timed(|| output(command));
    let (passed, last_line) = result.unwrap_or_else(|error| {
        eprintln!("`{command}` cannot be run: {error}");
        (false, String::new())
    });
    println!("── {command}: {}, {seconds}", word(passed));
    Outcome { name: command.to_owned(), seconds, passed, last_line }
}

/// Returns the word for an outcome.
pub(crate) fn word(passed: bool) -> &'static str {
    if passed { "passed" } else { "FAILED" }
}

/// Runs a command, prints what it prints, and returns whether it succeeded and the last line.
fn output(command: &str) -> std::io::Result<(bool, String)> {
    let mut shell = Command::new("sh");
    shell.args(["-c", command]).current_dir(root()).env(STRICT, "1");
    let mut child = shell.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
    let mut last = String::new();
    if let Some(out) = child.stdout.take() {
        for line in BufReader::new(out).lines().map_while(std::result::Result::ok) {
            println!("{line}");
            if !line.trim().is_empty() {
                last = line;
            }
        }
    }
    Ok((child.wait()?.success(), last))
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
