//! The prompt of one request: text cut into parts, and documents from their look-up to the end of the answer.

mod blend;
mod context;
mod inquire;
mod parts;
mod text;

pub(crate) use parts::LivePrompt;
