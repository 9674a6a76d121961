//! Host storage: owned, lent or reserved bytes behind a lock, so that safe code cannot race.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::any::Any;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use kvcore::{Error, MemoryKind, Result, Storage};
use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use smallvec::SmallVec;

use crate::NAME;

#[cfg(target_os = "linux")]
mod pages;
#[cfg(target_os = "linux")]
mod reserved;

#[cfg(target_os = "linux")]
pub use reserved::CpuReserved;

/// Alignment of an allocation: a cache line, which also suits every SIMD width.
const ALIGN: usize = 64;

/// Bytes of a large page. Rows of a pool are accessed in any order: with small pages, most accesses would
/// also miss the TLB.
#[cfg(target_os = "linux")]
const LARGE_PAGE: usize = 2 << 20;

// Decision: docs/decisions/backend-cpu.md#the-cpu-backend-locks-storages
/// Bytes of host memory.
///
/// The bytes lie behind a reader–writer lock, which kernels hold while they run. The contract asks callers to
/// order streams by events. If a caller forgets to, results may be stale, but two threads never race on an
/// element.
pub struct CpuStorage {
    bytes: RwLock<Bytes>,
    kind: MemoryKind,
    address: u64,
    len: usize,
}

struct Bytes {
    ptr: NonNull<u8>,
    len: usize,
    owner: Owner,
}

enum Owner {
    /// Allocated by [`CpuStorage::allocate`] with this layout.
    Allocated(Layout),
    /// Mapped by the system for this storage alone.
    #[cfg(target_os = "linux")]
    Reserved(#[expect(dead_code, reason = "held for its Drop")] reserved::Mapping),
    /// Lent to the storage; the owner keeps the bytes alive.
    Lent(#[expect(dead_code, reason = "held for its Drop")] Arc<dyn Any + Send + Sync>),
}

// SAFETY: `Bytes` owns its memory, or keeps the owner alive, which is `Send`; no field is tied to a thread.
unsafe impl Send for Bytes {}
// SAFETY: `&Bytes` gives only shared access to the bytes, by `as_slice`, and the owner is `Sync`.
unsafe impl Sync for Bytes {}

impl Drop for Bytes {
    fn drop(&mut self) {
        if let Owner::Allocated(layout) = self.owner {
            // SAFETY: `ptr` came from `alloc` with `layout`, and `drop` runs once.
            unsafe { dealloc(self.ptr.as_ptr(), layout) }
        }
    }
}

impl Bytes {
    fn as_slice(&self) -> &[u8] {
        // SAFETY: `ptr` is valid for `len` initialised bytes while `self` lives, and writes need `&mut self`.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.len) }
    }

    fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: `ptr` is valid for `len` initialised bytes while `self` lives, and `&mut self` excludes
        // every other access through the storage.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.len) }
    }
}

impl CpuStorage {
    /// Allocates `bytes` zeroed bytes. On Linux, many bytes take memory only as they are touched.
    ///
    /// # Errors
    /// Returns [`Error::Zero`] if `bytes` is 0, and [`Error::Allocation`] if the system refuses.
    pub fn allocate(kind: MemoryKind, bytes: usize) -> Result<Self> {
        if bytes == 0 {
            return Err(Error::Zero { what: "bytes of an allocation" });
        }
        #[cfg(target_os = "linux")]
        if bytes >= 2 * LARGE_PAGE {
            let (ptr, _, mapping) = reserved::Mapping::new(kind, bytes)?;
            return Ok(Self::new(Bytes { ptr, len: bytes, owner: Owner::Reserved(mapping) }, kind));
        }
        let refused = |reason: &str| Error::Allocation { bytes, kind, reason: reason.to_owned() };
        let layout =
            Layout::from_size_align(bytes, ALIGN).map_err(|_| refused("larger than the address space"))?;
        // SAFETY: the size of `layout` is `bytes`, which is not 0.
        let ptr = NonNull::new(unsafe { alloc_zeroed(layout) })
            .ok_or_else(|| refused("the system is out of memory"))?;
        Ok(Self::new(Bytes { ptr, len: bytes, owner: Owner::Allocated(layout) }, kind))
    }

