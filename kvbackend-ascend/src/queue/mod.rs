//! A stream's queue, below all operations: the work that an operation enqueues, and the memory that it uses.
//!
//! ```text
//!   state     ACL's stream, and what its calls share under a lock
//!   work      one operation: memory between its operators, lists for the device, copies, what it holds
//!   capture   a recording under way, which takes the place of the stream's own memory
//!   graph     replays of what was captured
//! ```
//!
//! ACL frees and destroys things immediately, even if work still uses them. The queue therefore holds
//! everything that enqueued work uses. The bookkeeping is in [`kvcore::device::queue`]; this module makes the
//! ACL calls.

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
