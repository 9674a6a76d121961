//! Work of one operation: calls of operators, copies, lists that go up, and memory between operators.

use std::sync::Arc;

use kvcore::{Error, MemoryKind, Operation, Result, StepInputs, Storage};

use super::capture::{MakeList, Recording, uncapturable};
use super::{Held, Queue, Way, copy};
use crate::bindings::types as sys;
use crate::device::Device;
use crate::memory::AscendStorage;
use crate::operations::Plans;
use crate::operators::{Tensor, bytes_of};

/// Alignment of memory between operators, and the bytes behind each piece, which operators may read beyond its end.
const ALIGN: usize = 64;
const BEHIND: usize = 32;

/// Least bytes of memory between operators.
const LEAST: usize = 1 << 20;

/// Memory between the operators of an operation. The next operation of the stream takes it again, because its operators
/// run behind those before.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    memory: Option<Arc<dyn Storage>>,
    used: usize,
}

impl Scratch {
    /// Returns scratch that begins with memory that others used before.
    pub(super) fn over(memory: Option<Arc<dyn Storage>>) -> Self {
        Self { memory, used: 0 }
    }

    pub(super) fn memory(&self) -> Option<&Arc<dyn Storage>> {
        self.memory.as_ref()
    }

    /// Returns the address of `bytes` bytes that no other piece of the operation has. The caller holds the memory that is
    /// given beside it.
    fn piece(&mut self, device: &Arc<Device>, bytes: usize) -> Result<(u64, Arc<dyn Storage>)> {
        let wanted = bytes
            .checked_add(BEHIND)
            .and_then(|bytes| bytes.checked_next_multiple_of(ALIGN))
            .ok_or(Error::Overflow { what: "bytes between operators" })?;
        let memory = match &self.memory {
            Some(memory) if memory.len() - self.used >= wanted => Arc::clone(memory),
            known => {
                // Work that is enqueued holds the memory before.
                let len = known.as_ref().map_or(LEAST, |memory| memory.len().saturating_mul(2)).max(wanted);
                let allocate = |len| AscendStorage::uninitialised(device, MemoryKind::Device, len);
                let made = match allocate(len) {
                    // There may be room for what is wanted, and no more.
                    Err(Error::Allocation { .. }) if len > wanted => allocate(wanted)?,
                    made => made?,
                };
                self.used = 0;
                let made: Arc<dyn Storage> = Arc::new(made);
                self.memory.insert(made).clone()
            }
        };
        let at = memory.address() + self.used as u64;
        self.used += wanted;
        Ok((at, memory))
    }
}

/// How much memory between operators was in use.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Mark {
    memory: Option<u64>,
    used: usize,
}

/// The work of one operation on a stream.
pub(crate) struct Work<'a> {
    device: &'a Arc<Device>,
    stream: sys::aclrtStream,
    queue: &'a mut Queue,
    /// The capture that takes the work, if there is one.
    recording: Option<&'a mut Recording>,
}

impl<'a> Work<'a> {
    pub(super) fn new(
        device: &'a Arc<Device>,
        stream: sys::aclrtStream,
        queue: &'a mut Queue,
        recording: Option<&'a mut Recording>,
    ) -> Self {
        let mut work = Self { device, stream, queue, recording };
        work.scratch().used = 0;
        work
    }

    fn scratch(&mut self) -> &mut Scratch {
        match &mut self.recording {
            Some(recording) => recording.scratch(self.stream),
            None => &mut self.queue.scratch,
        }
    }

    /// Notes the check of an operation that is captured.
    ///
    /// # Errors
    /// Returns [`Error::Unsupported`] for an operation that cannot be captured.
    pub(super) fn admit(&mut self, operation: Operation<'_>) -> Result<()> {
        self.recording.as_mut().map_or(Ok(()), |recording| recording.admit(operation))
    }

    /// Returns the step that is captured, if the work is part of a capture.
    pub(crate) fn captured_step(&self) -> Option<&StepInputs> {
        self.recording.as_ref().map(|recording| recording.step())
    }

