//! The error type of this crate.

use std::path::PathBuf;

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
    /// A file of a model is malformed.
    #[error("{path}: {}", .source.reason())]
    File {
        /// The path of the file.
        path: PathBuf,
        /// The error of its contents.
        source: Box<Error>,
    },
    /// A config is malformed, contradictory or of an unsupported model.
    #[error("config: {0}")]
    Config(String),
    /// A GGUF file contradicts itself, or needs an unsupported feature.
    #[error("{path} is no GGUF file that can be read: {reason}")]
    Gguf {
        /// The path of the file.
        path: PathBuf,
        /// The field or tensor, and the reason.
        reason: String,
    },
    /// A file of weights is truncated, or its header or the index of its shards is wrong.
    #[error("weights: {0}")]
    Weights(String),
    /// A weight is missing, or does not suit the config or the dense steps.
    #[error("weights: {name} {problem}")]
    Weight {
        /// The name of the tensor.
        name: String,
        /// The reason.
        problem: WeightProblem,
    },
    /// The tokenizer.json cannot be loaded, or cannot encode or decode a text.
    #[error("tokenizer: {0}")]
    Tokenizer(String),
    /// The chat template is missing or fails.
    #[error("chat template of {place}: {reason}")]
    Template {
        /// The file that the template is from, or would be from, and its field there.
        place: String,
        /// The line, and the reason or the template's own words.
        reason: String,
    },
    /// The messages of a conversation cannot be answered.
    #[error("messages: {0}")]
    Messages(String),
    /// A stop string is empty, so that it would end every answer before its first token.
    #[error("a stop string is empty and would end every answer at once; leave it out")]
    EmptyStop,
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
    /// The library under the dense steps cannot compute a step: memory or a device failed, or extents do not
    /// fit.
    #[error("dense steps ({implementation}): {source}")]
    Dense {
        /// The name of the implementation.
        implementation: &'static str,
        /// The error of the library.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// Queries of latent attention were given to a border of a model without latent attention.
    #[error("latent queries have no buffer at this border; create it with `latent` set in its BorderExtents")]
    NoLatentQueries,
    /// An error of `kvcore`.
    #[error(transparent)]
    Core(#[from] kvcore::Error),
}

impl Error {
    /// Returns an error of the contents of a file with the path of this file. An error that names its file,
    /// or that no file is to blame for, stays as it is.
    pub(crate) fn in_file(self, path: impl Into<PathBuf>) -> Self {
        match self {
            Self::Config(_) | Self::Weights(_) | Self::Weight { .. } | Self::Tokenizer(_) => {
                Self::File { path: path.into(), source: Box::new(self) }
            }
            other => other,
        }
    }

    /// Returns the message without the kind of the file, for messages that begin with the path.
    fn reason(&self) -> String {
        match self {
            Self::Config(reason) | Self::Weights(reason) | Self::Tokenizer(reason) => reason.clone(),
            Self::Weight { name, problem } => format!("tensor {name:?} {problem}"),
            other => other.to_string(),
        }
    }
}

/// The reason why a weight is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WeightProblem {
    /// No file has a tensor of this name.
    #[error("is missing")]
    Missing,
    /// The element type is not supported.
    #[error(
        "has element type {0} (F32, F16 and BF16 are read); convert the model to one of them, or take it as a GGUF file"
    )]
    Type(String),
    /// The tensor has another shape than the config asks for.
    #[error("has shape {got:?}, the config asks for {expected:?}")]
    Shape {
        /// The shape that the config asks for.
        expected: Vec<usize>,
        /// The shape of the tensor.
        got: Vec<usize>,
    },
    /// The tensor has another number of axes than its use asks for.
    #[error("has {got} axes, its use asks for {expected}")]
    Rank {
        /// The number of axes that the use asks for.
        expected: usize,
        /// The number of axes of the tensor.
        got: usize,
    },
    /// The rows are no whole number of blocks.
    #[error("has rows of {width} elements, which are no whole blocks of {block}")]
    Blocks {
        /// The number of elements of a row.
        width: usize,
        /// The number of elements of a block.
        block: usize,
    },
    /// The bytes are truncated, or there are too many.
    #[error("has {got} bytes, its type and shape ask for {expected}")]
    Length {
        /// The number of bytes that type and shape ask for; the largest number if they exceed the address
        /// space.
        expected: usize,
        /// The number of bytes.
        got: usize,
    },
}

/// A result with the error type of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;
