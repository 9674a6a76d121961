//! Copies from device to device.

use std::sync::Arc;

use kvcore::{CopyTensor, Error, MemoryKind, Result, Storage, TensorView};

use super::AscendStorage;
use crate::NAME;
use crate::device::Device;
use crate::stream::{Way, Work};

/// Returns the device of a storage that lies on another one than `device`, and that `device` reaches.
///
/// # Errors
/// Returns [`Error::ForeignHandle`] for a storage of another backend, of the host, and of a device that has no way to this
/// one.
pub(crate) fn of_peer<'a>(device: &Device, storage: &'a Arc<dyn Storage>) -> Result<&'a Arc<Device>> {
    let foreign = || Error::ForeignHandle { what: "a storage", backend: NAME };
    let known = storage.as_any().downcast_ref::<AscendStorage>();
    let known = known.filter(|known| known.kind == MemoryKind::Device).ok_or_else(foreign)?;
    if known.device.ordinal == device.ordinal || reaches(device, &known.device) {
        Ok(&known.device)
    } else {
        Err(foreign())
    }
}

fn reaches(device: &Device, peer: &Device) -> bool {
    let acl = &device.library.acl;
    if acl.aclrtDeviceCanAccessPeer.is_err() || acl.aclrtDeviceEnablePeerAccess.is_err() {
        return false;
    }
    let mut can = 0;
    // SAFETY: `can` is a place for the answer.
    let code = unsafe { acl.aclrtDeviceCanAccessPeer(&raw mut can, device.ordinal, peer.ordinal) };
    code == 0 && can != 0
}

/// Enqueues a copy from the memory of another device. The work holds both storages.
///
/// # Errors
/// Returns [`Error::Unsupported`] for views that are not contiguous, [`Error::DeviceLost`] if the other device is lost, and
/// the errors of the device.
pub(crate) fn copy_from(work: &mut Work<'_>, peer: &Arc<Device>, op: &CopyTensor) -> Result<()> {
    let address = |view: &TensorView| {
        if !view.is_contiguous() {
            let what =
                "a copy between devices of a view that is not contiguous; copy the view first".to_owned();
            return Err(Error::Unsupported { backend: NAME, what });
        }
        let range = view.host_range(view.dtype().bytes_for(view.len())?)?;
        Ok(view.storage().address() + range.start as u64)
    };
    let (dst, src) = (address(&op.dst)?, address(&op.src)?);
    // Its own error, so that the receiving device is not taken to be lost.
    drop(peer.bind()?);
    let device = work.device();
    if device.ordinal != peer.ordinal && device.peers.lock().insert(peer.ordinal) {
        // Another backend of the device may have enabled it: a copy that has no way says so itself.
        // SAFETY: the device's context is current; the flags are none.
        unsafe { device.library.acl.aclrtDeviceEnablePeerAccess(peer.ordinal, 0) };
    }
    work.copy_bytes(dst, src, op.bytes(), Way::Within)
}
