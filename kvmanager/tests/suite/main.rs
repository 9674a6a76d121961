//! Tests the managers on the CPU backend.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../../../kvbackend-cpu/tests/caches/common.rs"]
mod common;
mod manager;
mod pipeline;
mod tiers;
