//! Memory of records that have been written or used, for the next ones. The kernel takes longer to provide fresh
//! memory than a copy into it takes.

use parking_lot::Mutex;

use crate::buffer::RecordBuffer;
use crate::io::{LARGE, PAGE, Piece};

/// The number of bytes of the smallest pieces. Smaller buffers are left to the allocator.
const SMALLEST: usize = 64 << 10;

/// The number of pages behind the buffers of a record, for what the record writes behind them.
pub(super) const TAIL: usize = 1;

/// Memory that nobody uses, up to a number of bytes.
pub(super) struct Spares {
    kept: Mutex<Kept>,
    /// The largest number of pages.
    most: usize,
}

#[derive(Default)]
struct Kept {
    /// Pieces, starting with the one that has been here longest. None follows another one.
    pieces: Vec<Piece>,
    pages: usize,
}

impl Kept {
    /// Takes the smallest piece that has room, and of those the one that came last, which the processor's cache may
    /// still contain.
    fn take(&mut self, pages: usize) -> Option<Piece> {
        let fitting = self.pieces.iter().enumerate().rev().filter(|(_, piece)| piece.pages() >= pages);
        let (at, _) = fitting.min_by_key(|(_, piece)| piece.pages())?;
        Some(self.remove(at))
    }

    fn remove(&mut self, at: usize) -> Piece {
        let piece = self.pieces.remove(at);
        self.pages -= piece.pages();
        piece
    }

    /// Adds a piece, joined with those before and behind it. Returns the pieces that leave.
    fn add(&mut self, mut piece: Piece, most: usize) -> Vec<Piece> {
        for is_before in [true, false] {
            let next_to = |kept: &Piece| {
                if is_before { kept.is_followed_by(&piece) } else { piece.is_followed_by(kept) }
            };
            if let Some(at) = self.pieces.iter().position(next_to) {
                let kept = self.remove(at);
                let joined = if is_before { kept.join(piece) } else { piece.join(kept) };
                piece = match joined {
                    Ok(joined) => joined,
                    Err((first, _)) => first,
                };
            }
        }
        if !(Spares::FEWEST_PAGES..=most).contains(&piece.pages()) {
            return vec![piece];
        }
        self.pages += piece.pages();
        self.pieces.push(piece);
        let mut leaving = Vec::new();
        while self.pages > most {
            leaving.push(self.remove(0));
        }
        leaving
    }
}

impl Spares {
    /// The number of pages of the smallest pieces.
    pub(super) const FEWEST_PAGES: usize = SMALLEST / PAGE;

    /// Creates an empty set that keeps at most `most` bytes.
    pub(super) fn new(most: usize) -> Self {
        Self { kept: Mutex::default(), most: most / PAGE }
    }

    /// Returns buffers of these lengths with undefined contents. If they fill whole pages, and unless they are small, they
    /// lie one behind the other in memory that a disk can use, with [a page](TAIL) behind the last one.
    pub(super) fn buffers(&self, lens: &[usize]) -> Vec<RecordBuffer> {
        let pages = lens.iter().try_fold(0_usize, |sum, len| sum.checked_add(len / PAGE));
        if let Some(pages) = pages.filter(|_| lens.iter().all(|len| len.is_multiple_of(PAGE)))
            && let Some(piece) = self.piece(pages, TAIL)
            && let Ok(buffers) = RecordBuffer::divide(piece, lens)
        {
            return buffers;
        }
        let one = |&len: &usize| match self.piece(len.div_ceil(PAGE), 0) {
            Some(piece) => RecordBuffer::divide(piece, &[len]).ok().and_then(|mut one| one.pop()),
            None => None,
        };
        lens.iter().map(|len| one(len).unwrap_or_else(|| vec![0; *len].into())).collect()
    }

    /// Returns a piece of at least `pages` pages and `tail` more with undefined contents, or `None` if it would be small.
    pub(super) fn piece(&self, pages: usize, tail: usize) -> Option<Piece> {
        if pages < Self::FEWEST_PAGES {
            return None;
        }
        // As many pieces as a large page has room for without their tails: with these, the memory is not smaller than one.
        let count = (LARGE / PAGE / pages).max(1);
        let pages = pages + tail;
        let spare = self.kept.lock().take(pages);
        let piece = spare.unwrap_or_else(|| Piece::allocate(count * pages));
        if piece.pages() - pages < Self::FEWEST_PAGES {
            return Some(piece);
        }
        let (piece, rest) = piece.split(pages);
        self.give([rest]);
        Some(piece)
    }

    /// Allocates memory of at most `bytes` bytes, so that nobody waits for it later.
    pub(super) fn provide(&self, bytes: usize) {
        let pages = (bytes / PAGE).min(self.most);
        if pages >= Self::FEWEST_PAGES {
            self.give([Piece::allocate(pages)]);
        }
    }

