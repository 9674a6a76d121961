//! Reads decoys: documents that other documents see while they are computed, but that the question never
//! sees.

use std::path::PathBuf;

use crate::error::{Error, Result};
use crate::folder;
use crate::run::document;

/// Reads each file as one decoy, and each directory as the decoys in its files, ordered by file name. Returns
/// `usual` if there are no paths. A directory without files is an error.
pub(crate) fn read(paths: &[PathBuf], usual: &[String]) -> Result<Vec<String>> {
    let mut decoys = Vec::new();
    for path in paths {
        if path.is_dir() {
            let files = folder::documents(path)?;
            if files.is_empty() {
                return Err(Error::NoDecoys(path.clone()));
            }
            decoys.extend(files.into_iter().map(|(_, text)| text));
        } else {
            decoys.push(document(path)?);
        }
    }
    Ok(if paths.is_empty() { usual.to_vec() } else { decoys })
}
