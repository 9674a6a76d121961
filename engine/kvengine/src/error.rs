//! The error type of this crate.

use std::path::PathBuf;

use crate::config::PoolTag;

/// An error from setting up an engine or answering a request.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file cannot be read.
    #[error("cannot read {path}: {source}")]
    Io {
        /// The path of the file.
        path: PathBuf,
        /// The error from the system.
        source: std::io::Error,
    },
    /// A file cannot be written.
    #[error("cannot write {path}: {source}")]
    Write {
        /// The path of the file.
        path: PathBuf,
        /// The error from the system.
        source: std::io::Error,
    },
    /// A file that should contain tuned reuse settings is malformed.
    #[error("{path} does not contain tuned reuse settings: {reason}")]
    Tuned {
        /// The path of the file.
        path: PathBuf,
        /// A description of the problem, with the field and its line.
        reason: String,
    },
    /// The reuse settings were tuned for another model.
    #[error(
        "reuse was tuned for the model {tuned}…, but this model is {model}…; run kvc tune for this model"
    )]
    TunedForOther {
        /// The first digits of the identity of the model that the settings were tuned for.
        tuned: String,
        /// The first digits of this model's identity.
        model: String,
    },
    /// A sampling setting is out of range.
    #[error("sampling: {setting} is {value}; it must be {needed}")]
    Sampling {
        /// The name of the setting.
        setting: &'static str,
        /// The value of the setting.
        value: f32,
        /// The allowed values.
        needed: &'static str,
    },
    /// The logits of a request are not numbers, because the cache's format cannot store a layer's keys or values.
    #[error(
        "no token can be chosen: the cache format {format} cannot store the keys or values of layer {layer}, which are \
         too large or not numbers, so the logits are not numbers; use the format bf16 or f32"
    )]
    CacheOverflow {
        /// The first layer whose keys or values cannot be stored.
        layer: usize,
        /// The format of the cache.
        format: kvcore::KvFormat,
    },
    /// The logits of a request contain a value that is not a number, or no finite value.
    #[error(
        "no token can be chosen: the logits are not numbers{}; check the model's weights and configuration, and try the \
         cache format f32",
        first_broken(*.layer)
    )]
    NotNumbers {
        /// The first layer whose keys or values are not numbers, or `None` if all of them are, or if they are no
        /// longer stored.
        layer: Option<usize>,
    },
    /// An operation needs chunks, but the engine has a static or a grouped cache. The string suggests what to
    /// do instead.
    #[error("static and grouped caches cannot keep chunks; {0}")]
    NoChunks(&'static str),
    /// The engine cannot release its caches' memory. The string suggests what to do instead.
    #[error("this engine's caches cannot sleep; {0}")]
    NoSleepMode(&'static str),
    /// A request arrived while a pool was asleep.
    #[error("the {0} of this engine is asleep; call wake_up first")]
    Asleep(PoolTag),
    /// A pool cannot sleep, because requests hold some of its blocks.
    #[error(
        "{held} blocks of the {pool} are in use; wait for the requests that use them to finish, then try again"
    )]
    InUse {
        /// The pool.
        pool: PoolTag,
        /// The number of held blocks.
        held: usize,
    },
    /// The pool of sequences cannot sleep, because requests wait for it.
    #[error("{requests} requests wait to be computed; wait for them to finish, then try again")]
    Waiting {
        /// The number of waiting requests.
        requests: usize,
    },
    /// The prompt has no tokens.
    #[error("the prompt is empty; give it at least one token")]
    EmptyPrompt,
    /// The request was stopped by its observer.
    #[error(
        "the request was stopped by its observer, and its memory was released; send it again to get an answer"
    )]
    Cancelled,
    /// The step that computed the request was interrupted by a panic in an observer, a backend or a strategy.
    #[error(
        "a panic interrupted the step that computed the request, and its memory was released; send it again to get an \
         answer"
    )]
    Interrupted,
    /// A pass that computed tokens of several requests failed.
    #[error("the pass over this and other requests failed: {0}")]
    Pass(std::sync::Arc<Error>),
    /// The request took longer than its time limit.
    #[error("the request took longer than its limit of {limit:?}; the tokens generated so far stay valid")]
    TimeOut {
        /// The limit.
        limit: std::time::Duration,
    },
    /// A request asks for several samples, and the engine's cache cannot fork sequences.
    #[error("{samples} samples need a paged cache; this engine has a static one")]
    Samples {
        /// The number of samples.
        samples: usize,
    },
    /// A request asks for more samples or beams than may run at once.
    #[error(
        "{asked} samples or beams are more than the {most} that can run at the same time; use fewer, or raise \
         Scheduling::running"
    )]
    TooManyAnswers {
        /// The number of samples or beams.
        asked: usize,
        /// The maximum number of samples and beams, [`Scheduling::running`](crate::Scheduling::running).
        most: usize,
    },
    /// The settings of a beam search contradict each other or the request.
    #[error("beams: {0}")]
    Beams(&'static str),
    /// Page-sparse decode is impossible with this model or cache. The string suggests what to do instead.
    #[error("sparse decode: {0}")]
    Pages(&'static str),
    /// An answer's constraint is malformed, cannot be obeyed, or contradicts the request.
    #[error("the constraint on the answer: {0}")]
    Constraint(String),
    /// A thread cannot be started.
    #[error("cannot start a thread: {0}")]
    Thread(std::io::Error),
    /// A document is too short to be registered.
    #[error(
        "document {id} has {bytes} bytes; a registered document has at least {least}, because shorter texts stand in \
         prompts by chance: join it with its neighbours"
    )]
    ShortDocument {
        /// The ID of the document.
        id: String,
        /// The number of bytes of its text.
        bytes: usize,
        /// The least number of bytes.
        least: usize,
    },
    /// A document does not fit into a library of registered documents.
    #[error(
        "the library of registered documents would have {asked} {what}, and its limit is {limit}; remove documents first"
    )]
    LibraryFull {
        /// The limited quantity.
        what: &'static str,
        /// The quantity with the document.
        asked: usize,
        /// The limit.
        limit: usize,
    },
    /// An error from the model.
    #[error(transparent)]
    Model(kvmodel::Error),
    /// An error from `kvchunk`.
    #[error(transparent)]
    Chunk(#[from] kvchunk::Error),
    /// An error from the tier on a disk.
    #[error(transparent)]
    Tier(#[from] kvtier::Error),
    /// An error from `kvcore`.
    #[error(transparent)]
    Core(#[from] kvcore::Error),
}

impl Error {
    /// Returns true if the error means that a pool has too few free blocks. In that case, the request may
    /// succeed later.
    pub(crate) fn is_out_of_blocks(&self) -> bool {
        use kvcore::Error::OutOfBlocks;
        matches!(self, Self::Core(OutOfBlocks { .. }) | Self::Chunk(kvchunk::Error::Core(OutOfBlocks { .. })))
    }
}

impl From<kvmodel::Error> for Error {
    /// Converts errors that this crate also defines to this crate's variants.
    fn from(error: kvmodel::Error) -> Self {
        match error {
            kvmodel::Error::Cancelled => Self::Cancelled,
            kvmodel::Error::EmptyPrompt => Self::EmptyPrompt,
            kvmodel::Error::Core(error) => Self::Core(error),
            other => Self::Model(other),
        }
    }
}

/// Names the first layer that computed something else than numbers.
fn first_broken(layer: Option<usize>) -> String {
    layer.map(|layer| format!(", beginning with the keys or values of layer {layer}")).unwrap_or_default()
}

/// A result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;
