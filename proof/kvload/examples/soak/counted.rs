//! Counts the bytes that the process has allocated and not given back.
//!
//! Resident memory alone does not tell a leak from an allocator that keeps memory, so a soak looks at both.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

/// The allocator of the process, with a count of the bytes that it has lent.
struct Counted<A>(A);

#[global_allocator]
static ALLOCATOR: Counted<System> = Counted(System);

/// The bytes that are lent.
static LENT: AtomicUsize = AtomicUsize::new(0);

/// Limits the arenas of glibc's allocator as `kvc` does. Other threads must not have been started.
#[cfg(target_env = "gnu")]
pub(crate) fn limit_arenas() {
    if std::env::var_os("MALLOC_ARENA_MAX").is_none() {
        // SAFETY: `mallopt` accepts any two numbers, and only this thread runs, so that no other one allocates meanwhile.
        unsafe { libc::mallopt(libc::M_ARENA_MAX, 2) };
    }
}

/// Does nothing: other allocators have no arenas for each thread.
#[cfg(not(target_env = "gnu"))]
pub(crate) fn limit_arenas() {}

/// Returns the number of bytes that are allocated now.
pub(crate) fn allocated() -> u64 {
    LENT.load(Ordering::Relaxed) as u64
}

// SAFETY: every method passes its arguments on unchanged to an allocator that keeps the contract, and returns its result.
unsafe impl<A: GlobalAlloc> GlobalAlloc for Counted<A> {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller guarantees that `layout` has a size above 0.
        let memory = unsafe { self.0.alloc(layout) };
        lend(memory, layout.size());
        memory
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller guarantees that `layout` has a size above 0.
        let memory = unsafe { self.0.alloc_zeroed(layout) };
        lend(memory, layout.size());
        memory
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        LENT.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller guarantees that `memory` came from this allocator with `layout`, and so from `self.0`.
        unsafe { self.0.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller guarantees that `memory` came from this allocator with `layout`, and that `size` is above 0.
        let moved = unsafe { self.0.realloc(memory, layout, size) };
        if !moved.is_null() {
            LENT.fetch_sub(layout.size(), Ordering::Relaxed);
            LENT.fetch_add(size, Ordering::Relaxed);
        }
        moved
    }
}

fn lend(memory: *mut u8, bytes: usize) {
    if !memory.is_null() {
        LENT.fetch_add(bytes, Ordering::Relaxed);
    }
}
