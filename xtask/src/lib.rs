//! The library part of `xtask`: helpers that its tasks share with the programs of `kvbench`, `kvlab` and
//! `kvbackend-ascend`.
//!
//! - [`run`]: start a program, report its failure, read and write files
//! - [`tools`]: tools that a task needs, and the commands that install them
//! - [`page`]: tables that a task writes into a document
//! - [`counts`]: test counts, read from the output of test programs
//! - [`cann_headers`]: CANN's headers, from Python wheels
//! - [`cuda_compiler`]: the CUDA compiler, from Python wheels
//! - [`cuda_double`]: the CUDA driver's test double
//! - [`published`]: the published language model for the longer checks

pub mod cann_headers;
pub mod counts;
pub mod cuda_compiler;
pub mod cuda_double;
pub mod page;
pub mod published;
pub mod run;
pub mod tools;
