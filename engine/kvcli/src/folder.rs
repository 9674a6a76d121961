//! Folders with one document in each file.

use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::run::document;

/// Reads the documents in a folder's files, ordered by file name, with their paths. Subfolders are ignored. The result
/// is empty if there are no files.
pub(crate) fn documents(folder: &Path) -> Result<Vec<(PathBuf, String)>> {
    let unreadable = |source| Error::Document { path: folder.to_owned(), source };
    let entries = std::fs::read_dir(folder).map_err(unreadable)?;
    let entries = entries.map(|entry| Ok(entry?.path())).collect::<std::io::Result<Vec<_>>>();
    let mut files = entries.map_err(unreadable)?;
    files.retain(|file| file.is_file());
    files.sort();
    files.into_iter().map(|file| document(&file).map(|text| (file, text))).collect()
}
