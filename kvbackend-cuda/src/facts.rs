//! A device's properties, as reported by the driver.

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{CUdevice, CUdevice_attribute};

/// The lowest major compute capability that the kernels support.
const OLDEST: i32 = 8;

/// A device's properties, which determine how kernels are launched.
#[derive(Debug, Clone)]
pub(crate) struct DeviceFacts {
    pub(crate) name: String,
    pub(crate) total_memory: usize,
    pub(crate) compute_capability: (i32, i32),
    pub(crate) multiprocessors: u32,
    /// The maximum shared memory per block, in bytes.
    pub(crate) shared_memory: u32,
    /// True if address ranges can be reserved and physical memory can be mapped to them.
    pub(crate) virtual_memory: bool,
    /// True if the device supports stream-ordered memory pools.
    pub(crate) pools: bool,
}

impl DeviceFacts {
    /// Reads a device's properties.
    pub(crate) fn of(handle: CUdevice) -> Result<Self, DriverError> {
        use CUdevice_attribute::{
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
            CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
            CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED,
        };
        // SAFETY: `handle` is a device that the driver returned.
        let attribute = |attribute| unsafe { result::device::get_attribute(handle, attribute) };
        Ok(Self {
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

    /// Returns the reason why the backend cannot use the device, or `None` if it can.
    pub(crate) fn unfit(&self) -> Option<String> {
        let (major, minor) = self.compute_capability;
        (major < OLDEST).then(|| {
            format!(
                "compute capability {major}.{minor} is too old for the kernels, which need {OLDEST}.0; the wgpu backend \
                 may support it"
            )
        })
    }
}
