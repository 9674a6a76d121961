//! Lists that go up to the device: slots, positions, pairs of blocks, plans.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::result;
use cudarc::driver::sys::CUstream;
use kvcore::{MemoryKind, Result, Storage};

use crate::device::Device;
use crate::memory::{self, CudaStorage};

/// Least bytes of an upload's memory.
const LEAST: usize = 4096;

/// Most uploads that wait for another use. Twice [`AHEAD`](super::graph::AHEAD): replays under way hold one each, and
/// pinned memory that goes while kernels run makes the host wait for them.
const KEPT: usize = 2 * super::graph::AHEAD;

/// Memory of a list: where the host writes it, and where kernels read it.
#[derive(Debug)]
pub(crate) struct Upload {
    host: *mut c_void,
    storage: CudaStorage,
}

// SAFETY: the host's memory is written by the holder of the stream's lock only.
unsafe impl Send for Upload {}
// SAFETY: as for `Send`.
unsafe impl Sync for Upload {}

impl Upload {
    fn new(device: &Arc<Device>, bytes: usize) -> Result<Self> {
        let storage = CudaStorage::allocate(device, MemoryKind::Device, bytes)?;
        let (host, _) = memory::pinned(bytes, memory::WRITTEN_ONLY)
            .map_err(|error| device.no_memory(error, MemoryKind::Pinned, bytes))?;
        Ok(Self { host, storage })
    }

    /// Returns the address of the list on the device.
    pub(crate) fn address(&self) -> u64 {
        self.storage.address()
    }

    /// Returns the memory that the host writes.
    pub(super) fn host(&self) -> *mut c_void {
        self.host
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        let Ok(_bound) = self.storage.device().bind() else { return };
        // SAFETY: `host` came from `pinned`. No copy reads it, because enqueued copies hold the upload.
        let _ = unsafe { result::free_host(self.host) };
    }
}

/// The uploads of a stream, those in use and those that wait for another list.
#[derive(Debug, Default)]
pub(super) struct Uploads(Vec<Arc<Upload>>);

impl Uploads {
    /// Returns memory for `bytes` bytes that no enqueued work uses.
    fn room(&mut self, device: &Arc<Device>, bytes: usize) -> Result<Arc<Upload>> {
        let unused = |upload: &Arc<Upload>| Arc::strong_count(upload) == 1;
        if let Some(known) = self.0.iter().find(|known| known.storage.len() >= bytes && unused(known)) {
            return Ok(Arc::clone(known));
        }
        let made = Arc::new(Upload::new(device, bytes.next_power_of_two().max(LEAST))?);
        if self.0.len() >= KEPT {
            // The smallest serves the fewest lists. Where work still uses it, that work keeps it alive.
            let smallest = (0..self.0.len()).min_by_key(|&i| self.0[i].storage.len()).unwrap_or_default();
            self.0.swap_remove(smallest);
        }
        self.0.push(Arc::clone(&made));
        Ok(made)
    }

    /// Copies bytes to pinned memory, from which an enqueued copy takes them. The caller holds it until then.
    pub(super) fn stage(&mut self, device: &Arc<Device>, bytes: &[u8]) -> Result<Arc<Upload>> {
        let upload = self.room(device, bytes.len().max(1))?;
        // SAFETY: the upload has room for the bytes. Nobody reads or writes it, because nobody else holds it.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), upload.host.cast::<u8>(), bytes.len()) };
        Ok(upload)
    }

    /// Enqueues the copy of a list to the device. The caller holds the upload until the copy is done.
    pub(super) fn send(
        &mut self,
        device: &Arc<Device>,
        stream: CUstream,
        bytes: &[u8],
    ) -> Result<Arc<Upload>> {
        let upload = self.stage(device, bytes)?;
        if bytes.is_empty() {
            return Ok(upload);
        }
        // SAFETY: the pinned memory has these bytes and lives as long as the upload.
        unsafe {
            let host = std::slice::from_raw_parts(upload.host.cast::<u8>(), bytes.len());
            result::memcpy_htod_async(upload.address(), host, stream)
                .map_err(|error| device.refused(error))?;
        }
        Ok(upload)
    }
}
