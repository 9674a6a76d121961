//! The Ascend backend on the first devices of the machine, or on the simulator of CANN: memory, failures, order, and what
//! goes when. The contract itself is checked by the conformance suite.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod codes;
mod common;
mod failure;
mod fused;
mod graphs;
mod hccl;
mod holds;
mod launches;
mod libraries;
mod memory;
mod peers;
mod rules;
mod sabotage;
mod simulator;
