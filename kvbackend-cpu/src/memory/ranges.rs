//! The range locks of a storage. Operations on disjoint ranges do not wait for each other.

use std::ops::Range;

use parking_lot::{Condvar, Mutex};
use smallvec::SmallVec;

/// The uses of one storage, in the order in which they were requested.
///
/// A use consists of all ranges of the storage that one operation accesses. It begins as soon as it does not
/// conflict with an earlier use. Two uses conflict if they share a byte and at least one of the uses writes
/// it. A use never overtakes an earlier use that it conflicts with, so readers cannot starve a writer.
#[derive(Default)]
pub(super) struct RangeLocks {
    state: Mutex<RangeState>,
    ended: Condvar,
}

#[derive(Default)]
struct RangeState {
    /// The ranges of running and waiting uses, in the order of their turns. The inline capacity is enough for
    /// a few concurrent operations.
    uses: SmallVec<[(RangeTurn, RangeUse); 8]>,
    next: u64,
    waiting: usize,
}

/// The position of a use in the order of a storage's uses.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct RangeTurn(u64);

/// A byte range that a use reads or writes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RangeUse {
    pub(super) bytes: Range<usize>,
    pub(super) write: bool,
}

impl RangeUse {
    fn conflicts(&self, other: &Self) -> bool {
        let shared = self.bytes.start.max(other.bytes.start) < self.bytes.end.min(other.bytes.end);
        shared && (self.write || other.write)
    }
}

impl RangeState {
    /// Returns whether the use of `turn` conflicts with any earlier use.
    fn must_wait(&self, turn: RangeTurn) -> bool {
        let first = self.uses.iter().position(|(known, _)| *known == turn).unwrap_or(self.uses.len());
        let (earlier, own) = self.uses.split_at(first);
        let mut own = own.iter().take_while(|(known, _)| *known == turn);
        own.any(|(_, own)| earlier.iter().any(|(_, other)| own.conflicts(other)))
    }
}

impl RangeLocks {
    /// Waits until the ranges may be used, and returns the turn to pass to [`end`](Self::end) afterwards.
    pub(super) fn begin<'a>(&self, ranges: impl Iterator<Item = &'a RangeUse>) -> RangeTurn {
        let mut state = self.state.lock();
        let (turn, alone) = (RangeTurn(state.next), state.uses.is_empty());
        state.next += 1;
        for range in ranges {
            state.uses.push((turn, range.clone()));
        }
        if !alone && state.must_wait(turn) {
            state.waiting += 1;
            while state.must_wait(turn) {
                self.ended.wait(&mut state);
            }
            state.waiting -= 1;
        }
        turn
    }

    /// Ends a use. The caller must not keep references into its ranges.
    pub(super) fn end(&self, turn: RangeTurn) {
        let mut state = self.state.lock();
        state.uses.retain(|(known, _)| *known != turn);
        let waiting = state.waiting > 0;
        drop(state);
        if waiting {
            self.ended.notify_all();
        }
    }

    /// Returns the number of waiting uses.
    #[cfg(test)]
    pub(super) fn waiting(&self) -> usize {
        self.state.lock().waiting
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    fn reads(bytes: Range<usize>) -> RangeUse {
        RangeUse { bytes, write: false }
    }

    fn writes(bytes: Range<usize>) -> RangeUse {
        RangeUse { bytes, write: true }
    }

    /// Blocks until `count` uses are waiting.
    fn until_waiting(locks: &RangeLocks, count: usize) {
        while locks.waiting() < count {
            std::thread::yield_now();
        }
    }

    #[test]
    fn disjoint_ranges_and_readers_of_one_range_do_not_wait() {
        let locks = RangeLocks::default();
        let all = [writes(0..8), writes(8..16), reads(16..24), reads(20..32), writes(32..32), writes(4..4)];
        // This test has only one thread, so a use that had to wait would never return.
        let turns = all.map(|range| locks.begin([range].iter()));
        for turn in turns {
            locks.end(turn);
        }
        let again = locks.begin([writes(0..32)].iter());
        locks.end(again);
    }

    #[test]
    fn a_reader_does_not_pass_a_writer_that_waits() {
        let (locks, order) = (RangeLocks::default(), Mutex::new(Vec::new()));
        let first = locks.begin([reads(0..8)].iter());
        let enter = |name, range| {
            let turn = locks.begin([range].iter());
            order.lock().push(name);
            locks.end(turn);
        };
        std::thread::scope(|scope| {
            scope.spawn(|| enter("writer", writes(4..12)));
            until_waiting(&locks, 1);
            scope.spawn(|| enter("reader", reads(4..8)));
            until_waiting(&locks, 2);
            // A use that shares no bytes with the waiting uses can begin.
            enter("other", writes(12..16));
            locks.end(first);
        });
        assert_eq!(*order.lock(), ["other", "writer", "reader"]);
    }

    #[test]
    fn uses_of_several_ranges_in_any_order_never_deadlock_or_meet() {
        let locks = RangeLocks::default();
        let users: [AtomicUsize; 4] = std::array::from_fn(|_| AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (locks, users) = (&locks, &users);
                scope.spawn(move || {
                    for round in 0..500 {
                        let (a, b) = ((thread + round) % 4, (thread * 3 + round / 4) % 4);
                        let ranges = [a, b].map(|i| writes(8 * i..8 * i + 8));
                        let turn = locks.begin(ranges.iter().take(if a == b { 1 } else { 2 }));
                        assert_eq!(users[a].fetch_add(1, Ordering::Relaxed), 0);
                        std::thread::yield_now();
                        users[a].fetch_sub(1, Ordering::Relaxed);
                        locks.end(turn);
                    }
                });
            }
        });
    }
}
