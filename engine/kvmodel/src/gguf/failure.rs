//! Errors from reading a GGUF file, before the file's path is added.

use crate::error::Error;

/// Advice for a file that contradicts itself.
pub(super) const AGAIN: &str = "download the file again, or convert the model again";

/// The reason why a file cannot be read.
#[derive(Debug)]
pub(super) enum GgufFailure {
    Io(std::io::Error),
    Wrong(String),
    Other(Error),
}

impl From<Error> for GgufFailure {
    fn from(error: Error) -> Self {
        Self::Other(error)
    }
}

/// Returns the error for a file that contradicts itself or needs an unsupported feature.
pub(super) fn wrong<T>(reason: impl Into<String>) -> Result<T, GgufFailure> {
    Err(GgufFailure::Wrong(reason.into()))
}