    /// Creates a storage over memory that other code allocated; `owner` is dropped with the storage.
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
    /// // SAFETY: the vector lives in `owner`, its memory does not move, and nobody locks it meanwhile.
    /// let storage = unsafe { CpuStorage::from_raw(ptr, 4096, MemoryKind::System, owner) }?;
    /// assert_eq!(storage.len(), 4096);
    /// # Ok::<(), kvcore::Error>(())
    /// ```
    ///
    /// # Safety
    /// `ptr` must be valid for reads and writes of `bytes` initialised bytes for as long as `owner` lives.
    /// While the storage lives, nothing else may access these bytes except through the storage. In particular
    /// no other storage covers one of them: each storage has a lock of its own. Operations refuse operands that
    /// share memory, such as two arenas over windows that overlap, yet operations on different streams cannot
    /// see each other's.
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
        Ok(Self::new(Bytes { ptr, len: bytes, owner: Owner::Lent(owner) }, kind))
    }

    fn new(bytes: Bytes, kind: MemoryKind) -> Self {
        let (address, len) = (bytes.ptr.as_ptr() as u64, bytes.len);
        Self { bytes: RwLock::new(bytes), kind, address, len }
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

/// Returns the CPU storage behind a handle.
pub(crate) fn cpu(storage: &Arc<dyn Storage>) -> Result<&CpuStorage> {
    storage.as_any().downcast_ref().ok_or(Error::ForeignHandle { what: "a storage", backend: NAME })
}

/// Returns the error for a storage that a kernel uses without the lock that the use needs.
pub(crate) fn not_locked() -> Error {
    let reason = "a kernel uses a storage that it has not locked, or has locked only to read".to_owned();
    Error::Device { backend: NAME, reason }
}

/// Locks of the storages that one operation touches.
///
/// Each storage is locked once, in order of address, so that operations on different streams cannot deadlock.
pub(crate) struct Access<'a>(Few<(u64, Lock<'a>)>);

/// A list whose inline capacity covers the storages that operations touch, so that it does not use the heap.
type Few<T> = SmallVec<[T; 8]>;

enum Lock<'a> {
    Read(RwLockReadGuard<'a, Bytes>),
    Write(RwLockWriteGuard<'a, Bytes>),
}

impl<'a> Access<'a> {
    /// Locks `reads` for reading and `writes` for writing; a storage in both lists is locked for writing.
    pub(crate) fn new(reads: &[&'a Arc<dyn Storage>], writes: &[&'a Arc<dyn Storage>]) -> Result<Self> {
        let mut wanted: Few<(&CpuStorage, bool)> = Few::new();
        for (list, write) in [(writes, true), (reads, false)] {
            for storage in list {
                let storage = cpu(storage)?;
                if !wanted.iter().any(|(known, _)| std::ptr::eq(*known, storage)) {
                    wanted.push((storage, write));
                }
            }
        }
        wanted.sort_unstable_by_key(|(storage, _)| storage.address);
        Ok(Self(
            wanted
                .into_iter()
                .map(|(storage, write)| {
                    let lock = if write {
                        Lock::Write(storage.bytes.write())
                    } else {
                        Lock::Read(storage.bytes.read())
                    };
                    (storage.address, lock)
                })
                .collect(),
        ))
    }

    /// Returns the bytes of a locked storage, for reading.
    pub(crate) fn read(&self, storage: &Arc<dyn Storage>) -> Result<&[u8]> {
        match self.0.iter().find(|(address, _)| *address == storage.address()) {
            Some((_, Lock::Read(guard))) => Ok(guard.as_slice()),
            Some((_, Lock::Write(guard))) => Ok(guard.as_slice()),
            None => Err(not_locked()),
        }
    }

    /// Returns the bytes of a storage that is locked for writing.
    pub(crate) fn write(&mut self, storage: &Arc<dyn Storage>) -> Result<&mut [u8]> {
        match self.0.iter_mut().find(|(address, _)| *address == storage.address()) {
            Some((_, Lock::Write(guard))) => Ok(guard.as_mut_slice()),
            _ => Err(not_locked()),
        }
    }

    /// Returns the bytes of all locked storages, to be taken out one by one.
    pub(crate) fn parts(&mut self) -> Parts<'_> {
        let parts = self.0.iter_mut().map(|(address, lock)| {
            let part = match lock {
                Lock::Read(guard) => LockedBytes::Read(guard.as_slice()),
                Lock::Write(guard) => LockedBytes::Write(guard.as_mut_slice()),
            };
            (*address, part)
        });
        Parts(parts.collect())
    }
}

