//! Memory of whole pages, and a pool of it that a disk can use without preparing it each time.

use std::fmt;
use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use parking_lot::Mutex;

use super::area::{LARGE, Piece};

/// The number of bytes per page. Offsets, lengths and addresses of direct I/O are multiples of it.
pub const PAGE: usize = 4096;

/// One page, aligned for direct I/O.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(4096))]
pub(super) struct Page([u8; PAGE]);

/// Aligned memory of whole pages.
///
/// # Drop behaviour
/// Memory from a pool goes back to the pool.
pub struct Pages {
    memory: Memory,
    /// The number of pages in use, from the start.
    count: usize,
}

enum Memory {
    Own(Vec<Page>),
    Piece(Piece),
    Lent(Lent),
}

/// Memory from a pool, and its number there. There is no piece only while it is dropped.
struct Lent {
    piece: Option<Piece>,
    number: u16,
    pool: Arc<PagePool>,
}

impl Pages {
    /// Allocates `count` pages of zeros.
    pub fn new(count: usize) -> Self {
        Self { memory: Memory::Own(vec![Page::zeroed(); count]), count }
    }

    /// Returns the pages of a piece.
    pub(crate) fn of(piece: Piece) -> Self {
        Self { count: piece.pages(), memory: Memory::Piece(piece) }
    }

    /// Returns whether these are the pages [of](Self::of) a piece.
    pub(crate) fn is_piece(&self) -> bool {
        matches!(self.memory, Memory::Piece(_))
    }

    /// Returns the piece that these pages are [of](Self::of).
    pub(crate) fn into_piece(self) -> Option<Piece> {
        match self.memory {
            Memory::Piece(piece) => Some(piece),
            Memory::Own(_) | Memory::Lent(_) => None,
        }
    }

    /// Returns the bytes.
    pub fn bytes(&self) -> &[u8] {
        let bytes = match &self.memory {
            Memory::Own(memory) => bytemuck::cast_slice(memory),
            Memory::Piece(piece) => piece.bytes(),
            Memory::Lent(lent) => lent.piece.as_ref().map(Piece::bytes).unwrap_or_default(),
        };
        &bytes[..self.count * PAGE]
    }

    /// Returns the bytes, to be filled.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let bytes = match &mut self.memory {
            Memory::Own(memory) => bytemuck::cast_slice_mut(memory),
            Memory::Piece(piece) => piece.bytes_mut(),
            Memory::Lent(lent) => lent.piece.as_mut().map(Piece::bytes_mut).unwrap_or_default(),
        };
        &mut bytes[..self.count * PAGE]
    }

    /// Returns the number of this memory among the pieces of `pool` that a disk can prepare, or `None` if it is none of
    /// them.
    #[cfg_attr(not(target_os = "linux"), allow(dead_code))]
    pub(super) fn number_in(&self, pool: &Arc<PagePool>) -> Option<u16> {
        let Memory::Lent(lent) = &self.memory else { return None };
        Some(lent.number).filter(|number| Arc::ptr_eq(&lent.pool, pool) && *number < PagePool::PREPARED)
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        self.pool.free.lock().extend(self.piece.take().map(|piece| (piece, self.number)));
    }
}

impl fmt::Debug for Pages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} pages", self.count)
    }
}

/// Memory of one size that is lent and comes back, so that it is neither allocated nor erased for each request.
/// The address of each piece stays the same as long as the pool lives.
pub(super) struct PagePool {
    /// The memory that is not lent, with its number. A piece that is lent keeps the pool alive.
    free: Mutex<Vec<(Piece, u16)>>,
}

impl PagePool {
    /// The number of pages per piece of memory.
    pub(super) const PAGES: usize = 128;

    /// The number of pieces.
    pub(super) const PIECES: u16 = 10 * Self::PER_LARGE;

    /// The number of pieces, the first ones, that a disk can prepare. They fill whole large pages, which are locked as
    /// a whole, and are less than the 8 MiB that an unprivileged process may lock on most systems.
    pub(super) const PREPARED: u16 = 3 * Self::PER_LARGE;

