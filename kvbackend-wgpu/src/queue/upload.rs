//! Host data that kernels and copies in the next submission read.

use kvcore::Result;
use wgpu::{Buffer, BufferUsages};

use crate::device::GpuDevice;
use crate::pipeline::Binding;

/// The size of a submission's first upload buffer, in bytes. Each further buffer is at least twice as large
/// as the one before.
const FIRST: u64 = 64 << 10;

// Decision: docs/decisions/backend-wgpu.md#pending-work-is-limited
/// The maximum total size of the upload buffers, in bytes. If it would be exceeded, the recorded work is
/// submitted.
const MANY: u64 = 16 << 20;

/// A device buffer, and the bytes to write to it before the next submission.
struct UploadBuffer {
    buffer: Buffer,
    bytes: Vec<u8>,
}

/// A stream's upload buffers, each larger than the one before. Only the last buffer has room left.
#[derive(Default)]
pub(super) struct Uploads(Vec<UploadBuffer>);

/// Returns the number of bytes that an upload takes: a whole number of words, at least one.
fn padded(bytes: usize) -> u64 {
    (bytes as u64).next_multiple_of(4).max(4)
}

impl Uploads {
    fn has_room(&self, device: &GpuDevice, size: u64) -> bool {
        let align = device.binding_align();
        let end = |last: &UploadBuffer| (last.bytes.len() as u64).next_multiple_of(align) + size;
        self.0.last().is_some_and(|last| end(last) <= last.buffer.size())
    }

    /// Returns whether adding `bytes` bytes needs a new buffer with which all buffers together would exceed
    /// [`MANY`].
    pub(super) fn are_many_with(&self, device: &GpuDevice, bytes: usize) -> bool {
        let (size, all) = (padded(bytes), self.0.iter().map(|one| one.buffer.size()).sum::<u64>());
        !self.has_room(device, size) && all + size > MANY
    }

    /// Adds bytes to upload, and returns a binding for them.
    pub(super) fn add(&mut self, device: &GpuDevice, bytes: &[u8]) -> Result<Binding> {
        let size = padded(bytes.len());
        if !self.has_room(device, size) {
            let next = self.0.last().map_or(FIRST, |last| 2 * last.buffer.size());
            let usage = BufferUsages::STORAGE | BufferUsages::COPY_SRC | BufferUsages::COPY_DST;
            let buffer = device.buffer("arguments", size.next_power_of_two().max(next), usage)?;
            self.0.push(UploadBuffer { buffer, bytes: Vec::new() });
        }
        let last = self.0.len() - 1;
        let UploadBuffer { buffer, bytes: filled } = &mut self.0[last];
        let offset = (filled.len() as u64).next_multiple_of(device.binding_align());
        filled.resize(offset as usize, 0);
        filled.extend_from_slice(bytes);
        filled.resize((offset + size) as usize, 0);
        Ok(Binding { buffer: buffer.clone(), offset, size })
    }

    /// Passes all bytes to the device's queue.
    pub(super) fn write(&self, device: &GpuDevice) {
        for one in self.0.iter().filter(|one| !one.bytes.is_empty()) {
            device.queue.write_buffer(&one.buffer, 0, &one.bytes);
        }
    }

    /// After a submission, drops all bytes, and all buffers except the largest. The next submission reuses
    /// that buffer, unless it exceeds [`MANY`].
    pub(super) fn clear(&mut self) {
        self.0 = self.0.pop().into_iter().filter(|one| one.buffer.size() <= MANY).collect();
        self.forget();
    }

    /// Drops all bytes, but keeps the buffers.
    pub(super) fn forget(&mut self) {
        self.0.iter_mut().for_each(|one| one.bytes.clear());
    }
}
