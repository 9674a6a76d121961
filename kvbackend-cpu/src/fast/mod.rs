//! Fast kernels, which compute the same results as the reference kernels at memory speed.
//!
//! ```text
//!   stream ─► KernelTable ─► Fast::scatter, gather, …    parts for threads (Workers)
//!                               └─► Task::run::<S>        one part, compiled for an instruction set
//! ```
//!
//! Kernels that only move or rotate elements give the same bits as the reference. Attention adds in a
//! different order and uses its own exponential function, so its results match the reference's up to
//! rounding.

mod attend;
mod blocks;
mod codes;
mod convert;
mod foreign;
mod locked;
mod rope;
mod rotate;
mod rows;
mod runs;
mod tensor;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::Thresholds;
use crate::simd::AvailableLevel;
use crate::workers::Workers;

/// The fast kernels of one backend.
pub(crate) struct Fast {
    level: AvailableLevel,
    workers: Arc<Workers>,
    thresholds: Thresholds,
}

impl Fast {
    pub(crate) fn new(level: AvailableLevel, workers: Arc<Workers>, thresholds: Thresholds) -> Self {
        Self { level, workers, thresholds }
    }

    /// Returns the number of parts into which to split `units` units of work, which move `bytes` bytes in
    /// total.
    fn parts(&self, units: usize, bytes: usize) -> usize {
        self.workers.parts(units, bytes, self.thresholds.bytes_per_thread)
    }

    /// Returns whether a kernel that moves `bytes` bytes bypasses the caches.
    fn streams(&self, bytes: usize) -> bool {
        bytes >= self.thresholds.stream_bytes
    }
}

impl fmt::Debug for Fast {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fast({}, {} threads)", self.level.level(), self.workers.count())
    }
}

/// Divides `units` into `parts` parts of about equal length, and returns part `part`.
fn share(units: Range<usize>, part: usize, parts: usize) -> Range<usize> {
    let at = |part: usize| units.start + units.len() * part / parts;
    at(part)..at(part + 1)
}

/// Divides units between the queues of [`runs::CopyRuns`], and returns each queue's offsets.
fn queues<I>(units: Range<usize>, offsets: impl Fn(Range<usize>) -> I) -> [I; runs::QUEUES] {
    std::array::from_fn(|queue| offsets(share(units.clone(), queue, runs::QUEUES)))
}
