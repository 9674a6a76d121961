//! Methods of tensor views that copy elements, also between host and device.

use super::TensorView;
use crate::base::{Error, MemoryKind, Result};
use crate::device::{Backend, CopyTensor, Stream, allocate_tensor};

/// Copies are enqueued and do not block. Wait for the stream before the host reads the result, and use an
/// event to order work on other streams. Source and destination may have any strides.
///
/// ```
/// use kvbackend_cpu::CpuBackend;
/// use kvcore::{Backend, DType, MemoryKind, allocate_tensor};
///
/// let backend = CpuBackend::new();
/// let stream = backend.stream()?;
/// let host = allocate_tensor(backend.as_ref(), MemoryKind::Pinned, DType::U8, &[2, 3])?;
/// stream.write(&host, &[1, 2, 3, 4, 5, 6])?;
/// let device = allocate_tensor(backend.as_ref(), MemoryKind::Device, DType::U8, &[3, 2])?;
/// host.permute(&[1, 0])?.h2d(&device, stream.as_ref())?;       // transposed on the way
/// let mut bytes = [0; 6];
/// stream.read(&device, &mut bytes)?;
/// assert_eq!(bytes, [1, 4, 2, 5, 3, 6]);
///
/// let column = device.slice(1, 0, 1)?.contiguous(backend.as_ref(), stream.as_ref())?;
/// stream.read(&column, &mut bytes[..3])?;
/// assert_eq!(bytes[..3], [1, 2, 3]);
/// # Ok::<(), kvcore::Error>(())
/// ```
impl TensorView {
    /// Copies the elements to `dst`, which must have the same shape and element type.
    ///
    /// # Errors
    /// Returns the errors of [`CopyTensor::check`], and [`Error::ForeignHandle`] if a view is in another
    /// backend's memory. Nothing is enqueued in these cases.
    pub fn copy_to(&self, dst: &Self, stream: &dyn Stream) -> Result<()> {
        stream.copy_tensor(&CopyTensor { src: self.clone(), dst: dst.clone() })
    }

    /// Returns a contiguous view of the same elements. If this view is contiguous, the result is a clone of
    /// it (as in `PyTorch`); otherwise the result is a copy in new memory of the same kind. To copy into
    /// existing memory, use [`copy_to`](Self::copy_to).
    ///
    /// # Errors
    /// Returns [`Error::Allocation`] if there is not enough memory for the copy, and the errors of
    /// [`copy_to`](Self::copy_to).
    pub fn contiguous(&self, backend: &dyn Backend, stream: &dyn Stream) -> Result<Self> {
        if self.is_contiguous() {
            return Ok(self.clone());
        }
        let copy = allocate_tensor(backend, self.storage().kind(), self.dtype(), self.shape())?;
        self.copy_to(&copy, stream)?;
        Ok(copy)
    }

    /// Copies this view of host memory to a view of device memory (like `cudaMemcpyAsync`, host to device).
    /// The device reads [`MemoryKind::Pinned`] memory directly; for [`MemoryKind::System`] memory a backend
    /// may use a staging buffer.
    ///
    /// # Errors
    /// Returns [`Error::WrongMemory`] if this view is not in host memory or `device` is not in device memory,
    /// and the errors of [`copy_to`](Self::copy_to).
    pub fn h2d(&self, device: &Self, stream: &dyn Stream) -> Result<()> {
        in_host("source of a host-to-device copy", self)?;
        in_device("destination of a host-to-device copy", device)?;
        self.copy_to(device, stream)
    }

    /// Copies this view of device memory to a view of host memory.
    ///
    /// # Errors
    /// Returns [`Error::WrongMemory`] if this view is not in device memory or `host` is not in host memory,
    /// and the errors of [`copy_to`](Self::copy_to).
    pub fn d2h(&self, host: &Self, stream: &dyn Stream) -> Result<()> {
        in_device("source of a device-to-host copy", self)?;
        in_host("destination of a device-to-host copy", host)?;
        self.copy_to(host, stream)
    }
}

fn in_host(what: &'static str, view: &TensorView) -> Result<()> {
    match view.storage().kind() {
        kind if kind.is_host() => Ok(()),
        got => Err(Error::WrongMemory { what, expected: "host", got }),
    }
}

fn in_device(what: &'static str, view: &TensorView) -> Result<()> {
    match view.storage().kind() {
        MemoryKind::Device => Ok(()),
        got => Err(Error::WrongMemory { what, expected: "device", got }),
    }
}
