//! The error type of this crate.

use std::path::PathBuf;

use crate::engine::PoolTag;

/// What can go wrong between a model directory and an answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file that cannot be read.
    #[error("cannot read {path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A config.json that is malformed, contradictory or of an unsupported model.
    #[error("config.json: {0}")]
    Config(String),
    /// Weights that are truncated, missing, or not of the shape that the config says.
    #[error("weights: {0}")]
    Weights(String),
    /// A tokenizer.json that cannot be loaded, or a text that it cannot encode.
    #[error("tokenizer: {0}")]
    Tokenizer(String),
    /// A chat template that is missing or fails.
    #[error("chat template: {0}")]
    Template(String),
    /// Something that needs chunks, asked of a static cache; what to do instead.
    #[error("a static cache keeps no chunks: {0}")]
    NoChunks(&'static str),
    /// An engine whose memory cannot be released; what to do instead.
    #[error("this engine's caches cannot sleep: {0}")]
    NoSleepMode(&'static str),
    /// A request while the caches sleep.
    #[error("the {0} of this engine sleeps; call wake_up first")]
    Asleep(PoolTag),
    /// A pool that cannot sleep while somebody holds blocks of it.
    #[error("{held} blocks of the {pool} are held; let the requests that hold them end, then let it sleep")]
    InUse {
        /// The pool.
        pool: PoolTag,
        /// Blocks.
        held: usize,
    },
    /// A token id that the model has no embedding for.
    #[error(
        "token id {token} is outside the vocabulary of {vocabulary}; encode the prompt with the tokenizer of this model"
    )]
    TokenOutOfVocabulary {
        /// The id.
        token: u32,
        /// Number of embeddings.
        vocabulary: usize,
    },
    /// A prompt without any token.
    #[error("the prompt is empty; give it at least one token")]
    EmptyPrompt,
    /// A request that its observer stopped.
    #[error("the request was stopped by its observer; nothing is held for it, ask again to have it answered")]
    Cancelled,
    /// From dense mathematics.
    #[error("tensor operation: {0}")]
    Candle(#[from] candle_core::Error),
    /// From chunks.
    #[error(transparent)]
    Chunk(#[from] kvchunk::Error),
    /// From the cache.
    #[error(transparent)]
    Core(#[from] kvcore::Error),
}

/// Shorthand for results of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;
