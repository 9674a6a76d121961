//! Runs one program of a step: its output goes to files, and it is killed when its time is up.

use std::fs::{self, File};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use xtask::run::{Result, STRICT};

/// The interval at which to check whether a program has ended.
const LOOK: Duration = Duration::from_millis(50);

/// A program's output, and its failure if it failed.
#[derive(Debug)]
pub(super) struct Ran {
    /// The standard output, even if the program was killed.
    pub(super) output: String,
    /// The reason for the program's failure; `None` if it succeeded.
    pub(super) failure: Option<String>,
}

/// Runs a program until `deadline`. Standard output goes to `FOLDER/NAME.out`, errors to `FOLDER/NAME.err`.
pub(super) fn run(command: &mut Command, folder: &Path, name: &str, deadline: Instant) -> Result<Ran> {
    let [out, err] = ["out", "err"].map(|end| folder.join(format!("{name}.{end}")));
    let create = |path: &Path| File::create(path).map_err(|e| format!("{}: {e}", path.display()));
    // A separate process group, so the program's children can be killed with it. Tests that need the double
    // are skipped on a card; that is not a failure.
    command
        .stdin(Stdio::null())
        .stdout(create(&out)?)
        .stderr(create(&err)?)
        .process_group(0)
        .env_remove(STRICT);
    let mut child = command.spawn().map_err(|e| format!("{} cannot be run: {e}", program(command)))?;
    let failure = waited(&mut child, deadline)?;
    let text = |path: &Path| {
        fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
    };
    let failure = failure.map(|how| match last_line(&text(&err)) {
        Some(line) => format!("{how}: {line}"),
        None => how,
    });
    Ok(Ran { output: text(&out), failure })
}

fn program(command: &Command) -> String {
    command.get_program().to_string_lossy().into_owned()
}

/// Waits for a program. At the deadline, kills it and its children. Returns the reason for its failure,
/// or `None` if it succeeded.
fn waited(child: &mut Child, deadline: Instant) -> Result<Option<String>> {
    loop {
        match child.try_wait().map_err(|e| e.to_string())? {
            Some(status) if status.success() => return Ok(None),
            Some(status) => return Ok(Some(status.to_string())),
            None if Instant::now() < deadline => sleep(LOOK),
            None => {
                let group = format!("kill -KILL -- -{}", child.id());
                let ended = Command::new("sh").args(["-c", &group]).stderr(Stdio::null()).status();
                if !ended.is_ok_and(|status| status.success()) {
                    // It may have ended in the meantime.
                    let _ = child.kill();
                }
                let _ = child.wait();
                return Ok(Some("its time was over".to_owned()));
            }
        }
    }
}

/// Returns the last line that is not blank.
pub(super) fn last_line(text: &str) -> Option<&str> {
    text.lines().map(str::trim).rfind(|line| !line.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ran(script: &str, seconds: f64) -> (Ran, f64) {
        let folder =
            std::env::temp_dir().join(format!("gpu-check-process-{}-{}", std::process::id(), script.len()));
        fs::create_dir_all(&folder).unwrap_or_default();
        let start = Instant::now();
        let deadline = start + Duration::from_secs_f64(seconds);
        let ran = run(Command::new("sh").args(["-c", script]), &folder, "a", deadline);
        let _ = fs::remove_dir_all(folder);
        let ran = ran.unwrap_or_else(|error| Ran { output: String::new(), failure: Some(error) });
        (ran, start.elapsed().as_secs_f64())
    }

    #[test]
    fn output_is_kept_and_a_failure_is_explained_by_the_last_error() {
        let (good, _) = ran("echo a; echo b >&2", 20.0);
        assert_eq!((good.output.as_str(), good.failure), ("a\n", None));
        let (bad, _) = ran("echo first >&2; echo why >&2; exit 3", 20.0);
        assert!(bad.failure.is_some_and(|reason| reason.ends_with("3: why")));
    }

    #[test]
    fn a_program_is_ended_with_its_children_and_its_output_is_kept() {
        let (late, seconds) = ran("echo begun; sleep 60 & sleep 60; echo never", 0.3);
        assert_eq!(late.output, "begun\n");
        assert!(late.failure.is_some_and(|reason| reason.contains("time was over")));
        assert!(seconds < 30.0);
    }
}
