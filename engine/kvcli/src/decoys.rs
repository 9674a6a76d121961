//! Reads decoys: documents that other documents see while they are computed, but that the question never
//! sees.

use std::path::PathBuf;

use crate::error::{Error, Result};
use crate::run::document;

/// Reads each file as one decoy, and each directory as the decoys in its files, ordered by file name. Returns
/// `usual` if there are no paths. A directory without files is an error.
pub(crate) fn read(paths: &[PathBuf], usual: &[String]) -> Result<Vec<String>> {
    let mut decoys = Vec::new();
    for path in paths {
        if path.is_dir() {
            let unreadable = |source| Error::Document { path: path.clone(), source };
            let entries = std::fs::read_dir(path).map_err(unreadable)?;
            let entries = entries.map(|entry| Ok(entry?.path())).collect::<std::io::Result<Vec<_>>>();
            let mut files = entries.map_err(unreadable)?;
            files.retain(|file| file.is_file());
            files.sort();
            if files.is_empty() {
                return Err(Error::NoDecoys(path.clone()));
            }
            for file in &files {
                decoys.push(document(file)?);
            }
        } else {
            decoys.push(document(path)?);
        }
    }
    Ok(if paths.is_empty() { usual.to_vec() } else { decoys })
}
