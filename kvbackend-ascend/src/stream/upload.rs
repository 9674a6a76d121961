//! Lists that go up to the device: indices, masks, cosines and sines.

use std::sync::Arc;

use kvcore::{MemoryKind, Result};

use crate::bindings::types as sys;
use crate::device::Device;
use crate::memory::AscendStorage;

/// Least bytes of an upload's memory.
const LEAST: usize = 4096;

/// Most uploads that wait for another use.
const KEPT: usize = 32;

/// Memory of a list: where the host writes it, and where operators read it.
#[derive(Debug)]
pub(crate) struct Upload {
    /// None for a list that is sent once.
    host: Option<AscendStorage>,
    device: AscendStorage,
}

impl Upload {
    fn new(device: &Arc<Device>, bytes: usize) -> Result<Self> {
        Ok(Self {
            host: Some(AscendStorage::uninitialised(device, MemoryKind::Pinned, bytes)?),
            device: AscendStorage::uninitialised(device, MemoryKind::Device, bytes)?,
        })
    }

    /// Returns memory of a list that is sent once, of at least one byte.
    pub(super) fn of_device(device: &Arc<Device>, bytes: usize) -> Result<Self> {
        let device = AscendStorage::uninitialised(device, MemoryKind::Device, bytes.max(1))?;
        Ok(Self { host: None, device })
    }

    /// Returns the address of the list on the device.
    pub(crate) fn address(&self) -> u64 {
        kvcore::Storage::address(&self.device)
    }

    /// Returns the address that the host writes; 0 for a list that is sent once.
    pub(super) fn host(&self) -> u64 {
        self.host.as_ref().map_or(0, kvcore::Storage::address)
    }

    fn len(&self) -> usize {
        kvcore::Storage::len(&self.device)
    }
}

/// The uploads of a stream, those in use and those that wait for another list.
#[derive(Debug, Default)]
pub(super) struct Uploads(Vec<Arc<Upload>>);

impl Uploads {
    /// Returns memory for `bytes` bytes that no enqueued work uses.
    fn room(&mut self, device: &Arc<Device>, bytes: usize) -> Result<Arc<Upload>> {
        let unused = |upload: &Arc<Upload>| Arc::strong_count(upload) == 1;
        if let Some(known) = self.0.iter().find(|known| known.len() >= bytes && unused(known)) {
            return Ok(Arc::clone(known));
        }
        let made = Arc::new(Upload::new(device, bytes.next_power_of_two().max(LEAST))?);
        if self.0.len() >= KEPT {
            // The smallest serves the fewest lists. Where work still uses it, that work keeps it alive.
            let smallest = (0..self.0.len()).min_by_key(|&i| self.0[i].len()).unwrap_or_default();
            self.0.swap_remove(smallest);
        }
        self.0.push(Arc::clone(&made));
        Ok(made)
    }

    /// Copies bytes to pinned memory, from which an enqueued copy takes them. The caller holds it until then.
    pub(super) fn stage(&mut self, device: &Arc<Device>, bytes: &[u8]) -> Result<Arc<Upload>> {
        let upload = self.room(device, bytes.len().max(1))?;
        // SAFETY: the upload has room for the bytes. Nobody reads or writes it, because nobody else holds it.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), upload.host() as *mut u8, bytes.len()) };
        Ok(upload)
    }

    /// Enqueues the copy of a list to the device. The caller holds the upload until the copy is done. The device's
    /// context is current.
    pub(super) fn send(
        &mut self,
        device: &Arc<Device>,
        stream: sys::aclrtStream,
        bytes: &[u8],
    ) -> Result<Arc<Upload>> {
        let upload = self.stage(device, bytes)?;
        if !bytes.is_empty() {
            super::copy(device, stream, upload.address(), upload.host(), bytes.len(), super::Way::Up)?;
        }
        Ok(upload)
    }
}
