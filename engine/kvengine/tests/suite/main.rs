//! Tests of the whole crate: complete requests, recomputation, sleep, and failures.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod asking;
#[cfg(all(feature = "ascend", feature = "cuda"))]
mod batch;
mod beams;
mod blending;
mod cancel;
mod changed_files;
#[path = "../../../kvmodel/tests/suite/common.rs"]
#[allow(dead_code, reason = "the suite of kvmodel uses the rest")]
mod common;
mod constraints;
mod conversations;
mod crowd;
mod decoys;
mod devices;
mod disk;
mod disk_early;
mod disk_saves;
mod disk_tenants;
mod disk_waits;
mod drafts;
mod endings;
mod engine;
mod failure;
mod faulty;
mod flops;
mod giving_way;
mod groups;
mod guided;
mod little_index;
mod no_system;
mod numbers;
mod outgrown;
mod panics;
mod portable;
mod questions;
mod reasons;
mod recompute;
mod replicas;
mod retention;
mod scaling;
mod serving;
mod sharing;
mod sleep_mode;
mod sleeping;
mod sparse;
mod tiers;
mod unrotated;
mod views;
#[cfg(feature = "wgpu")]
mod wgpu;
mod windows;
