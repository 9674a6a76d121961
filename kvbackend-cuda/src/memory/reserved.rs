//! Reserved memory: a fixed range of addresses, whose physical memory is mapped and unmapped one granule at a
//! time.

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::result::DriverError;
use cudarc::driver::sys::{self, CUdeviceptr, CUmemAllocationProp, CUmemGenericAllocationHandle};
use kvcore::device::queue::{Granules, granules_for};
use kvcore::{Error, MemoryKind, ReservedStorage, Result, Storage};

use super::{CudaStorage, FreedBy};
use crate::device::CudaDevice;
use crate::driver::NAME;

/// A reserved range of addresses on a device, with its physical memory.
///
/// The granularity is a power of two, at least the driver's minimum (usually 2 MiB). Each granule has its own
/// physical memory, which can be released while its neighbours stay in use.
#[derive(Debug)]
pub struct CudaReserved {
    storage: CudaStorage,
    granules: Arc<Granules<CUmemGenericAllocationHandle>>,
}

/// Reserved addresses, and the physical memory that is mapped to them.
pub(super) struct CudaReservation {
    device: Arc<CudaDevice>,
    address: CUdeviceptr,
    len: usize,
    granules: Arc<Granules<CUmemGenericAllocationHandle>>,
}

impl Drop for CudaReservation {
    fn drop(&mut self) {
        let Ok(_bound) = self.device.bind() else { return };
        let (address, granule) = (self.address, self.granules.granule());
        // SAFETY: each handle is mapped at its offset, and no work uses the storage anymore.
        self.granules
            .unmap(0..self.len, |at, handle| unsafe { release(address + at as u64, granule, handle) });
        // SAFETY: the addresses were reserved with this length, and nothing is mapped there.
        let _ = unsafe { sys::cuMemAddressFree(self.address, self.len) };
    }
}

/// Describes the physical memory to allocate on a device.
fn properties(ordinal: i32) -> CUmemAllocationProp {
    // SAFETY: all zeros is a valid value of a plain C struct.
    let mut properties: CUmemAllocationProp = unsafe { std::mem::zeroed() };
    properties.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    properties.location.id = ordinal;
    properties
}

/// Unmaps a granule and frees its physical memory.
///
/// # Safety
/// `handle` must be mapped at `address` with `bytes` bytes, and no work may use this memory.
unsafe fn release(address: CUdeviceptr, bytes: usize, handle: CUmemGenericAllocationHandle) {
    // SAFETY: the caller guarantees that `handle` is mapped there, and that no work uses the memory.
    unsafe {
        let _ = sys::cuMemUnmap(address, bytes);
        let _ = sys::cuMemRelease(handle);
    }
}

/// Allocates physical memory and maps it at an address.
///
/// # Safety
/// The `bytes` bytes at `address` must be reserved, and nothing may be mapped there.
unsafe fn place(
    ordinal: i32,
    address: CUdeviceptr,
    bytes: usize,
) -> Result<CUmemGenericAllocationHandle, DriverError> {
    let (properties, mut handle) = (properties(ordinal), 0);
    let access = sys::CUmemAccessDesc {
        location: properties.location,
        flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    };
    // SAFETY: the descriptions are valid, and the caller guarantees that the range is reserved and unmapped.
    unsafe {
        sys::cuMemCreate(&raw mut handle, bytes, &raw const properties, 0).result()?;
        if let Err(error) = sys::cuMemMap(address, bytes, 0, handle, 0).result() {
            let _ = sys::cuMemRelease(handle);
            return Err(error);
        }
        if let Err(error) = sys::cuMemSetAccess(address, bytes, &raw const access, 1).result() {
            release(address, bytes, handle);
            return Err(error);
        }
    }
    Ok(handle)
}

impl CudaReserved {
    pub(crate) fn reserve(device: &Arc<CudaDevice>, kind: MemoryKind, bytes: usize) -> Result<Self> {
        if bytes == 0 {
            return Err(Error::Zero { what: "bytes of a reservation" });
        }
        if kind != MemoryKind::Device || !device.facts.virtual_memory {
            let what =
                format!("reserving {kind} memory; reserve device memory, on a device with virtual memory");
            return Err(Error::Unsupported { backend: NAME, what });
        }
        let _bound = device.bind()?;
        let refused = |error| device.no_memory(error, kind, bytes);
        let (properties, mut least, mut address) = (properties(device.ordinal), 0usize, 0);
        let minimum = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        // SAFETY: `properties` describes memory of this device.
        unsafe { sys::cuMemGetAllocationGranularity(&raw mut least, &raw const properties, minimum) }
            .result()
            .map_err(refused)?;
        let (granule, len) = granules_for(bytes, least)?;
        // SAFETY: with address 0 the driver chooses an unused range.
        unsafe { sys::cuMemAddressReserve(&raw mut address, len, granule, 0, 0) }
            .result()
            .map_err(refused)?;
        let granules = Arc::new(Granules::new(granule, len));
        let reservation =
            CudaReservation { device: Arc::clone(device), address, len, granules: Arc::clone(&granules) };
        let owner = FreedBy::Reserved(reservation);
        let host = std::ptr::null_mut();
        let storage =
            CudaStorage { device: Arc::clone(device), address, len, kind, host, owner, lender: None };
        let reserved = Self { storage, granules };
        reserved.map(0..len)?;
        Ok(reserved)
    }

    /// Maps zeroed memory at an offset. `wanted` is the number of bytes that an error reports.
    fn place(&self, at: usize, wanted: usize) -> Result<CUmemGenericAllocationHandle> {
        let CudaStorage { device, address, .. } = &self.storage;
        let (address, granule) = (address + at as u64, self.granules.granule());
        // SAFETY: the granule is in the reservation and has no memory. Nothing uses the new memory yet.
        unsafe {
            let handle = place(device.ordinal, address, granule)
                .map_err(|error| device.no_memory(error, MemoryKind::Device, wanted))?;
            device.zero(address, granule).inspect_err(|_| release(address, granule, handle))?;
            Ok(handle)
        }
    }

    /// Returns a function that unmaps and frees the granule at a given offset.
    fn release(&self) -> impl Fn(usize, CUmemGenericAllocationHandle) {
        let (address, granule) = (self.storage.address, self.granules.granule());
        // SAFETY: `granules` passes each handle with its offset, and no work uses the granule.
        move |at, handle| unsafe { release(address + at as u64, granule, handle) }
    }
}

impl Storage for CudaReserved {
    fn len(&self) -> usize {
        self.storage.len
    }

    fn address(&self) -> u64 {
        self.storage.address
    }

    fn kind(&self) -> MemoryKind {
        self.storage.kind
    }

    /// Returns the inner [`CudaStorage`], which operations downcast to.
    fn as_any(&self) -> &dyn Any {
        &self.storage
    }
}

impl ReservedStorage for CudaReserved {
    fn granularity(&self) -> usize {
        self.granules.granule()
    }

    fn map(&self, range: Range<usize>) -> Result<()> {
        self.granules.check(&range)?;
        let _bound = self.storage.device.bind()?;
        let wanted = range.len();
        self.granules.map(range, |at| self.place(at, wanted), self.release())
    }

    fn unmap(&self, range: Range<usize>) -> Result<()> {
        self.granules.check(&range)?;
        let _bound = self.storage.device.bind()?;
        self.granules.unmap(range, self.release());
        Ok(())
    }

    fn mapped_bytes(&self) -> usize {
        self.granules.mapped_bytes()
    }
}