    /// Keeps pieces. The ones that have been here longest leave if there are too many.
    pub(super) fn give(&self, pieces: impl IntoIterator<Item = Piece>) {
        for piece in Piece::join_all(pieces.into_iter().collect()) {
            let leaving = self.kept.lock().add(piece, self.most);
            drop(leaving);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    const PAGES: usize = Spares::FEWEST_PAGES;

    impl Spares {
        /// Returns the address and the number of pages of each piece.
        fn pieces(&self) -> Vec<(usize, usize)> {
            let kept = self.kept.lock();
            assert_eq!(kept.pages, kept.pieces.iter().map(Piece::pages).sum::<usize>());
            assert!(kept.pages <= self.most);
            kept.pieces.iter().map(|piece| (piece.address(), piece.pages())).collect()
        }
    }

    #[test]
    fn memory_is_used_again_up_to_a_limit() {
        let spares = Spares::new(8 * SMALLEST);
        let (large, small) = (Piece::allocate(4 * PAGES), Piece::allocate(PAGES / 2));
        let address = large.address();
        spares.give([large, small]);
        assert_eq!(spares.pieces(), [(address, 4 * PAGES)], "the other one is too small");
        let again = spares.piece(3 * PAGES + 1, 0).unwrap();
        assert_eq!((again.address(), again.pages()), (address, 4 * PAGES), "the rest would be too small");
        assert!(spares.piece(3 * PAGES, 0).is_some_and(|other| other.address() != address), "it is lent");
        spares.give([Piece::allocate(9 * PAGES)]);
        assert!(spares.pieces().iter().all(|(_, pages)| *pages < 9 * PAGES), "it is larger than the limit");
        let five: Vec<Piece> = (0..5).map(|_| Piece::allocate(4 * PAGES)).collect();
        let newest: Vec<_> = five[3..].iter().map(|piece| (piece.address(), 4 * PAGES)).collect();
        for piece in five {
            spares.give([piece]);
        }
        assert_eq!(spares.pieces(), newest, "the oldest ones have left");
    }

    #[test]
    fn a_large_page_is_divided_and_joined() {
        let spares = Spares::new(usize::MAX);
        let pages = LARGE / PAGE / 4;
        let mut four: Vec<Piece> = (0..4).map(|_| spares.piece(pages, 0).unwrap()).collect();
        let first = four[0].address();
        assert!(four.iter().zip(0..).all(|(piece, at)| piece.address() == first + at * LARGE / 4));
        assert_eq!(spares.pieces(), [], "it is lent as a whole");
        four.swap(0, 2);
        for piece in four {
            spares.give([piece]);
        }
        assert_eq!(spares.pieces(), [(first, 4 * pages)]);
        let little = Piece::allocate(PAGES);
        let (address, large) = (little.address(), first);
        spares.give([little]);
        assert_eq!(spares.piece(PAGES, 0).unwrap().address(), address, "the smallest one that has room");
        assert_eq!(spares.pieces(), [(large, 4 * pages)]);
    }

    #[test]
    fn records_that_divide_a_large_page_get_one() {
        for pages in [16, 64, 128, 256] {
            let spares = Spares::new(usize::MAX);
            let count = LARGE / PAGE / pages;
            let records: Vec<_> = (0..count).flat_map(|_| spares.buffers(&[pages * PAGE])).collect();
            let start = records[0].as_ptr() as usize;
            assert_eq!(start % LARGE, 0, "a large page begins where the memory begins");
            assert!(
                records
                    .iter()
                    .zip(0..)
                    .all(|(record, at)| record.as_ptr() as usize == start + at * (pages + TAIL) * PAGE)
            );
            assert_eq!(spares.pieces(), [], "it is lent as a whole");
            let pieces: Vec<Piece> = records.into_iter().filter_map(RecordBuffer::into_piece).collect();
            spares.give(pieces);
            assert_eq!(spares.pieces(), [(start, count * (pages + TAIL))]);
            assert!(count * (pages + TAIL) * PAGE >= LARGE, "{pages} pages");
        }
    }

    #[test]
    fn memory_that_was_provided_is_what_the_first_buffers_use() {
        let spares = Spares::new(8 * SMALLEST);
        spares.provide(SMALLEST - 1);
        assert_eq!(spares.pieces(), [], "it would be small");
        spares.provide(4 * SMALLEST);
        let (start, pages) = spares.pieces()[0];
        assert_eq!((pages, spares.pieces().len()), (4 * PAGES, 1));
        let buffers = spares.buffers(&[SMALLEST; 3]);
        assert_eq!((buffers[0].as_ptr() as usize, spares.pieces()), (start, Vec::new()));
        assert_eq!(
            buffers[2].memory_bytes(),
            2 * SMALLEST,
            "the rest is larger than the tail, and too small"
        );
        spares.provide(9 * SMALLEST);
        assert_eq!(spares.pieces()[0].1, 8 * PAGES, "no more than are kept");
    }

    #[test]
    fn memory_that_does_not_come_back_leaves_nothing_behind() {
        let spares = Spares::new(64 * SMALLEST);
        for len in [LARGE + LARGE / 8, 11 * LARGE + PAGE, LARGE / 3 / PAGE * PAGE] {
            for _ in 0..200 {
                drop(spares.buffers(&[len]));
            }
            assert!(spares.pieces().len() <= 2, "{:?}", spares.pieces());
        }
    }

    #[test]
    fn buffers_that_fill_pages_follow_each_other() {
        let spares = Spares::new(usize::MAX);
        let buffers = spares.buffers(&[SMALLEST, 3 * SMALLEST]);
        assert!(buffers.iter().map(|buffer| buffer.len()).eq([SMALLEST, 3 * SMALLEST]));
        assert!(buffers.iter().all(RecordBuffer::fills_pages));
        let pieces: Vec<Piece> = buffers.into_iter().filter_map(RecordBuffer::into_piece).collect();
        assert_eq!(Piece::join_all(pieces).len(), 1);
        for (lens, reused) in
            [(&[100, SMALLEST + 1][..], 1), (&[100, SMALLEST - 100], 1), (&[SMALLEST / 2], 0)]
        {
            let buffers = spares.buffers(lens);
            assert!(buffers.iter().map(|buffer| buffer.len()).eq(lens.iter().copied()));
            assert!(!buffers.iter().any(RecordBuffer::fills_pages), "{lens:?}");
            assert_eq!(buffers.into_iter().filter_map(RecordBuffer::into_piece).count(), reused, "{lens:?}");
        }
    }
}
