//! The CUDA backend on the first devices of the machine, or on the test double of the driver: memory,
//! failures, order, and the launches that operations take. The contract itself is checked by the conformance
//! suite.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod attention;
mod common;
mod compiled;
mod dense;
mod double;
mod failure;
mod graphs;
mod holds;
mod launches;
mod memory;
mod nccl;
mod rig;
