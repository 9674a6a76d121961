//! The programs that the steps run: built in this workspace, or copied from another machine in one folder.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde::Deserialize;
use xtask::run::{Result, cargo_command, create_folder, root, write};
use xtask::tools::first_line;

use super::absolute;

/// A program to build.
struct Built {
    name: &'static str,
    /// Cargo's name for its kind of target.
    kind: &'static str,
    /// The target's crate. Several crates have tests of the same name.
    of: &'static str,
}

const BUILT: &[Built] = &[
    Built { name: "kvc", kind: "bin", of: "kvcli" },
    Built { name: "conform", kind: "example", of: "kvconform" },
    Built { name: "suite", kind: "test", of: "kvbackend-cuda" },
    Built { name: "collectives", kind: "test", of: "kvconform" },
    Built { name: "kernels_on_cuda", kind: "bench", of: "kvbench" },
    Built { name: "kernels_on_wgpu", kind: "bench", of: "kvbench" },
];

/// The peers' script: its name, and its path in the repository.
pub(super) const PEERS: (&str, &str) = ("gpu.py", "proof/peers/gpu.py");

/// The file with the source version in a folder of copied programs.
const VERSION: &str = "VERSION";

/// The maximum size of a folder of copied programs, in bytes.
const MOST: u64 = 60 << 20;

/// The programs, by name.
pub(super) struct Programs {
    paths: Vec<(String, PathBuf)>,
    /// The source version.
    pub(super) version: String,
}

impl Programs {
    /// Returns the programs in a folder that [`collect`] has filled.
    pub(super) fn of_folder(folder: &Path) -> Result<Self> {
        let folder = absolute(folder);
        let names = BUILT.iter().map(|built| built.name).chain([PEERS.0]);
        let paths: Vec<(String, PathBuf)> = names.map(|name| (name.to_owned(), folder.join(name))).collect();
        if let Some((name, _)) = paths.iter().find(|(_, path)| !path.is_file()) {
            return Err(format!(
                "{} has no {name}; `gpu-check --collect` fills such a folder",
                folder.display()
            ));
        }
        let version = fs::read_to_string(folder.join(VERSION)).unwrap_or_default().trim().to_owned();
        Ok(Self { paths, version })
    }

    /// Builds the programs in the same way as the tests: with the whole workspace and all features.
    pub(super) fn built() -> Result<Self> {
        let mut command = cargo_command("build --release --quiet --workspace --all-features");
        for built in BUILT {
            command.args([&format!("--{}", built.kind), built.name]);
        }
        command.arg("--message-format=json");
        println!("gpu-check: builds the programs");
        let output = command
            .stderr(Stdio::inherit())
            .output()
            .map_err(|e| format!("`cargo build` cannot be run: {e}"))?;
        if !output.status.success() {
            return Err("the programs are not built".to_owned());
        }
        let mut paths = executables(&String::from_utf8_lossy(&output.stdout))?;
        paths.push((PEERS.0.to_owned(), root().join(PEERS.1)));
        Ok(Self { paths, version: checked_out() })
    }

    /// Returns the path of a program.
    pub(super) fn path(&self, name: &str) -> Result<&Path> {
        let known = self.paths.iter().find(|(known, _)| known == name);
        known.map(|(_, path)| path.as_path()).ok_or_else(|| format!("there is no program {name:?}"))
    }
}

/// A line of Cargo's messages.
#[derive(Deserialize)]
struct CargoMessage {
    executable: Option<PathBuf>,
    #[serde(default)]
    package_id: String,
    target: Option<CargoTarget>,
}

#[derive(Deserialize)]
struct CargoTarget {
    name: String,
    kind: Vec<String>,
}

/// Parses the paths of the programs from Cargo's messages.
fn executables(messages: &str) -> Result<Vec<(String, PathBuf)>> {
    let messages: Vec<CargoMessage> =
        messages.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let path = |built: &Built| {
        let is_it = |message: &&CargoMessage| {
            let of = message.package_id.rsplit('/').next().unwrap_or_default();
            let named =
                |it: &CargoTarget| it.name == built.name && it.kind.iter().any(|kind| kind == built.kind);
            of.split(['#', '@']).next() == Some(built.of) && message.target.as_ref().is_some_and(named)
        };
        let executable = messages.iter().filter(is_it).find_map(|message| message.executable.clone());
        executable
            .map(|path| (built.name.to_owned(), path))
            .ok_or_else(|| format!("Cargo built no {} of {}", built.name, built.of))
    };
    BUILT.iter().map(path).collect()
}

