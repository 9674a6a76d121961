//! Runs programs, reads and writes files, and skips tasks that cannot run here.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};

/// The result of a task: nothing, or an error message.
pub type Result<T = ()> = std::result::Result<T, String>;

/// Returns a task's exit code, after printing its error. An empty message prints nothing, because the task
/// has already printed its failures.
pub fn exit_code(result: Result) -> ExitCode {
    let Err(message) = result else { return ExitCode::SUCCESS };
    if !message.is_empty() {
        eprintln!("xtask: {message}");
    }
    ExitCode::FAILURE
}

/// Returns an error that lists the problems, or `Ok` if the list is empty.
pub fn none_of(what: &str, list: &[impl AsRef<str>]) -> Result {
    let list: Vec<&str> = list.iter().map(AsRef::as_ref).collect();
    if list.is_empty() { Ok(()) } else { Err(format!("{what}: {}", list.join("; "))) }
}

/// Returns the root of the workspace.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().map_or_else(|| PathBuf::from("."), Path::to_path_buf)
}

/// Returns Cargo's target folder.
pub fn target() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from)
}

/// Returns the command `cargo ARGS` in the workspace root. The arguments are separated by spaces. Uses the
/// same `cargo` that runs this program.
pub fn cargo_command(args: &str) -> Command {
    let mut command = Command::new(cargo_program());
    command.args(args.split(' ')).current_dir(root());
    command
}

/// Runs `cargo ARGS` in the workspace root.
pub fn cargo(args: &str) -> Result {
    run(&mut cargo_command(args), &format!("cargo {args}"))
}

/// Returns the name or path of the `cargo` that runs this program.
pub fn cargo_program() -> std::ffi::OsString {
    std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into())
}

/// Runs a command. Errors refer to the command as `name`.
pub fn run(command: &mut Command, name: &str) -> Result {
    match command.status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("`{name}` failed ({status})")),
        Err(error) => Err(format!("`{name}` cannot be run: {error}")),
    }
}

/// Runs a command and passes each line of its standard output to `each` as soon as it is printed. Returns
/// true if the command succeeded.
pub fn lines(command: &mut Command, name: &str, mut each: impl FnMut(&str)) -> Result<bool> {
    let failed = |error| format!("`{name}` cannot be run: {error}");
    let mut child = command.stdout(Stdio::piped()).spawn().map_err(failed)?;
    if let Some(out) = child.stdout.take() {
        BufReader::new(out).lines().map_while(std::result::Result::ok).for_each(|line| each(&line));
    }
    child.wait().map(|status| status.success()).map_err(failed)
}

/// Calls `work` for each item, in parallel on all processors. Returns the results in order, or the first
/// error.
pub fn in_parallel<T: Sync, R: Send>(items: &[T], work: impl Fn(&T) -> Result<R> + Sync) -> Result<Vec<R>> {
    let next = AtomicUsize::new(0);
    let one = || {
        let mut done = Vec::new();
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(item) = items.get(at) else { return Ok(done) };
            done.push((at, work(item)?));
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get).min(items.len());
    let done: Result<Vec<Vec<(usize, R)>>> = std::thread::scope(|scope| {
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(one)).collect();
        let joined = running.into_iter().map(std::thread::ScopedJoinHandle::join);
        joined.map(|done| done.unwrap_or_else(|_| Err("a thread panicked".to_owned()))).collect()
    });
    let mut done: Vec<(usize, R)> = done?.into_iter().flatten().collect();
    done.sort_by_key(|(at, _)| *at);
    Ok(done.into_iter().map(|(_, result)| result).collect())
}

/// Reads a text file.
pub fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))
}

/// Writes a file, replacing an older one.
pub fn write(path: &Path, text: &str) -> Result {
    std::fs::write(path, text).map_err(|e| format!("{}: {e}", path.display()))
}

/// Creates a folder and its missing parents.
pub fn create_folder(path: &Path) -> Result {
    std::fs::create_dir_all(path).map_err(|e| format!("{}: {e}", path.display()))
}

/// The environment variable that forbids skipping a required check. `cargo xtask ci` and `cargo xtask deep`
/// set it; `kvconform::skip` also reads it.
pub const STRICT: &str = "KVCACHE_STRICT";

/// Reports that a task is skipped, and why. If [`STRICT`] is set, prints nothing and returns an error instead.
pub fn skip(reason: &str) -> Result {
    if std::env::var_os(STRICT).is_some() {
        return Err(format!("nothing may be skipped here, but a test was skipped: {reason}"));
    }
    println!("SKIPPED: {reason}");
    Ok(())
}
