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
    /// The file with the registered documents cannot be read, created or locked.
    #[error("cannot keep registered documents in {path}: {source}")]
    Documents {
        /// The path of the file.
        path: PathBuf,
        /// The error from the system.
        source: std::io::Error,
    },
    /// Another server uses the file with the registered documents.
    #[error(
        "{path} is in use by another server; give each server its own file of registered documents, or stop the other one"
    )]
    DocumentsInUse {
        /// The path of the file.
        path: PathBuf,
    },
    /// The file has something other than registered documents.
    #[error(
        "{path} is not a file of registered documents; name another path, where the server can create one"
    )]
    NoDocuments {
        /// The path of the file.
        path: PathBuf,
    },
    /// Another version of the server has written the file with the registered documents.
    #[error(
        "{path} has registered documents of version {version}, which this program cannot read; use the program that wrote \
         it, or name another file and register the documents again"
    )]
    DocumentsVersion {
        /// The path of the file.
        path: PathBuf,
        /// The version of the file.
        version: u64,
    },
    /// A line of the file with the registered documents is damaged.
    #[error(
        "{path}, line {line}: {reason}; copy the file, check the disk, remove the line, and register its document again"
    )]
    DocumentsLine {
        /// The path of the file.
        path: PathBuf,
        /// The number of the line, counted from 1.
        line: usize,
        /// A description of the problem.
        reason: String,
    },
    /// A name of an origin is none that browsers send.
    #[error(
        "the origin {origin:?} cannot be allowed: {reason}; name it like https://app.example or http://localhost:3000"
    )]
    Origin {
        /// The name.
        origin: String,
        /// A description of the problem.
        reason: &'static str,
    },
    /// The pages of every site would use a server without keys.
    #[error(
        "with --allow-origin '*' and without keys, every web page could use this server in its visitors' browsers; name the \
         origins, or give --api-key-file"
    )]
    AnyOrigin,
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
