//! Storages: device memory from a pool, pinned host memory, memory that the caller lends, and reserved
//! address ranges.

use std::any::Any;
use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{self, CUdeviceptr};
use kvcore::{Error, MemoryKind, Result, Storage};

use crate::device::CudaDevice;
use crate::driver::NAME;

mod lent;
mod peer;
mod reserved;

pub(crate) use peer::copy_from_peer;
pub use reserved::CudaReserved;

/// A range of device memory, or of host memory that the device can access.
///
/// The address is a device pointer. Enqueued operations hold the storage, and its memory is freed once no
/// work uses it.
pub struct CudaStorage {
    device: Arc<CudaDevice>,
    address: CUdeviceptr,
    len: usize,
    kind: MemoryKind,
    /// The host address of pinned memory, or null for device memory.
    host: *mut c_void,
    owner: FreedBy,
    /// The address of the [`LoanMemory`](kvcore::device::queue::LoanMemory) that lent the storage, if there
    /// is one.
    lender: Option<usize>,
}

/// The mechanism that frees a storage's memory.
enum FreedBy {
    Pool,
    Allocation,
    Pinned,
    Reserved(#[expect(dead_code, reason = "held for its Drop")] reserved::CudaReservation),
    Lent(#[expect(dead_code, reason = "held for its Drop")] Arc<dyn Any + Send + Sync>),
}

// SAFETY: memory from the driver may be used and freed from any thread, and lent owners are `Send`.
unsafe impl Send for CudaStorage {}
// SAFETY: the same condition as for `Send`; a storage never hands out a reference to its bytes.
unsafe impl Sync for CudaStorage {}

impl fmt::Debug for CudaStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "CudaStorage({} bytes of {} memory at {:#x} on {:?})",
            self.len, self.kind, self.address, self.device
        )
    }
}

impl CudaStorage {
    /// Allocates zeroed memory.
    pub(crate) fn allocate(device: &Arc<CudaDevice>, kind: MemoryKind, bytes: usize) -> Result<Self> {
        if bytes == 0 {
            return Err(Error::Zero { what: "bytes of an allocation" });
        }
        let _bound = device.bind()?;
        let refused = |error| device.no_memory(error, kind, bytes);
        let none = std::ptr::null_mut();
        let (address, host, owner) = match (kind, device.pool) {
            (MemoryKind::Device, Some(pool)) => {
                // SAFETY: the pool and the stream belong to the device.
                let address = unsafe { result::mem_pool::alloc_async(pool, bytes, device.setup) };
                (address.map_err(refused)?, none, FreedBy::Pool)
            }
            (MemoryKind::Device, None) => {
                // SAFETY: the context is current.
                (unsafe { result::malloc_sync(bytes) }.map_err(refused)?, none, FreedBy::Allocation)
            }
            (MemoryKind::Pinned, _) => {
                let (host, address) = pinned(bytes, PORTABLE).map_err(refused)?;
                (address, host, FreedBy::Pinned)
            }
            (other, _) => {
                let what = format!("{other} memory, which kernels cannot access; use pinned memory");
                return Err(Error::Unsupported { backend: NAME, what });
            }
        };
        let storage =
            Self { device: Arc::clone(device), address, len: bytes, kind, host, owner, lender: None };
        match storage.owner {
            // SAFETY: the memory was just allocated for `bytes` bytes.
            FreedBy::Pinned => unsafe { host.cast::<u8>().write_bytes(0, bytes) },
            // SAFETY: the memory was just allocated for `bytes` bytes, and nothing else uses it.
            _ => unsafe { device.zero(address, bytes) }?,
        }
        Ok(storage)
    }

    /// Writes bytes at the start of the storage, and waits for the write. No enqueued work may use the
    /// memory.
    pub(crate) fn fill(&self, bytes: &[u8]) -> Result<()> {
        let _bound = self.device.bind()?;
        let bytes = &bytes[..bytes.len().min(self.len)];
        // SAFETY: the range is in the storage, and `bytes` outlives the wait.
        unsafe { result::memcpy_htod_async(self.address, bytes, self.device.setup) }
            .map_err(|error| self.device.refused(error))?;
        self.device.settle()
    }

    /// Returns the host address of pinned memory, or `None` for device memory.
    pub(crate) fn host(&self) -> Option<*mut u8> {
        (!self.host.is_null()).then(|| self.host.cast())
    }

    /// Marks the storage as lent by the activation memory at address `lender`.
    pub(crate) fn lent_by(mut self, lender: usize) -> Self {
        self.lender = Some(lender);
        self
    }

    /// Returns the address of the activation memory that lent the storage, if there is one.
    pub(crate) fn lender(&self) -> Option<usize> {
        self.lender
    }

    pub(crate) fn device(&self) -> &Arc<CudaDevice> {
        &self.device
    }
}

/// Flags for pinned memory that every context can use.
pub(crate) const PORTABLE: u32 = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;

/// Flags for pinned memory that the host only writes and never reads.
pub(crate) const WRITTEN_ONLY: u32 = PORTABLE | sys::CU_MEMHOSTALLOC_WRITECOMBINED;

/// Allocates pinned memory. Returns its host address and its device address.
pub(crate) fn pinned(bytes: usize, flags: u32) -> Result<(*mut c_void, CUdeviceptr), DriverError> {
    // SAFETY: a context is current.
    let host = unsafe { result::malloc_host(bytes, flags) }?;
    let mut address = 0;
    // SAFETY: `host` is memory that the driver has just mapped for the device.
    let status = unsafe { sys::cuMemHostGetDevicePointer_v2(&raw mut address, host, 0) };
    status.result().map(|()| (host, address)).inspect_err(|_| {
        // SAFETY: `host` came from `malloc_host`, and nothing else uses it.
        let _ = unsafe { result::free_host(host) };
    })
}

impl Drop for CudaStorage {
    fn drop(&mut self) {
        let Ok(_bound) = self.device.bind() else { return }; // the memory of a lost context is gone
        // SAFETY: `owner` records how the memory was allocated. No enqueued work uses it, because work holds
        // its storages until it is done.
        let _ = match self.owner {
            FreedBy::Pool => unsafe { result::free_async(self.address, self.device.setup) },
            FreedBy::Allocation => unsafe { result::free_sync(self.address) },
            FreedBy::Pinned => unsafe { result::free_host(self.host) },
            FreedBy::Reserved(_) | FreedBy::Lent(_) => Ok(()),
        };
    }
}

impl Storage for CudaStorage {
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

/// Downcasts a storage of this device to this backend's type.
///
/// # Errors
/// Returns [`Error::ForeignHandle`] if the storage belongs to another backend or device.
pub(crate) fn of<'a>(device: &Arc<CudaDevice>, storage: &'a Arc<dyn Storage>) -> Result<&'a CudaStorage> {
    let known = storage.as_any().downcast_ref::<CudaStorage>();
    known
        .filter(|known| Arc::ptr_eq(&known.device, device))
        .ok_or(Error::ForeignHandle { what: "a storage", backend: NAME })
}
