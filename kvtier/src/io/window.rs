//! Writes that are started one after another, with a few of them under way.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::{Condvar, Mutex};

use super::{Direction, DiskIo, IoEnd, IoRequest, OnEnd, Pages, Piece};

/// Starts writes while earlier ones are under way, so that memory is filled while the disk works. A caller waits for room
/// before it starts a write, so that only a few writes are under way.
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
    /// The owner waits until fewer writes are under way.
    wanted: usize,
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
    /// The number of writes with memory of the file at which there is no room for another one. The windows of all threads
    /// that write leave some of this memory to reads.
    const MOST: usize = 6;

    /// The number of writes with memory of the caller's at which there is no room for another one. A disk may end all requests
    /// of a file at once, and others should wait to be the next ones.
    const MOST_OF_CALLER: usize = 12;

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
            let is_last = left.fetch_sub(1, Ordering::Release) == 1;
            // Each time the owner is woken takes the processor as long as a small request.
            let wakes = is_last || state.under_way < state.wanted;
            drop(state);
            if wakes {
                shared.ended.notify_all();
            }
        });
        WriteGroup { under_way, on_end }
    }

    /// Returns memory for the next write as soon as it may start.
    pub(crate) fn pages(&self, count: usize) -> Pages {
        self.wait_for_room();
        self.io.pages(count)
    }

    /// Waits until another write may start with memory of the file.
    fn wait_for_room(&self) {
        drop(self.wait_for_fewer(Self::MOST, Self::MOST));
    }

    /// Waits until another write may start with memory of the caller's.
    pub(crate) fn wait_for_turn(&self) {
        drop(self.wait_for_fewer(Self::MOST_OF_CALLER, Self::MOST_OF_CALLER - Self::MOST_OF_CALLER / 4));
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
        let mut state = self.wait_for_fewer(1, 1);
        (state.failed.take().map_or(Ok(()), Err), std::mem::take(&mut state.pieces))
    }

    /// If `most` writes or more are under way, waits until there are fewer than `below`.
    fn wait_for_fewer(&self, most: usize, below: usize) -> parking_lot::MutexGuard<'_, WritesState> {
        let mut state = self.writes.state.lock();
        if state.under_way >= most {
            state.wanted = below;
            while state.under_way >= below {
                self.writes.ended.wait(&mut state);
            }
            state.wanted = 0;
        }
        state
    }

    /// Waits until a condition holds, which only the end of a group's writes changes.
    fn wait(&self, holds: impl Fn(&WritesState) -> bool) -> parking_lot::MutexGuard<'_, WritesState> {
        let mut state = self.writes.state.lock();
        while !holds(&state) {
            self.writes.ended.wait(&mut state);
        }
        state
    }
}
