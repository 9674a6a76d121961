//! Copies many equally sized runs of bytes.
//!
//! A single stream of loads waits for memory most of the time. Therefore, four streams run side by side. Each
//! stream prefetches its next run, and stores do not read the cache line first. Together, the streams are as
//! fast as `memcpy` on one large run.

use crate::raw::{Destination, Origin};
use crate::simd::{Simd, SimdTask};

// Decision: docs/decisions/backend-cpu.md#large-copies-run-as-four-streams
/// Number of queues of runs. One run of each queue is copied at the same time.
pub(super) const QUEUES: usize = 4;
/// Size of a cache line in bytes.
const LINE: usize = 64;

/// Copies runs of `bytes` bytes, each from the first to the second offset of a pair.
///
/// # Safety
/// No byte may be both read and written, and no other thread may access the bytes being written.
pub(super) struct CopyRuns<'a, I> {
    pub(super) from: Origin<'a>,
    pub(super) to: Destination<'a>,
    pub(super) bytes: usize,
    /// The offset pairs of each queue. Copying is fastest if the runs of a queue are adjacent.
    pub(super) offsets: [I; QUEUES],
    /// True to bypass the caches.
    pub(super) stream: bool,
}

#[derive(Clone, Copy)]
struct CopyRun {
    from: *const u8,
    to: *mut u8,
}

impl<I: Iterator<Item = (usize, usize)>> CopyRuns<'_, I> {
    /// Returns a queue's next run that can bypass the caches. Copies any earlier runs of the queue that
    /// cannot.
    #[inline(always)]
    fn next(&mut self, queue: usize, stream: bool) -> Option<CopyRun> {
        let (bytes, from, to) = (self.bytes, self.from, self.to);
        self.offsets[queue].find_map(|(a, b)| {
            let run = CopyRun { from: from.at(a, bytes), to: to.at(b, bytes) };
            if stream && to.is_line(b) {
                return Some(run);
            }
            // SAFETY: `at` checked that `bytes` bytes are in bounds on both sides, and by the contract of
            // `CopyRuns` the sides do not overlap and no other thread accesses the destination.
            unsafe { std::ptr::copy_nonoverlapping(run.from, run.to, bytes) };
            None
        })
    }

    /// Returns each queue's next run that can bypass the caches. If a queue has no such run left, copies the
    /// runs found in the other queues and returns `None`.
    #[inline(always)]
    fn next_of_each(&mut self) -> Option<[CopyRun; QUEUES]> {
        let mut all = [None; QUEUES];
        for (queue, run) in all.iter_mut().enumerate() {
            *run = self.next(queue, true);
        }
        if let [Some(a), Some(b), Some(c), Some(d)] = all {
            return Some([a, b, c, d]);
        }
        for run in all.into_iter().flatten() {
            // SAFETY: `next` obtained both pointers from `at` for `bytes` bytes, and by the contract of
            // `CopyRuns` the two sides do not overlap.
            unsafe { std::ptr::copy_nonoverlapping(run.from, run.to, self.bytes) };
        }
        None
    }
}

impl<I: Iterator<Item = (usize, usize)>> SimdTask for CopyRuns<'_, I> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(mut self) {
        if self.stream && S::STREAMS && self.bytes >= LINE {
            let mut now = self.next_of_each();
            while let Some(runs) = now {
                let ahead = self.next_of_each();
                // SAFETY: `next` obtained the pointers of each run from `at` for `bytes` bytes, and returned
                // only runs whose destination begins a cache line; the caller guarantees the instruction set.
                // The runs `ahead` are only prefetched; if there are none, the current runs are prefetched
                // instead.
                unsafe { copy::<S>(&runs, ahead.as_ref().unwrap_or(&runs), self.bytes) };
                now = ahead;
            }
            // SAFETY: the instruction set of `S` is available by contract, and no pointers are involved.
            unsafe { S::fence() };
        }
        for queue in 0..QUEUES {
            while self.next(queue, false).is_some() {}
        }
    }
}

/// Copies four runs side by side and prefetches the runs `ahead`.
///
/// # Safety
/// Each of `runs` must be valid for `bytes` bytes on both sides, which must not overlap, and its destination
/// must be aligned to a cache line. The caller must be compiled for the instruction set of `S`. The pointers
/// of `ahead` need not be valid.
#[inline(always)]
unsafe fn copy<S: Simd>(runs: &[CopyRun; QUEUES], ahead: &[CopyRun; QUEUES], bytes: usize) {
    let whole = bytes - bytes % LINE;
    let mut at = 0;
    // SAFETY: `at + LINE <= whole <= bytes` in the loop, and the rest is `bytes - whole` bytes starting at
    // `whole`; the caller guarantees `bytes` bytes and aligned destinations, which stay aligned because `at`
    // is a multiple of `LINE`.
    unsafe {
        while at < whole {
            for queue in 0..QUEUES {
                S::prefetch(ahead[queue].from.wrapping_add(at));
                S::stream_line(runs[queue].to.add(at), runs[queue].from.add(at));
            }
            at += LINE;
        }
        if whole < bytes {
            for run in runs {
                let (from, to) = (run.from.add(whole), run.to.add(whole));
                std::ptr::copy_nonoverlapping(from, to, bytes - whole);
            }
        }
    }
}
