//! Reserved host memory: an anonymous mapping whose pages can be returned to the system. Pages are zeroed
//! when they are mapped again.

use std::any::Any;
use std::ops::Range;
use std::ptr::{NonNull, null_mut};

use kvcore::{Error, MemoryKind, ReservedStorage, Result, Storage, check_granules};
use parking_lot::Mutex;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use rustix::param::page_size;

use super::ranges::RangeUse;
use super::{CpuStorage, LARGE_PAGE, MemoryOwner, OwnedMemory, pages};

/// Host memory whose pages can be unmapped and mapped again. Kernels access this memory as a [`CpuStorage`].
///
/// Unmapping a range drops its pages but does not protect them. On the next access, the system provides a
/// zeroed page, so safe code may read and write an unmapped range. Such a page uses physical memory until the
/// range is unmapped or mapped again, which drops the page.
#[derive(Debug)]
pub struct CpuReserved {
    storage: CpuStorage,
    /// For each page, true if the page is mapped. This lock must be taken before any lock on the bytes.
    mapped: Mutex<Vec<bool>>,
    page: usize,
}

/// A zeroed anonymous mapping, which is unmapped on drop. The system allocates its pages on first access.
pub(super) struct Mapping {
    ptr: NonNull<u8>,
    len: usize,
}

// SAFETY: a `Mapping` belongs to the process, not to a thread: any thread may unmap it.
unsafe impl Send for Mapping {}
// SAFETY: `&Mapping` gives no access to the mapped bytes.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `ptr` and `len` describe a mapping that `Mapping::new` made, and nothing refers to it any
        // more. `munmap` can fail only for a range that is not a mapping; then memory is leaked, not freed
        // twice.
        let _ = unsafe { munmap(self.ptr.as_ptr().cast(), self.len) };
    }
}

impl Mapping {
    /// Maps `bytes` bytes, rounded up to whole pages. Returns the address, the rounded size, and the mapping.
    /// Large mappings begin at a large-page boundary.
    pub(super) fn new(kind: MemoryKind, bytes: usize) -> Result<(NonNull<u8>, usize, Self)> {
        let refused = |reason: &str| Error::Allocation { bytes, kind, reason: reason.to_owned() };
        let fits = |len: &usize| isize::try_from(*len).is_ok();
        let usable = bytes.checked_next_multiple_of(page_size()).filter(fits);
        let usable = usable.ok_or_else(|| refused("larger than the address space"))?;
        let large = usable >= 2 * LARGE_PAGE;
        let len = usable.checked_add(if large { LARGE_PAGE } else { 0 }).filter(fits);
        let len = len.ok_or_else(|| refused("larger than the address space"))?;
        // SAFETY: with a null address the system chooses an unused range, so the new private mapping does not
        // affect other memory.
        let ptr =
            unsafe { mmap_anonymous(null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE) };
        let ptr = ptr.map_err(|errno| refused(&errno.to_string()))?;
        let ptr = NonNull::new(ptr.cast::<u8>()).ok_or_else(|| refused("the system returned no address"))?;
        let mapping = Self { ptr, len };
        if !large {
            return Ok((ptr, usable, mapping));
        }
        // SAFETY: the distance to the next large page is less than `LARGE_PAGE`, and the mapping is that much
        // longer.
        let start = unsafe { ptr.add(ptr.as_ptr().align_offset(LARGE_PAGE)) };
        pages::prefer(start, usable);
        Ok((start, usable, mapping))
    }
}

impl CpuReserved {
    /// Reserves `bytes` bytes, rounded up to whole pages.
    ///
    /// # Errors
    /// Returns [`Error::Zero`] if `bytes` is 0, and [`Error::Allocation`] if the system refuses.
    pub fn reserve(kind: MemoryKind, bytes: usize) -> Result<Self> {
        if bytes == 0 {
            return Err(Error::Zero { what: "bytes of a reservation" });
        }
        let page = page_size();
        let (ptr, len, mapping) = Mapping::new(kind, bytes)?;
        let storage = CpuStorage::new(OwnedMemory { ptr, owner: MemoryOwner::Reserved(mapping) }, len, kind);
        Ok(Self { storage, mapped: Mutex::new(vec![true; len / page]), page })
    }

    // Decision: docs/decisions/backend-cpu.md#released-pages-are-dropped-not-protected
    /// Returns the pages of `range` to the system. The range must consist of whole pages inside the mapping.
    fn discard(&self, range: &Range<usize>) -> Result<()> {
        if range.is_empty() {
            return Ok(());
        }
        let whole = RangeUse { bytes: range.clone(), write: true };
        let turn = self.storage.locks.begin(std::iter::once(&whole));
        // SAFETY: the range is locked, so nothing else reads or writes it, and the caller guarantees that it
        // is inside the mapping.
        let at = unsafe { self.storage.bytes_mut(range) }.as_mut_ptr();
        // SAFETY: the range is in a private anonymous mapping, and its lock excludes all other readers and
        // writers. The bytes are zero afterwards, which is a valid value.
        let dropped = unsafe { madvise(at.cast(), range.len(), Advice::LinuxDontNeed) };
        self.storage.locks.end(turn);
        dropped.map_err(|errno| Error::Allocation {
            bytes: range.len(),
            kind: self.storage.kind,
            reason: format!("pages cannot be released: {errno}"),
        })
    }

    fn pages(&self, range: &Range<usize>) -> Range<usize> {
        range.start / self.page..range.end / self.page
    }
}

impl Storage for CpuReserved {
    fn len(&self) -> usize {
        self.storage.len()
    }

    fn address(&self) -> u64 {
        self.storage.address()
    }

    fn kind(&self) -> MemoryKind {
        self.storage.kind()
    }

    /// Returns the inner [`CpuStorage`], because kernels downcast to that type.
    fn as_any(&self) -> &dyn Any {
        &self.storage
    }
}

impl ReservedStorage for CpuReserved {
    fn granularity(&self) -> usize {
        self.page
    }

    fn map(&self, range: Range<usize>) -> Result<()> {
        check_granules(&range, self.page, self.len())?;
        let mut mapped = self.mapped.lock();
        let pages = self.pages(&range);
        let mut page = pages.start;
        for run in mapped[pages.clone()].chunk_by(|a, b| a == b) {
            let next = page + run.len();
            if !run[0] {
                // Bytes that were written while the run was unmapped are dropped first, so a newly mapped run
                // is always zeroed.
                self.discard(&(page * self.page..next * self.page))?;
            }
            page = next;
        }
        mapped[pages].fill(true);
        Ok(())
    }

    fn unmap(&self, range: Range<usize>) -> Result<()> {
        check_granules(&range, self.page, self.len())?;
        let mut mapped = self.mapped.lock();
        self.discard(&range)?;
        mapped[self.pages(&range)].fill(false);
        Ok(())
    }

    fn mapped_bytes(&self) -> usize {
        self.mapped.lock().iter().filter(|&&mapped| mapped).count() * self.page
    }
}
