//! Tuned reuse: settings that were chosen for one model by measurement, the file that stores them, and the
//! settings of a model without such a file.

use std::path::Path;
use std::sync::Arc;

use kvchunk::Reuse;
use kvmodel::{Model, read_small_file};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::request::Request;
use crate::result_file::ResultFile;

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
    pub fn write(&self, file: ResultFile) -> Result<()> {
        let path = file.path().to_owned();
        let text = serde_json::to_string_pretty(self).map_err(std::io::Error::from);
        text.and_then(|text| file.write(&(text + "\n"))).map_err(|source| Error::Write { path, source })
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
}
