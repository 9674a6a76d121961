//! The error type of this crate.

/// Everything that can go wrong between a workload or a set of questions and its report.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A workload with a setting that no prompt can be drawn from.
    #[error("workload: {0}")]
    Workload(String),
    /// A file of questions that cannot be parsed.
    #[error("questions{}: {reason}", of_line(*line))]
    Dataset {
        /// The line, counted from 1; 0 for the file.
        line: usize,
        /// Why the line is refused.
        reason: String,
    },
    /// From the engine that answers.
    #[error(transparent)]
    Model(#[from] kvmodel::Error),
    /// From chunks.
    #[error(transparent)]
    Chunk(#[from] kvchunk::Error),
    /// From the cache.
    #[error(transparent)]
    Core(#[from] kvcore::Error),
}

/// Shorthand for results of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Returns ", line N" for a line, and nothing for the whole file.
fn of_line(line: usize) -> String {
    if line == 0 { String::new() } else { format!(", line {line}") }
}
