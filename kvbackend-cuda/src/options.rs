//! Options of the backend.

use std::path::PathBuf;

/// Options of a [`CudaBackend`](crate::CudaBackend). The default is the first device with the committed
/// kernels.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CudaOptions {
    /// Number of the device in the driver's order, which `CUDA_VISIBLE_DEVICES` changes.
    pub device: usize,
    /// Where kernels come from.
    pub kernels: KernelCode,
}

// Decision: docs/decisions/backend-cuda.md#kernels-are-compiled-at-run-time-only-on-request
/// The origin of a device's kernels.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum KernelCode {
    /// The PTX in this crate, written for the oldest supported card. The driver compiles it for the card in
    /// use.
    #[default]
    Committed,
    /// Code that NVRTC compiles on this machine for its card. NVRTC must be installed.
    Compiled {
        /// Folder that keeps the code for the next start. Without a folder, each start compiles.
        keep_in: Option<PathBuf>,
    },
}
