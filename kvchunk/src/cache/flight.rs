//! Single flight: if several requests miss a chunk or a system prompt at the same time, only one of them
//! computes it.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

/// Work in progress on a piece or a system prompt, which is being computed, put to sleep or woken.
#[derive(Debug, Default)]
pub(crate) struct Flight {
    state: Mutex<FlightState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct FlightState {
    landed: bool,
    wakers: Vec<Waker>,
}

impl Flight {
    /// Ends the flight, whether or not the work succeeded. Every waiter then asks the cache again.
    ///
    /// The caller must not hold any lock of the cache, because a waker may use the cache.
    pub(crate) fn land(&self) {
        let landed = FlightState { landed: true, wakers: Vec::new() };
        let FlightState { wakers, .. } = std::mem::replace(&mut *self.state.lock(), landed);
        self.changed.notify_all();
        wakers.into_iter().for_each(Waker::wake);
    }
}

// Decision: docs/decisions/chunks.md#waiting-for-another-request-is-left-to-the-caller
/// A handle for waiting for a piece, or a system prompt, that another request is working on.
///
/// A thread [waits](Self::wait), a scheduler [polls](Self::is_over), and an async engine awaits the handle,
/// which is a future.
///
/// The handle does not report how the work ended; ask the cache again to find out. If the work failed or was
/// cancelled, the first request that asks takes over the work. Never wait while you hold a reservation that
/// you have not computed yet, because two requests could wait for each other.
#[derive(Debug, Clone)]
pub struct ChunkWaiter(pub(crate) Arc<Flight>);

impl ChunkWaiter {
    /// Blocks until the work has ended.
    pub fn wait(&self) {
        let mut state = self.0.state.lock();
        while !state.landed {
            self.0.changed.wait(&mut state);
        }
    }

    /// Blocks until the work has ended or `limit` has passed. Returns whether the work has ended.
    pub fn wait_for(&self, limit: Duration) -> bool {
        let mut state = self.0.state.lock();
        let Some(until) = Instant::now().checked_add(limit) else {
            drop(state);
            self.wait();
            return true;
        };
        while !state.landed && !self.0.changed.wait_until(&mut state, until).timed_out() {}
        state.landed
    }

    /// Returns whether the work has ended. Never blocks.
    pub fn is_over(&self) -> bool {
        self.0.state.lock().landed
    }
}

impl Future for ChunkWaiter {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let mut state = self.0.state.lock();
        if state.landed {
            return Poll::Ready(());
        }
        if !state.wakers.iter().any(|waker| waker.will_wake(context.waker())) {
            state.wakers.push(context.waker().clone());
        }
        Poll::Pending
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

    #[test]
    fn futures_are_woken_once() {
        use std::sync::atomic::{AtomicUsize, Ordering};
        use std::task::Wake;

        #[derive(Default)]
        struct Count(AtomicUsize);
        impl Wake for Count {
            fn wake(self: Arc<Self>) {
                self.0.fetch_add(1, Ordering::SeqCst);
            }
        }

        let (flight, woken) = (Arc::new(Flight::default()), Arc::<Count>::default());
        let mut waiter = ChunkWaiter(Arc::clone(&flight));
        let waker = Waker::from(Arc::clone(&woken));
        let mut poll = || Pin::new(&mut waiter).poll(&mut Context::from_waker(&waker));
        assert_eq!([poll(), poll()], [Poll::Pending; 2]);
        assert_eq!(woken.0.load(Ordering::SeqCst), 0);
        flight.land();
        assert_eq!(woken.0.load(Ordering::SeqCst), 1, "one waker, however often it polled");
        assert_eq!(poll(), Poll::Ready(()));
    }
}
