//! Behaviour of the whole crate: exactness against transformers, the rules of reuse, and files of models.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod approximate;
mod bad_files;
#[allow(dead_code, reason = "the suite of kvengine uses the rest")]
mod common;
mod decoys;
mod exactness;
mod gguf;
mod gguf_fields;
mod gguf_lists;
mod gguf_tokenizers;
#[allow(dead_code, reason = "unit tests use the rest")]
mod greedy;
mod heads;
mod rope;
mod rotated;
mod rules;
mod sinks;
mod stored;
mod streams;
