//! Byte copies through ACL.

use std::ffi::c_void;

use kvcore::Result;

use crate::bindings::types as sys;
use crate::device::Npu;

/// The direction of a copy. Host memory must be pinned for an enqueued copy, but not for an immediate one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CopyDirection {
    ToDevice,
    ToHost,
    OnDevice,
}

impl CopyDirection {
    fn kind(self) -> sys::aclrtMemcpyKind {
        match self {
            Self::ToDevice => sys::ACL_MEMCPY_HOST_TO_DEVICE,
            Self::ToHost => sys::ACL_MEMCPY_DEVICE_TO_HOST,
            Self::OnDevice => sys::ACL_MEMCPY_DEVICE_TO_DEVICE,
        }
    }
}

/// Enqueues a copy. The device's context must be current, and the caller must hold the memory of both ranges
/// until the copy is done.
pub(crate) fn copy(
    npu: &Npu,
    stream: sys::aclrtStream,
    dst: u64,
    src: u64,
    bytes: usize,
    direction: CopyDirection,
) -> Result<()> {
    let (dst, src) = (dst as *mut c_void, src as *const c_void);
    // SAFETY: the caller holds the memory of both ranges until the copy is done; host memory is pinned.
    npu.check(unsafe { npu.library.acl.aclrtMemcpyAsync(dst, bytes, src, bytes, direction.kind(), stream) })
}

/// Copies bytes immediately. No enqueued work may use either range, and the device's context must be current.
///
/// # Safety
/// Both ranges must be valid for `bytes` bytes.
pub(crate) unsafe fn copy_now(
    npu: &Npu,
    dst: u64,
    src: u64,
    bytes: usize,
    direction: CopyDirection,
) -> Result<()> {
    let (dst, src) = (dst as *mut c_void, src as *const c_void);
    // SAFETY: the caller guarantees that both ranges are valid for `bytes` bytes.
    npu.check(unsafe { npu.library.acl.aclrtMemcpy(dst, bytes, src, bytes, direction.kind()) })
}
