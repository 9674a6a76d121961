//! Memory in large pages, divided into pieces.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::ptr::NonNull;

use super::PAGE;
use super::pages::Page;

/// The number of bytes of a large page of most processors.
pub(super) const LARGE: usize = 2 << 20;

// Decision: docs/decisions/tiers.md#disks-get-memory-in-large-pages
/// An allocation that the system is asked to back with large pages.
///
/// # Drop behaviour
/// Releases the memory. The pieces must have been dropped.
pub(super) struct Area {
    memory: NonNull<Page>,
    layout: Layout,
}

// SAFETY: the area only owns its memory, and never reads or writes it.
unsafe impl Send for Area {}
// SAFETY: no method of a shared area reads or writes the memory.
unsafe impl Sync for Area {}

impl Area {
    /// Allocates at least one page of zeros.
    pub(super) fn new(pages: usize) -> Self {
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

    /// Returns the pages in pieces of `count` pages.
    ///
    /// # Safety
    /// Must be called once. All pieces must be dropped before the area is.
    pub(super) unsafe fn pieces(&self, count: usize) -> impl Iterator<Item = &'static mut [Page]> {
        let pages = self.layout.size() / PAGE;
        // SAFETY: these are the pages of the allocation, filled with zeros. The caller guarantees that nobody else has
        // a reference to them, and that the allocation lives longer.
        let all = unsafe { std::slice::from_raw_parts_mut(self.memory.as_ptr(), pages) };
        all.chunks_exact_mut(count)
    }
}

impl Drop for Area {
    fn drop(&mut self) {
        // SAFETY: `new` allocated the memory with this layout, and the pieces have been dropped.
        unsafe { dealloc(self.memory.as_ptr().cast(), self.layout) };
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
