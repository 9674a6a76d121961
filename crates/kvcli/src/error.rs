//! What `kvc` reports when it fails.

use std::path::PathBuf;

/// A failure, as the user reads it.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// From the model and its caches.
    #[error(transparent)]
    Model(#[from] kvmodel::Error),
    /// From the laboratory.
    #[error(transparent)]
    Lab(#[from] kvlab::Error),
    /// A prompt file that cannot be read.
    #[error("cannot read the prompt from {from}: {source}")]
    Prompt { from: String, source: std::io::Error },
    /// A backend that this program was built without.
    #[error("this program was built without the {0:?} backend; build it with `--features {0}`")]
    #[cfg(not(all(feature = "cpu", feature = "wgpu")))]
    NoBackend(&'static str),
    /// A model directory that is none.
    #[error("{0} is not a directory; --model takes one with config.json, *.safetensors and tokenizer.json")]
    NotADirectory(PathBuf),
    /// A file of questions that cannot be read.
    #[error("cannot read the questions from {path}: {source}")]
    Dataset { path: PathBuf, source: std::io::Error },
    /// A file of questions that is none.
    #[error("{path}: {source}")]
    Questions { path: PathBuf, source: kvlab::Error },
    /// A model without questions.
    #[error(
        "{0} has neither dataset.jsonl nor world.json; give questions with --dataset (see kvc eval --help)"
    )]
    NoDataset(PathBuf),
    /// A gate that did not open.
    #[error("reuse is not fit for this model; what does not hold: {0}")]
    GateClosed(String),
    /// A gate that could not be decided.
    #[error("whether reuse is fit for this model cannot be said: {0}")]
    GateUndecided(String),
    /// A plot that cannot be drawn.
    #[error("cannot draw {path}: {reason}")]
    Plot { path: PathBuf, reason: String },
    /// The demo's own check.
    #[error("{0}")]
    Demo(String),
    /// Output that cannot be written.
    #[error("cannot write the result: {0}")]
    Output(#[from] std::io::Error),
}

impl Error {
    /// What to do about a cache that is too small, where the options of a command can do it.
    pub(crate) fn hint(&self) -> Option<&'static str> {
        use kvcore::Error::{NotEnoughMemory, OutOfBlocks};
        use kvmodel::Error::{Chunk, Core};
        let (Self::Model(error) | Self::Lab(kvlab::Error::Model(error))) = self else { return None };
        match error {
            // A budget of chunks is that of their sleep.
            Chunk(kvchunk::Error::Core(NotEnoughMemory { .. })) => {
                Some("give sleeping documents more host memory: --chunk-sleep-memory MIB")
            }
            Core(OutOfBlocks { .. } | NotEnoughMemory { .. })
            | Chunk(kvchunk::Error::Core(OutOfBlocks { .. })) => Some(
                "give the caches more memory: --kv-memory MIB (--help says how much they have without it)",
            ),
            _ => None,
        }
    }
}

pub(crate) type Result<T> = std::result::Result<T, Error>;
