//! The times that a slab's loads and writes take, for those who observe them.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::Slab;

/// Something that a slab does and that takes the disk some time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SlabStep {
    /// A load, from its start until the record was read and checked, or could not be read.
    Load,
    /// A batch of records, from its first write until the disk has synced it or failed.
    Write,
}

/// Called with each time, on the thread that measures it.
pub type OnTime = Arc<dyn Fn(SlabStep, Duration) + Send + Sync>;

/// The observer of a slab's times.
#[derive(Default)]
pub(super) struct Times(Mutex<Option<OnTime>>);

impl Times {
    /// Tells the observer that a step has ended.
    pub(super) fn took(&self, step: SlabStep, time: Duration) {
        let observer = self.0.lock().clone();
        if let Some(observer) = observer {
            observer(step, time);
        }
    }
}

impl fmt::Debug for Times {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Times").field(&self.0.lock().is_some()).finish()
    }
}

impl Slab {
    /// Has `observer` called with the time of each load and write from now on, instead of an earlier observer.
    pub fn observe(&self, observer: OnTime) {
        *self.shared.times.0.lock() = Some(observer);
    }
}
