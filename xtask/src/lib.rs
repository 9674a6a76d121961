//! The library part of `xtask`: helpers that its tasks share with the programs of `kvbench`, `kvlab` and
//! `kvbackend-ascend`.
//!
//! - [`run`]: start a program, report its failure, read and write files
//! - [`tools`]: tools that a task needs, and the commands that install them
//! - [`page`]: tables that a task writes into a document
//! - [`counts`]: counts of tests, read from the output of test programs
//! - [`cann_headers`]: headers of CANN, from Python wheels
//! - [`cuda_compiler`]: the compiler of CUDA, from Python wheels
//! - [`cuda_double`]: the test double of the CUDA driver
//! - [`published`]: the published language model of the longer checks

pub mod cann_headers;
pub mod counts;
pub mod cuda_compiler;
pub mod cuda_double;
pub mod page;
pub mod published;
pub mod run;
pub mod tools;
