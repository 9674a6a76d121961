//! The error type of this crate.

use crate::url::ServerUrl;

/// A failure of a client.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An address has another form.
    #[error("{url:?} is no address of a server: {reason}; write http://HOST:PORT")]
    Url {
        /// The address.
        url: String,
        /// The fault.
        reason: &'static str,
    },
    /// The server does not accept a connection.
    #[error("cannot connect to {url}: {source}")]
    Connect {
        /// The server.
        url: ServerUrl,
        /// The system's error.
        source: std::io::Error,
    },
    /// A request could not be sent, or its response ended early.
    #[error("the connection failed: {0}")]
    Connection(#[from] hyper::Error),
    /// A request contains what HTTP does not allow, such as a space in a path.
    #[error("malformed request: {0}")]
    Request(#[from] hyper::http::Error),
    /// The server answered with another status than 200.
    #[error("status {status}: {body}")]
    Status {
        /// The status.
        status: u16,
        /// The body of the response, which says why.
        body: String,
    },
    /// A response is not JSON of the expected form.
    #[error("cannot read the response {text:?}: {source}")]
    Json {
        /// The response, or an event of it.
        text: String,
        /// The parser's error.
        source: serde_json::Error,
    },
    /// A stream ended with an error of the server.
    #[error("the answer ended with an error: {0}")]
    Stream(String),
    /// A prompt is longer than the limit.
    #[error("a prompt of {tokens} tokens is longer than the limit of {limit}")]
    TooLong {
        /// The length of the prompt.
        tokens: usize,
        /// The limit.
        limit: usize,
    },
    /// The client's threads cannot be started.
    #[error("cannot start the client: {0}")]
    Start(#[source] std::io::Error),
}

/// A result with the error type of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;
