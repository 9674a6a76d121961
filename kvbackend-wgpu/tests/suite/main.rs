//! Properties that the conformance suite does not test: the bits of elements, rows that share words, windows,
//! and errors. Without an adapter, every test prints SKIPPED, or fails where nothing may be skipped.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod common;
mod elements;
mod failure;
mod memory;
mod submissions;
mod windows;
mod words;
