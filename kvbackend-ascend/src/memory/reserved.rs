//! Reserved memory: addresses that stay while physical memory behind them goes and comes back, granule by granule.

use std::any::Any;
use std::ffi::c_void;
use std::ops::Range;
use std::sync::Arc;

use kvcore::{Error, MemoryKind, ReservedStorage, Result, Storage, check_granules};
use parking_lot::Mutex;

use super::{AscendStorage, Owner};
use crate::bindings::types as sys;
use crate::device::Npu;
use crate::errors::unsupported;

/// Number of granules up to which a reservation has granules of the least size. Larger reservations have larger ones,
/// because each is a call of the driver.
const FINE: usize = 2048;

/// Largest granule.
const LARGEST: usize = 64 << 20;

/// A handle of physical memory.
#[derive(Debug)]
struct Handle(sys::aclrtDrvMemHandle);

// SAFETY: handles may be used from any thread that has the device's context current.
unsafe impl Send for Handle {}

/// Reserved memory of a device.
///
/// The granularity is a power of two, at least ACL's (usually 2 MiB). Each granule has physical memory of its own, so that
/// any granule can be released while its neighbours stay in use.
#[derive(Debug)]
pub struct AscendReserved {
    storage: AscendStorage,
    granule: usize,
    handles: Arc<Mutex<Vec<Option<Handle>>>>,
}

/// Reserved addresses, and the physical memory that is mapped there.
pub(super) struct Reservation {
    npu: Arc<Npu>,
    address: u64,
    granule: usize,
    handles: Arc<Mutex<Vec<Option<Handle>>>>,
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let Ok(_current) = self.npu.bind_lost() else { return };
        for (i, handle) in self.handles.lock().iter_mut().enumerate() {
            if let Some(handle) = handle.take() {
                // SAFETY: `handle` is mapped at granule `i`, and no work uses the storage any more.
                unsafe { release(&self.npu, self.address + (i * self.granule) as u64, &handle) };
            }
        }
        // SAFETY: the addresses were reserved, and nothing is mapped there.
        unsafe { self.npu.library.acl.aclrtReleaseMemAddress(self.address as *mut c_void) };
    }
}

/// Returns whether the libraries can reserve and map memory.
pub(crate) fn is_there(npu: &Npu) -> bool {
    let acl = &npu.library.acl;
    acl.aclrtMemGetAllocationGranularity.is_ok()
        && acl.aclrtReserveMemAddress.is_ok()
        && acl.aclrtReleaseMemAddress.is_ok()
        && acl.aclrtMallocPhysical.is_ok()
        && acl.aclrtFreePhysical.is_ok()
        && acl.aclrtMapMem.is_ok()
        && acl.aclrtUnmapMem.is_ok()
}

/// Describes physical memory of a device.
fn properties(ordinal: i32) -> sys::aclrtPhysicalMemProp {
    sys::aclrtPhysicalMemProp {
        handleType: sys::ACL_MEM_HANDLE_TYPE_NONE,
        allocationType: sys::ACL_MEM_ALLOCATION_TYPE_PINNED,
        memAttr: sys::ACL_HBM_MEM_HUGE,
        location: sys::aclrtMemLocation { id: ordinal as u32, type_: sys::ACL_MEM_LOCATION_TYPE_DEVICE },
        reserve: 0,
    }
}

/// Unmaps a granule and gives its memory back: in this order, because memory that is freed first goes only when it is
/// unmapped.
///
/// # Safety
/// `handle` is mapped at `address`, and no work uses the memory.
unsafe fn release(npu: &Npu, address: u64, handle: &Handle) {
    let acl = &npu.library.acl;
    // SAFETY: as the caller guarantees.
    unsafe {
        acl.aclrtUnmapMem(address as *mut c_void);
        acl.aclrtFreePhysical(handle.0);
    }
}

/// Maps new physical memory at an address. Returns the error code if ACL refuses.
///
/// # Safety
/// The `bytes` bytes from `address` on are reserved, and nothing is mapped there.
unsafe fn place(npu: &Npu, address: u64, bytes: usize) -> std::result::Result<Handle, i32> {
    let (acl, properties, mut handle) = (&npu.library.acl, properties(npu.ordinal), std::ptr::null_mut());
    // SAFETY: the description is valid, and the range is the caller's.
    unsafe {
        match acl.aclrtMallocPhysical(&raw mut handle, bytes, &raw const properties, 0) {
            0 => {}
            code => return Err(code),
        }
        match acl.aclrtMapMem(address as *mut c_void, bytes, 0, handle, 0) {
            0 => Ok(Handle(handle)),
            code => {
                acl.aclrtFreePhysical(handle);
                Err(code)
            }
        }
    }
}

