//! Tests beyond the conformance suite: elements bit by bit, rows that share words, windows, and handling of
//! errors. Without an adapter, every test prints SKIPPED.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod common;
mod elements;
mod failure;
mod memory;
mod submissions;
mod windows;
mod words;
