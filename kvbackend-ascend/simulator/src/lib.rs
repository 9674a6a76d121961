//! A simulator of the CANN libraries that the Ascend backend loads: a single library under all their names,
//! which runs on the CPU.
//!
//! The simulator is stricter than a device. The host cannot read device memory, new memory contains NaN,
//! memory accesses are checked when work *executes*, a fault loses the device, an executor can be used only
//! once, and unordered work of two streams on the same bytes is a fault. The simulator implements CANN's
//! contract as we understand it; it cannot show that we are right.
//!
//! The simulator starts no threads. An eager device runs work as soon as it is enqueued and its waits are
//! done; a lazy device runs nothing before a wait. Every run of a program gives the same result.
#![allow(
    clippy::cast_ptr_alignment,
    clippy::missing_safety_doc,
    clippy::not_unsafe_ptr_arg_deref,
    missing_docs,
    non_snake_case,
    unreachable_pub,
    unsafe_op_in_unsafe_fn,
    reason = "the functions are those of CANN, and their contract is CANN's"
)]

mod address;
mod clock;
mod control;
mod device;
mod event;
mod executor;
mod graph;
mod hccl;
mod operators;
mod pinned;
mod state;
mod stream;
mod task;
mod tensor;
mod virtual_memory;

#[path = "../../src/bindings/types.rs"]
#[allow(
    clippy::all,
    clippy::pedantic,
    dead_code,
    non_camel_case_types,
    non_upper_case_globals,
    reason = "made by a program, with the names of C"
)]
mod types;
