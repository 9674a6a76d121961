//! Errors as Python exceptions.

use pyo3::create_exception;
use pyo3::exceptions::PyException;
use pyo3::prelude::*;

create_exception!(
    kvcache,
    KvCacheError,
    PyException,
    "An error of kvcache. The attributes are the numbers of the message, by name; `kind` is the name of the error."
);

/// Errors of the crates below, on their way to Python.
#[derive(Debug)]
pub(crate) enum Failure {
    Core(kvcore::Error),
    Chunk(kvchunk::Error),
    Model(kvmodel::Error),
    Engine(kvengine::Error),
}

pub(crate) type Result<T, E = Failure> = std::result::Result<T, E>;

impl From<kvcore::Error> for Failure {
    fn from(error: kvcore::Error) -> Self {
        Self::Core(error)
    }
}

impl From<kvchunk::Error> for Failure {
    fn from(error: kvchunk::Error) -> Self {
        match error {
            kvchunk::Error::Core(error) => Self::Core(error),
            other => Self::Chunk(other),
        }
    }
}

impl From<kvmodel::Error> for Failure {
    fn from(error: kvmodel::Error) -> Self {
        match error {
            kvmodel::Error::Core(error) => Self::Core(error),
            other => Self::Model(other),
        }
    }
}

impl From<kvengine::Error> for Failure {
    fn from(error: kvengine::Error) -> Self {
        match error {
            kvengine::Error::Core(error) => Self::Core(error),
            kvengine::Error::Chunk(error) => error.into(),
            kvengine::Error::Model(error) => error.into(),
            other => Self::Engine(other),
        }
    }
}

/// Returns the numbers of an error by name.
fn numbers(error: &kvcore::Error) -> Vec<(&'static str, i128)> {
    use kvcore::Error as E;
    let wide = |x: usize| x as i128;
    match *error {
        E::OutOfBlocks { asked, free, evictable, total } => vec![
            ("asked", wide(asked)),
            ("free", wide(free)),
            ("evictable", wide(evictable)),
            ("total", wide(total)),
        ],
        E::Mismatch { expected, got, .. } => vec![("expected", wide(expected)), ("got", wide(got))],
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

impl From<Failure> for PyErr {
    fn from(failure: Failure) -> Self {
        let (text, debug) = match &failure {
            Failure::Core(error) => (error.to_string(), format!("{error:?}")),
            Failure::Chunk(error) => (error.to_string(), format!("{error:?}")),
            Failure::Model(error) => (error.to_string(), format!("{error:?}")),
            Failure::Engine(error) => (error.to_string(), format!("{error:?}")),
        };
        let kind: String = debug.chars().take_while(|c| c.is_alphanumeric()).collect();
        let error = KvCacheError::new_err(text);
        Python::attach(|py| {
            let value = error.value(py);
            let mut set = value.setattr("kind", kind);
            if let Failure::Core(core) = &failure {
                for (name, number) in numbers(core) {
                    set = set.and_then(|()| value.setattr(name, number));
                }
            }
            // An exception without its attributes is still the exception.
            drop(set);
        });
        error
    }
}
