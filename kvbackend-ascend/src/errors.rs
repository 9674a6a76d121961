//! The backend's name, and the errors that several rooms return.

use kvcore::{Error, device::capture};

/// Name of the backend in errors and on command lines.
pub(crate) const NAME: &str = "ascend";

/// Returns the error for a device that cannot be used.
pub(crate) fn no_device(reason: String) -> Error {
    Error::NoDevice { backend: NAME, reason }
}

/// Returns the error for something that the backend does not do.
pub(crate) fn unsupported(what: impl Into<String>) -> Error {
    Error::Unsupported { backend: NAME, what: what.into() }
}

/// Returns the error for something that a graph cannot hold.
pub(crate) fn uncapturable(what: &str) -> Error {
    capture::uncapturable(NAME, what)
}

/// Returns the error for a handle of another backend, or of another device.
pub(crate) fn foreign(what: &'static str) -> Error {
    Error::ForeignHandle { what, backend: NAME }
}
