//! Storages: device memory, pinned host memory, memory that the caller lends, and reserved addresses.

use std::any::Any;
use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

use kvcore::{Error, MemoryKind, Result, Storage};

use crate::NAME;
use crate::bindings::types as sys;
use crate::device::Device;

mod peer;
mod reserved;

pub(crate) use peer::{copy_from, of_peer};
pub(crate) use reserved::is_there as maps;

pub use reserved::AscendReserved;

/// Bytes of a device's memory, or of pinned host memory.
///
/// The address is a pointer of the device, or of the host for pinned memory. ACL frees at once, whatever still uses the
/// memory: operations that are enqueued hold the storage, so that it goes when no work uses it any more.
pub struct AscendStorage {
    device: Arc<Device>,
    address: u64,
    len: usize,
    kind: MemoryKind,
    owner: Owner,
    /// Whether the memory is on loan for an activation of the dense steps.
    activation: bool,
}

/// The way in which the memory of a storage goes.
enum Owner {
    Device,
    Pinned,
    Reserved(#[expect(dead_code, reason = "held for its Drop")] reserved::Reservation),
    Lent(#[expect(dead_code, reason = "held for its Drop")] Arc<dyn Any + Send + Sync>),
}

impl fmt::Debug for AscendStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "AscendStorage({} bytes of {} memory at {:#x} on {:?})",
            self.len, self.kind, self.address, self.device
        )
    }
}

impl AscendStorage {
    /// Allocates zeroed memory.
    pub(crate) fn allocate(device: &Arc<Device>, kind: MemoryKind, bytes: usize) -> Result<Self> {
        let storage = Self::uninitialised(device, kind, bytes)?;
        let _bound = device.bind()?;
        match kind {
            // SAFETY: the pinned memory was just allocated for `bytes` bytes.
            MemoryKind::Pinned => unsafe { (storage.address as *mut u8).write_bytes(0, bytes) },
            // SAFETY: the memory was just allocated for `bytes` bytes, and nothing else knows the address.
            _ => unsafe { device.zero(storage.address, bytes) }?,
        }
        Ok(storage)
    }

    /// Allocates memory with arbitrary contents.
    pub(crate) fn uninitialised(device: &Arc<Device>, kind: MemoryKind, bytes: usize) -> Result<Self> {
        if bytes == 0 {
            return Err(Error::Zero { what: "bytes of an allocation" });
        }
        let acl = &device.library.acl;
        let _bound = device.bind()?;
        let mut address = std::ptr::null_mut();
        // SAFETY: `address` is a place for the answer, and the device's context is current.
        let (code, owner) = match kind {
            MemoryKind::Device => (
                unsafe { acl.aclrtMalloc(&raw mut address, bytes, sys::ACL_MEM_MALLOC_HUGE_FIRST) },
                Owner::Device,
            ),
            // SAFETY: as above.
            MemoryKind::Pinned => (unsafe { acl.aclrtMallocHost(&raw mut address, bytes) }, Owner::Pinned),
            other => {
                let what = format!("{other} memory, which the device does not reach: take pinned memory");
                return Err(Error::Unsupported { backend: NAME, what });
            }
        };
        device.check_memory(code, kind, bytes)?;
        Ok(Self {
            device: Arc::clone(device),
            address: address as u64,
            len: bytes,
            kind,
            owner,
            activation: false,
        })
    }

    /// Wraps memory of the caller.
    ///
    /// # Safety
    /// See [`AscendBackend::lent`](crate::AscendBackend::lent).
    pub(crate) unsafe fn lent(
        device: &Arc<Device>,
        address: u64,
        bytes: usize,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<Self> {
        if bytes == 0 || address == 0 {
            return Err(Error::Zero { what: "address or bytes of lent memory" });
        }
        let (device, kind, owner) = (Arc::clone(device), MemoryKind::Device, Owner::Lent(owner));
        Ok(Self { device, address, len: bytes, kind, owner, activation: false })
    }

    /// Marks the memory as that of activations.
    pub(crate) fn for_activations(mut self) -> Self {
        self.activation = true;
        self
    }

    /// Returns whether the memory is on loan for an activation of the dense steps.
    pub(crate) fn is_activation(&self) -> bool {
        self.activation
    }

    /// Returns the address of pinned memory on the host.
    pub(crate) fn host(&self) -> Option<*mut u8> {
        (self.kind == MemoryKind::Pinned).then_some(self.address as *mut u8)
    }
}

/// Returns the storage if it is of the device, or pinned memory of the process.
///
/// # Errors
/// Returns [`Error::ForeignHandle`] for any other storage.
pub(crate) fn of<'a>(device: &Arc<Device>, storage: &'a Arc<dyn Storage>) -> Result<&'a AscendStorage> {
    let known = storage.as_any().downcast_ref::<AscendStorage>();
    known
        .filter(|known| Arc::ptr_eq(&known.device, device))
        .ok_or(Error::ForeignHandle { what: "a storage", backend: NAME })
}

impl Drop for AscendStorage {
    fn drop(&mut self) {
        let Ok(_bound) = self.device.bind_lost() else { return };
        let acl = &self.device.library.acl;
        let address = self.address as *mut c_void;
        // SAFETY: each pointer came from the allocation that its owner names. No enqueued work uses it, because work
        // holds its storages until it is done.
        match self.owner {
            Owner::Device => unsafe { acl.aclrtFree(address) },
            // SAFETY: as above.
            Owner::Pinned => unsafe { acl.aclrtFreeHost(address) },
            Owner::Reserved(_) | Owner::Lent(_) => 0,
        };
    }
}

impl Storage for AscendStorage {
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
