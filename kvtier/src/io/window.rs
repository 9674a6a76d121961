//! Writes that are started one after another, with a few of them under way.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::{Condvar, Mutex};

use super::{Direction, DiskIo, IoEnd, IoRequest, OnEnd, Pages};

/// Starts writes while earlier ones are under way, so that memory is filled while the disk works. At most
/// [`Window::MOST`] writes are under way, and their memory is used again.
pub(crate) struct Window<'a> {
    io: &'a dyn DiskIo,
    writes: Arc<Writes>,
}

/// The writes that have been started.
#[derive(Default)]
struct Writes {
    state: Mutex<WritesState>,
    ended: Condvar,
}

#[derive(Default)]
struct WritesState {
    under_way: usize,
    failed: Option<io::Error>,
}

/// Writes of a window whose common end matters.
pub(crate) struct WriteGroup {
    under_way: Arc<AtomicUsize>,
    on_end: OnEnd,
}

impl WriteGroup {
    /// Returns whether all writes of this group that have been started have ended.
    pub(crate) fn has_ended(&self) -> bool {
        self.under_way.load(Ordering::Acquire) == 0
    }
}

impl<'a> Window<'a> {
    /// The number of writes that are under way at once. Two windows together keep a file busy, and leave some of
    /// its memory to reads.
    const MOST: usize = 12;

    /// Creates a window without writes.
    pub(crate) fn new(io: &'a dyn DiskIo) -> Self {
        Self { io, writes: Arc::default() }
    }

    /// Creates a group without writes.
    pub(crate) fn group(&self) -> WriteGroup {
        let under_way = Arc::<AtomicUsize>::default();
        let (shared, left) = (Arc::clone(&self.writes), Arc::clone(&under_way));
        let on_end = Arc::new(move |end: IoEnd| {
            let IoEnd { pages, result, .. } = end;
            // Before the next one is let in, which uses this memory.
            drop(pages);
            let mut state = shared.state.lock();
            state.under_way -= 1;
            state.failed = state.failed.take().or(result.err());
            left.fetch_sub(1, Ordering::Release);
            drop(state);
            shared.ended.notify_all();
        });
        WriteGroup { under_way, on_end }
    }

    /// Returns memory for the next write as soon as it may start.
    pub(crate) fn pages(&self, count: usize) -> Pages {
        drop(self.wait(|state| state.under_way < Self::MOST));
        self.io.pages(count)
    }

    /// Starts a write that belongs to a group.
    pub(crate) fn write(&self, group: &WriteGroup, offset: u64, pages: Pages) {
        self.writes.state.lock().under_way += 1;
        group.under_way.fetch_add(1, Ordering::Relaxed);
        let request = IoRequest { direction: Direction::Write, offset, pages };
        self.io.start(vec![request], Arc::clone(&group.on_end));
    }

    /// Waits for the writes of a group. Returns whether no write of this window has failed so far.
    pub(crate) fn wait_for(&self, group: &WriteGroup) -> bool {
        self.wait(|_| group.has_ended()).failed.is_none()
    }

    /// Waits for all writes.
    ///
    /// # Errors
    /// Returns the error of the first write that failed.
    pub(crate) fn finish(self) -> io::Result<()> {
        self.wait(|state| state.under_way == 0).failed.take().map_or(Ok(()), Err)
    }

    /// Waits until a condition holds, which only the end of a write changes.
    fn wait(&self, holds: impl Fn(&WritesState) -> bool) -> parking_lot::MutexGuard<'_, WritesState> {
        let mut state = self.writes.state.lock();
        while !holds(&state) {
            self.writes.ended.wait(&mut state);
        }
        state
    }
}
