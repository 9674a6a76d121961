//! The crate's locks, from `parking_lot`, or from `loom` when the `loom` models are checked
//! (`RUSTFLAGS="--cfg loom"`).

#[cfg(not(loom))]
mod imp {
    use std::cell::Cell;
    use std::sync::atomic::{AtomicUsize, Ordering};

    pub(crate) use parking_lot::{Mutex, MutexGuard};
    pub(crate) use std::sync::Arc;

    static THREADS: AtomicUsize = AtomicUsize::new(0);

    thread_local! {
        static TURN: Cell<usize> = Cell::new(THREADS.fetch_add(1 << 20, Ordering::Relaxed));
    }

    /// Returns this thread's counter and then increases it by `step`. The counters of different threads start
    /// far apart.
    pub(crate) fn turn(step: usize) -> usize {
        TURN.with(|turn| turn.replace(turn.get().wrapping_add(step)))
    }
}

#[cfg(loom)]
mod imp {
    pub(crate) use loom::sync::{Arc, MutexGuard};

    #[derive(Debug, Default)]
    pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(loom::sync::Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
        }

        pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
            self.0.try_lock().ok()
        }
    }

    /// Returns 0: loom models must be deterministic, so every thread begins at the first shard.
    pub(crate) fn turn(_: usize) -> usize {
        0
    }
}

pub(crate) use imp::{Arc, Mutex, MutexGuard, turn};
