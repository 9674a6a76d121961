//! The workspace's crates, from `cargo metadata`.

use std::process::Stdio;

use serde::Deserialize;
use xtask::run::{Result, cargo_command};

/// A crate.
#[derive(Deserialize)]
pub(crate) struct Package {
    pub(crate) name: String,
    #[serde(default)]
    pub(crate) manifest_path: String,
    #[serde(default)]
    pub(crate) dependencies: Vec<Dependency>,
    #[serde(default)]
    pub(crate) features: serde_json::Map<String, serde_json::Value>,
}

/// A dependency of a crate.
#[derive(Deserialize)]
pub(crate) struct Dependency {
    pub(crate) name: String,
    /// `dev` or `build`; `None` for an ordinary dependency.
    pub(crate) kind: Option<String>,
    /// The folder, if the dependency is a crate of the workspace.
    pub(crate) path: Option<String>,
}

/// Returns the workspace's crates.
pub(crate) fn packages() -> Result<Vec<Package>> {
    let mut command = cargo_command("metadata --no-deps --format-version 1");
    let output = command.stderr(Stdio::inherit()).output().map_err(|e| format!("`cargo metadata`: {e}"))?;
    parsed(&output.stdout)
}

/// Parses the output of `cargo metadata`.
pub(crate) fn parsed(json: &[u8]) -> Result<Vec<Package>> {
    #[derive(Deserialize)]
    struct Metadata {
        packages: Vec<Package>,
    }
    let metadata = serde_json::from_slice(json).map_err(|e| format!("`cargo metadata`: {e}"));
    metadata.map(|Metadata { packages }| packages)
}
