//! Behaviour of the whole crate: exactness against transformers, the rules of reuse, requests from start to
//! end, and the model in the repository.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod approximate;
mod asking;
mod bad_files;
#[cfg(all(feature = "ascend", feature = "cuda"))]
mod batch;
mod blending;
mod cancel;
mod common;
mod devices;
mod endings;
mod engine;
mod exactness;
mod failure;
mod faulty;
mod flops;
mod gguf;
mod questions;
mod recompute;
mod replicas;
mod rope;
mod rotated;
mod rules;
mod scaling;
mod sharing;
mod sinks;
mod sleep_mode;
mod sleeping;
mod stored;
mod unrotated;
mod views;
