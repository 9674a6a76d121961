//! Writes that are started one after another, with a few of them under way.

use std::io;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

use super::{Direction, DiskIo, IoEnd, IoRequest, OnEnd, Pages};

/// Starts writes while earlier ones are under way, so that memory is filled while the disk works. At most
/// [`Window::MOST`] writes are under way, and their memory is used again.
pub(crate) struct Window<'a> {
    io: &'a dyn DiskIo,
    writes: Arc<Writes>,
    on_end: OnEnd,
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

impl<'a> Window<'a> {
    /// The number of writes that are under way at once. Two windows together keep a file busy, and leave some of
    /// its memory to reads.
    const MOST: usize = 12;

    /// Creates a window without writes.
    pub(crate) fn new(io: &'a dyn DiskIo) -> Self {
        let writes = Arc::<Writes>::default();
        let shared = Arc::clone(&writes);
        let on_end = Arc::new(move |end: IoEnd| {
            let IoEnd { pages, result, .. } = end;
            // Before the next one is let in, which uses this memory.
            drop(pages);
            let mut state = shared.state.lock();
            state.under_way -= 1;
            state.failed = state.failed.take().or(result.err());
            drop(state);
            shared.ended.notify_all();
        });
        Self { io, writes, on_end }
    }

    /// Returns memory for the next write as soon as it may start.
    pub(crate) fn pages(&self, count: usize) -> Pages {
        drop(self.wait(Self::MOST - 1));
        self.io.pages(count)
    }

    /// Starts a write.
    pub(crate) fn write(&self, offset: u64, pages: Pages) {
        self.writes.state.lock().under_way += 1;
        let request = IoRequest { direction: Direction::Write, offset, pages };
        self.io.start(vec![request], Arc::clone(&self.on_end));
    }

    /// Waits for all writes.
    ///
    /// # Errors
    /// Returns the error of the first write that failed since the last call.
    pub(crate) fn finish(&self) -> io::Result<()> {
        self.wait(0).failed.take().map_or(Ok(()), Err)
    }

    /// Waits until at most `most` writes are under way.
    fn wait(&self, most: usize) -> parking_lot::MutexGuard<'_, WritesState> {
        let mut state = self.writes.state.lock();
        while state.under_way > most {
            self.writes.ended.wait(&mut state);
        }
        state
    }
}
