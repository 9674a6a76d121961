//! The prompt of one request: splits text into parts, and manages the documents from lookup to the end of the
//! answer.

mod blend;
mod context;
mod costs;
mod decoys;
mod inquire;
mod parts;
mod text;

pub(crate) use context::behind;
pub use decoys::BUILT_IN_DECOYS;
pub(crate) use parts::LivePrompt;
pub use text::document_text;
