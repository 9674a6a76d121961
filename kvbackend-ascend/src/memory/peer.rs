//! Access to the memory of other devices.

use std::sync::Arc;

use kvcore::{MemoryKind, Result, Storage};

use super::AscendStorage;
use crate::device::Npu;
use crate::errors::foreign;

/// Returns the device that owns a storage. This device must be `npu` itself, or a device whose memory `npu`
/// can access.
///
/// # Errors
/// Returns [`kvcore::Error::ForeignHandle`] if the storage belongs to another backend, to the host, or to a
/// device that `npu` cannot access.
pub(crate) fn of_peer<'a>(npu: &Npu, storage: &'a Arc<dyn Storage>) -> Result<&'a Arc<Npu>> {
    let known = storage.as_any().downcast_ref::<AscendStorage>();
    let known = known.filter(|known| known.kind == MemoryKind::Device).ok_or(foreign("a storage"))?;
    if known.npu.ordinal == npu.ordinal || reaches(npu, &known.npu) {
        Ok(&known.npu)
    } else {
        Err(foreign("a storage"))
    }
}

fn reaches(npu: &Npu, peer: &Npu) -> bool {
    let acl = &npu.library.acl;
    if acl.aclrtDeviceCanAccessPeer.is_err() || acl.aclrtDeviceEnablePeerAccess.is_err() {
        return false;
    }
    let mut can = 0;
    // SAFETY: `can` is valid for writes.
    let code = unsafe { acl.aclrtDeviceCanAccessPeer(&raw mut can, npu.ordinal, peer.ordinal) };
    code == 0 && can != 0
}
