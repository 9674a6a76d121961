//! Copies of tensors with any strides: on one device, between the device and pinned memory, and from other
//! devices.

use std::sync::Arc;

use kvcore::{CopyTensor, MemoryKind, Result, TensorView};
use smallvec::SmallVec;

use crate::bindings::types as sys;
use crate::device::Npu;
use crate::errors::unsupported;
use crate::memory;
use crate::operators::{Tensor, bytes_of};
use crate::queue::{CopyDirection, Work};

pub(super) fn copy_tensor(work: &mut Work<'_>, op: &CopyTensor) -> Result<()> {
    if op.dst.is_empty() {
        return Ok(());
    }
    let npu = work.npu();
    if memory::of(npu, op.src.storage()).is_err() {
        let peer = memory::of_peer(npu, op.src.storage())?;
        return copy_from(work, peer, op);
    }
    let on_host = |view: &TensorView| view.storage().kind() != MemoryKind::Device;
    match (on_host(&op.src), on_host(&op.dst)) {
        (false, false) => on_device(work, &BitTensor::of(&op.src), &BitTensor::of(&op.dst)),
        (true, false) => {
            let src = to_device(work, &op.src)?;
            on_device(work, &src, &BitTensor::of(&op.dst))
        }
        (false, true) => to_host(work, &BitTensor::of(&op.src), &op.dst),
        (true, true) => {
            let src = to_device(work, &op.src)?;
            to_host(work, &src, &op.dst)
        }
    }
}

/// A view as integers of one, two, four or eight bytes, for copying its elements bit for bit.
#[derive(Debug, Clone)]
struct BitTensor(Tensor);

impl BitTensor {
    fn of(view: &TensorView) -> Self {
        let at = view.storage().address();
        let (mut dims, mut strides): (SmallVec<[usize; 8]>, SmallVec<[usize; 8]>) =
            (view.shape().into(), view.strides().into());
        let (dtype, offset) = match view.dtype().bits() {
            64 => (sys::ACL_INT64, view.offset() * 8),
            32 => (sys::ACL_INT32, view.offset() * 4),
            16 => (sys::ACL_INT16, view.offset() * 2),
            8 => (sys::ACL_INT8, view.offset()),
            bits => {
                // Rows of elements smaller than a byte start at a byte boundary and consist of whole bytes.
                let per_byte = 8 / bits;
                let last = dims.len().saturating_sub(1);
                for (axis, (dim, stride)) in dims.iter_mut().zip(&mut strides).enumerate() {
                    if axis == last {
                        *dim /= per_byte;
                    } else {
                        *stride /= per_byte;
                    }
                }
                (sys::ACL_INT8, view.offset() / per_byte)
            }
        };
        Self(Tensor::strided(at + offset as u64, dtype, &dims, &strides))
    }

    /// Returns the number of bytes from the first element through the last.
    fn span(&self) -> usize {
        self.0.span() * bytes_of(self.0.dtype())
    }

    /// Returns the same view at another address.
    fn at(&self, address: u64) -> Self {
        Self(self.0.moved(address))
    }
}

/// Copies between two views on the device.
fn on_device(work: &mut Work<'_>, src: &BitTensor, dst: &BitTensor) -> Result<()> {
    if src.0.is_dense() && dst.0.is_dense() {
        return work.copy_bytes(dst.0.address(), src.0.address(), src.span(), CopyDirection::OnDevice);
    }
    work.convert(&src.0, &dst.0)
}

/// Copies a view in pinned memory to the device, including the bytes between its elements.
fn to_device(work: &mut Work<'_>, src: &TensorView) -> Result<BitTensor> {
    let src = BitTensor::of(src);
    let staged = work.bytes(src.span())?;
    work.copy_bytes(staged, src.0.address(), src.span(), CopyDirection::ToDevice)?;
    Ok(src.at(staged))
}

/// Copies a tensor on the device to a view in pinned memory.
fn to_host(work: &mut Work<'_>, src: &BitTensor, dst: &TensorView) -> Result<()> {
    let dst = BitTensor::of(dst);
    if src.0.is_dense() && dst.0.is_dense() {
        return work.copy_bytes(dst.0.address(), src.0.address(), src.span(), CopyDirection::ToHost);
    }
    let staged = work.bytes(dst.span())?;
    if !dst.0.is_dense() {
        // The bytes between the elements stay unchanged.
        work.copy_bytes(staged, dst.0.address(), dst.span(), CopyDirection::ToDevice)?;
    }
    on_device(work, src, &dst.at(staged))?;
    work.copy_bytes(dst.0.address(), staged, dst.span(), CopyDirection::ToHost)
}

/// Enqueues a copy from another device's memory. The work must hold both storages.
///
/// # Errors
/// Returns [`kvcore::Error::Unsupported`] if a view is not contiguous, [`kvcore::Error::DeviceLost`] if the
/// other device is lost, or a device error.
fn copy_from(work: &mut Work<'_>, peer: &Arc<Npu>, op: &CopyTensor) -> Result<()> {
    let address = |view: &TensorView| {
        if !view.is_contiguous() {
            let what = "a copy between devices of a view that is not contiguous; copy the view first";
            return Err(unsupported(what));
        }
        let range = view.host_range(view.dtype().bytes_for(view.len())?)?;
        Ok(view.storage().address() + range.start as u64)
    };
    let (dst, src) = (address(&op.dst)?, address(&op.src)?);
    // An error here concerns only the other device: the receiving device is not lost.
    drop(peer.bind()?);
    let npu = work.npu();
    if npu.ordinal != peer.ordinal && npu.peers.lock().insert(peer.ordinal) {
        // Another backend on the device may already have enabled access. If the peer cannot be reached, the
        // copy itself fails.
        // SAFETY: the device's context is current, and the only valid value for the flags is 0.
        unsafe { npu.library.acl.aclrtDeviceEnablePeerAccess(peer.ordinal, 0) };
    }
    work.copy_bytes(dst, src, op.bytes(), CopyDirection::OnDevice)
}
