//! The laboratory on the model in the repository: the gate, and answers under reuse.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod common;
mod gate;
mod published;
mod tiny_rag;
mod tuning;
