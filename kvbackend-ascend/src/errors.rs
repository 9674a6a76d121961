//! The backend's name, and errors that several modules return.

use kvcore::{Error, device::capture};

/// The backend's name in errors and on command lines.
pub(crate) const NAME: &str = "ascend";

/// Returns the error for a device that cannot be used.
pub(crate) fn no_device(reason: String) -> Error {
    Error::NoDevice { backend: NAME, reason }
}

/// Returns the error for a request that the backend does not support.
pub(crate) fn unsupported(what: impl Into<String>) -> Error {
    Error::Unsupported { backend: NAME, what: what.into() }
}

/// Returns the error for an operation that cannot be captured in a graph.
pub(crate) fn uncapturable(what: &str) -> Error {
    capture::uncapturable(NAME, what)
}

/// Returns the error for a handle that belongs to another backend or device.
pub(crate) fn foreign(what: &'static str) -> Error {
    Error::ForeignHandle { what, backend: NAME }
}
