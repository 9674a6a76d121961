//! The clock of a pool: the system clock, or a clock that a test controls.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A source of time, in milliseconds since a fixed moment.
pub trait Clock: Send + Sync + fmt::Debug {
    /// Returns the current time. The time never decreases. A pool reads a clock that panics as 0.
    fn millis(&self) -> u64;
}

/// Converts to whole milliseconds, rounded up, so that a nonzero time never becomes zero.
pub(super) fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

/// The system's monotonic clock.
#[derive(Debug)]
pub struct SystemClock(Instant);

impl Default for SystemClock {
    fn default() -> Self {
        Self(Instant::now())
    }
}

impl Clock for SystemClock {
    fn millis(&self) -> u64 {
        self.0.elapsed().as_millis() as u64
    }
}

/// A clock that moves only by calls to [`advance`](Self::advance), for tests and simulations.
#[derive(Debug, Clone, Default)]
pub struct ManualClock(Arc<AtomicU64>);

impl ManualClock {
    /// Advances the clock by whole milliseconds.
    pub fn advance(&self, by: Duration) {
        self.0.fetch_add(by.as_millis() as u64, Ordering::Relaxed);
    }
}

impl Clock for ManualClock {
    fn millis(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}
