//! Keys and values below device memory: the record of a piece, and a file of records that is bounded, survives a
//! crash, and is found again after a restart.
//!
//! ```
//! use std::time::{Duration, Instant};
//! use kvcore::KeyScope;
//! use kvtier::{Record, RecordId, Slab, SlabConfig};
//!
//! # let folder = tempfile::tempdir().unwrap();
//! # let folder = folder.path();
//! let scope = KeyScope::new("my-model", b"weights digest").root();
//! let config = SlabConfig { limit: 16 << 20, ..SlabConfig::default() };
//! let id = RecordId {
//!     key: scope.child(&[1, 2, 3]),
//!     tokens: [1, 2, 3].into(),
//!     stored_start: 0,
//!     label: "f32, 2 layers of 4".into(),
//! };
//! let slab = Slab::open(folder, scope, config)?;
//! slab.store(Record::new(id.clone(), vec![vec![1; 64], vec![2; 64]]));
//! drop(slab); // writes what is waiting
//! let slab = Slab::open(folder, scope, config)?;
//! let found = slab.load(&id, Instant::now() + Duration::from_secs(1)).unwrap();
//! assert_eq!(*found, [vec![1; 64], vec![2; 64]]);
//! # Ok::<(), kvtier::Error>(())
//! ```
//!
//! | module | contents |
//! |---|---|
//! | [`record`] | [`Record`]: the contents of a piece with everything that must match before they are used |
//! | `buffer` | [`RecordBuffer`]: K, V or scales, in memory that a disk reads and writes |
//! | [`slab`] | [`Slab`]: a file of fixed size in which records survive the process |
//! | `file` | [`RecordWriter`], [`RecordReader`]: a file of records to carry elsewhere |
//! | [`io`] | [`DiskIo`]: positioned reads and writes of whole pages, many at a time, with `io_uring` or threads |

#![deny(unsafe_code)]

pub mod io;
pub mod record;
pub mod slab;

mod buffer;
mod digest;
mod error;
mod file;
mod known;

pub use buffer::RecordBuffer;
pub use error::{Error, Result};
pub use file::{RecordReader, RecordWriter};
pub use io::{DiskIo, FileIo, IoChoice, IoWay};
pub use known::{Gone, KnownKeys};
pub use record::{AccountId, Record, RecordId, RecordNote};
pub use slab::{
    AccountUsage, Found, InspectedAccount, InspectedScope, Inspection, Listing, Loading, Missed, OnTime,
    Slab, SlabConfig, SlabStep, SlabUsage, Stored,
};
