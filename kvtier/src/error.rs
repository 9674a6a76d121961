//! Errors of the tiers below device memory.

use std::path::PathBuf;

/// The result of an operation on a tier.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The reason why a tier cannot be opened or used. A record that is missing or damaged is not an error; see
/// [`Missed`](crate::Missed).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The path is not a folder.
    #[error("{path} is not a folder; name a folder that kvtier may fill")]
    NotAFolder {
        /// The path.
        path: PathBuf,
    },
    /// Another process has opened the folder.
    #[error(
        "{path} is in use by another process; give each process its own folder, or stop the other process"
    )]
    InUse {
        /// The folder.
        path: PathBuf,
    },
    /// The folder has no slab.
    #[error("{path} contains no slab of this version; name a folder that --disk has filled")]
    NoSlab {
        /// The folder.
        path: PathBuf,
    },
    /// The path is no regular file.
    #[error("{path} is not a regular file; remove it, or name another file")]
    NotAFile {
        /// The path.
        path: PathBuf,
    },
    /// The file is not a file of records.
    #[error("{path} contains no records; name a file that was saved")]
    NoRecords {
        /// The file.
        path: PathBuf,
    },
    /// The file was written for another model, tokenizer or format.
    #[error("{path} was saved with another model, tokenizer or format")]
    OtherScope {
        /// The file.
        path: PathBuf,
    },
    /// The bytes of a file are not those that were written, or were written by another version.
    #[error("{path} is damaged at byte {offset}, or of another version")]
    DamagedFile {
        /// The file.
        path: PathBuf,
        /// The start of the record that is damaged.
        offset: u64,
    },
    /// The limit is too small for the file's own tables and one record.
    #[error("a limit of {limit} bytes is too small for a disk tier; use at least {least} bytes")]
    LimitTooSmall {
        /// The limit.
        limit: u64,
        /// The smallest limit.
        least: u64,
    },
    /// The file system refused an operation.
    #[error("{what} {path}: {source}")]
    File {
        /// The operation, as in `cannot create`.
        what: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
}

impl Error {
    /// Returns a function that adds the operation and the path to an error of the system.
    pub(crate) fn at(
        what: &'static str,
        path: &std::path::Path,
    ) -> impl FnOnce(std::io::Error) -> Self + use<> {
        let path = path.to_owned();
        move |source| Self::File { what, path, source }
    }
}
