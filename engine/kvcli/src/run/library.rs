//! `kvc run --library`: the documents of a folder, which are found verbatim in prompts.

use std::cell::RefCell;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kvcore::SystemClock;
use kvengine::{CutPrompt, DocumentLibrary, LibraryLimits, NewDocument, PromptTokens};
use kvmodel::TextCodec;

use super::prompts::AskedPrompt;
use crate::error::{Error, Result};
use crate::folder;

/// The documents of a folder. The name of a document's file is its ID.
#[derive(Debug)]
pub(super) struct LibraryFolder {
    folder: PathBuf,
    count: usize,
    library: RefCell<DocumentLibrary>,
}

impl LibraryFolder {
    /// Reads the documents in a folder's files.
    pub(super) fn read(folder: &Path) -> Result<Self> {
        let documents = folder::documents(folder)?;
        let count = documents.len();
        if count == 0 {
            return Err(Error::NoDocuments(folder.to_owned()));
        }
        // The folder's owner decides how many documents there are.
        let limits = LibraryLimits { documents: usize::MAX, bytes: usize::MAX };
        let mut library = DocumentLibrary::new(limits, Arc::new(SystemClock::default()));
        for (path, text) in documents {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            library.register(NewDocument::new(name, text))?;
        }
        Ok(Self { folder: folder.to_owned(), count, library: RefCell::new(library) })
    }

    /// Cuts a text at the documents that stand in it.
    pub(super) fn cut(&self, codec: &TextCodec, text: &str, special: bool) -> Result<AskedPrompt> {
        let found = self.library.borrow_mut().find(text);
        let places: Vec<Range<usize>> = found.iter().map(|found| found.range.clone()).collect();
        let CutPrompt { tokens, chunks } = PromptTokens::around(codec, text, &places, special)?;
        let name = |number: usize| found[number].id.to_string();
        Ok(AskedPrompt { tokens, documents: chunks.into_iter().map(|number| number.map(name)).collect() })
    }

    /// Says which documents a prompt contains.
    pub(super) fn note(&self, prompt: &AskedPrompt) -> String {
        let (folder, count) = (self.folder.display(), self.count);
        let found: Vec<&str> = prompt.documents.iter().flatten().map(String::as_str).collect();
        if found.is_empty() {
            return format!(
                "None of the {count} documents in {folder} stands verbatim in the prompt, so it is treated as an \
                 ordinary prompt without documents."
            );
        }
        format!("Documents of {folder} in the prompt: {}", found.join(", "))
    }
}
