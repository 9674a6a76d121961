//! Copies of tensors of any strides, within the device and between the device and pinned memory.

use kvcore::{CopyTensor, MemoryKind, Result, TensorView};
use smallvec::SmallVec;

use crate::bindings::types as sys;
use crate::memory;
use crate::operators::Tensor;
use crate::stream::{Way, Work};

pub(super) fn copy_tensor(work: &mut Work<'_>, op: &CopyTensor) -> Result<()> {
    if op.dst.is_empty() {
        return Ok(());
    }
    let device = work.device();
    if memory::of(device, op.src.storage()).is_err() {
        let peer = memory::of_peer(device, op.src.storage())?;
        return memory::copy_from(work, peer, op);
    }
    let on_host = |view: &TensorView| view.storage().kind() != MemoryKind::Device;
    match (on_host(&op.src), on_host(&op.dst)) {
        (false, false) => within(work, &Bytes::of(&op.src), &Bytes::of(&op.dst)),
        (true, false) => {
            let src = up(work, &op.src)?;
            within(work, &src, &Bytes::of(&op.dst))
        }
        (false, true) => down(work, &Bytes::of(&op.src), &op.dst),
        (true, true) => {
            let src = up(work, &op.src)?;
            down(work, &src, &op.dst)
        }
    }
}

/// A view as elements whose bits are copied: numbers of one, two, four or eight bytes.
#[derive(Debug, Clone)]
struct Bytes(Tensor);

impl Bytes {
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
                // Rows of smaller elements are whole bytes, and begin at one.
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

    /// Returns the bytes from the first element to the last.
    fn span(&self) -> usize {
        self.0.span() * crate::operators::bytes_of(self.0.dtype())
    }

    /// Returns the same elements from another address on.
    fn at(&self, address: u64) -> Self {
        Self(self.0.moved(address))
    }
}

/// Copies within the device.
fn within(work: &mut Work<'_>, src: &Bytes, dst: &Bytes) -> Result<()> {
    if src.0.is_dense() && dst.0.is_dense() {
        return work.copy_bytes(dst.0.address(), src.0.address(), src.span(), Way::Within);
    }
    work.convert(&src.0, &dst.0)
}

/// Copies a view of pinned memory to the device, with the bytes between its elements.
fn up(work: &mut Work<'_>, src: &TensorView) -> Result<Bytes> {
    let src = Bytes::of(src);
    let staged = work.bytes(src.span())?;
    work.copy_bytes(staged, src.0.address(), src.span(), Way::Up)?;
    Ok(src.at(staged))
}

/// Copies to a view of pinned memory.
fn down(work: &mut Work<'_>, src: &Bytes, dst: &TensorView) -> Result<()> {
    let dst = Bytes::of(dst);
    if src.0.is_dense() && dst.0.is_dense() {
        return work.copy_bytes(dst.0.address(), src.0.address(), src.span(), Way::Down);
    }
    let staged = work.bytes(dst.span())?;
    if !dst.0.is_dense() {
        // What lies between the elements stays.
        work.copy_bytes(staged, dst.0.address(), dst.span(), Way::Up)?;
    }
    within(work, src, &dst.at(staged))?;
    work.copy_bytes(dst.0.address(), staged, dst.span(), Way::Down)
}
