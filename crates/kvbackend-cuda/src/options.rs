//! Options of the backend.

/// Options of a [`CudaBackend`](crate::CudaBackend). The default is the first device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CudaOptions {
    /// Number of the device, as the driver counts them (`CUDA_VISIBLE_DEVICES` changes the order).
    pub device: usize,
}
