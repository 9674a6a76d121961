//! Running programs, and saying what is missing.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The result of a task: nothing, or a message to the user.
pub(crate) type Result<T = ()> = std::result::Result<T, String>;

/// Returns the root of the workspace.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().map_or_else(|| PathBuf::from("."), Path::to_path_buf)
}

/// Returns the `cargo` that runs this program, in the root of the workspace.
pub(crate) fn cargo_command(args: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(args).current_dir(root());
    command
}

/// Runs `cargo ARGS`.
pub(crate) fn cargo(args: &[&str]) -> Result {
    run(&mut cargo_command(args), &format!("cargo {}", args.join(" ")))
}

/// Runs a command whose failure is reported under `name`.
pub(crate) fn run(command: &mut Command, name: &str) -> Result {
    match command.status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("`{name}` failed ({status})")),
        Err(error) => Err(format!("`{name}` cannot be run: {error}")),
    }
}

/// The variable of the environment under which nothing that is required may be skipped: `cargo xtask ci` and
/// `deep` set it, `kvconform::skip` reads it too.
pub(crate) const STRICT: &str = "KVCACHE_STRICT";

/// Says that a task cannot run here and why; an error where nothing may be skipped.
pub(crate) fn skip(reason: &str) -> Result {
    if std::env::var_os(STRICT).is_some() {
        return Err(format!("nothing may be skipped here: {reason}"));
    }
    println!("SKIPPED: {reason}");
    Ok(())
}
