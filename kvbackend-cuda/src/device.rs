//! An open device: its context, properties and health, and the memory pool and kernels that streams and
//! storages share.

use std::collections::HashSet;
use std::fmt;
use std::sync::{Arc, OnceLock};

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{self, CUcontext, CUdevice, CUdeviceptr, CUfunction, CUmemoryPool, CUstream};
use kvcore::{Counters, Error, MemoryKind, Result};
use parking_lot::Mutex;

use crate::driver::{self, CurrentContext, NAME};
use crate::facts::DeviceFacts;
use crate::module::{CudaKernel, Modules};
use crate::options::{CudaOptions, KernelCode};

/// The number of bytes that the pool keeps for later allocations instead of returning them to the device.
const KEPT: u64 = 64 << 20;

/// An open device with its primary context, which stays retained until this value is dropped.
pub(crate) struct CudaDevice {
    pub(crate) ordinal: i32,
    pub(crate) handle: CUdevice,
    pub(crate) context: CUcontext,
    pub(crate) facts: DeviceFacts,
    pub(crate) counters: Counters,
    modules: Modules,
    /// The stream on which memory is zeroed, filled and freed. Nothing else runs on it.
    pub(crate) setup: CUstream,
    /// The pool for device memory, if the device supports pools.
    pub(crate) pool: Option<CUmemoryPool>,
    /// Indices of the devices whose memory this device has requested peer access to.
    pub(crate) peers: Mutex<HashSet<i32>>,
    // Decision: docs/decisions/backend-cuda.md#a-lost-device-stays-lost
    lost: OnceLock<String>,
}

// SAFETY: the driver's handles may be used from any thread; a context is made current for each call.
unsafe impl Send for CudaDevice {}
// SAFETY: the same condition as for `Send`; the driver locks the state that calls share.
unsafe impl Sync for CudaDevice {}

impl fmt::Debug for CudaDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({}, {})", self.ordinal, self.facts.name)
    }
}

impl CudaDevice {
    /// Opens the device with the given index.
    ///
    /// # Errors
    /// Returns [`Error::NoDevice`] if there is no such device, if it is too old for the kernels, or if the
    /// driver cannot open it.
    pub(crate) fn open(options: &CudaOptions) -> Result<Arc<Self>> {
        let ordinal = options.device;
        driver::version()?;
        let refused = |error| driver::no_device(format!("device {ordinal}: {}", driver::text(error)));
        let count = result::device::get_count().map_err(refused)?;
        let ordinal = i32::try_from(ordinal).unwrap_or(i32::MAX);
        if ordinal >= count {
            let reason = match count {
                0 => "the driver found no device".to_owned(),
                _ => format!("there is no device {ordinal}; the devices are 0 to {}", count - 1),
            };
            return Err(driver::no_device(reason));
        }
        let handle = result::device::get(ordinal).map_err(refused)?;
        let facts = DeviceFacts::of(handle).map_err(refused)?;
        if let Some(reason) = facts.unfit() {
            return Err(driver::no_device(format!("device {ordinal} ({}): {reason}", facts.name)));
        }
        // SAFETY: `handle` is a device that the driver returned; the context is released by `Drop`.
        let context = unsafe { result::primary_ctx::retain(handle) }.map_err(refused)?;
        let made = Self::in_context(ordinal, handle, context, facts, options.kernels.clone());
        if made.is_err() {
            // SAFETY: the context was retained above, and nothing uses it.
            let _ = unsafe { result::primary_ctx::release(handle) };
        }
        made
    }

    fn in_context(
        ordinal: i32,
        handle: CUdevice,
        context: CUcontext,
        facts: DeviceFacts,
        kernels: KernelCode,
    ) -> Result<Arc<Self>> {
        let _bound = CurrentContext::new(context)?;
        let refused = |error| driver::no_device(format!("device {ordinal}: {}", driver::text(error)));
        let setup = result::stream::create(result::stream::StreamKind::NonBlocking).map_err(refused)?;
        let pool = if facts.pools {
            Some(create_pool(ordinal).map_err(|error| {
                // SAFETY: the stream was created above, and nothing else uses it.
                let _ = unsafe { result::stream::destroy(setup) };
                refused(error)
            })?)
        } else {
            None
        };
        Ok(Arc::new(Self {
            ordinal,
            handle,
            context,
            facts,
            counters: Counters::default(),
            modules: Modules::new(kernels),
            setup,
            pool,
            peers: Mutex::default(),
            lost: OnceLock::new(),
        }))
    }

