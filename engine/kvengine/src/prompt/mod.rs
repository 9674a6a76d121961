//! The prompt of one request: text cut into parts, and its documents from lookup to the end of the answer.

mod blend;
mod context;
mod inquire;
mod parts;
mod text;

pub(crate) use parts::LivePrompt;
