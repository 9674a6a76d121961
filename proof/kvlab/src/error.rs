//! The error type of this crate.

/// An error in a workload or a set of questions, or from the engine that answers.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A setting of a workload is out of range.
    #[error("workload: {0}")]
    Workload(String),
    /// A file of questions cannot be parsed.
    #[error("questions{}: {reason}{}", of_line(*line), form(*line))]
    Dataset {
        /// The line number, from 1; 0 for the whole file.
        line: usize,
        /// The reason that the line is invalid.
        reason: String,
    },
    /// The name of an arm is unknown.
    #[error(
        "{0:?} is not a strategy; use full attention, or positions (overlapped, sequential, absolute), mode \
         (with-system, alone, sink:K) and recompute strategy, separated by commas, for example \
         sequential,with-system,link:16; optionally, add the temperature and scale of the attention to documents: T 0.9 \
         S 0.9"
    )]
    UnknownArm(String),
    /// A search has no reuse candidates, or no questions to judge them by.
    #[error(
        "there is nothing to tune: a search needs at least one reuse candidate, and local questions to judge it with"
    )]
    NothingToTune,
    /// A disk did not store the documents of a measurement in time.
    #[error("the disk takes more than two minutes to store the documents; name a folder on a faster disk")]
    SlowDisk,
    /// The file of a disk cannot be opened.
    #[error("cannot open {path}: {source}")]
    Disk {
        /// The file.
        path: std::path::PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The caller could not keep an answer.
    #[error("cannot keep an answer: {0}")]
    NotKept(#[source] std::io::Error),
    /// An error of the engine or its model.
    #[error(transparent)]
    Engine(#[from] kvengine::Error),
    /// An error of `kvchunk`.
    #[error(transparent)]
    Chunk(#[from] kvchunk::Error),
    /// An error of `kvcore`.
    #[error(transparent)]
    Core(#[from] kvcore::Error),
}

impl From<kvmodel::Error> for Error {
    fn from(error: kvmodel::Error) -> Self {
        Self::Engine(error.into())
    }
}

/// A result with the error type of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Returns ", line N", or nothing if the error concerns the whole file.
fn of_line(line: usize) -> String {
    if line == 0 { String::new() } else { format!(", line {line}") }
}

/// Returns the expected form of a line, for an error message about one line.
fn form(line: usize) -> &'static str {
    if line == 0 {
        ""
    } else {
        "; each line must be a JSON object with system, documents (a list), question and answer, and optionally kind and \
         grader"
    }
}
