//! Memory that the system provides ahead of its first use. Where the host of a virtual machine has to provide it as well,
//! the first use of 2 MiB takes 3 to 5 ms.

use kvcore::Storage;

/// The number of bytes that are provided at a time. Meanwhile, other threads may have to wait to map memory.
#[cfg(target_os = "linux")]
const PORTION: usize = 2 << 20;

/// Has the system provide memory of the CPU's backend, whose contents stay. Ends at the first error.
#[cfg(target_os = "linux")]
pub(crate) fn provide(storage: &dyn Storage) {
    use rustix::mm::{Advice, madvise};
    let (start, page) = (storage.address() as usize, rustix::param::page_size());
    let end = (start + storage.len()) / page * page;
    let mut at = start.next_multiple_of(page);
    while at < end {
        // Up to the next multiple of a portion, so that large pages are provided whole.
        let next = (at + 1).next_multiple_of(PORTION).min(end);
        // SAFETY: the pages belong to the storage, and the advice does not change their contents.
        if unsafe { madvise(at as *mut _, next - at, Advice::LinuxPopulateWrite) }.is_err() {
            return;
        }
        at = next;
    }
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn provide(_storage: &dyn Storage) {}
