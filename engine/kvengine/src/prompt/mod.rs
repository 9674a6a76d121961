//! The prompt of one request: splits text into parts, and manages the documents from lookup to the end of the
//! answer.

mod blend;
mod context;
mod inquire;
mod parts;
mod text;

pub(crate) use parts::LivePrompt;
