//! Tests the caches of `kvcore` on real memory.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod batches;
mod common;
mod faulty;
mod grouped;
mod permits;
mod sharing;
mod sleeping;
mod statics;
mod windows;