    /// The number of pieces in a large page.
    const PER_LARGE: u16 = (LARGE / (Self::PAGES * PAGE)) as u16;

    /// Allocates the memory.
    pub(super) fn new() -> Arc<Self> {
        let mut rest = Piece::allocate(usize::from(Self::PIECES) * Self::PAGES);
        let mut free = Vec::with_capacity(Self::PIECES.into());
        for number in 0..Self::PIECES {
            let (piece, others) = rest.split(Self::PAGES);
            free.push((piece, number));
            rest = others;
        }
        // Those that a disk can prepare are lent first.
        free.reverse();
        Arc::new(Self { free: Mutex::new(free) })
    }

    /// Lends `count` pages with undefined contents. Allocates them if nothing is left, or if a piece is too small
    /// or much too large.
    pub(super) fn lend(self: &Arc<Self>, count: usize) -> Pages {
        let fits = (2..=Self::PAGES).contains(&count);
        let piece = if fits { self.free.lock().pop() } else { None };
        piece.map_or_else(
            || Pages::new(count),
            |(piece, number)| {
                let lent = Lent { piece: Some(piece), number, pool: Arc::clone(self) };
                Pages { memory: Memory::Lent(lent), count }
            },
        )
    }

    /// Returns the number of pieces that are not lent.
    #[cfg(test)]
    pub(super) fn left(&self) -> usize {
        self.free.lock().len()
    }

    /// Calls a function with the bytes of every piece that a disk can prepare, in the order of their numbers. No memory
    /// may be lent.
    #[cfg_attr(not(target_os = "linux"), allow(dead_code))]
    pub(super) fn with_prepared<R>(&self, call: impl FnOnce(&mut [&mut [u8]]) -> R) -> R {
        let mut free = self.free.lock();
        free.sort_by_key(|(_, number)| std::cmp::Reverse(*number));
        let prepared = free.iter_mut().rev().take(usize::from(Self::PREPARED));
        let mut pieces: Vec<&mut [u8]> = prepared.map(|(piece, _)| piece.bytes_mut()).collect();
        call(&mut pieces)
    }
}

impl fmt::Debug for PagePool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} pieces", self.free.lock().len(), Self::PIECES)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_lent_once_and_comes_back() {
        let pool = PagePool::new();
        let lent: Vec<Pages> = (0..PagePool::PIECES).map(|_| pool.lend(7)).collect();
        let mut numbers: Vec<_> = lent.iter().filter_map(|pages| pages.number_in(&pool)).collect();
        numbers.sort_unstable();
        assert_eq!(numbers, (0..PagePool::PREPARED).collect::<Vec<_>>());
        let addresses: Vec<_> = lent.iter().map(|pages| pages.bytes().as_ptr()).collect();
        assert!(addresses.iter().all(|address| address.addr() % PAGE == 0));
        let mut apart: Vec<_> = addresses.iter().map(|address| address.addr()).collect();
        apart.sort_unstable();
        assert!(apart.windows(2).all(|pair| pair[1] - pair[0] >= PagePool::PAGES * PAGE), "no two overlap");
        let more = pool.lend(7);
        assert_eq!((more.number_in(&pool), more.bytes().len()), (None, 7 * PAGE), "nothing was left");
        drop(lent);
        let again = pool.lend(PagePool::PAGES);
        assert!(addresses.contains(&again.bytes().as_ptr()) && again.bytes().len() == PagePool::PAGES * PAGE);
        assert_eq!(again.number_in(&PagePool::new()), None, "it is from another pool");
    }

    #[test]
    fn memory_outlives_the_owner_of_its_pool() {
        let pool = PagePool::new();
        let mut lent = pool.lend(PagePool::PAGES);
        drop(pool);
        lent.bytes_mut().fill(7);
        assert!(lent.bytes().iter().all(|byte| *byte == 7));
    }

    #[test]
    fn single_and_many_pages_are_allocated() {
        let pool = PagePool::new();
        for count in [0, 1, PagePool::PAGES + 1] {
            let pages = pool.lend(count);
            assert_eq!((pages.number_in(&pool), pages.bytes().len()), (None, count * PAGE));
        }
    }
}
