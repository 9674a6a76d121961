//! The work of one operation: scratch memory, lists for the device, copies, and everything that the work
//! holds.

use std::sync::Arc;

use kvcore::device::queue::{CapturedStream, Hold};
use kvcore::{Operation, Result, StepInputs};

use super::capture::{self, AclRecording, MakeList};
use super::copies::{CopyDirection, copy};
use super::list::ListMemory;
use super::scratch::{ScratchMark, WorkScratch};
use super::state::{AclStream, StreamMemory};
use crate::bindings::types as sys;
use crate::device::Npu;
use crate::errors::uncapturable;

/// The work of one operation, on a stream or in the capture that records it.
pub(crate) struct Work<'a> {
    npu: &'a Arc<Npu>,
    stream: sys::aclrtStream,
    memory: &'a mut StreamMemory,
    recording: Option<&'a mut AclRecording>,
}

impl AclStream {
    /// Runs `enqueue`, and holds everything that `enqueue` registers until the enqueued work is done.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::Unsupported`] if this thread is recording a capture that the stream has not
    /// joined, or an error of `enqueue`.
    pub(crate) fn enqueue(&self, enqueue: impl FnOnce(&mut Work<'_>) -> Result<()>) -> Result<()> {
        self.recorded(|recording| {
            let _current = self.npu.bind()?;
            let mut memory = self.memory.lock();
            let captured = recording.is_some();
            let mut work = Work { npu: &self.npu, stream: self.raw, memory: &mut memory, recording };
            work.scratch().restart();
            let done = enqueue(&mut work);
            if captured {
                return done;
            }
            // Work that was enqueued before an error still runs, so its memory stays held.
            done.and(memory.in_flight.tidy(self))
        })
    }
}

impl<'a> Work<'a> {
    fn scratch(&mut self) -> &mut WorkScratch {
        match &mut self.recording {
            Some(recording) => capture::scratch(recording, self.stream),
            None => &mut self.memory.scratch,
        }
    }

    /// Records an operation's check if the operation is being captured.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::Unsupported`] if the operation cannot be captured.
    pub(crate) fn admit(&mut self, operation: Operation<'_>) -> Result<()> {
        self.recording.as_mut().map_or(Ok(()), |recording| recording.admit(operation).map(drop))
    }

    /// Returns the step that is being captured, if the work is part of a capture.
    pub(crate) fn captured_step(&self) -> Option<&StepInputs> {
        self.recording.as_ref().map(|recording| recording.step())
    }

    /// Adds a list that each replay rewrites, and returns its address on the device.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::Unsupported`] outside a capture, or [`kvcore::Error::Allocation`] if the
    /// device is out of memory.
    pub(crate) fn replayed_list(&mut self, bytes: usize, make: MakeList) -> Result<u64> {
        match &mut self.recording {
            Some(recording) => capture::add_list(recording, self.npu, bytes, make),
            None => Err(uncapturable("a list of no capture")),
        }
    }

    pub(crate) fn npu(&self) -> &'a Arc<Npu> {
        self.npu
    }

    pub(crate) fn stream(&self) -> sys::aclrtStream {
        self.stream
    }

    /// Holds an object until the work is done.
    pub(crate) fn hold(&mut self, hold: Hold) {
        match &mut self.recording {
            Some(recording) => recording.hold(hold),
            None => self.memory.in_flight.hold(hold),
        }
    }

    /// Holds a list's memory until the work is done.
    pub(crate) fn hold_list(&mut self, list: &Arc<ListMemory>) {
        self.hold(Hold::Other(Arc::clone(list) as _));
    }

    /// Returns the address of `bytes` bytes of scratch memory, with arbitrary contents.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::Allocation`] if the device is out of memory.
    pub(crate) fn bytes(&mut self, bytes: usize) -> Result<u64> {
        let npu = self.npu;
        let (at, memory) = self.scratch().piece(npu, bytes)?;
        self.hold(Hold::Storage(memory));
        Ok(at)
    }

    /// Returns a mark of the scratch memory that is in use now.
    pub(crate) fn mark(&mut self) -> ScratchMark {
        self.scratch().mark()
    }

    /// Frees the scratch memory taken since a mark. Later operators may reuse it, because they run after the
    /// operators that use it now.
    pub(crate) fn free_since(&mut self, mark: ScratchMark) {
        self.scratch().free_since(mark);
    }

    /// Sends a list to the device, and holds its memory until the work is done.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::Allocation`] if the device is out of memory, or another device error.
    pub(crate) fn send(&mut self, bytes: &[u8]) -> Result<Arc<ListMemory>> {
        if let Some(recording) = &mut self.recording {
            return capture::add_constant(recording, self.npu, bytes);
        }
        let list = self.memory.lists.send(self.npu, self.stream, bytes)?;
        self.hold_list(&list);
        Ok(list)
    }

    /// Enqueues a copy of bytes. The work must hold the memory of both ranges.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub(crate) fn copy_bytes(
        &mut self,
        dst: u64,
        src: u64,
        bytes: usize,
        direction: CopyDirection,
    ) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        copy(self.npu, self.stream, dst, src, bytes, direction)
    }
}
