//! Fast kernels: the same results as the references, at the speed of memory.
//!
//! ```text
//!   stream ─► KernelTable ─► Fast::scatter, gather, …    parts for threads (Workers)
//!                               └─► Task::run::<S>        one part, compiled for an instruction set
//! ```
//!
//! What only moves or rotates elements gives the reference's bits. Attention adds in another order and takes
//! its own exponential: it agrees to rounding.

mod blocks;
mod pieces;
mod rope;
mod rotate;
mod rows;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::simd::Available;
use crate::workers::Workers;

/// From this many bytes on, copies go past the caches: whoever reads so much later would not find it there.
const STREAM_FROM: usize = 4 << 20;

/// The fast kernels of one backend.
pub(crate) struct Fast {
    level: Available,
    workers: Arc<Workers>,
}

impl Fast {
    pub(crate) fn new(level: Available, workers: Arc<Workers>) -> Self {
        Self { level, workers }
    }
}

impl fmt::Debug for Fast {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fast({}, {} threads)", self.level.level(), self.workers.count())
    }
}

/// The part `part` of `units` cut into `parts`.
fn share(units: Range<usize>, part: usize, parts: usize) -> Range<usize> {
    let at = |part: usize| units.start + units.len() * part / parts;
    at(part)..at(part + 1)
}

/// A list for each lane of [`pieces::Pieces`].
fn lanes<I>(units: Range<usize>, places: impl Fn(Range<usize>) -> I) -> [I; pieces::LANES] {
    std::array::from_fn(|lane| places(share(units.clone(), lane, pieces::LANES)))
}
