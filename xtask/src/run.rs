//! Running programs, and saying what is missing.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// What a task ends with: nothing, or what to tell the user.
pub(crate) type Result<T = ()> = std::result::Result<T, String>;

/// The root of the workspace.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().map_or_else(|| PathBuf::from("."), Path::to_path_buf)
}

/// `cargo` in the root of the workspace, as this program was run.
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

/// Whether `cargo TOOL --version` works.
pub(crate) fn has_tool(tool: &str) -> bool {
    let mut command = cargo_command(&[tool, "--version"]);
    command.stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|s| s.success())
}
