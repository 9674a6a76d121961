//! Single flight: of several requests that miss a chunk at once, one computes it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

/// A flight: work on a piece that is under way. The piece is being computed, put to sleep or woken.
#[derive(Debug, Default)]
pub(crate) struct Flight {
    landed: Mutex<bool>,
    changed: Condvar,
}

impl Flight {
    /// Ends the flight, whether or not the work succeeded. Every waiter asks the cache again.
    pub(crate) fn land(&self) {
        *self.landed.lock() = true;
        self.changed.notify_all();
    }
}

// Decision: docs/decisions/chunks.md#waiting-for-another-request-is-the-callers-business
/// A handle to wait for a piece that another request works on.
///
/// A waiter does not tell how the work ended: ask the cache again. If the work failed or was cancelled, the
/// first request to ask takes it over. Never wait while you hold a reservation that is not computed yet,
/// because two requests could wait for each other.
#[derive(Debug, Clone)]
pub struct ChunkWaiter(pub(crate) Arc<Flight>);

impl ChunkWaiter {
    /// Blocks until the work has ended.
    pub fn wait(&self) {
        let mut landed = self.0.landed.lock();
        while !*landed {
            self.0.changed.wait(&mut landed);
        }
    }

    /// Blocks until the work has ended or `limit` has passed. Returns true if the work has ended.
    pub fn wait_for(&self, limit: Duration) -> bool {
        let mut landed = self.0.landed.lock();
        let Some(until) = Instant::now().checked_add(limit) else {
            drop(landed);
            self.wait();
            return true;
        };
        while !*landed && !self.0.changed.wait_until(&mut landed, until).timed_out() {}
        *landed
    }

    /// Returns true if the work has ended. Never blocks.
    pub fn is_over(&self) -> bool {
        *self.0.landed.lock()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiters_wake_when_the_work_has_ended() {
        let flight = Arc::new(Flight::default());
        let waiter = ChunkWaiter(Arc::clone(&flight));
        assert!(!waiter.is_over() && !waiter.wait_for(Duration::from_millis(5)));
        let waiting: Vec<_> = (0..3)
            .map(|_| {
                let waiter = waiter.clone();
                std::thread::spawn(move || waiter.wait())
            })
            .collect();
        flight.land();
        for thread in waiting {
            thread.join().unwrap();
        }
        assert!(waiter.is_over() && waiter.wait_for(Duration::MAX));
    }
}
