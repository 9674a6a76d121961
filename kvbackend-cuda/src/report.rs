//! Reports this machine's devices for display.

use cudarc::driver::result;
use kvcore::Result;

use crate::facts::DeviceFacts;
use crate::{device, driver};

/// A device found by the driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CudaReport {
    /// Index of the device, for [`CudaOptions::device`](crate::CudaOptions::device).
    pub ordinal: usize,
    /// The GPU's name.
    pub name: String,
    /// Compute capability: major and minor.
    pub compute_capability: (i32, i32),
    /// Total device memory in bytes.
    pub total_memory: usize,
    /// True if memory can be reserved and mapped. Memory pools need this in order to sleep.
    pub virtual_memory: bool,
    /// The reason why the backend cannot use the device, or `None` if it can.
    pub unfit: Option<String>,
    /// The driver's CUDA version, for example 13000 for 13.0.
    pub driver: i32,
}

/// Returns this machine's devices.
///
/// # Errors
/// Returns [`kvcore::Error::NoDevice`] if there is no driver, or if the driver does not start.
pub fn devices() -> Result<Vec<CudaReport>> {
    let version = driver::version()?;
    let refused = |error| driver::no_device(driver::text(error));
    (0..device::count()?)
        .map(|ordinal| {
            let handle = result::device::get(ordinal as i32).map_err(refused)?;
            let facts = DeviceFacts::of(handle).map_err(refused)?;
            Ok(CudaReport {
                ordinal,
                unfit: facts.unfit(),
                name: facts.name,
                virtual_memory: facts.virtual_memory,
                compute_capability: facts.compute_capability,
                total_memory: facts.total_memory,
                driver: version,
            })
        })
        .collect()
}
