//! Uploads of lists to the device: slots, positions, pairs of blocks, plans.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::result;
use kvcore::{MemoryKind, Result, Storage};

use super::raw::RawStream;
use crate::device::CudaDevice;
use crate::memory::{self, CudaStorage};

/// The maximum number of replays that may be enqueued but not done. At this limit, the host waits for the
/// oldest replay before it enqueues another one.
pub(super) const AHEAD: usize = 32;

/// The maximum number of uploads kept for reuse. It is twice [`AHEAD`], because each replay that is not
/// done holds an upload, and freeing pinned memory makes the host wait for running kernels.
const KEPT: usize = 2 * AHEAD;

/// Memory for one list: a buffer that the host writes, and a buffer that kernels read.
#[derive(Debug)]
pub(crate) struct CudaUpload {
    host: *mut c_void,
    storage: CudaStorage,
}

// SAFETY: only the holder of the stream's lock writes the host memory.
unsafe impl Send for CudaUpload {}
// SAFETY: the same condition as for `Send`.
unsafe impl Sync for CudaUpload {}

impl CudaUpload {
    fn new(device: &Arc<CudaDevice>, bytes: usize) -> Result<Self> {
        let storage = CudaStorage::allocate(device, MemoryKind::Device, bytes)?;
        let (host, _) = memory::pinned(bytes, memory::WRITTEN_ONLY)
            .map_err(|error| device.no_memory(error, MemoryKind::Pinned, bytes))?;
        Ok(Self { host, storage })
    }

    /// Returns the list's device address, which is a multiple of 256.
    pub(crate) fn address(&self) -> u64 {
        self.storage.address()
    }

    /// Returns the address of the list's host memory.
    pub(crate) fn host(&self) -> *mut c_void {
        self.host
    }
}

impl Drop for CudaUpload {
    fn drop(&mut self) {
        let Ok(_bound) = self.storage.device().bind() else { return };
        // SAFETY: `pinned` allocated `host`. No copy reads it, because enqueued copies hold the upload.
        let _ = unsafe { result::free_host(self.host) };
    }
}

/// A stream's uploads, either in use or kept for reuse.
#[derive(Debug, Default)]
pub(crate) struct CudaUploads(Vec<(usize, Arc<CudaUpload>)>);

impl CudaUploads {
    /// Copies bytes to pinned memory, from which a copy can be enqueued. The caller must hold the upload
    /// until that copy is done.
    pub(crate) fn stage(&mut self, device: &Arc<CudaDevice>, bytes: &[u8]) -> Result<Arc<CudaUpload>> {
        let make = |bytes| CudaUpload::new(device, bytes);
        let upload = kvcore::device::queue::room(&mut self.0, bytes.len().max(1), KEPT, make)?;
        // SAFETY: the upload has room for the bytes. Nothing reads or writes it, because nothing else holds
        // it.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), upload.host.cast::<u8>(), bytes.len()) };
        Ok(upload)
    }

    /// Enqueues a copy of a list to device memory that no other list uses. The caller must hold the upload
    /// until the copy is done.
    pub(crate) fn send(&mut self, stream: &RawStream, bytes: &[u8]) -> Result<Arc<CudaUpload>> {
        let upload = self.stage(&stream.device, bytes)?;
        // SAFETY: the upload's memory on the device has room for the bytes.
        unsafe { copy_up(stream, &upload, upload.address(), bytes.len()) }?;
        Ok(upload)
    }
}

/// Enqueues a copy of an upload's first `bytes` bytes to a device address. The caller must hold the upload
/// until the copy is done.
///
/// # Safety
/// The `bytes` bytes at `to` must be device memory that is held until the copy is done.
pub(super) unsafe fn copy_up(stream: &RawStream, upload: &CudaUpload, to: u64, bytes: usize) -> Result<()> {
    if bytes == 0 {
        return Ok(());
    }
    // SAFETY: `stage` has written the bytes to the pinned memory, which lives as long as the upload.
    unsafe {
        let host = std::slice::from_raw_parts(upload.host.cast::<u8>(), bytes);
        result::memcpy_htod_async(to, host, stream.raw).map_err(|error| stream.device.refused(error))
    }
}
