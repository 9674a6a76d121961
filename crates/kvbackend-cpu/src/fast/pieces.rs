//! Copies of many pieces of equal size.
//!
//! A single stream of loads waits for memory most of the time. Four streams side by side, each asking for its
//! next piece meanwhile, and stores that do not read the line first, reach what `memcpy` reaches on one large
//! piece.

use crate::raw::{Origin, Target};
use crate::simd::{Simd, Task};

/// Pieces copied side by side.
pub(super) const LANES: usize = 4;
/// A cache line.
const LINE: usize = 64;

/// Pieces of `bytes` bytes, from the first to the second place of each pair.
///
/// No byte is both read and written, and no other thread touches the places written.
pub(super) struct Pieces<'a, I> {
    pub(super) from: Origin<'a>,
    pub(super) to: Target<'a>,
    pub(super) bytes: usize,
    /// Four lists, best of places that follow each other.
    pub(super) places: [I; LANES],
    /// Whether to go past the caches.
    pub(super) stream: bool,
}

#[derive(Clone, Copy)]
struct Piece {
    from: *const u8,
    to: *mut u8,
}

impl<I: Iterator<Item = (usize, usize)>> Pieces<'_, I> {
    /// The next piece of a lane that can go past the caches; others are copied at once.
    #[inline(always)]
    fn next(&mut self, lane: usize, stream: bool) -> Option<Piece> {
        let (bytes, from, to) = (self.bytes, self.from, self.to);
        self.places[lane].find_map(|(a, b)| {
            let piece = Piece { from: from.at(a, bytes), to: to.at(b, bytes) };
            if stream && to.is_line(b) {
                return Some(piece);
            }
            // SAFETY: `at` has checked both ends, and by contract they do not overlap.
            unsafe { std::ptr::copy_nonoverlapping(piece.from, piece.to, bytes) };
            None
        })
    }

    /// The next pieces, if every lane has one; those of the others are copied otherwise.
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
            // SAFETY: as in `next`.
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
                // SAFETY: as in `next`; the last four ask for their own lines, which are there already.
                unsafe { copy::<S>(&pieces, ahead.as_ref().unwrap_or(&pieces), self.bytes) };
                now = ahead;
            }
            // SAFETY: the instruction set is the caller's.
            unsafe { S::fence() };
        }
        for lane in 0..LANES {
            while self.next(lane, false).is_some() {}
        }
    }
}

/// # Safety
/// All pieces are valid for `bytes` bytes, and what is written is aligned to lines.
#[inline(always)]
unsafe fn copy<S: Simd>(pieces: &[Piece; LANES], ahead: &[Piece; LANES], bytes: usize) {
    let whole = bytes - bytes % LINE;
    let mut at = 0;
    // SAFETY: `at` stays within whole lines of each piece, and the rest is copied byte by byte.
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
