//! Options of the backend.

use std::path::PathBuf;

/// Options of a [`CudaBackend`](crate::CudaBackend). The default is the first device, with the kernels that are part of
/// the crate.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CudaOptions {
    /// Number of the device, as the driver counts them (`CUDA_VISIBLE_DEVICES` changes the order).
    pub device: usize,
    /// Where kernels come from.
    pub kernels: KernelCode,
}

/// The origin of a device's kernels.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum KernelCode {
    /// The PTX in this crate, for the oldest card that it serves. The driver compiles it further for the card.
    #[default]
    Committed,
    /// Compiled on this machine for its card, by NVRTC, which must be installed.
    Compiled {
        /// Folder in which the code is kept for the next start. Without one, it is compiled at each start.
        keep_in: Option<PathBuf>,
    },
}
