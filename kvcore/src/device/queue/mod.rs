//! The bookkeeping shared by backends with device queues. This module does not call a driver.
//!
//! ```text
//!   hold       memory and handles that enqueued work uses, in batches that end with marks of the device
//!   recent     lists and plans of the last operations, by key
//!   uploads    pinned memory for lists, reused when no work holds it
//!   lists      the lists of a captured step, which each replay overwrites
//!   capture    the capture that a thread records, and its streams
//!   memory     activation memory, on loan
//!   granules   the mapped granules of a reservation
//! ```

mod capture;
mod granules;
mod hold;
mod lists;
mod memory;
mod recent;
mod uploads;

pub use capture::{CaptureSide, Captured, CapturedStream, Recording, capture};
pub use granules::{Granules, granules_for};
pub use hold::{Hold, InFlight, Mark};
pub use lists::StepLists;
pub use memory::LoanMemory;
pub use recent::Recent;
pub use uploads::room;
