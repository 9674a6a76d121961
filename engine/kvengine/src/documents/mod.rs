//! Registered documents: texts that are found verbatim wherever they stand in a prompt, and become chunks.
//!
//! ```text
//!  prompt ──► DocumentLibrary::find ──► found documents ──► PromptTokens::around ──► system, chunks, question
//! ```

mod cut;
mod fingerprint;
mod index;
mod library;

pub use cut::CutPrompt;
pub use library::{
    DocumentCosts, DocumentLibrary, FoundDocument, LibraryLimits, NewDocument, RegisteredDocument,
};
