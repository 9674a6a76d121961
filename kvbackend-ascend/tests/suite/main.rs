//! The Ascend backend on the machine's first devices, or on the CANN simulator. `devices` runs the cases that
//! all backends share; the other modules test operators, libraries, and memory. The conformance suite checks
//! the contract.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod codes;
mod common;
mod devices;
mod failure;
mod fused;
mod graphs;
mod hccl;
mod holds;
mod launches;
mod libraries;
mod memory;
mod rules;
mod simulator;