    /// Returns a list that each replay makes anew, as bytes on the device.
    ///
    /// # Errors
    /// Returns [`Error::Unsupported`] outside of captures, and [`Error::Allocation`] if the device is out of memory.
    pub(crate) fn replayed_list(&mut self, bytes: usize, make: MakeList) -> Result<u64> {
        match &mut self.recording {
            Some(recording) => recording.list(self.device, bytes, make),
            None => Err(uncapturable("a list of no capture")),
        }
    }

    pub(crate) fn device(&self) -> &'a Arc<Device> {
        self.device
    }

    pub(crate) fn stream(&self) -> sys::aclrtStream {
        self.stream
    }

    pub(crate) fn plans(&mut self) -> &mut Plans {
        match &mut self.recording {
            Some(recording) => &mut recording.plans,
            None => &mut self.queue.plans,
        }
    }

    /// Holds something until the work is done.
    pub(crate) fn hold(&mut self, held: Held) {
        match &mut self.recording {
            Some(recording) => recording.hold(held),
            None => self.queue.in_flight.hold(held),
        }
    }

    /// Returns a dense tensor between operators, with arbitrary contents.
    pub(crate) fn temporary(&mut self, dtype: sys::aclDataType, dims: &[usize]) -> Result<Tensor> {
        let bytes = elements_of(dims)?
            .checked_mul(bytes_of(dtype))
            .ok_or(Error::Overflow { what: "bytes between operators" })?;
        let at = self.bytes(bytes)?;
        Ok(Tensor::dense(at, dtype, dims))
    }

    /// Returns the address of bytes between operators.
    pub(crate) fn bytes(&mut self, bytes: usize) -> Result<u64> {
        let device = self.device;
        let (at, memory) = self.scratch().piece(device, bytes)?;
        self.hold(Held::Storage(memory));
        Ok(at)
    }

    /// Marks how much memory between operators is in use.
    pub(crate) fn mark(&mut self) -> Mark {
        let scratch = self.scratch();
        Mark { memory: scratch.memory.as_ref().map(|memory| memory.address()), used: scratch.used }
    }

    /// Lets later operators use the memory again that was taken since a mark. They run behind those that use it.
    pub(crate) fn release(&mut self, mark: Mark) {
        let scratch = self.scratch();
        if scratch.memory.as_ref().map(|memory| memory.address()) == mark.memory {
            scratch.used = mark.used;
        }
    }

    /// Fills a dense tensor with zeros.
    pub(crate) fn zero(&mut self, x: &Tensor) -> Result<()> {
        let bytes = x.span() * bytes_of(x.dtype());
        let at = x.address() as *mut std::ffi::c_void;
        let acl = &self.device.library.acl;
        // SAFETY: the range is memory between operators, which the stream holds until the work is done.
        self.device.check(unsafe { acl.aclrtMemsetAsync(at, bytes, 0, bytes, self.stream) })
    }

    /// Sends a list up and holds it.
    pub(crate) fn send(&mut self, bytes: &[u8]) -> Result<Arc<super::Upload>> {
        if let Some(recording) = &mut self.recording {
            return recording.constant(self.device, bytes);
        }
        let upload = self.queue.uploads.send(self.device, self.stream, bytes)?;
        self.queue.in_flight.hold(Held::Upload(Arc::clone(&upload)));
        Ok(upload)
    }

    /// Enqueues a copy of bytes between memories that the work holds.
    pub(crate) fn copy_bytes(&mut self, dst: u64, src: u64, bytes: usize, way: Way) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        copy(self.device, self.stream, dst, src, bytes, way)
    }
}

/// Returns the product of extents.
fn elements_of(dims: &[usize]) -> Result<usize> {
    dims.iter()
        .try_fold(1usize, |product, &n| product.checked_mul(n))
        .ok_or(Error::Overflow { what: "elements between operators" })
}
