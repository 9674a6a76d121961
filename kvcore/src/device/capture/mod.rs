//! What backends share that capture graphs: a gate, which keeps other threads' calls away from a stream while it is captured,
//! and the checks that each replay repeats.

mod check;
mod gate;

pub use check::{ReplayCheck, uncapturable, without_work};
pub use gate::{CaptureGate, CapturePass};
