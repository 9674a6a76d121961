//! The error type of this crate.

/// What can go wrong between a prompt and its placed chunks.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A part of a chunked prompt holds nothing.
    #[error("{part} is empty; a chunked prompt is system, chunks and question, none of them empty")]
    EmptyPart {
        /// `"system prompt"`, `"chunk 2"`, `"question"`.
        part: String,
    },
    /// An empty separator would split everywhere.
    #[error("the separator is empty")]
    EmptySeparator,
    /// A prompt whose largest position the model does not have.
    #[error("the prompt needs position {largest}, the model has {limit} (0..{limit}); shorten it")]
    TooLong {
        /// Largest position of the prompt.
        largest: i64,
        /// Positions that the model has.
        limit: usize,
    },
    /// A configuration value out of its domain.
    #[error("{what} must be at least 1")]
    Zero {
        /// The value.
        what: &'static str,
    },
    /// From the structures below.
    #[error(transparent)]
    Core(#[from] kvcore::Error),
}

/// Shorthand for results of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;
