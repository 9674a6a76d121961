//! Lent and reserved memory under work of the backend's streams.
//!
//! Tests that need a stream are not unit tests, because these would compile every kernel a second time.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod lent;
#[cfg(target_os = "linux")]
mod reserved;
