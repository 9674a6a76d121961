//! Tuned reuse: a way of reuse that was chosen for a model by measurement, and the file that holds it.

use std::path::Path;
use std::sync::Arc;

use kvchunk::Reuse;
use kvmodel::Model;
use serde::{Deserialize, Serialize};

use crate::Request;
use crate::error::{Error, Result};

/// The version of the file that this crate writes and reads.
const VERSION: u32 = 1;

/// A way of reuse that was chosen for one model, with what was measured of it. `kvc tune` writes it.
///
/// ```no_run
/// # use kvengine::{Request, TunedReuse};
/// # use kvmodel::{Model, PromptTokens};
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
    /// What was measured; nothing reads it but people.
    measured: TunedBy,
}

/// What was measured of a way of reuse against full attention.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TunedBy {
    /// The questions that both answered.
    pub questions: usize,
    /// Questions that full attention answers and this way does not.
    pub lost: usize,
    /// Questions that this way answers and full attention does not.
    pub gained: usize,
    /// The most points of a hundred that were allowed to be lost.
    pub within: f64,
    /// True if the answers bound the loss by that, with 95 % confidence; false if they refute it; none if they do neither.
    pub fits: Option<bool>,
    /// The Kullback–Leibler divergence from full attention along its own answers, in nats a token.
    pub divergence: f64,
    /// Operations of a prefill, as a share of full attention's.
    pub operations: f64,
}

impl TunedReuse {
    /// Creates the file's content for a model.
    pub fn new(model: &Model, reuse: Reuse, measured: TunedBy) -> Self {
        Self { version: VERSION, model: hex(model.identity()), reuse, measured }
    }

    /// Reads a file.
    ///
    /// # Errors
    /// Returns [`Error::Io`] if it cannot be read, and [`Error::Tuned`] if it is no such file, with the line and the field.
    pub fn read(path: &Path) -> Result<Self> {
        let text =
            std::fs::read_to_string(path).map_err(|source| Error::Io { path: path.to_owned(), source })?;
        let bad = |reason: String| Error::Tuned { path: path.to_owned(), reason };
        let tuned: Self = serde_json::from_str(&text).map_err(|error| bad(error.to_string()))?;
        if tuned.version != VERSION {
            return Err(bad(format!(
                "it has version {}, and {VERSION} is read: write it anew with kvc tune",
                tuned.version
            )));
        }
        tuned.reuse.scaling.check().map_err(|error| bad(error.to_string()))?;
        Ok(tuned)
    }

    /// Writes a file.
    ///
    /// # Errors
    /// Returns [`Error::Write`] if it cannot be written.
    pub fn write(&self, path: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(self).map_err(std::io::Error::from);
        let write = |text: String| std::fs::write(path, text + "\n");
        text.and_then(write).map_err(|source| Error::Write { path: path.to_owned(), source })
    }

    /// Returns the way of reuse.
    ///
    /// # Errors
    /// Returns [`Error::TunedForOther`] if it was chosen for another model.
    pub fn of(&self, model: &Model) -> Result<Reuse> {
        let identity = hex(model.identity());
        if self.model == identity {
            return Ok(self.reuse);
        }
        Err(Error::TunedForOther { tuned: short(&self.model), model: short(&identity) })
    }

    /// Returns what was measured.
    pub fn measured(&self) -> &TunedBy {
        &self.measured
    }
}

impl Request {
    /// Reuses chunks in this way.
    #[must_use]
    pub fn reusing(self, way: &Reuse) -> Self {
        Self { cell: way.cell, recompute: Arc::new(way.recompute), scaling: way.scaling, ..self }
    }
}

fn hex(bytes: &[u8; 32]) -> String {
    blake3::Hash::from_bytes(*bytes).to_hex().to_string()
}

/// Returns as many digits as tell models apart in a message.
fn short(digits: &str) -> String {
    digits.chars().take(12).collect()
}
