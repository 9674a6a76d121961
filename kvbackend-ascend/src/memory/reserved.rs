//! Reserved memory: a range of addresses stays reserved while its physical memory is freed and mapped again,
//! one granule at a time.

use std::any::Any;
use std::ffi::c_void;
use std::ops::Range;
use std::sync::Arc;

use kvcore::device::queue::{Granules, granules_for};
use kvcore::{Error, MemoryKind, ReservedStorage, Result, Storage};

use super::AscendStorage;
use crate::bindings::types as sys;
use crate::device::Npu;
use crate::errors::unsupported;

/// A handle to physical memory.
#[derive(Debug)]
struct PhysicalMemory(sys::aclrtDrvMemHandle);

// SAFETY: handles may be used from any thread on which the device's context is current.
unsafe impl Send for PhysicalMemory {}

/// A reserved range of addresses on a device, with its physical memory.
///
/// The granularity is a power of two, at least ACL's minimum (usually 2 MiB). Each granule has its own
/// physical memory, which can be freed while its neighbours stay in use.
#[derive(Debug)]
pub struct AscendReserved {
    storage: AscendStorage,
    addresses: Arc<ReservedAddresses>,
}

/// Reserved addresses, and the physical memory that is mapped to them.
#[derive(Debug)]
struct ReservedAddresses {
    npu: Arc<Npu>,
    address: u64,
    granules: Granules<PhysicalMemory>,
}

impl Drop for ReservedAddresses {
    fn drop(&mut self) {
        let Ok(_current) = self.npu.bind_lost() else { return };
        self.granules.unmap(0..self.granules.reserved_bytes(), |at, handle| {
            // SAFETY: `handle` is mapped at `at`. No work uses the memory anymore, because work holds its
            // storage.
            unsafe { self.release(at, &handle) }
        });
        // SAFETY: the addresses were reserved, and nothing is mapped there.
        unsafe { self.npu.library.acl.aclrtReleaseMemAddress(self.address as *mut c_void) };
    }
}

/// Returns whether the libraries can reserve and map memory.
pub(crate) fn maps(npu: &Npu) -> bool {
    let acl = &npu.library.acl;
    acl.aclrtMemGetAllocationGranularity.is_ok()
        && acl.aclrtReserveMemAddress.is_ok()
        && acl.aclrtReleaseMemAddress.is_ok()
        && acl.aclrtMallocPhysical.is_ok()
        && acl.aclrtFreePhysical.is_ok()
        && acl.aclrtMapMem.is_ok()
        && acl.aclrtUnmapMem.is_ok()
}

/// Describes the physical memory to allocate on a device.
fn properties(ordinal: i32) -> sys::aclrtPhysicalMemProp {
    sys::aclrtPhysicalMemProp {
        handleType: sys::ACL_MEM_HANDLE_TYPE_NONE,
        allocationType: sys::ACL_MEM_ALLOCATION_TYPE_PINNED,
        memAttr: sys::ACL_HBM_MEM_HUGE,
        location: sys::aclrtMemLocation { id: ordinal as u32, type_: sys::ACL_MEM_LOCATION_TYPE_DEVICE },
        reserve: 0,
    }
}

impl ReservedAddresses {
    /// Unmaps a granule and then frees its memory. The order matters: memory that is freed first remains
    /// allocated until it is unmapped.
    ///
    /// # Safety
    /// `handle` must be mapped at offset `at`, and no work may use the memory.
    unsafe fn release(&self, at: usize, handle: &PhysicalMemory) {
        let acl = &self.npu.library.acl;
        // SAFETY: the caller guarantees that `handle` is mapped at `at`, and that the memory is unused.
        unsafe {
            acl.aclrtUnmapMem((self.address + at as u64) as *mut c_void);
            acl.aclrtFreePhysical(handle.0);
        }
    }

    /// Maps new physical memory at an offset. Returns ACL's error code if that fails.
    ///
    /// # Safety
    /// `at` must be the offset of a granule without memory.
    unsafe fn place(&self, at: usize) -> std::result::Result<PhysicalMemory, i32> {
        let (acl, bytes) = (&self.npu.library.acl, self.granules.granule());
        let (properties, mut handle) = (properties(self.npu.ordinal), std::ptr::null_mut());
        let address = (self.address + at as u64) as *mut c_void;
        // SAFETY: the description is valid, and the range is reserved and has no memory.
        unsafe {
            match acl.aclrtMallocPhysical(&raw mut handle, bytes, &raw const properties, 0) {
                0 => {}
                code => return Err(code),
            }
            match acl.aclrtMapMem(address, bytes, 0, handle, 0) {
                0 => Ok(PhysicalMemory(handle)),
                code => {
                    acl.aclrtFreePhysical(handle);
                    Err(code)
                }
            }
        }
    }

