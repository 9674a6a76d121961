//! Copies of many pieces of equal size.
//!
//! A single stream of loads waits for memory most of the time. Therefore four streams run side by side, each
//! prefetches its next piece, and stores do not read the line first. Together they reach the speed of
//! `memcpy` on one large piece.

use crate::raw::{Origin, Target};
use crate::simd::{Simd, Task};

// Decision: docs/decisions/backend-cpu.md#four-streams-of-copies
/// Number of pieces copied side by side.
pub(super) const LANES: usize = 4;
/// Bytes of a cache line.
const LINE: usize = 64;

/// Copies pieces of `bytes` bytes, from the first to the second place of each pair.
///
/// The maker guarantees that no byte is both read and written, and that no other thread accesses the places
/// written.
pub(super) struct Pieces<'a, I> {
    pub(super) from: Origin<'a>,
    pub(super) to: Target<'a>,
    pub(super) bytes: usize,
    /// Four lists of places, fastest if the places of a list are adjacent.
    pub(super) places: [I; LANES],
    /// True to bypass the caches.
    pub(super) stream: bool,
}

#[derive(Clone, Copy)]
struct Piece {
    from: *const u8,
    to: *mut u8,
}

impl<I: Iterator<Item = (usize, usize)>> Pieces<'_, I> {
    /// Returns the next piece of a lane that can bypass the caches. Pieces that cannot are copied on the way.
    #[inline(always)]
    fn next(&mut self, lane: usize, stream: bool) -> Option<Piece> {
        let (bytes, from, to) = (self.bytes, self.from, self.to);
        self.places[lane].find_map(|(a, b)| {
            let piece = Piece { from: from.at(a, bytes), to: to.at(b, bytes) };
            if stream && to.is_line(b) {
                return Some(piece);
            }
            // SAFETY: `at` checked that `bytes` bytes lie inside at both ends, and the maker of `Pieces`
            // guarantees that the ends do not overlap and that no other thread accesses the destination.
            unsafe { std::ptr::copy_nonoverlapping(piece.from, piece.to, bytes) };
            None
        })
    }

    /// Returns the next piece of every lane, if each lane has one. Otherwise copies the pieces that were
    /// found.
    #[inline(always)]
    fn next_of_each(&mut self) -> Option<[Piece; LANES]> {
        let mut all = [None; LANES];
        for (lane, piece) in all.iter_mut().enumerate() {
            *piece = self.next(lane, true);
        }
        if let [Some(a), Some(b), Some(c), Some(d)] = all {
            return Some([a, b, c, d]);
        }
        for piece in all.into_iter().flatten() {
            // SAFETY: `next` obtained both pointers from `at` for `bytes` bytes, and the maker of `Pieces`
            // guarantees that the ends do not overlap.
            unsafe { std::ptr::copy_nonoverlapping(piece.from, piece.to, self.bytes) };
        }
        None
    }
}

impl<I: Iterator<Item = (usize, usize)>> Task for Pieces<'_, I> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(mut self) {
        if self.stream && S::STREAMS && self.bytes >= LINE {
            let mut now = self.next_of_each();
            while let Some(pieces) = now {
                let ahead = self.next_of_each();
                // SAFETY: `next` obtained the pointers of each piece from `at` for `bytes` bytes, and
                // returned only pieces whose destination begins a cache line; the caller guarantees the
                // instruction set. `ahead` is only prefetched; at the end the pieces themselves stand in for
                // it.
                unsafe { copy::<S>(&pieces, ahead.as_ref().unwrap_or(&pieces), self.bytes) };
                now = ahead;
            }
            // SAFETY: the instruction set of `S` is available by contract, and no pointer is involved.
            unsafe { S::fence() };
        }
        for lane in 0..LANES {
            while self.next(lane, false).is_some() {}
        }
    }
}

/// Copies four pieces side by side and prefetches the pieces `ahead`.
///
/// # Safety
/// Each of `pieces` is valid for `bytes` bytes at both ends, which do not overlap, and its destination is
/// aligned to a cache line. The caller is compiled for the instruction set of `S`. The pointers of `ahead`
/// may be any.
#[inline(always)]
unsafe fn copy<S: Simd>(pieces: &[Piece; LANES], ahead: &[Piece; LANES], bytes: usize) {
    let whole = bytes - bytes % LINE;
    let mut at = 0;
    // SAFETY: `at + LINE <= whole <= bytes` in the loop, and the rest is `bytes - whole` bytes from `whole`
    // on; the caller guarantees `bytes` bytes and aligned destinations, which stay aligned because `at` is a
    // multiple of `LINE`.
    unsafe {
        while at < whole {
            for lane in 0..LANES {
                S::prefetch(ahead[lane].from.wrapping_add(at));
                S::stream_line(pieces[lane].to.add(at), pieces[lane].from.add(at));
            }
            at += LINE;
        }
        if whole < bytes {
            for piece in pieces {
                let (from, to) = (piece.from.add(whole), piece.to.add(whole));
                std::ptr::copy_nonoverlapping(from, to, bytes - whole);
            }
        }
    }
}
