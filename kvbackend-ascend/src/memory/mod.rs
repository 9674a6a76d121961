//! Storages: device memory, pinned host memory, memory that the caller lends, and reserved address ranges.

use std::any::Any;
use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

use kvcore::{Error, MemoryKind, Result, Storage};

use crate::bindings::types as sys;
use crate::device::Npu;
use crate::errors::{foreign, unsupported};

mod peer;
mod reserved;

pub(crate) use peer::of_peer;
pub(crate) use reserved::maps;

pub use reserved::AscendReserved;

/// A range of device memory or of pinned host memory.
///
/// The address is a device pointer, or a host pointer for pinned memory. ACL frees memory immediately, even
/// if work still uses it. Enqueued operations therefore hold the storage, whose memory is freed once no work
/// uses it.
pub struct AscendStorage {
    npu: Arc<Npu>,
    address: u64,
    len: usize,
    kind: MemoryKind,
    free_call: FreeCall,
    /// True if the memory holds an activation of the dense steps.
    activation: bool,
}

/// The call that frees a storage's memory.
enum FreeCall {
    Device,
    Pinned,
    /// No call: the owner frees the memory, and is dropped with the storage.
    Owner(#[expect(dead_code, reason = "held for its Drop")] Arc<dyn Any + Send + Sync>),
}

impl fmt::Debug for AscendStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "AscendStorage({} bytes of {} memory at {:#x} on {:?})",
            self.len, self.kind, self.address, self.npu
        )
    }
}

impl AscendStorage {
    /// Allocates zeroed memory.
    pub(crate) fn allocate(npu: &Arc<Npu>, kind: MemoryKind, bytes: usize) -> Result<Self> {
        let storage = Self::uninitialised(npu, kind, bytes)?;
        let _current = npu.bind()?;
        match kind {
            // SAFETY: the pinned memory was just allocated for `bytes` bytes.
            MemoryKind::Pinned => unsafe { (storage.address as *mut u8).write_bytes(0, bytes) },
            // SAFETY: the memory was just allocated for `bytes` bytes, and nothing else uses it.
            _ => unsafe { npu.zero(storage.address, bytes) }?,
        }
        Ok(storage)
    }

    /// Allocates memory with arbitrary contents.
    pub(crate) fn uninitialised(npu: &Arc<Npu>, kind: MemoryKind, bytes: usize) -> Result<Self> {
        if bytes == 0 {
            return Err(Error::Zero { what: "bytes of an allocation" });
        }
        let acl = &npu.library.acl;
        let _current = npu.bind()?;
        let mut address = std::ptr::null_mut();
        // SAFETY: `address` is valid for writes, and the device's context is current.
        let (code, free_call) = match kind {
            MemoryKind::Device => (
                unsafe { acl.aclrtMalloc(&raw mut address, bytes, sys::ACL_MEM_MALLOC_HUGE_FIRST) },
                FreeCall::Device,
            ),
            // SAFETY: `address` is valid for writes, and the device's context is current.
            MemoryKind::Pinned => (unsafe { acl.aclrtMallocHost(&raw mut address, bytes) }, FreeCall::Pinned),
            other => {
                let what = "memory, which the device cannot access; use pinned memory";
                return Err(unsupported(format!("{other} {what}")));
            }
        };
        npu.check_memory(code, kind, bytes)?;
        Ok(Self {
            npu: Arc::clone(npu),
            address: address as u64,
            len: bytes,
            kind,
            free_call,
            activation: false,
        })
    }

    /// Creates a storage over the caller's memory.
    ///
    /// # Safety
    /// See [`AscendBackend::lent`](crate::AscendBackend::lent).
    pub(crate) unsafe fn lent(
        npu: &Arc<Npu>,
        address: u64,
        bytes: usize,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<Self> {
        if bytes == 0 || address == 0 {
            return Err(Error::Zero { what: "address or bytes of lent memory" });
        }
        Ok(Self::owned(npu, address, bytes, owner))
    }

    /// Creates a storage over device memory that its owner frees.
    fn owned(npu: &Arc<Npu>, address: u64, len: usize, owner: Arc<dyn Any + Send + Sync>) -> Self {
        let (npu, kind, free_call) = (Arc::clone(npu), MemoryKind::Device, FreeCall::Owner(owner));
        Self { npu, address, len, kind, free_call, activation: false }
    }

    /// Marks the memory as activation memory.
    pub(crate) fn for_activations(mut self) -> Self {
        self.activation = true;
        self
    }

    /// Returns whether the memory holds an activation of the dense steps.
    pub(crate) fn is_activation(&self) -> bool {
        self.activation
    }

    /// Returns the host address of pinned memory, or `None` for device memory.
    pub(crate) fn host(&self) -> Option<*mut u8> {
        (self.kind == MemoryKind::Pinned).then_some(self.address as *mut u8)
    }
}

/// Downcasts a storage of this device to this backend's type.
///
/// # Errors
/// Returns [`Error::ForeignHandle`] if the storage belongs to another backend or device.
pub(crate) fn of<'a>(npu: &Arc<Npu>, storage: &'a Arc<dyn Storage>) -> Result<&'a AscendStorage> {
    let known = storage.as_any().downcast_ref::<AscendStorage>();
    known.filter(|known| Arc::ptr_eq(&known.npu, npu)).ok_or(foreign("a storage"))
}

/// Checks that operators can access a storage.
///
/// # Errors
/// Returns [`Error::Unsupported`] if the storage is not in device memory.
pub(crate) fn on_device(what: &str, storage: &Arc<dyn Storage>) -> Result<()> {
    match storage.kind() {
        MemoryKind::Device => Ok(()),
        other => Err(unsupported(format!("{what} in {other} memory; copy it to the device first"))),
    }
}

impl Drop for AscendStorage {
    fn drop(&mut self) {
        let Ok(_current) = self.npu.bind_lost() else { return };
        let acl = &self.npu.library.acl;
        let address = self.address as *mut c_void;
        // SAFETY: `free_call` matches the call that allocated the pointer. No enqueued work uses the memory,
        // because work holds its storages until it is done.
        match self.free_call {
            FreeCall::Device => unsafe { acl.aclrtFree(address) },
            // SAFETY: `aclrtMallocHost` allocated the pointer, and no enqueued work uses it.
            FreeCall::Pinned => unsafe { acl.aclrtFreeHost(address) },
            FreeCall::Owner(_) => 0,
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
