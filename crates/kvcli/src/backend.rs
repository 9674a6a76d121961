//! Backends by name.

use std::sync::Arc;

use kvcore::Backend;

use crate::args::BackendName;
use crate::error::Result;

/// Opens the backend of the given name.
///
/// # Errors
/// Returns an error if this program was built without the backend, or if the machine has no such device.
#[cfg_attr(
    all(feature = "cpu", not(any(feature = "cuda", feature = "wgpu"))),
    allow(clippy::unnecessary_wraps, reason = "other builds lack a backend")
)]
pub(crate) fn open(name: &BackendName) -> Result<Arc<dyn Backend>> {
    match name {
        #[cfg(feature = "cpu")]
        BackendName::Cpu => Ok(kvbackend_cpu::CpuBackend::new()),
        #[cfg(not(feature = "cpu"))]
        BackendName::Cpu => Err(crate::error::Error::NoBackend("cpu")),
        #[cfg(feature = "cuda")]
        BackendName::Cuda(device) => {
            let options = kvbackend_cuda::CudaOptions { device: *device };
            Ok(kvbackend_cuda::CudaBackend::with_options(&options).map_err(kvmodel::Error::from)?)
        }
        #[cfg(not(feature = "cuda"))]
        BackendName::Cuda(_) => Err(crate::error::Error::NoBackend("cuda")),
        #[cfg(feature = "wgpu")]
        BackendName::Wgpu(adapter) => {
            let options = kvbackend_wgpu::WgpuOptions {
                adapter: adapter.clone(),
                ..kvbackend_wgpu::WgpuOptions::default()
            };
            Ok(kvbackend_wgpu::WgpuBackend::with_options(&options).map_err(kvmodel::Error::from)?)
        }
        #[cfg(not(feature = "wgpu"))]
        BackendName::Wgpu(_) => Err(crate::error::Error::NoBackend("wgpu")),
    }
}
