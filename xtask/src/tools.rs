//! Tools that tasks need on the machine: checks for their presence, and the commands that install them.

use std::process::{Command, Stdio};

use crate::run::{Result, cargo_command};

/// One tool.
#[derive(Debug, Clone, Copy)]
pub enum Tool {
    /// A program, and the Debian package that contains it.
    Program(&'static str, &'static str),
    /// A Debian package that contains no program.
    Package(&'static str),
    /// A Cargo subcommand, by the name of its crate.
    Cargo(&'static str),
    /// A program from crates.io: its name, its crate and the required version.
    Crate(&'static str, &'static str, &'static str),
    /// A target of the Rust toolchain.
    Target(&'static str),
    /// A component of the Rust toolchain.
    Component(&'static str),
    /// A tool that one task finds and builds itself.
    Made {
        /// The name, which is unique among tools.
        name: &'static str,
        /// Returns true if this machine has the tool.
        is_here: fn() -> bool,
        /// Returns the command that builds the tool.
        bring: fn() -> String,
    },
}

/// The runner for `cargo xtask instructions`. Its version must match the `gungraun` version in
/// `proof/kvbench/instructions/Cargo.toml`.
pub const GUNGRAUN: Tool = Tool::Crate("gungraun-runner", "gungraun-runner", "0.20.0");

impl Tool {
    /// Returns the name. Equal tools have equal names.
    fn name(&self) -> &'static str {
        match self {
            Self::Program(name, _)
            | Self::Package(name)
            | Self::Cargo(name)
            | Self::Crate(name, ..)
            | Self::Target(name)
            | Self::Component(name)
            | Self::Made { name, .. } => name,
        }
    }

    /// Returns true if this machine has the tool. A machine without `dpkg` counts as having every package;
    /// in that case, the step itself reports what is missing.
    pub fn is_here(&self) -> bool {
        match self {
            Self::Program(program, _) => runs(program, &["--version"]),
            Self::Package(name) => !runs("dpkg", &["--version"]) || runs("dpkg", &["-s", name]),
            Self::Cargo(name) => runs(name, &["--version"]),
            Self::Crate(program, _, version) => {
                first_line(program, &["--version"]).is_some_and(|line| line.ends_with(version))
            }
            Self::Target(name) => lists("target", name),
            Self::Component(name) => lists("component", name),
            Self::Made { is_here, .. } => is_here(),
        }
    }

    /// Returns the Debian package that contains the tool, if there is one.
    fn package(&self) -> Option<&'static str> {
        match self {
            Self::Program(_, package) | Self::Package(package) => Some(package),
            _ => None,
        }
    }

    /// Returns the command that installs the tool.
    pub fn bring(&self) -> String {
        match self {
            Self::Program(_, package) | Self::Package(package) => format!("apt-get install -y -q {package}"),
            Self::Cargo(name) => format!("cargo install --locked {name}"),
            Self::Crate(_, name, version) => {
                format!("cargo install --locked --force {name} --version {version}")
            }
            Self::Target(name) => format!("rustup target add {name}"),
            Self::Component(name) => format!("rustup component add {name}"),
            Self::Made { bring, .. } => bring(),
        }
    }
}

/// Returns shell commands that install the missing tools. All packages are installed by one command.
pub fn commands(tools: impl IntoIterator<Item = Tool>) -> Vec<String> {
    let mut missing: Vec<Tool> = Vec::new();
    for tool in tools {
        if !missing.iter().any(|known| known.name() == tool.name()) && !tool.is_here() {
            missing.push(tool);
        }
    }
    of_missing(&missing)
}

fn of_missing(missing: &[Tool]) -> Vec<String> {
    let packages: Vec<&str> = missing.iter().filter_map(Tool::package).collect();
    let mut commands = Vec::new();
    if !packages.is_empty() {
        commands.push("apt-get update -q".to_owned());
        commands.push(format!("apt-get install -y -q {}", packages.join(" ")));
    }
    commands.extend(missing.iter().filter(|tool| tool.package().is_none()).map(Tool::bring));
    commands
}

/// Checks that this machine has all tools. The error names the first missing one and the command that
/// installs it.
pub fn require(what: &str, tools: &[Tool]) -> Result {
    match tools.iter().find(|tool| !tool.is_here()) {
        Some(tool) => Err(format!(
            "{what} needs tools that this machine lacks; on Debian, install them with: \
             {}",
            tool.bring()
        )),
        None => Ok(()),
    }
}

/// Returns the first line that a program prints, or `None` if it cannot run.
pub fn first_line(program: &str, args: &[&str]) -> Option<String> {
    let output = Command::new(program).args(args).stderr(Stdio::null()).output().ok()?;
    String::from_utf8_lossy(&output.stdout).lines().next().map(str::to_owned)
}

/// Returns true if a command can be run and succeeds. Its output is discarded.
pub fn succeeds(command: &mut Command) -> bool {
    command.stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|status| status.success())
}

fn runs(program: &str, args: &[&str]) -> bool {
    // Cargo also finds subcommands in its own folder.
    match program.strip_prefix("cargo-") {
        Some(subcommand) => succeeds(cargo_command(subcommand).args(args)),
        None => succeeds(Command::new(program).args(args)),
    }
}

/// Returns true if rustup lists a target or component as installed. Also returns true without rustup, because
/// nothing could be installed.
fn lists(kind: &str, name: &str) -> bool {
    let output = Command::new("rustup").args([kind, "list", "--installed"]).output();
    let listed = |text: &str| text.lines().any(|line| line.starts_with(name));
    output.map_or(true, |output| listed(&String::from_utf8_lossy(&output.stdout)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_command_installs_all_packages_and_each_other_tool_has_its_own() {
        let tools = [
            Tool::Program("valgrind", "valgrind"),
            Tool::Cargo("cargo-deny"),
            Tool::Package("libvulkan1"),
            Tool::Target("t"),
            Tool::Made { name: "made", is_here: || false, bring: || "make it".to_owned() },
        ];
        assert_eq!(
            of_missing(&tools),
            [
                "apt-get update -q",
                "apt-get install -y -q valgrind libvulkan1",
                "cargo install --locked cargo-deny",
                "rustup target add t",
                "make it",
            ]
        );
        assert!(of_missing(&[]).is_empty());
        assert_eq!(commands([tools[4], tools[4]]), ["make it"], "a tool is installed once");
    }

    #[test]
    fn a_missing_tool_is_named_with_its_command() {
        assert_eq!(require("this", &[]), Ok(()));
        let refused = require("this", &[Tool::Program("no-such-program", "no-such-package")]);
        assert!(refused.is_err_and(|message| message.contains("apt-get install -y -q no-such-package")));
    }
}