/// Bytes of several storages at the same time. The bytes of a storage can be taken once.
pub(crate) struct Parts<'a>(Few<(u64, LockedBytes<'a>)>);

enum LockedBytes<'a> {
    Read(&'a [u8]),
    Write(&'a mut [u8]),
}

impl<'a> Parts<'a> {
    fn take(&mut self, storage: &Arc<dyn Storage>) -> Result<LockedBytes<'a>> {
        let at = self.0.iter().position(|(address, _)| *address == storage.address());
        let at = at.ok_or_else(not_locked)?;
        Ok(self.0.swap_remove(at).1)
    }

    /// Takes the bytes of a locked storage, for reading.
    pub(crate) fn read(&mut self, storage: &Arc<dyn Storage>) -> Result<&'a [u8]> {
        self.take(storage).map(|part| match part {
            LockedBytes::Read(bytes) => bytes,
            LockedBytes::Write(bytes) => bytes,
        })
    }

    /// Takes the bytes of a storage that is locked for writing.
    pub(crate) fn write(&mut self, storage: &Arc<dyn Storage>) -> Result<&'a mut [u8]> {
        match self.take(storage)? {
            LockedBytes::Write(bytes) => Ok(bytes),
            LockedBytes::Read(_) => Err(not_locked()),
        }
    }
}

#[cfg(test)]
mod tests {
    use kvcore::{Backend, DType, OwnedStorage};
    use parking_lot::Mutex;

    use super::*;

    #[test]
    fn memory_is_zeroed_and_no_bytes_are_an_error() {
        let storage: Arc<dyn Storage> = Arc::new(CpuStorage::allocate(MemoryKind::Pinned, 100).unwrap());
        assert_eq!(storage.address() % ALIGN as u64, 0);
        let access = Access::new(&[&storage], &[]).unwrap();
        assert!(access.read(&storage).unwrap().iter().all(|&b| b == 0));
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
        assert_eq!(Access::new(&[&storage], &[]).unwrap().read(&storage).unwrap()[63], 7);
        drop(storage);
        assert_eq!(Arc::strong_count(&owner), 1);
    }

    #[test]
    fn an_owned_storage_over_lent_memory_is_written_and_keeps_its_owner() {
        let mut bytes = vec![0u8; 64];
        let ptr = NonNull::new(bytes.as_mut_ptr()).unwrap();
        let owner: Arc<Mutex<Vec<u8>>> = Arc::new(Mutex::new(bytes));
        // SAFETY: `ptr` points to the 64 bytes of the vector, which lives in `owner` and does not move;
        // nothing else touches them before the storage is gone.
        let storage = unsafe { CpuStorage::from_raw(ptr, 64, MemoryKind::System, owner.clone()) }.unwrap();
        let owned = OwnedStorage::from_arc(Arc::new(storage)).unwrap();
        let view = owned.view_at(16, DType::U8, &[4]).unwrap();
        drop(owned);
        assert_eq!(Arc::strong_count(&owner), 2, "the view holds the memory");
        crate::CpuBackend::new().stream().unwrap().write(&view, &[1, 2, 3, 4]).unwrap();
        drop(view);
        assert_eq!(Arc::strong_count(&owner), 1);
        assert_eq!(owner.lock()[14..22], [0, 0, 1, 2, 3, 4, 0, 0]);
    }

    #[test]
    fn one_storage_in_two_roles_is_locked_once() {
        let storage: Arc<dyn Storage> = Arc::new(CpuStorage::allocate(MemoryKind::System, 8).unwrap());
        let mut access = Access::new(&[&storage], &[&storage]).unwrap();
        access.write(&storage).unwrap()[3] = 1;
        assert_eq!(access.read(&storage).unwrap()[3], 1);
        let mut parts = access.parts();
        assert_eq!(parts.write(&storage).unwrap()[3], 1);
        assert!(parts.read(&storage).is_err(), "taken already");
    }
}
