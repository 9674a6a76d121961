//! Memory in large pages, divided into pieces.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use super::PAGE;
use super::pages::Page;

/// The number of bytes of a large page of most processors.
pub(crate) const LARGE: usize = 2 << 20;

// Decision: docs/decisions/tiers.md#disks-get-memory-in-large-pages
/// An allocation that the system is asked to back with large pages. Only its pieces read and write it.
///
/// # Drop behaviour
/// Releases the memory.
struct Area {
    memory: NonNull<Page>,
    layout: Layout,
}

// SAFETY: the area only owns its memory, and never reads or writes it.
unsafe impl Send for Area {}
// SAFETY: no method of a shared area reads or writes the memory.
unsafe impl Sync for Area {}

impl Area {
    /// Allocates at least one page of zeros.
    fn new(pages: usize) -> Self {
        let bytes = pages.max(1).saturating_mul(PAGE);
        let Ok(layout) = Layout::from_size_align(bytes, LARGE) else {
            panic!("{bytes} bytes cannot be allocated")
        };
        // SAFETY: the layout has a size that is not 0.
        let Some(memory) = NonNull::new(unsafe { alloc(layout) }) else { handle_alloc_error(layout) };
        prefer_large(memory, bytes);
        // Only now, because the first write to a page decides how large it is.
        // SAFETY: the allocation has so many bytes.
        unsafe { memory.write_bytes(0, bytes) };
        Self { memory: memory.cast(), layout }
    }
}

impl Drop for Area {
    fn drop(&mut self) {
        // SAFETY: `new` allocated the memory with this layout, and the pieces, which hold the area, have been dropped.
        unsafe { dealloc(self.memory.as_ptr().cast(), self.layout) };
    }
}

/// Whole pages of an area, which nothing but this piece refers to. The area lives as long as one of its pieces.
pub(crate) struct Piece {
    start: NonNull<Page>,
    pages: usize,
    area: Arc<Area>,
}

// SAFETY: nobody else refers to the piece's pages, as with a box.
unsafe impl Send for Piece {}
// SAFETY: a shared piece is only read.
unsafe impl Sync for Piece {}

impl Piece {
    /// Allocates an area of `pages` pages, at least one, filled with zeros.
    pub(crate) fn allocate(pages: usize) -> Self {
        let area = Area::new(pages);
        Self { start: area.memory, pages: area.layout.size() / PAGE, area: Arc::new(area) }
    }

    /// Returns the number of pages.
    pub(crate) fn pages(&self) -> usize {
        self.pages
    }

    /// Returns the address of the first byte.
    pub(crate) fn address(&self) -> usize {
        self.start.as_ptr().addr()
    }

    /// Returns the bytes.
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: the pages belong to the area, which `self` keeps alive, were filled with zeros, and nobody else refers
        // to them. Any bytes are valid.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().cast(), self.pages * PAGE) }
    }

    /// Returns the bytes, to be filled.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr().cast(), self.pages * PAGE) }
    }

    /// Divides the piece in front of page `at`, or behind its last page.
    pub(crate) fn split(self, at: usize) -> (Self, Self) {
        let Self { start, pages, area } = self;
        let at = at.min(pages);
        // SAFETY: the sum is inside the piece, or just behind it.
        let rest = unsafe { start.add(at) };
        (Self { start, pages: at, area: Arc::clone(&area) }, Self { start: rest, pages: pages - at, area })
    }

    /// Returns whether `next` follows this piece in the same area.
    pub(crate) fn is_followed_by(&self, next: &Self) -> bool {
        // SAFETY: the sum is inside the area, or just behind it.
        let end = unsafe { self.start.add(self.pages) };
        end == next.start && Arc::ptr_eq(&self.area, &next.area)
    }

    /// Joins two pieces of an area that follow each other, or returns both as `Err`.
    pub(crate) fn join(self, next: Self) -> Result<Self, (Self, Self)> {
        if !self.is_followed_by(&next) {
            return Err((self, next));
        }
        let Self { start, pages, area } = self;
        Ok(Self { start, pages: pages + next.pages, area })
    }

    /// Appends a piece to others, and joins it with the last one if they follow each other.
    pub(crate) fn push(pieces: &mut Vec<Self>, piece: Self) {
        if piece.pages == 0 {
            return;
        }
        let Some(last) = pieces.pop() else { return pieces.push(piece) };
        match last.join(piece) {
            Ok(both) => pieces.push(both),
            Err((last, piece)) => pieces.extend([last, piece]),
        }
    }

    /// Joins all pieces that follow each other. Returns them in the order of their addresses.
    pub(crate) fn join_all(mut pieces: Vec<Self>) -> Vec<Self> {
        pieces.sort_unstable_by_key(Self::address);
        let mut joined = Vec::with_capacity(pieces.len());
        for piece in pieces {
            Self::push(&mut joined, piece);
        }
        joined
    }
}

impl fmt::Debug for Piece {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} pages", self.pages)
    }
}

/// Asks the system to back memory with large pages. If the system refuses, the pages stay small.
fn prefer_large(memory: NonNull<u8>, bytes: usize) {
    #[cfg(target_os = "linux")]
    {
        use rustix::mm::{Advice, madvise};
        // SAFETY: these are whole pages of an allocation of the caller's, and the advice does not change their contents.
        let _ = unsafe { madvise(memory.as_ptr().cast(), bytes, Advice::LinuxHugepage) };
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (memory, bytes);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_divided_and_joined_without_a_byte_in_common() {
        let whole = Piece::allocate(7);
        let address = whole.address();
        let (mut first, rest) = whole.split(3);
        let (mut second, mut third) = rest.split(1);
        for (piece, byte) in [&mut first, &mut second, &mut third].into_iter().zip(1..) {
            piece.bytes_mut().fill(byte);
        }
        assert_eq!([first.pages(), second.pages(), third.pages()], [3, 1, 3]);
        let (third, first) = third.join(first).unwrap_err();
        let other = Piece::allocate(1);
        let mut joined = Piece::join_all(vec![third, other, first, second]);
        joined.sort_unstable_by_key(|piece| std::cmp::Reverse(piece.pages()));
        assert_eq!((joined.len(), joined[0].pages(), joined[0].address()), (2, 7, address));
        let expected = [vec![1; 3 * PAGE], vec![2; PAGE], vec![3; 3 * PAGE]].concat();
        assert_eq!(joined[0].bytes(), expected);
    }

    #[test]
    fn a_part_of_an_area_outlives_the_rest() {
        let (first, mut rest) = Piece::allocate(2).split(1);
        drop(first);
        rest.bytes_mut().fill(7);
        let (rest, nothing) = rest.split(9);
        assert_eq!((rest.pages(), nothing.pages()), (1, 0));
        drop(nothing);
        assert!(rest.bytes().iter().all(|byte| *byte == 7));
    }
}
