//! An opened device: its context, what it can do, its health, and what streams and storages share.

use std::collections::HashSet;
use std::fmt;
use std::sync::{Arc, OnceLock};

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{self, CUcontext, CUdevice, CUdevice_attribute, CUmemoryPool, CUstream};
use kvcore::{Counters, Error, MemoryKind, Result};
use parking_lot::Mutex;

use crate::NAME;
use crate::driver::{self, Bound};
use crate::module::Modules;
use crate::options::{CudaOptions, KernelCode};

/// Compute capability of the oldest devices that the kernels serve.
const OLDEST: i32 = 8;

/// A device whose primary context is retained.
pub(crate) struct Device {
    pub(crate) ordinal: i32,
    pub(crate) handle: CUdevice,
    pub(crate) context: CUcontext,
    pub(crate) facts: DeviceFacts,
    pub(crate) counters: Counters,
    pub(crate) modules: Modules,
    /// The stream on which memory is zeroed and freed. Nothing else runs on it.
    pub(crate) setup: CUstream,
    /// The pool of device memory, if the device has pools.
    pub(crate) pool: Option<CUmemoryPool>,
    /// The devices to whose memory peer access was asked for.
    pub(crate) peers: Mutex<HashSet<i32>>,
    lost: OnceLock<String>,
}

// SAFETY: the driver's handles may be used from any thread; contexts are bound to a thread for each call.
unsafe impl Send for Device {}
// SAFETY: as for `Send`; the driver locks what calls share.
unsafe impl Sync for Device {}

/// The facts of a device that decide how kernels are launched.
#[derive(Debug, Clone)]
pub(crate) struct DeviceFacts {
    pub(crate) name: String,
    pub(crate) total_memory: usize,
    pub(crate) compute_capability: (i32, i32),
    pub(crate) multiprocessors: u32,
    /// Most bytes of shared memory of a block.
    pub(crate) shared_memory: u32,
    /// Whether memory can be reserved and mapped.
    pub(crate) virtual_memory: bool,
    /// Whether memory comes from stream-ordered pools.
    pub(crate) pools: bool,
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({}, {})", self.ordinal, self.facts.name)
    }
}

/// Reads the facts of a device.
pub(crate) fn facts(handle: CUdevice) -> Result<DeviceFacts, DriverError> {
    use CUdevice_attribute::{
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED,
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED,
    };
    // SAFETY: `handle` is a device that the driver returned.
    let attribute = |attribute| unsafe { result::device::get_attribute(handle, attribute) };
    Ok(DeviceFacts {
        name: result::device::get_name(handle)?,
        // SAFETY: `handle` is a device that the driver returned.
        total_memory: unsafe { result::device::total_mem(handle) }?,
        compute_capability: (
            attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        multiprocessors: attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32,
        shared_memory: attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)? as u32,
        virtual_memory: attribute(CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED)? != 0,
        pools: attribute(CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED)? != 0,
    })
}

/// Returns the reason why the backend cannot use a device, if there is one.
pub(crate) fn unfit(facts: &DeviceFacts) -> Option<String> {
    let (major, minor) = facts.compute_capability;
    (major < OLDEST).then(|| {
        format!(
            "compute capability {major}.{minor} is too old for the kernels, which need {OLDEST}.0; the wgpu backend may \
             serve it"
        )
    })
}

impl Device {
    /// Opens a device by its number.
    ///
    /// # Errors
    /// Returns [`Error::NoDevice`] if there is no such device, if it is too old for the kernels, or if the driver
    /// refuses to open it.
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
        let facts = facts(handle).map_err(refused)?;
        if let Some(reason) = unfit(&facts) {
            return Err(driver::no_device(format!("device {ordinal} ({}): {reason}", facts.name)));
        }
        // SAFETY: `handle` is a device that the driver returned; the context is released by `Drop`.
        let context = unsafe { result::primary_ctx::retain(handle) }.map_err(refused)?;
        let made = Self::in_context(ordinal, handle, context, facts, options.kernels.clone());
        if made.is_err() {
            // SAFETY: the context was retained above, and nothing of it is left.
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
        let _bound = Bound::new(context)?;
        let refused = |error| driver::no_device(format!("device {ordinal}: {}", driver::text(error)));
        let setup = result::stream::create(result::stream::StreamKind::NonBlocking).map_err(refused)?;
        let pool = if facts.pools {
            Some(crate::memory::create_pool(ordinal).map_err(|error| {
                // SAFETY: the stream was created above, and nothing else knows it.
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
    /// Returns [`Error::DeviceLost`] if the context has ended.
    pub(crate) fn bind(&self) -> Result<Bound> {
        if let Some(reason) = self.lost.get() {
            return Err(Error::DeviceLost { backend: NAME, reason: reason.clone() });
        }
        Bound::new(self.context).map_err(|error| self.noted(error))
    }

    /// Returns the error of a refused call, and remembers that the device is lost if it says so.
    pub(crate) fn refused(&self, error: DriverError) -> Error {
        self.noted(driver::refused(error))
    }

    /// Returns the error of a refused allocation, as [`refused`](Self::refused) does.
    pub(crate) fn no_memory(&self, error: DriverError, kind: MemoryKind, bytes: usize) -> Error {
        self.noted(driver::no_memory(error, kind, bytes))
    }

    fn noted(&self, error: Error) -> Error {
        if let Error::DeviceLost { reason, .. } = &error {
            let _ = self.lost.set(reason.clone());
        }
        error
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if let Ok(_bound) = Bound::new(self.context) {
            self.modules.unload();
            // SAFETY: storages and streams hold the device, so that nothing uses the stream, the pool or the
            // context any more.
            unsafe {
                // Frees that are still enqueued come before the end of their pool.
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

/// Waits for the setup stream, so that all streams see what it did.
pub(crate) fn settle(device: &Device) -> Result<()> {
    // SAFETY: the device owns the stream.
    unsafe { result::stream::synchronize(device.setup) }.map_err(|error| device.refused(error))
}

/// Zeroes bytes of the device before anything else uses them.
///
/// # Safety
/// The `bytes` bytes from `address` on belong to the caller, and no enqueued work uses them.
pub(crate) unsafe fn zero(device: &Device, address: sys::CUdeviceptr, bytes: usize) -> Result<()> {
    // SAFETY: the caller guarantees that the range is its own.
    unsafe { result::memset_d8_async(address, 0, bytes, device.setup) }
        .map_err(|error| device.refused(error))?;
    settle(device)
}
