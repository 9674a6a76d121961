//! Large pages for large allocations.

use std::ptr::NonNull;

use rustix::mm::{Advice, madvise};
use rustix::param::page_size;

// Decision: docs/decisions/backend-cpu.md#large-allocations-ask-for-large-pages
/// Asks the system to back an allocation with large pages. If the system refuses, the allocation keeps small
/// pages.
pub(super) fn prefer(ptr: NonNull<u8>, bytes: usize) {
    let (start, page) = (ptr.as_ptr() as usize, page_size());
    let first = start.next_multiple_of(page);
    let end = (start + bytes) / page * page;
    if first < end {
        let at = ptr.as_ptr().wrapping_add(first - start);
        // SAFETY: `first..end` are whole pages inside the `bytes` bytes at `ptr`, and this advice does not
        // change their contents.
        let _ = unsafe { madvise(at.cast(), end - first, Advice::LinuxHugepage) };
    }
}
