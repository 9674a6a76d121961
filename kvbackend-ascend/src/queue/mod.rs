//! A stream's queue, below all operations: the work that an operation enqueues, and the memory that it uses.
//!
//! ```text
//!   state     ACL's stream, and the state that its calls share under a lock
//!   work      one operation: scratch memory, lists for the device, copies, everything that it holds
//!   capture   a recording under way, which replaces the stream's own memory
//!   graph     replays of captured work
//! ```
//!
//! ACL frees memory and destroys events and graphs immediately, even if work still uses them. The queue
//! therefore holds everything that enqueued work uses. The bookkeeping is in [`kvcore::device::queue`]; this
//! module makes the ACL calls.

mod capture;
mod copies;
mod event;
mod graph;
mod list;
mod scratch;
mod state;
mod work;

pub(crate) use capture::capture;
pub(crate) use copies::{CopyDirection, copy, copy_now};
pub(crate) use event::AclEvent;
pub use event::AscendEvent;
pub(crate) use list::ListMemory;
pub(crate) use state::{AclStream, NpuActivations};
pub(crate) use work::Work;
