//! The laboratory, tested on the repository's model: the gate, and answers with reuse.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod common;
mod gate;
mod published;
mod tiny_rag;
mod tuning;
