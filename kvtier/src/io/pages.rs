//! Memory of whole pages, and a pool of it that a disk can use without preparing it each time.

use std::fmt;
use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use parking_lot::Mutex;

/// The number of bytes per page. Offsets, lengths and addresses of direct I/O are multiples of it.
pub const PAGE: usize = 4096;

/// One page, aligned for direct I/O.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(4096))]
struct Page([u8; PAGE]);

/// Aligned memory of whole pages.
///
/// # Drop behaviour
/// Memory from a pool goes back to the pool.
pub struct Pages {
    memory: Vec<Page>,
    /// The number of pages in use, from the start.
    count: usize,
    home: Option<Home>,
}

/// The pool that memory belongs to, and the number of the memory in the pool.
struct Home {
    pool: Arc<PagePool>,
    number: u16,
}

impl Pages {
    /// Allocates `count` pages of zeros.
    pub fn new(count: usize) -> Self {
        Self { memory: vec![Page::zeroed(); count], count, home: None }
    }

    /// Returns the bytes.
    pub fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.memory[..self.count])
    }

    /// Returns the bytes, to be filled.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(&mut self.memory[..self.count])
    }

    /// Returns the number of this memory in `pool`, or `None` if it is not from this pool.
    #[cfg_attr(not(target_os = "linux"), allow(dead_code))]
    pub(super) fn number_in(&self, pool: &Arc<PagePool>) -> Option<u16> {
        self.home.as_ref().filter(|home| Arc::ptr_eq(&home.pool, pool)).map(|home| home.number)
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        if let Some(Home { pool, number }) = self.home.take() {
            pool.free.lock().push((std::mem::take(&mut self.memory), number));
        }
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
    /// The memory that is not lent, with its number.
    free: Mutex<Vec<(Vec<Page>, u16)>>,
}

impl PagePool {
    /// The number of pages per piece of memory.
    pub(super) const PAGES: usize = 64;

    /// The number of pieces. Together they are less than the 8 MiB that an unprivileged process may lock on most
    /// systems.
    pub(super) const PIECES: u16 = 30;

    /// Allocates the memory.
    pub(super) fn new() -> Arc<Self> {
        let piece = |number| (vec![Page::zeroed(); Self::PAGES], number);
        Arc::new(Self { free: Mutex::new((0..Self::PIECES).map(piece).collect()) })
    }

    /// Lends `count` pages with undefined contents. Allocates them if nothing is left, or if a piece is too small
    /// or much too large.
    pub(super) fn lend(self: &Arc<Self>, count: usize) -> Pages {
        let fits = (2..=Self::PAGES).contains(&count);
        let piece = if fits { self.free.lock().pop() } else { None };
        piece.map_or_else(
            || Pages::new(count),
            |(memory, number)| Pages { memory, count, home: Some(Home { pool: Arc::clone(self), number }) },
        )
    }

    /// Returns the number of pieces that are not lent.
    #[cfg(test)]
    pub(super) fn left(&self) -> usize {
        self.free.lock().len()
    }

    /// Calls a function with the bytes of every piece, in the order of their numbers. No memory may be lent.
    #[cfg_attr(not(target_os = "linux"), allow(dead_code))]
    pub(super) fn with_pieces<R>(&self, call: impl FnOnce(&mut [&mut [u8]]) -> R) -> R {
        let mut free = self.free.lock();
        free.sort_by_key(|(_, number)| *number);
        let mut pieces: Vec<&mut [u8]> =
            free.iter_mut().map(|(memory, _)| bytemuck::cast_slice_mut(memory)).collect();
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
        let mut numbers: Vec<_> = lent.iter().map(|pages| pages.number_in(&pool).unwrap()).collect();
        numbers.sort_unstable();
        assert_eq!(numbers, (0..PagePool::PIECES).collect::<Vec<_>>());
        let addresses: Vec<_> = lent.iter().map(|pages| pages.bytes().as_ptr()).collect();
        assert!(addresses.iter().all(|address| address.addr() % PAGE == 0));
        let more = pool.lend(7);
        assert_eq!((more.number_in(&pool), more.bytes().len()), (None, 7 * PAGE), "nothing was left");
        drop(lent);
        let again = pool.lend(PagePool::PAGES);
        assert!(addresses.contains(&again.bytes().as_ptr()) && again.bytes().len() == 64 * PAGE);
        assert_eq!(again.number_in(&PagePool::new()), None, "it is from another pool");
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
