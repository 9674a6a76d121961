//! Rust of `ffi/ascend.h`: types and values, and a table of functions for each library. Made by `cargo xtask bindgen`.
#![allow(
    clippy::all,
    clippy::pedantic,
    clippy::restriction,
    dead_code,
    missing_docs,
    missing_debug_implementations,
    non_camel_case_types,
    non_snake_case,
    non_upper_case_globals,
    unreachable_pub,
    unused_imports,
    reason = "made by a program, with the names of C"
)]

mod acl;
mod base;
mod hccl;
mod operators;
pub(crate) mod types;

pub(crate) use acl::Acl;
pub(crate) use base::Base;
pub(crate) use hccl::Hccl;
pub(crate) use operators::Operators;
