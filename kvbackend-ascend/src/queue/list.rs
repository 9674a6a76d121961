//! Memory for the lists that operators read: indices, masks, cosines and sines.

use std::sync::Arc;

use kvcore::device::queue::room;
use kvcore::{MemoryKind, Result, Storage};

use super::copies::{CopyDirection, copy};
use crate::bindings::types as sys;
use crate::device::Npu;
use crate::memory::AscendStorage;

/// The maximum number of list buffers that a stream keeps for reuse.
const KEPT: usize = 32;

/// Memory for one list: a buffer that the host writes, and a buffer that operators read.
#[derive(Debug)]
pub(crate) struct ListMemory {
    /// The buffer that the host writes, or `None` for a list that is sent only once.
    host: Option<AscendStorage>,
    device: AscendStorage,
}

impl ListMemory {
    fn new(npu: &Arc<Npu>, bytes: usize) -> Result<Self> {
        Ok(Self {
            host: Some(AscendStorage::uninitialised(npu, MemoryKind::Pinned, bytes)?),
            device: AscendStorage::uninitialised(npu, MemoryKind::Device, bytes)?,
        })
    }

    /// Allocates memory of at least one byte for a list that is sent only once.
    pub(super) fn on_device(npu: &Arc<Npu>, bytes: usize) -> Result<Self> {
        let device = AscendStorage::uninitialised(npu, MemoryKind::Device, bytes.max(1))?;
        Ok(Self { host: None, device })
    }

    /// Returns the address of the list on the device.
    pub(crate) fn address(&self) -> u64 {
        self.device.address()
    }

    /// Returns the address that the host writes to, or 0 for a list that is sent only once.
    pub(crate) fn host(&self) -> u64 {
        self.host.as_ref().map_or(0, Storage::address)
    }
}

/// A stream's list buffers, either in use or kept for reuse.
#[derive(Debug, Default)]
pub(crate) struct ListPool(Vec<(usize, Arc<ListMemory>)>);

impl ListPool {
    /// Copies bytes to pinned memory, from which a copy can be enqueued. The caller must hold the memory
    /// until that copy is done.
    pub(crate) fn stage(&mut self, npu: &Arc<Npu>, bytes: &[u8]) -> Result<Arc<ListMemory>> {
        let memory = room(&mut self.0, bytes.len().max(1), KEPT, |len| ListMemory::new(npu, len))?;
        // SAFETY: the memory has room for the bytes, and nothing else uses it.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), memory.host() as *mut u8, bytes.len()) };
        Ok(memory)
    }

    /// Copies a list to the device. The caller must hold the returned memory until the copy is done. The
    /// device's context must be current.
    pub(super) fn send(
        &mut self,
        npu: &Arc<Npu>,
        stream: sys::aclrtStream,
        bytes: &[u8],
    ) -> Result<Arc<ListMemory>> {
        let memory = self.stage(npu, bytes)?;
        if !bytes.is_empty() {
            let (dst, src) = (memory.address(), memory.host());
            copy(npu, stream, dst, src, bytes.len(), CopyDirection::ToDevice)?;
        }
        Ok(memory)
    }
}
