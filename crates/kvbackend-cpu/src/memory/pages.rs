//! Large pages for large allocations.

use std::ptr::NonNull;

use rustix::mm::{Advice, madvise};
use rustix::param::page_size;

/// Asks the system for large pages behind an allocation. It may refuse: then pages are small and all else is the same.
pub(super) fn prefer(ptr: NonNull<u8>, bytes: usize) {
    let (start, page) = (ptr.as_ptr() as usize, page_size());
    let first = start.next_multiple_of(page);
    let end = (start + bytes) / page * page;
    if first < end {
        let at = ptr.as_ptr().wrapping_add(first - start);
        // SAFETY: whole pages of memory of the caller, whose contents this advice leaves as they are.
        let _ = unsafe { madvise(at.cast(), end - first, Advice::LinuxHugepage) };
    }
}
