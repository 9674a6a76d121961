//! The error type of this crate.

use std::net::SocketAddr;
use std::path::PathBuf;

/// An error from starting or running a server. Errors of single requests are answers to their clients.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The address cannot be listened on.
    #[error("cannot listen on {address}: {source}; choose another --host or --port")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The error from the system.
        source: std::io::Error,
    },
    /// A thread cannot be started, or signals cannot be received.
    #[error("cannot start the server: {0}")]
    Start(#[from] std::io::Error),
    /// The file with the keys of clients cannot be read.
    #[error("cannot read the keys from {path}: {source}")]
    Keys {
        /// The path of the file.
        path: PathBuf,
        /// The error from the system.
        source: std::io::Error,
    },
    /// A line of the file with the keys is malformed.
    #[error("{path}, line {line}: {reason}; each line must be a key and the name of its tenant")]
    KeyLine {
        /// The path of the file.
        path: PathBuf,
        /// The number of the line, counted from 1.
        line: usize,
        /// A description of the problem.
        reason: String,
    },
    /// The engine refuses a setting of the server.
    #[error(transparent)]
    Engine(#[from] kvengine::Error),
    /// A limit is not possible.
    #[error("{limit} is 0, so the server could not answer anything; use at least 1")]
    Limit {
        /// The name of the limit.
        limit: &'static str,
    },
    /// The model has no name.
    #[error("the model has no name; give it one, so that requests can name it")]
    NoName,
}

/// A result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;
