//! The error type of this crate.

use std::path::PathBuf;

use crate::engine::PoolTag;

/// An error between a model directory and an answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file cannot be read.
    #[error("cannot read {path}: {source}")]
    Io {
        /// The path of the file.
        path: PathBuf,
        /// The reason that the system gave.
        source: std::io::Error,
    },
    /// The config.json is malformed, contradictory or of an unsupported model.
    #[error("config.json: {0}")]
    Config(String),
    /// The weights are truncated, missing, or not of the shape that the config requires.
    #[error("weights: {0}")]
    Weights(String),
    /// The tokenizer.json cannot be loaded, or cannot encode or decode a text.
    #[error("tokenizer: {0}")]
    Tokenizer(String),
    /// The chat template is missing or fails.
    #[error("chat template: {0}")]
    Template(String),
    /// An operation needs chunks, but the engine has a static cache. The text says what to do instead.
    #[error("a static cache keeps no chunks: {0}")]
    NoChunks(&'static str),
    /// The engine cannot release the memory of its caches. The text says what to do instead.
    #[error("this engine's caches cannot sleep: {0}")]
    NoSleepMode(&'static str),
    /// A request arrived while the caches sleep.
    #[error("the {0} of this engine sleeps; call wake_up first")]
    Asleep(PoolTag),
    /// A pool cannot sleep, because requests hold blocks of it.
    #[error("{held} blocks of the {pool} are held; let the requests that hold them end, then let it sleep")]
    InUse {
        /// The pool.
        pool: PoolTag,
        /// The number of held blocks.
        held: usize,
    },
    /// The model has no embedding for a token id.
    #[error(
        "token id {token} is outside the vocabulary of {vocabulary}; encode the prompt with the tokenizer of this model"
    )]
    TokenOutOfVocabulary {
        /// The token id.
        token: u32,
        /// The number of embeddings.
        vocabulary: usize,
    },
    /// The prompt has no token.
    #[error("the prompt is empty; give it at least one token")]
    EmptyPrompt,
    /// The observer stopped the request.
    #[error("the request was stopped by its observer; nothing is held for it, ask again to have it answered")]
    Cancelled,
    /// An error of candle.
    #[error("tensor operation: {0}")]
    Candle(#[from] candle_core::Error),
    /// An error of `kvchunk`.
    #[error(transparent)]
    Chunk(#[from] kvchunk::Error),
    /// An error of `kvcore`.
    #[error(transparent)]
    Core(#[from] kvcore::Error),
}

/// A result with the error type of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;