impl AscendReserved {
    pub(crate) fn reserve(npu: &Arc<Npu>, kind: MemoryKind, bytes: usize) -> Result<Self> {
        if bytes == 0 {
            return Err(Error::Zero { what: "bytes of a reservation" });
        }
        if kind != MemoryKind::Device || !is_there(npu) {
            let what =
                format!("reserving {kind} memory; reserve device memory, with a CANN that maps memory");
            return Err(unsupported(what));
        }
        let _current = npu.bind()?;
        let acl = &npu.library.acl;
        let (mut properties, mut least, mut address) = (properties(npu.ordinal), 0, std::ptr::null_mut());
        // SAFETY: `properties` describes memory of this device, and `least` is a place for the answer.
        let code = unsafe {
            acl.aclrtMemGetAllocationGranularity(
                &raw mut properties,
                sys::ACL_RT_MEM_ALLOC_GRANULARITY_MINIMUM,
                &raw mut least,
            )
        };
        npu.check_memory(code, kind, bytes)?;
        let granule = (bytes / FINE).next_power_of_two().min(LARGEST).max(least.next_power_of_two());
        let len = bytes
            .checked_next_multiple_of(granule)
            .ok_or(Error::Overflow { what: "bytes of a reservation" })?;
        // SAFETY: without an expected address ACL chooses an unused range.
        let code = unsafe { acl.aclrtReserveMemAddress(&raw mut address, len, 0, std::ptr::null_mut(), 0) };
        npu.check_memory(code, kind, bytes)?;
        let address = address as u64;
        let handles = Arc::new(Mutex::new((0..len / granule).map(|_| None).collect()));
        let reservation =
            Reservation { npu: Arc::clone(npu), address, granule, handles: Arc::clone(&handles) };
        let owner = Owner::Reserved(reservation);
        let storage = AscendStorage { npu: Arc::clone(npu), address, len, kind, owner, activation: false };
        let reserved = Self { storage, granule, handles };
        reserved.map(0..len)?;
        Ok(reserved)
    }

    fn at(&self, granule: usize) -> u64 {
        self.storage.address + (granule * self.granule) as u64
    }

    /// Maps zeroed memory at a granule that has none.
    fn place(&self, granule: usize, wanted: usize) -> Result<Handle> {
        let npu = &self.storage.npu;
        // SAFETY: the granule lies in the reservation and has no memory.
        let handle = unsafe { place(npu, self.at(granule), self.granule) }
            .map_err(|code| npu.memory_error(code, MemoryKind::Device, wanted))?;
        // SAFETY: the granule is new, and nothing else uses it.
        match unsafe { npu.zero(self.at(granule), self.granule) } {
            Ok(()) => Ok(handle),
            Err(error) => {
                // SAFETY: the granule was mapped above, and nothing uses it.
                unsafe { release(npu, self.at(granule), &handle) };
                Err(error)
            }
        }
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

    /// Returns the inner [`AscendStorage`], which operations look for.
    fn as_any(&self) -> &dyn Any {
        &self.storage
    }
}

impl ReservedStorage for AscendReserved {
    fn granularity(&self) -> usize {
        self.granule
    }

    fn map(&self, range: Range<usize>) -> Result<()> {
        check_granules(&range, self.granule, self.storage.len)?;
        let npu = &self.storage.npu;
        let _current = npu.bind()?;
        let mut handles = self.handles.lock();
        let mut placed = Vec::new();
        for i in (range.start / self.granule..range.end / self.granule).filter(|&i| handles[i].is_none()) {
            match self.place(i, range.len()) {
                Ok(handle) => placed.push((i, handle)),
                Err(error) => {
                    for (i, handle) in placed {
                        // SAFETY: the granule was mapped above, and nothing uses it yet.
                        unsafe { release(npu, self.at(i), &handle) };
                    }
                    return Err(error);
                }
            }
        }
        for (i, handle) in placed {
            handles[i] = Some(handle);
        }
        Ok(())
    }

    fn unmap(&self, range: Range<usize>) -> Result<()> {
        check_granules(&range, self.granule, self.storage.len)?;
        let npu = &self.storage.npu;
        let _current = npu.bind()?;
        let mut handles = self.handles.lock();
        for i in range.start / self.granule..range.end / self.granule {
            if let Some(handle) = handles[i].take() {
                // SAFETY: `handle` is mapped at granule `i`; the caller has waited for the work that uses it.
                unsafe { release(npu, self.at(i), &handle) };
            }
        }
        Ok(())
    }

    fn mapped_bytes(&self) -> usize {
        self.handles.lock().iter().flatten().count() * self.granule
    }
}
