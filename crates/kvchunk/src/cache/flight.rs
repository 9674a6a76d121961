//! Single flight: a chunk that several requests miss at once is computed by one of them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

/// Work on a piece that is under way: it is computed, put to sleep or woken.
#[derive(Debug, Default)]
pub(super) struct Flight {
    landed: Mutex<bool>,
    changed: Condvar,
}

impl Flight {
    /// The work has ended, well or not; whoever waited asks the cache again.
    pub(super) fn land(&self) {
        *self.landed.lock() = true;
        self.changed.notify_all();
    }
}

/// Waits for a piece that somebody else works on.
///
/// How the work ended is not said: ask the cache again. If it failed or was cancelled, the first to ask
/// takes it over. Never wait while holding a reservation that is not computed yet: two requests could
/// wait for each other.
#[derive(Debug, Clone)]
pub struct ChunkWaiter(pub(super) Arc<Flight>);

impl ChunkWaiter {
    /// Blocks until the work has ended.
    pub fn wait(&self) {
        let mut landed = self.0.landed.lock();
        while !*landed {
            self.0.changed.wait(&mut landed);
        }
    }

    /// Blocks until the work has ended or `limit` has passed; returns whether it has ended.
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

    /// Whether the work has ended; never blocks.
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
