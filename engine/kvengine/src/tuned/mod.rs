//! Tuned reuse: settings that were chosen for one model by measurement, the file that stores them, and the
//! settings of a model without such a file.

use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use kvchunk::Reuse;
use kvmodel::{Model, read_small_file};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::request::Request;

mod defaults;

pub use defaults::DefaultReuse;

/// The version of the file format that this crate writes and reads.
const VERSION: u32 = 1;

/// The contents of a file that `kvc tune` writes: the reuse settings that were chosen for a model, with their
/// measurements.
///
/// ```no_run
/// # use kvengine::{PromptTokens, Request, TunedReuse};
/// # use kvmodel::Model;
/// # fn ask(model: &Model, prompt: PromptTokens) -> kvengine::Result<Request> {
/// let reuse = TunedReuse::read("reuse.json".as_ref())?.of(model)?;
/// Ok(Request::new(prompt).reusing(&reuse))
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TunedReuse {
    version: u32,
    /// The model's [`identity`](Model::identity), in hexadecimal digits.
    model: String,
    reuse: Reuse,
    /// The texts of the decoys that the mode needs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    decoys: Vec<String>,
    /// The measurements, which are for information only.
    measured: TunedBy,
}

/// The measurements of tuned reuse settings, compared with full attention.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TunedBy {
    /// The number of questions that were asked, both with reuse and with full attention.
    pub questions: usize,
    /// The number of questions that only full attention answers correctly.
    pub lost: usize,
    /// The number of questions that only reuse answers correctly.
    pub gained: usize,
    /// The maximum allowed loss, in percentage points.
    pub within: f64,
    /// True if the answers show with 95 % confidence that the loss is within the limit, false if they show
    /// that it is not, and `None` if they show neither.
    pub fits: Option<bool>,
    /// The Kullback–Leibler divergence from full attention along the answers of full attention, in nats per
    /// token.
    pub divergence: f64,
    /// The operation count of a prefill, relative to full attention.
    pub operations: f64,
}

impl TunedReuse {
    /// Creates the file's content for a model. Of `decoys`, keeps only the texts that the mode needs.
    pub fn new(model: &Model, reuse: Reuse, decoys: &[String], measured: TunedBy) -> Self {
        let decoys = decoys.iter().take(reuse.cell.mode.num_decoys()).cloned().collect();
        Self { version: VERSION, model: hex(model.identity()), reuse, decoys, measured }
    }

    /// Reads tuned reuse settings from a file.
    ///
    /// # Errors
    /// Returns [`Error::Io`] if the file cannot be read, and [`Error::Tuned`], with the line and the field,
    /// if it is malformed.
    pub fn read(path: &Path) -> Result<Self> {
        let json = read_small_file(path).map_err(|source| Error::Io { path: path.to_owned(), source })?;
        let bad = |reason: String| Error::Tuned { path: path.to_owned(), reason };
        let tuned: Self = serde_json::from_slice(&json).map_err(|error| bad(error.to_string()))?;
        if tuned.version != VERSION {
            return Err(bad(format!(
                "it has version {}, but version {VERSION} is needed; write it again with kvc tune",
                tuned.version
            )));
        }
        tuned.reuse.scaling.check().map_err(|error| bad(error.to_string()))?;
        let (mode, given) = (tuned.reuse.cell.mode, tuned.decoys.len());
        if given < mode.num_decoys() {
            return Err(bad(kvchunk::Error::FewDecoys { mode, given }.to_string()));
        }
        Ok(tuned)
    }

    /// Writes these settings to a file. If this fails, an existing file is kept.
    ///
    /// # Errors
    /// Returns [`Error::Write`] if the file cannot be written.
    pub fn write(&self, path: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(self).map_err(std::io::Error::from);
        let write = |text: String| replace(path, &(text + "\n"));
        text.and_then(write).map_err(|source| Error::Write { path: path.to_owned(), source })
    }

