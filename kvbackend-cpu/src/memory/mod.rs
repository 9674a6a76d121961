//! Host storage: owned, lent or reserved bytes. Operations lock the ranges that they use, so safe code cannot
//! cause data races.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use kvcore::{Error, MemoryKind, Result, Storage};

use self::ranges::RangeLocks;
use crate::NAME;

mod access;
mod lent;
#[cfg(target_os = "linux")]
mod pages;
mod ranges;
#[cfg(target_os = "linux")]
mod reserved;
mod vector;
mod view;

pub use lent::{LentBytes, LentMemory};

pub(crate) use access::{Access, ByteSpan, LockedBytes, LockedParts, Window, WindowMut, not_locked};
#[cfg(target_os = "linux")]
pub use reserved::CpuReserved;
pub use view::{HostView, HostViewMut};

/// Alignment of allocations, in bytes: a cache line, which is enough for every SIMD width.
const ALIGN: usize = 64;

/// Size of a large page in bytes. Because the rows of a pool are accessed in any order, most accesses would
/// miss the TLB if pages were small.
#[cfg(target_os = "linux")]
const LARGE_PAGE: usize = 2 << 20;

// Decision: docs/decisions/backend-cpu.md#operations-lock-the-ranges-that-they-touch
/// A storage in host memory.
///
/// A running operation locks the byte ranges that it uses, such as the rows of one layer or the elements of a
/// view, for reading or writing. Operations on other ranges, such as another layer's, can run at the same
/// time. Callers must order streams by events. If a caller forgets this, results may be stale, but threads
/// never race on an element.
pub struct CpuStorage {
    memory: OwnedMemory,
    locks: RangeLocks,
    kind: MemoryKind,
    address: u64,
    len: usize,
}

/// A storage's bytes. Only ranges locked by `locks` may be accessed.
struct OwnedMemory {
    ptr: NonNull<u8>,
    owner: MemoryOwner,
}

