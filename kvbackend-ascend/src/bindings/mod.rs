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

/// Makes the table of a library's functions: a field of each name holds the function, or why it is missing, and
/// a method of the same name calls it and panics if it is missing.
macro_rules! table {
    ($table:ident, $(pub fn $name:ident($($argument:ident: $type:ty),* $(,)?) -> $result:ty;)*) => {
        pub struct $table {
            _library: ::libloading::Library,
            $(pub $name: Result<unsafe extern "C" fn($($argument: $type),*) -> $result, ::libloading::Error>,)*
        }

        impl $table {
            pub unsafe fn from_library(library: ::libloading::Library) -> Self {
                Self {
                    // SAFETY: the caller guarantees that the library's functions have these types. The table
                    // keeps the library loaded.
                    $($name: unsafe { library.get(concat!(stringify!($name), "\0").as_bytes()) }.map(|found| *found),)*
                    _library: library,
                }
            }

            $(
                pub unsafe fn $name(&self, $($argument: $type),*) -> $result {
                    let function = self.$name.as_ref().expect("a function that the library has");
                    // SAFETY: the caller passes what the header of the library asks for.
                    unsafe { function($($argument),*) }
                }
            )*
        }
    };
}

mod acl;
mod base;
mod hccl;
mod operators;
pub(crate) mod types;

pub(crate) use acl::Acl;
pub(crate) use base::Base;
pub(crate) use hccl::Hccl;
pub(crate) use operators::Operators;
