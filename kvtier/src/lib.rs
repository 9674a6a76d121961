#![doc = include_str!("../README.md")]
//!
//! # Modules
//!
//! | module | contents |
//! |---|---|
//! | [`record`] | [`Record`]: the contents of a piece with everything that must match before they are used |
//! | [`slab`] | [`Slab`]: a file of fixed size in which records survive the process |
//! | [`io`] | [`DiskIo`]: positioned reads and writes of whole pages, many at a time |

pub mod io;
pub mod record;
pub mod slab;

mod error;

pub use error::{Error, Result};
pub use io::{DiskIo, FileIo};
pub use record::{Record, RecordId};
pub use slab::{Found, Missed, Slab, SlabConfig, SlabUsage, Stored};