    /// Maps zeroed memory to a granule that has no memory. `wanted`, the total number of bytes that the
    /// caller maps, is only reported in errors.
    fn place_zeroed(&self, at: usize, wanted: usize) -> Result<PhysicalMemory> {
        // SAFETY: `map` calls this only for granules without memory.
        let handle = unsafe { self.place(at) }
            .map_err(|code| self.npu.memory_error(code, MemoryKind::Device, wanted))?;
        // SAFETY: the granule is new, and nothing else uses it.
        match unsafe { self.npu.zero(self.address + at as u64, self.granules.granule()) } {
            Ok(()) => Ok(handle),
            Err(error) => {
                // SAFETY: the granule was mapped above, and nothing uses it.
                unsafe { self.release(at, &handle) };
                Err(error)
            }
        }
    }

    fn map(&self, range: Range<usize>) -> Result<()> {
        self.granules.check(&range)?;
        let (_current, wanted) = (self.npu.bind()?, range.len());
        let place = |at| self.place_zeroed(at, wanted);
        // SAFETY: the granule was mapped by the same call, and nothing uses it yet.
        self.granules.map(range, place, |at, handle| unsafe { self.release(at, &handle) })
    }
}

impl AscendReserved {
    pub(crate) fn reserve(npu: &Arc<Npu>, kind: MemoryKind, bytes: usize) -> Result<Self> {
        if bytes == 0 {
            return Err(Error::Zero { what: "bytes of a reservation" });
        }
        if kind != MemoryKind::Device || !maps(npu) {
            let what =
                format!("reserving {kind} memory; reserve device memory, with a CANN that maps memory");
            return Err(unsupported(what));
        }
        let _current = npu.bind()?;
        let acl = &npu.library.acl;
        let (mut properties, mut least, mut address) = (properties(npu.ordinal), 0, std::ptr::null_mut());
        // SAFETY: `properties` describes memory of this device, and `least` is valid for writes.
        let code = unsafe {
            acl.aclrtMemGetAllocationGranularity(
                &raw mut properties,
                sys::ACL_RT_MEM_ALLOC_GRANULARITY_MINIMUM,
                &raw mut least,
            )
        };
        npu.check_memory(code, kind, bytes)?;
        let (granule, len) = granules_for(bytes, least)?;
        // SAFETY: without an expected address, ACL chooses an unused range.
        let code = unsafe { acl.aclrtReserveMemAddress(&raw mut address, len, 0, std::ptr::null_mut(), 0) };
        npu.check_memory(code, kind, bytes)?;
        let (npu, address) = (Arc::clone(npu), address as u64);
        let addresses = Arc::new(ReservedAddresses { npu, address, granules: Granules::new(granule, len) });
        addresses.map(0..len)?;
        let storage = AscendStorage::owned(&addresses.npu, address, len, Arc::clone(&addresses) as _);
        Ok(Self { storage, addresses })
    }
}

impl Storage for AscendReserved {
    fn len(&self) -> usize {
        self.storage.len
    }

    fn address(&self) -> u64 {
        self.storage.address
    }

    fn kind(&self) -> MemoryKind {
        self.storage.kind
    }

    /// Returns the inner [`AscendStorage`], which operations downcast to.
    fn as_any(&self) -> &dyn Any {
        &self.storage
    }
}

impl ReservedStorage for AscendReserved {
    fn granularity(&self) -> usize {
        self.addresses.granules.granule()
    }

    fn map(&self, range: Range<usize>) -> Result<()> {
        self.addresses.map(range)
    }

    /// The caller must have waited for the work that uses the range.
    fn unmap(&self, range: Range<usize>) -> Result<()> {
        let ReservedAddresses { npu, granules, .. } = &*self.addresses;
        granules.check(&range)?;
        let _current = npu.bind()?;
        // SAFETY: `handle` is mapped at this offset; the caller has waited for the work that uses it.
        granules.unmap(range, |at, handle| unsafe { self.addresses.release(at, &handle) });
        Ok(())
    }

    fn mapped_bytes(&self) -> usize {
        self.addresses.granules.mapped_bytes()
    }
}
