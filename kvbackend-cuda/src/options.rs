//! The backend's options.

use std::path::PathBuf;

/// Options of a [`CudaBackend`](crate::CudaBackend). By default, the first device and the committed kernels
/// are used.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CudaOptions {
    /// Index of the device in the driver's order, which `CUDA_VISIBLE_DEVICES` changes.
    pub device: usize,
    /// Where the kernels come from.
    pub kernels: KernelCode,
}

// Decision: docs/decisions/backend-cuda.md#kernels-are-compiled-at-run-time-only-on-request
/// Where a device's kernels come from.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum KernelCode {
    /// The PTX in this crate, made for the oldest supported card. The driver compiles it for the actual card.
    #[default]
    Committed,
    /// Code that NVRTC compiles on this machine, for its card. NVRTC must be installed.
    Compiled {
        /// Folder that caches the code for the next start. Without a folder, every start compiles.
        keep_in: Option<PathBuf>,
    },
}
