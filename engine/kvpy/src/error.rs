//! Converts errors to Python exceptions.

use pyo3::create_exception;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

create_exception!(
    kvcache,
    KvCacheError,
    PyRuntimeError,
    "An error of kvcache. The values in the message are also attributes; `kind` is the name of the error."
);

/// An error from a lower crate, before it is converted to a Python exception.
#[derive(Debug)]
pub(crate) enum CallError {
    Core(kvcore::Error),
    Chunk(kvchunk::Error),
    Model(kvmodel::Error),
    Engine(kvengine::Error),
    Manager(kvmanager::Error),
    Tier(kvtier::Error),
}

pub(crate) type Result<T, E = CallError> = std::result::Result<T, E>;

impl From<kvcore::Error> for CallError {
    fn from(error: kvcore::Error) -> Self {
        Self::Core(error)
    }
}

impl From<kvchunk::Error> for CallError {
    fn from(error: kvchunk::Error) -> Self {
        match error {
            kvchunk::Error::Core(error) => Self::Core(error),
            other => Self::Chunk(other),
        }
    }
}

impl From<kvmodel::Error> for CallError {
    fn from(error: kvmodel::Error) -> Self {
        match error {
            kvmodel::Error::Core(error) => Self::Core(error),
            other => Self::Model(other),
        }
    }
}

impl From<kvengine::Error> for CallError {
    fn from(error: kvengine::Error) -> Self {
        match error {
            kvengine::Error::Core(error) => Self::Core(error),
            kvengine::Error::Chunk(error) => error.into(),
            kvengine::Error::Model(error) => error.into(),
            other => Self::Engine(other),
        }
    }
}

impl From<kvmanager::Error> for CallError {
    fn from(error: kvmanager::Error) -> Self {
        match error {
            kvmanager::Error::Core(error) => Self::Core(error),
            other => Self::Manager(other),
        }
    }
}

impl From<kvtier::Error> for CallError {
    fn from(error: kvtier::Error) -> Self {
        Self::Tier(error)
    }
}

/// Returns the numbers in an error, by name.
fn numbers(error: &kvcore::Error) -> Vec<(&'static str, i128)> {
    use kvcore::{Compared, Error as E};
    let wide = |x: usize| x as i128;
    match *error {
        E::OutOfBlocks { asked, free, evictable, total } => vec![
            ("asked", wide(asked)),
            ("free", wide(free)),
            ("evictable", wide(evictable)),
            ("total", wide(total)),
        ],
        E::Mismatch { expected: Compared::Number(expected), got: Compared::Number(got), .. } => {
            vec![("expected", wide(expected)), ("got", wide(got))]
        }
        E::OutOfRange { value, limit, .. } => vec![("value", value), ("limit", limit)],
        E::TooLarge { value, most, .. } => vec![("value", value), ("most", most)],
        E::NotEnoughMemory { budget, block_bytes } => {
            vec![("budget", wide(budget)), ("block_bytes", wide(block_bytes))]
        }
        E::NotMultiple { value, of, .. } => vec![("value", wide(value)), ("of", wide(of))],
        E::Twice { number, .. } => vec![("number", i128::from(number))],
        _ => Vec::new(),
    }
}

impl From<CallError> for PyErr {
    fn from(failure: CallError) -> Self {
        let (text, debug) = match &failure {
            CallError::Core(error) => (error.to_string(), format!("{error:?}")),
            CallError::Chunk(error) => (error.to_string(), format!("{error:?}")),
            CallError::Model(error) => (error.to_string(), format!("{error:?}")),
            CallError::Engine(error) => (error.to_string(), format!("{error:?}")),
            CallError::Manager(error) => (error.to_string(), format!("{error:?}")),
            CallError::Tier(error) => (error.to_string(), format!("{error:?}")),
        };
        let kind: String = debug.chars().take_while(|c| c.is_alphanumeric()).collect();
        let error = KvCacheError::new_err(text);
        Python::attach(|py| {
            let value = error.value(py);
            let mut set = value.setattr("kind", kind);
            if let CallError::Core(core) = &failure {
                for (name, number) in numbers(core) {
                    set = set.and_then(|()| value.setattr(name, number));
                }
            }
            // If an attribute cannot be set, the exception is raised without it.
            drop(set);
        });
        error
    }
}