enum MemoryOwner {
    /// The bytes were allocated by the global allocator with this layout.
    Allocated(Layout),
    /// The bytes are a mapping that belongs only to this storage.
    #[cfg(target_os = "linux")]
    Reserved(#[expect(dead_code, reason = "held for its Drop")] reserved::Mapping),
    /// The bytes are lent to the storage. The owner keeps them alive.
    Lent(#[expect(dead_code, reason = "held for its Drop")] Arc<dyn Any + Send + Sync>),
    /// The bytes are lent for reading only, under the owner's own lock.
    Lender(Arc<dyn LentMemory>),
}

// SAFETY: `OwnedMemory` owns its bytes, or holds their owner, which is `Send`; no field is tied to a thread.
unsafe impl Send for OwnedMemory {}
// SAFETY: `&OwnedMemory` gives no access to the bytes; code that dereferences `ptr` excludes races. The owner
// is `Sync`.
unsafe impl Sync for OwnedMemory {}

impl Drop for OwnedMemory {
    fn drop(&mut self) {
        if let MemoryOwner::Allocated(layout) = self.owner {
            // SAFETY: `ptr` came from the global allocator with `layout`, and `drop` runs once.
            unsafe { dealloc(self.ptr.as_ptr(), layout) }
        }
    }
}

impl CpuStorage {
    /// Allocates `bytes` zeroed bytes. On Linux, the pages of a large allocation use physical memory only
    /// after they are first accessed.
    ///
    /// # Errors
    /// Returns [`Error::Zero`] if `bytes` is 0, and [`Error::Allocation`] if the system refuses.
    pub fn allocate(kind: MemoryKind, bytes: usize) -> Result<Self> {
        if bytes == 0 {
            return Err(Error::Zero { what: "bytes of an allocation" });
        }
        // Decision: docs/decisions/backend-cpu.md#large-memory-is-mapped
        #[cfg(target_os = "linux")]
        if bytes >= 2 * LARGE_PAGE {
            let (ptr, _, mapping) = reserved::Mapping::new(kind, bytes)?;
            return Ok(Self::new(OwnedMemory { ptr, owner: MemoryOwner::Reserved(mapping) }, bytes, kind));
        }
        let refused = |reason: &str| Error::Allocation { bytes, kind, reason: reason.to_owned() };
        let layout =
            Layout::from_size_align(bytes, ALIGN).map_err(|_| refused("larger than the address space"))?;
        // SAFETY: the size of `layout` is `bytes`, which is not 0.
        let ptr = NonNull::new(unsafe { alloc_zeroed(layout) })
            .ok_or_else(|| refused("the system is out of memory"))?;
        Ok(Self::new(OwnedMemory { ptr, owner: MemoryOwner::Allocated(layout) }, bytes, kind))
    }

    /// Creates a storage over memory that other code allocated. `owner` is dropped with the storage.
    ///
    /// ```
    /// use std::any::Any;
    /// use std::ptr::NonNull;
    /// use std::sync::{Arc, Mutex};
    /// use kvbackend_cpu::CpuStorage;
    /// use kvcore::{MemoryKind, Storage};
    ///
    /// let mut bytes = vec![0u8; 4096];
    /// let ptr = NonNull::from(bytes.as_mut_slice()).cast();
    /// let owner: Arc<dyn Any + Send + Sync> = Arc::new(Mutex::new(bytes));
    /// // SAFETY: the vector lives in `owner`, its memory does not move, and no code locks the mutex.
    /// let storage = unsafe { CpuStorage::from_raw(ptr, 4096, MemoryKind::System, owner) }?;
    /// assert_eq!(storage.len(), 4096);
    /// # Ok::<(), kvcore::Error>(())
    /// ```
    ///
    /// # Safety
    /// `ptr` must be valid for reads and writes of `bytes` initialised bytes for as long as `owner` lives.
    /// While the storage lives, nothing else may access these bytes except through the storage. In
    /// particular, no other storage may cover any of them, because each storage has its own lock. An
    /// operation rejects operands that share memory, such as two arenas over overlapping memory, but it
    /// cannot detect this between operations on different streams.
    ///
    /// # Errors
    /// Returns [`Error::Zero`] if `bytes` is 0.
    pub unsafe fn from_raw(
        ptr: NonNull<u8>,
        bytes: usize,
        kind: MemoryKind,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<Self> {
        if bytes == 0 {
            return Err(Error::Zero { what: "bytes of a lent memory" });
        }
        Ok(Self::new(OwnedMemory { ptr, owner: MemoryOwner::Lent(owner) }, bytes, kind))
    }

    /// Creates a storage that owns the `len` bytes of `memory`.
    fn new(memory: OwnedMemory, len: usize, kind: MemoryKind) -> Self {
        let address = memory.ptr.as_ptr() as u64;
        Self { memory, locks: RangeLocks::default(), kind, address, len }
    }

    /// Returns a slice of the storage's bytes.
    ///
    /// # Safety
    /// The range must be inside the storage, whose memory must not belong to a lender, and nothing may write
    /// to the range while the slice lives.
    unsafe fn bytes(&self, range: &Range<usize>) -> &[u8] {
        // SAFETY: the memory has `self.len` initialised bytes while `self` lives, and the range is inside
        // them by contract.
        unsafe { std::slice::from_raw_parts(self.memory.ptr.as_ptr().add(range.start), range.len()) }
    }

    /// Returns a mutable slice of the storage's bytes.
    ///
    /// # Safety
    /// The range must be inside the storage, whose memory must not belong to a lender, and nothing else may
    /// read or write the range while the slice lives.
    #[expect(clippy::mut_from_ref, reason = "the caller holds the lock of the range")]
    unsafe fn bytes_mut(&self, range: &Range<usize>) -> &mut [u8] {
        // SAFETY: the memory has `self.len` initialised bytes while `self` lives, and the range is inside
        // them by contract.
        unsafe { std::slice::from_raw_parts_mut(self.memory.ptr.as_ptr().add(range.start), range.len()) }
    }
}

impl fmt::Debug for CpuStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CpuStorage({} bytes of {} memory at {:#x})", self.len, self.kind, self.address)
    }
}

impl Storage for CpuStorage {
    fn len(&self) -> usize {
        self.len
    }

    fn address(&self) -> u64 {
        self.address
    }

    fn kind(&self) -> MemoryKind {
        self.kind
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Returns the CPU storage that a handle refers to.
pub(crate) fn cpu(storage: &Arc<dyn Storage>) -> Result<&CpuStorage> {
    storage.as_any().downcast_ref().ok_or(Error::ForeignHandle { what: "a storage", backend: NAME })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_zeroed_and_no_bytes_are_an_error() {
        let storage: Arc<dyn Storage> = Arc::new(CpuStorage::allocate(MemoryKind::Pinned, 100).unwrap());
        assert_eq!(storage.address() % ALIGN as u64, 0);
        let all = ByteSpan::new(&storage, 0..100);
        let access = Access::new(&[&all], &[]).unwrap();
        assert!(access.read(&all).unwrap().values.iter().all(|&b| b == 0));
        assert!(matches!(CpuStorage::allocate(MemoryKind::System, 0), Err(Error::Zero { .. })));
        assert!(matches!(
            CpuStorage::allocate(MemoryKind::System, usize::MAX / 2),
            Err(Error::Allocation { .. })
        ));
    }

    #[test]
    fn lent_memory_keeps_its_owner_alive() {
        let owner: Arc<Vec<u8>> = Arc::new(vec![7; 64]);
        let ptr = NonNull::new(owner.as_ptr().cast_mut()).unwrap();
        // SAFETY: `ptr` points to the 64 bytes of the vector, which `owner` keeps alive; they are only read
        // here.
        let storage = unsafe { CpuStorage::from_raw(ptr, 64, MemoryKind::System, owner.clone()) }.unwrap();
        let storage: Arc<dyn Storage> = Arc::new(storage);
        assert_eq!(Arc::strong_count(&owner), 2);
        let all = ByteSpan::new(&storage, 0..64);
        let access = Access::new(&[&all], &[]).unwrap();
        assert_eq!(access.read(&all).unwrap().values[63], 7);
        drop(access);
        drop(storage);
        assert_eq!(Arc::strong_count(&owner), 1);
    }
}
