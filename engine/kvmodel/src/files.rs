//! Reads a model's small files into memory.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use crate::dense::check_regular_file;
use crate::error::{Error, Result};

/// A file's contents, with the path to name in errors.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FileContents<'a> {
    pub(crate) path: &'a Path,
    pub(crate) bytes: &'a [u8],
}

/// A file's path and contents.
#[derive(Debug)]
pub(crate) struct SmallFile {
    path: PathBuf,
    bytes: Vec<u8>,
}

/// The maximum size in bytes of a file that is read as a whole: 512 MiB. The largest tokenizers have 50 MiB.
const MOST_BYTES: u64 = 512 << 20;

/// Reads a regular file of at most 512 MiB into memory. Nothing is read from pipes and devices, which may have no
/// end.
///
/// # Errors
/// Returns an I/O error if the file cannot be read, is too large, or is not a regular file.
pub fn read_small_file(path: &Path) -> std::io::Result<Vec<u8>> {
    check_regular_file(path)?;
    let bytes = std::fs::metadata(path)?.len();
    if bytes > MOST_BYTES {
        let reason = format!("it has {bytes} bytes, more than the limit of {MOST_BYTES}");
        return Err(std::io::Error::new(ErrorKind::InvalidInput, reason));
    }
    std::fs::read(path)
}

impl SmallFile {
    /// Reads a file.
    ///
    /// # Errors
    /// Returns [`Error::Io`], with the path, if the file cannot be read.
    pub(crate) fn read(path: PathBuf) -> Result<Self> {
        match read_small_file(&path) {
            Ok(bytes) => Ok(Self { path, bytes }),
            Err(source) => Err(Error::Io { path, source }),
        }
    }

    /// Reads an optional file.
    ///
    /// # Errors
    /// Returns [`Error::Io`], with the path, if the file exists but cannot be read.
    pub(crate) fn read_if_there(path: PathBuf) -> Result<Option<Self>> {
        match Self::read(path) {
            Ok(file) => Ok(Some(file)),
            Err(Error::Io { source, .. }) if source.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Returns the file's contents and path.
    pub(crate) fn contents(&self) -> FileContents<'_> {
        FileContents { path: &self.path, bytes: &self.bytes }
    }

    /// Parses the contents as UTF-8 with `parse`, and adds the file's path to errors.
    pub(crate) fn parse<T>(&self, parse: impl FnOnce(&str) -> Result<T>) -> Result<T> {
        let text = std::str::from_utf8(&self.bytes);
        let io = |error| Error::Io {
            path: self.path.clone(),
            source: std::io::Error::new(ErrorKind::InvalidData, error),
        };
        parse(text.map_err(io)?).map_err(|error| error.in_file(&self.path))
    }
}
