//! The error type of this crate.

use std::path::PathBuf;

/// An error in loading a model or answering a prompt with it.
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
    /// A weight file that is mapped into memory has changed, so that the model's weights may have changed too.
    #[error(
        "{path} has changed since the model was loaded; load the model again, or copy its weights into memory (kvc run \
         --weights copy) before files change"
    )]
    FileChanged {
        /// The path of the file.
        path: PathBuf,
    },
    /// A model file is malformed.
    #[error("{path}: {}", .source.reason())]
    File {
        /// The path of the file.
        path: PathBuf,
        /// The error in its contents.
        source: Box<Error>,
    },
    /// A config is malformed, contradicts itself, or describes a model that is not supported.
    #[error("config: {0}")]
    Config(String),
    /// A GGUF file contradicts itself or needs an unsupported feature.
    #[error("{path} is not a readable GGUF file: {reason}")]
    Gguf {
        /// The path of the file.
        path: PathBuf,
        /// The field or tensor, and the problem with it.
        reason: String,
    },
    /// A weight file is truncated, or its header or shard index is wrong.
    #[error("weights: {0}")]
    Weights(String),
    /// A weight is missing, or does not match the config or its use in the dense steps.
    #[error("weights: {name} {problem}")]
    Weight {
        /// The name of the tensor.
        name: String,
        /// The problem with the tensor.
        problem: WeightProblem,
    },
    /// The tokenizer.json cannot be loaded, or cannot encode or decode a string.
    #[error("tokenizer: {0}")]
    Tokenizer(String),
    /// The chat template is missing or fails.
    #[error("chat template of {place}: {reason}")]
    Template {
        /// The file that has, or should have, the template, and the template's field in that file.
        place: String,
        /// The line, and the reason or the template's own message.
        reason: String,
    },
    /// The messages are malformed, or do not end with a user's message.
    #[error("messages: {0}")]
    Messages(String),
    /// A variable for the chat template is malformed, or must not be set.
    #[error("template variables: {0}")]
    Variable(String),
    /// A list of tools is malformed.
    #[error("tools: {0}")]
    Tools(String),
    /// A stop string is empty, which would end every answer before its first token.
    #[error("a stop string is empty and would end every answer immediately; remove it")]
    EmptyStop,
    /// The model has no embedding for a token ID.
    #[error(
        "token ID {token} is outside the vocabulary of {vocabulary} tokens; encode the prompt with this model's tokenizer"
    )]
    TokenOutOfVocabulary {
        /// The token ID.
        token: u32,
        /// The vocabulary size: the number of embeddings.
        vocabulary: usize,
    },
    /// A text has more tokens than the model has positions.
    #[error(
        "a text of {bytes} bytes has at least {least} tokens, but the model supports at most {limit} positions; shorten \
         the text"
    )]
    TextTooLong {
        /// The length of the text in bytes.
        bytes: usize,
        /// The number of tokens that the text has at least.
        least: usize,
        /// The model's number of positions.
        limit: usize,
    },
    /// The prompt has no tokens.
    #[error("the prompt is empty; give it at least one token")]
    EmptyPrompt,
    /// The observer stopped the request.
    #[error(
        "the request was stopped by its observer, and its memory was released; send it again to get an answer"
    )]
    Cancelled,
    /// The library that runs the dense steps failed to compute a step, for example because memory ran out,
    /// the device failed, or shapes do not match.
    #[error("dense steps ({implementation}): {source}")]
    Dense {
        /// The name of the implementation.
        implementation: &'static str,
        /// The library's error.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// Latent queries were passed to a [`Border`](crate::dense::Border) that was created without a buffer
    /// for them.
    #[error("latent queries have no buffer here; set `latent` in the BorderExtents")]
    NoLatentQueries,
    /// An error of `kvcore`.
    #[error(transparent)]
    Core(#[from] kvcore::Error),
}

impl Error {
    /// Adds a file's path to an error in the file's contents. An error that already names a file, or that
    /// is not about a file, is returned unchanged.
    pub(crate) fn in_file(self, path: impl Into<PathBuf>) -> Self {
        match self {
            Self::Config(_) | Self::Weights(_) | Self::Weight { .. } | Self::Tokenizer(_) => {
                Self::File { path: path.into(), source: Box::new(self) }
            }
            other => other,
        }
    }

    /// Returns the message without a prefix such as `config: `, to append to the file's path.
    fn reason(&self) -> String {
        match self {
            Self::Config(reason) | Self::Weights(reason) | Self::Tokenizer(reason) => reason.clone(),
            Self::Weight { name, problem } => format!("tensor {name:?} {problem}"),
            other => other.to_string(),
        }
    }
}

/// The reason why a weight is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WeightProblem {
    /// No file has a tensor with this name.
    #[error("is missing")]
    Missing,
    /// The element type is not supported.
    #[error(
        "has the unsupported element type {0} (supported: F32, F16 and BF16); convert the model to a supported type, or \
         use a GGUF file"
    )]
    Type(String),
    /// The tensor does not have the shape that the config requires.
    #[error("has shape {got:?}, but the config requires {expected:?}")]
    Shape {
        /// The shape that the config requires.
        expected: Vec<usize>,
        /// The tensor's shape.
        got: Vec<usize>,
    },
    /// The tensor does not have the number of axes that its use requires.
    #[error("has {got} axes, but {expected} are required")]
    Rank {
        /// The number of axes that the tensor's use requires.
        expected: usize,
        /// The tensor's number of axes.
        got: usize,
    },
    /// A row does not consist of whole blocks.
    #[error("has rows of {width} elements, which is not a multiple of the block size {block}")]
    Blocks {
        /// The number of elements per row.
        width: usize,
        /// The number of elements per block.
        block: usize,
    },
    /// The number of bytes does not match the type and shape.
    #[error("has {got} bytes, but its type and shape require {expected}")]
    Length {
        /// The number of bytes that the type and shape require; `usize::MAX` if that number exceeds the
        /// address space.
        expected: usize,
        /// The number of bytes that the tensor has.
        got: usize,
    },
}

/// A result with the error type of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;
