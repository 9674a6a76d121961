//! Shared code for backends that capture graphs: a gate that blocks other threads' calls to a stream during a
//! capture, and the checks that each replay repeats.

mod check;
mod gate;

pub use check::{ReplayCheck, uncapturable, without_work};
pub use gate::{CaptureGate, CapturePass};
