//! Reserved memory: addresses that stay while physical memory behind them goes and comes back, granule by granule.

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::result::DriverError;
use cudarc::driver::sys::{self, CUdeviceptr, CUmemAllocationProp, CUmemGenericAllocationHandle};
use kvcore::{Error, MemoryKind, ReservedStorage, Result, Storage, check_granules};
use parking_lot::Mutex;

use super::{CudaStorage, Owner};
use crate::NAME;
use crate::device::{self, Device};

/// Number of granules up to which a reservation has granules of the least size. Larger reservations have larger ones,
/// because each is a call of the driver.
const FINE: usize = 2048;

/// Largest granule.
const LARGEST: usize = 64 << 20;

/// Reserved memory of a device.
///
/// The granularity is a power of two, at least the driver's (usually 2 MiB). Each granule has physical memory of its
/// own, so that any granule can be released while its neighbours stay in use.
#[derive(Debug)]
pub struct CudaReserved {
    storage: CudaStorage,
    granule: usize,
    handles: Arc<Mutex<Vec<Option<CUmemGenericAllocationHandle>>>>,
}

/// Reserved addresses, and the physical memory that is mapped there.
pub(super) struct Reservation {
    device: Arc<Device>,
    address: CUdeviceptr,
    len: usize,
    granule: usize,
    handles: Arc<Mutex<Vec<Option<CUmemGenericAllocationHandle>>>>,
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let Ok(_bound) = self.device.bind() else { return };
        let mut handles = self.handles.lock();
        for (i, handle) in handles.iter_mut().enumerate() {
            if let Some(handle) = handle.take() {
                // SAFETY: `handle` is mapped at granule `i`, and no work uses the storage any more.
                unsafe { release(self.address + (i * self.granule) as u64, self.granule, handle) };
            }
        }
        // SAFETY: the addresses were reserved with this length, and nothing is mapped there.
        let _ = unsafe { sys::cuMemAddressFree(self.address, self.len) };
    }
}

/// Describes physical memory of a device.
fn properties(ordinal: i32) -> CUmemAllocationProp {
    // SAFETY: all zeros is a valid value of a plain C struct.
    let mut properties: CUmemAllocationProp = unsafe { std::mem::zeroed() };
    properties.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    properties.location.id = ordinal;
    properties
}

/// Unmaps a granule and gives its memory back.
///
/// # Safety
/// `handle` is mapped at `address` with `bytes` bytes, and no work uses them.
unsafe fn release(address: CUdeviceptr, bytes: usize, handle: CUmemGenericAllocationHandle) {
    // SAFETY: as the caller guarantees.
    unsafe {
        let _ = sys::cuMemUnmap(address, bytes);
        let _ = sys::cuMemRelease(handle);
    }
}

/// Maps new physical memory at an address.
///
/// # Safety
/// The `bytes` bytes from `address` on are reserved, and nothing is mapped there.
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
    // SAFETY: the descriptions are valid, and the range is the caller's.
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
    pub(crate) fn reserve(device: &Arc<Device>, kind: MemoryKind, bytes: usize) -> Result<Self> {
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
        let granule = (bytes / FINE).next_power_of_two().min(LARGEST).max(least.next_power_of_two());
        let len = bytes
            .checked_next_multiple_of(granule)
            .ok_or(Error::Overflow { what: "bytes of a reservation" })?;
        // SAFETY: with address 0 the driver chooses an unused range.
        unsafe { sys::cuMemAddressReserve(&raw mut address, len, granule, 0, 0) }
            .result()
            .map_err(refused)?;
        let handles = Arc::new(Mutex::new(vec![None; len / granule]));
        let reservation =
            Reservation { device: Arc::clone(device), address, len, granule, handles: Arc::clone(&handles) };
        let owner = Owner::Reserved(reservation);
        let host = std::ptr::null_mut();
        let storage =
            CudaStorage { device: Arc::clone(device), address, len, kind, host, owner, lender: None };
        let reserved = Self { storage, granule, handles };
        reserved.map(0..len)?;
        Ok(reserved)
    }

    fn at(&self, granule: usize) -> CUdeviceptr {
        self.storage.address + (granule * self.granule) as u64
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

    /// Returns the inner [`CudaStorage`], which kernels look for.
    fn as_any(&self) -> &dyn Any {
        &self.storage
    }
}

impl ReservedStorage for CudaReserved {
    fn granularity(&self) -> usize {
        self.granule
    }

    fn map(&self, range: Range<usize>) -> Result<()> {
        check_granules(&range, self.granule, self.storage.len)?;
        let device = &self.storage.device;
        let _bound = device.bind()?;
        let mut handles = self.handles.lock();
        let mut placed = Vec::new();
        for i in (range.start / self.granule..range.end / self.granule).filter(|&i| handles[i].is_none()) {
            let made = unsafe {
                // SAFETY: granule `i` lies in the reservation and has no memory.
                place(device.ordinal, self.at(i), self.granule)
                    .map_err(|error| device.no_memory(error, MemoryKind::Device, range.len()))
                    // SAFETY: the granule is new, and nothing else uses it.
                    .and_then(|handle| {
                        device::zero(device, self.at(i), self.granule).map(|()| handle).inspect_err(|_| {
                            release(self.at(i), self.granule, handle);
                        })
                    })
            };
            match made {
                Ok(handle) => placed.push((i, handle)),
                Err(error) => {
                    for (i, handle) in placed {
                        // SAFETY: the granule was mapped above, and nothing uses it yet.
                        unsafe { release(self.at(i), self.granule, handle) };
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
        let _bound = self.storage.device.bind()?;
        let mut handles = self.handles.lock();
        for i in range.start / self.granule..range.end / self.granule {
            if let Some(handle) = handles[i].take() {
                // SAFETY: `handle` is mapped at granule `i`; the caller has waited for the work that uses it.
                unsafe { release(self.at(i), self.granule, handle) };
            }
        }
        Ok(())
    }

    fn mapped_bytes(&self) -> usize {
        self.handles.lock().iter().flatten().count() * self.granule
    }
}
