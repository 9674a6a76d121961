//! Copies between devices.

use std::sync::Arc;

use cudarc::driver::result;
use cudarc::driver::sys::{self, CUstream};
use kvcore::{CopyTensor, Error, Result, TensorView};

use super::CudaStorage;
use crate::device::CudaDevice;
use crate::driver::NAME;

/// Enqueues a copy from another device's memory. `into` is the stream's device, whose context must be
/// current. The caller must hold both storages until the copy is done.
///
/// # Errors
/// Returns [`Error::Unsupported`] if a view is not contiguous, [`Error::DeviceLost`] if the other device is
/// lost, or a device error.
pub(crate) fn copy_from_peer(into: &Arc<CudaDevice>, stream: CUstream, op: &CopyTensor) -> Result<()> {
    let foreign = || Error::ForeignHandle { what: "a storage", backend: NAME };
    let source = op.src.storage().as_any().downcast_ref::<CudaStorage>().ok_or_else(foreign)?;
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
    // An error here concerns only the other device: the receiving device is not lost.
    drop(source.device.bind()?);
    enable_access(into, &source.device);
    // SAFETY: the caller holds both storages until the copy is done, and storages keep their contexts alive.
    unsafe { result::memcpy_peer_async(into.context, dst, source.device.context, src, op.bytes(), stream) }
        .map_err(|error| into.refused(error))
}

/// Enables access to another device's memory. Does nothing if the devices do not support this: the driver
/// then copies through the host.
fn enable_access(into: &CudaDevice, from: &CudaDevice) {
    if into.context == from.context || !into.peers.lock().insert(from.ordinal) {
        return;
    }
    let mut can = 0;
    // SAFETY: both handles are devices that the driver returned, and `can` is valid for writes.
    let asked = unsafe { sys::cuDeviceCanAccessPeer(&raw mut can, into.handle, from.handle) };
    if asked.result().is_err() || can == 0 {
        return;
    }
    // SAFETY: the other device's context is alive.
    let _ = unsafe { sys::cuCtxEnablePeerAccess(from.context, 0) };
    if let Some(pool) = from.pool {
        // SAFETY: all zeros is a valid value of a plain C struct.
        let mut access: sys::CUmemAccessDesc = unsafe { std::mem::zeroed() };
        access.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        access.location.id = into.ordinal;
        access.flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        // SAFETY: the pool is alive, because its device is, and `access` is exactly one description.
        let _ = unsafe { sys::cuMemPoolSetAccess(pool, &raw const access, 1) };
    }
}
