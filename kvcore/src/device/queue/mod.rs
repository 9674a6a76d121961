//! The bookkeeping shared by backends with device queues. This module does not call a driver.
//!
//! ```text
//!   hold       memory and handles that enqueued work uses, in batches that end with marks of the device
//!   recent     lists and plans of the last operations, by key
//!   uploads    pinned memory of lists, used again when no work holds it
//!   lists      places of a captured step's lists, which each replay writes
//!   capture    the capture that a thread records, and the streams that take part
//!   memory     memory of activations, on loan
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
