//! The CUDA backend on the machine's first devices or on the driver's test double: memory, failures, order,
//! and launches per operation. The conformance suite checks the contract itself.
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