/// Returns the current commit, marked if files have changed.
fn checked_out() -> String {
    let folder = root().to_string_lossy().into_owned();
    let git = |args: &[&str]| first_line("git", &[&["-C", &folder], args].concat());
    let changed = git(&["status", "--porcelain", "--untracked-files=no"]).is_some();
    git(&["rev-parse", "--short=10", "HEAD"]).map_or_else(
        || "an unknown commit".to_owned(),
        |commit| format!("commit {commit}{}", if changed { " with changes" } else { "" }),
    )
}

/// Builds the programs, and copies them and this program into a folder. A machine without Rust can run them
/// from there.
pub(super) fn collect(folder: &Path) -> Result {
    let programs = Programs::built()?;
    let failed = |path: &Path, e: std::io::Error| format!("{}: {e}", path.display());
    create_folder(folder)?;
    let this = std::env::current_exe().map_err(|e| format!("the path of this program: {e}"))?;
    let all = programs.paths.iter().map(|(name, path)| (name.as_str(), path.as_path()));
    let mut bytes = 0;
    for (name, path) in all.chain([("gpu-check", this.as_path())]) {
        let copy = folder.join(name);
        // A running copy cannot be overwritten, but it can be replaced.
        let _ = fs::remove_file(&copy);
        fs::copy(path, &copy).map_err(|e| failed(path, e))?;
        if name != PEERS.0 {
            // Symbol names are useless on the other machine. They stay if `strip` is not installed.
            let _ = Command::new("strip").arg(&copy).stderr(Stdio::null()).status();
        }
        let size = copy.metadata().map_err(|e| failed(&copy, e))?.len();
        println!("{:>6.1} MiB  {}", size as f64 / f64::from(1 << 20), copy.display());
        bytes += size;
    }
    write(&folder.join(VERSION), &format!("{}\n", programs.version))?;
    let mib = bytes as f64 / f64::from(1 << 20);
    if bytes > MOST {
        return Err(format!(
            "{} has {mib:.0} MiB, more than the {} that can be carried",
            folder.display(),
            MOST >> 20
        ));
    }
    let folder = folder.display();
    println!("{mib:.0} MiB. On the machine with the card: {folder}/gpu-check --bin {folder}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(of: &str, name: &str, kind: &str, path: &str) -> String {
        format!(
            r#"{{"reason":"compiler-artifact","package_id":"path+file:///w/{of}#0.1.0","target":{{"name":"{name}","kind":["{kind}"]}},"executable":{path}}}"#
        )
    }

    #[test]
    fn programs_are_found_by_crate_name_and_kind() {
        let mut lines: Vec<String> = BUILT
            .iter()
            .map(|it| message(it.of, it.name, it.kind, &format!("\"/t/{}-{}\"", it.of, it.name)))
            .collect();
        lines.insert(0, message("kvmodel", "suite", "test", "\"/t/wrong\""));
        lines.insert(0, message("kvbackend-cuda", "suite", "test", "null"));
        lines.push("no JSON".to_owned());
        let paths = executables(&lines.join("\n"));
        let suite =
            |paths: &[(String, PathBuf)]| paths.iter().find(|it| it.0 == "suite").map(|it| it.1.clone());
        assert_eq!(paths.as_deref().map(suite), Ok(Some(PathBuf::from("/t/kvbackend-cuda-suite"))));
        assert!(executables(&lines[..2].join("\n")).is_err_and(|error| error.contains("kvc of kvcli")));
    }

    #[test]
    fn an_empty_folder_is_refused_by_what_it_lacks() {
        let error = Programs::of_folder(Path::new("/nonexistent")).err();
        assert!(error.is_some_and(|error| error.contains("has no kvc")));
    }

    #[test]
    fn the_script_of_the_peers_is_there() {
        assert!(root().join(PEERS.1).is_file());
    }
}