    /// Returns the reuse settings, which must have been chosen for `model`.
    ///
    /// # Errors
    /// Returns [`Error::TunedForOther`] if they were chosen for another model.
    pub fn of(&self, model: &Model) -> Result<Reuse> {
        let identity = hex(model.identity());
        if self.model == identity {
            return Ok(self.reuse);
        }
        Err(Error::TunedForOther { tuned: short(&self.model), model: short(&identity) })
    }

    /// Returns the texts of the decoys that the settings need.
    pub fn decoys(&self) -> &[String] {
        &self.decoys
    }

    /// Returns the measurements.
    pub fn measured(&self) -> &TunedBy {
        &self.measured
    }
}

impl Request {
    /// Applies reuse settings to the request.
    #[must_use]
    pub fn reusing(self, way: &Reuse) -> Self {
        Self { cell: way.cell, recompute: Arc::new(way.recompute), scaling: way.scaling, ..self }
    }
}

/// Writes a file beside the old one, and then replaces the old one. A full disk therefore does not cost the old
/// contents.
fn replace(path: &Path, text: &str) -> std::io::Result<()> {
    let old = std::fs::metadata(path).ok();
    if old.as_ref().is_some_and(|old| !old.is_file()) {
        // A device or a pipe is written, not replaced.
        return std::fs::write(path, text);
    }
    // A link stays a link.
    let path = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let mut beside = path.clone().into_os_string();
    beside.push(format!(".{}.part", std::process::id()));
    let write = || {
        let mut file = std::fs::File::create(&beside)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        old.map_or(Ok(()), |old| file.set_permissions(old.permissions()))?;
        std::fs::rename(&beside, &path)
    };
    write().inspect_err(|_| drop(std::fs::remove_file(&beside)))
}

fn hex(bytes: &[u8; 32]) -> String {
    blake3::Hash::from_bytes(*bytes).to_hex().to_string()
}

/// Returns the first few digits, which are enough to distinguish models in a message.
fn short(digits: &str) -> String {
    digits.chars().take(12).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_cannot_be_replaced_keeps_its_contents() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tuned.json");
        replace(&path, "old").unwrap();
        // A folder in the way of the new file.
        let beside = folder.path().join(format!("tuned.json.{}.part", std::process::id()));
        std::fs::create_dir(&beside).unwrap();
        assert!(replace(&path, "new").is_err());
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "old");
        std::fs::remove_dir(&beside).unwrap();
        replace(&path, "new").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "new");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "nothing is left beside it");
        assert!(replace(&folder.path().join("none/tuned.json"), "new").is_err());
    }

    #[test]
    #[cfg(unix)]
    fn what_is_no_regular_file_is_not_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let made = std::process::Command::new("mkfifo").arg(path("pipe")).status().unwrap();
        assert!(made.success());
        std::os::unix::fs::symlink("/dev/zero", path("device")).unwrap();
        std::os::unix::fs::symlink("none", path("link")).unwrap();
        std::fs::create_dir(path("folder")).unwrap();
        std::fs::File::create(path("large")).unwrap().set_len(1 << 40).unwrap();
        for name in ["pipe", "device", "link", "folder", "large"] {
            let error = TunedReuse::read(&path(name)).unwrap_err();
            assert!(matches!(error, Error::Io { .. }), "{name}: {error}");
            assert!(error.to_string().contains(name), "{error}");
        }
    }

    #[test]
    #[cfg(unix)]
    fn a_link_stays_a_link_and_a_device_stays_a_device() {
        let folder = tempfile::tempdir().unwrap();
        let (path, link) = (folder.path().join("tuned.json"), folder.path().join("link"));
        std::fs::write(&path, "old").unwrap();
        std::os::unix::fs::symlink(&path, &link).unwrap();
        replace(&link, "new").unwrap();
        assert!(link.is_symlink());
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "new");
        replace(Path::new("/dev/null"), "new").unwrap();
        assert!(!std::fs::metadata("/dev/null").unwrap().is_file());
    }
}
