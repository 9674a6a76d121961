//! The backend's options.

use std::path::PathBuf;

/// Options for a [`CudaBackend`](crate::CudaBackend). By default, the backend uses the first device, and the
/// committed kernels.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CudaOptions {
    /// Index of the device among the ones that the driver lists. `CUDA_VISIBLE_DEVICES` selects and orders
    /// them.
    pub device: usize,
    /// The source of the kernels.
    pub kernels: KernelCode,
}

// Decision: docs/decisions/backend-cuda.md#kernels-are-compiled-at-run-time-only-on-request
/// The source of a device's kernels.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum KernelCode {
    /// The PTX in this crate, compiled for the oldest supported GPU. The driver compiles it further for the
    /// actual GPU.
    #[default]
    Committed,
    /// Code that NVRTC compiles on this machine for its GPU. NVRTC must be installed.
    Compiled {
        /// The folder that caches the compiled code. Without a folder, the kernels are compiled at every
        /// start.
        keep_in: Option<PathBuf>,
    },
}