    /// Makes the device's context current on this thread.
    ///
    /// # Errors
    /// Returns [`Error::DeviceLost`] if the device is lost.
    pub(crate) fn bind(&self) -> Result<CurrentContext> {
        if let Some(reason) = self.lost.get() {
            return Err(Error::DeviceLost { backend: NAME, reason: reason.clone() });
        }
        CurrentContext::new(self.context).map_err(|error| self.noted(error))
    }

    /// Returns the error for a failed call. If the error destroys the device's context, marks the device as
    /// lost.
    pub(crate) fn refused(&self, error: DriverError) -> Error {
        self.noted(driver::refused(error))
    }

    /// Returns the error for a failed allocation. Like [`refused`](Self::refused), marks the device as lost
    /// if its context is destroyed.
    pub(crate) fn no_memory(&self, error: DriverError, kind: MemoryKind, bytes: usize) -> Error {
        self.noted(driver::no_memory(error, kind, bytes))
    }

    /// Returns a kernel, which is loaded on first use. The device's context must be current.
    ///
    /// # Errors
    /// Returns [`Error::Unsupported`] if the kernel needs more shared memory per block than the device has,
    /// or an error of the driver or the compiler.
    pub(crate) fn kernel(&self, kernel: CudaKernel) -> Result<CUfunction> {
        self.modules.get(&self.facts, kernel).map_err(|error| self.noted(error))
    }

    /// Waits for the setup stream's work, so that all streams can see its results.
    pub(crate) fn settle(&self) -> Result<()> {
        // SAFETY: the device owns the stream.
        unsafe { result::stream::synchronize(self.setup) }.map_err(|error| self.refused(error))
    }

    /// Zeroes bytes on the device, and waits until this is done.
    ///
    /// # Safety
    /// The `bytes` bytes at `address` must belong to the caller, and no enqueued work may use them.
    pub(crate) unsafe fn zero(&self, address: CUdeviceptr, bytes: usize) -> Result<()> {
        // SAFETY: the caller guarantees that it owns the range.
        unsafe { result::memset_d8_async(address, 0, bytes, self.setup) }
            .map_err(|error| self.refused(error))?;
        self.settle()
    }

    fn noted(&self, error: Error) -> Error {
        if let Error::DeviceLost { reason, .. } = &error {
            let _ = self.lost.set(reason.clone());
        }
        error
    }
}

/// Creates a pool for the device's memory. The device's context must be current.
fn create_pool(ordinal: i32) -> Result<CUmemoryPool, DriverError> {
    // SAFETY: all zeros is a valid value of a plain C struct, and of the unions in it.
    let mut properties: sys::CUmemPoolProps = unsafe { std::mem::zeroed() };
    properties.allocType = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    properties.location.id = ordinal;
    let mut kept = KEPT;
    // SAFETY: `properties` describes a pool of an open device; the threshold is a 64-bit number, as the
    // driver requires.
    unsafe {
        let pool = result::mem_pool::create(&raw const properties)?;
        let threshold = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        let set = sys::cuMemPoolSetAttribute(pool, threshold, (&raw mut kept).cast()).result();
        if let Err(error) = set {
            let _ = result::mem_pool::destroy(pool);
            return Err(error);
        }
        Ok(pool)
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        if let Ok(_bound) = CurrentContext::new(self.context) {
            self.modules.unload();
            // SAFETY: storages and streams hold the device, so nothing uses the stream, the pool or the
            // context anymore.
            unsafe {
                // Enqueued frees must run before the pool is destroyed.
                let _ = result::stream::synchronize(self.setup);
                let _ = result::stream::destroy(self.setup);
                if let Some(pool) = self.pool {
                    let _ = result::mem_pool::destroy(pool);
                }
            }
        }
        // SAFETY: `open` retained the context once.
        let _ = unsafe { result::primary_ctx::release(self.handle) };
    }
}

/// Returns the number of devices.
pub(crate) fn count() -> Result<usize> {
    driver::version()?;
    let count = result::device::get_count().map_err(|error| driver::no_device(driver::text(error)))?;
    Ok(count.max(0) as usize)
}
