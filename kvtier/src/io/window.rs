//! Writes that are started one after another, with a few of them under way.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::{Condvar, Mutex};

use super::{Direction, DiskIo, IoEnd, IoRequest, OnEnd, Pages, Piece};

/// Starts writes while earlier ones are under way, so that memory is filled while the disk works. A caller waits for room
/// before it starts a write, so that about [`Window::MOST`] writes are under way.
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
    /// The memory of writes that have ended, where it belongs to the caller.
    pieces: Vec<Piece>,
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
    /// The number of writes at which there is no room for another one. Two windows together keep a file busy, and leave
    /// some of its memory to reads.
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
            // Memory of the file is given back before the next write is let in, which uses it.
            let piece = pages.into_piece();
            let mut state = shared.state.lock();
            state.pieces.extend(piece);
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
        self.wait_for_room();
        self.io.pages(count)
    }

    /// Waits until another write may start.
    pub(crate) fn wait_for_room(&self) {
        drop(self.wait(|state| state.under_way < Self::MOST));
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

    /// Waits for all writes. Returns the error of the first one that failed, and the pieces that were written.
    pub(crate) fn finish(self) -> (io::Result<()>, Vec<Piece>) {
        let mut state = self.wait(|state| state.under_way == 0);
        (state.failed.take().map_or(Ok(()), Err), std::mem::take(&mut state.pieces))
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
