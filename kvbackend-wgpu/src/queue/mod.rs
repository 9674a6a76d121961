//! A stream's work on the device's only queue: recording, uploads, submissions, reads and waits.
//!
//! ```text
//! Queue ── recorded ─► submitted ─► done
//!    run(work)     submit()      wait
//! ```
//!
//! This module deals with kernel runs ([`Dispatch`]) and buffers, and knows nothing about the contract's
//! operations.

use std::sync::Arc;

use kvcore::Result;
use parking_lot::Mutex;
use wgpu::{Buffer, BufferUsages, SubmissionIndex};

use crate::device::GpuDevice;
use crate::pipeline::Binding;

mod dispatch;
mod pending;
mod read;
mod upload;

pub(crate) use dispatch::Dispatch;
use pending::Pending;
pub(crate) use pending::Point;

/// The maximum size of an aligned write that is uploaded with the next submission, in bytes. Larger writes
/// are passed to the device's queue at once.
pub(crate) const SMALL_WRITE: usize = 1 << 20;

/// A stream's recorded work, which runs in the order in which it was recorded.
pub(crate) struct Queue {
    device: Arc<GpuDevice>,
    pending: Mutex<Pending>,
}

impl Drop for Queue {
    /// Submits the recorded work, so that it still runs after the drop.
    fn drop(&mut self) {
        self.pending.get_mut().submit(&self.device);
    }
}

impl Queue {
    pub(crate) fn new(device: Arc<GpuDevice>) -> Self {
        Self { device, pending: Mutex::default() }
    }

    pub(crate) fn device(&self) -> &Arc<GpuDevice> {
        &self.device
    }

    /// Records dispatches in order.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::Unsupported`] if arguments exceed the largest binding. Nothing is recorded in
    /// that case.
    pub(crate) fn run(&self, work: Vec<Dispatch>) -> Result<()> {
        self.device.check()?;
        self.pending.lock().run(&self.device, work)
    }

    /// Records the dispatches for several pieces of a write, with no other work between them. Each piece
    /// comes with the number of bytes that were passed to the device's queue for it.
    ///
    /// # Errors
    /// Returns the error of a piece, or the errors of [`run`](Self::run).
    pub(crate) fn run_pieces(
        &self,
        pieces: impl Iterator<Item = Result<(Vec<Dispatch>, usize)>>,
    ) -> Result<()> {
        let mut pending = self.pending.lock();
        pending.check(&self.device)?;
        for piece in pieces {
            let (work, bytes) = piece?;
            pending.run(&self.device, work)?;
            pending.count_written(&self.device, bytes);
        }
        Ok(())
    }

    /// Counts bytes that were passed to the device's queue for later work.
    pub(crate) fn count_written(&self, bytes: usize) {
        if bytes > 0 {
            self.pending.lock().count_written(&self.device, bytes);
        }
    }

    /// Returns scratch memory of `bytes` bytes, in which a kernel leaves results for the same operation's
    /// next kernel. All operations of a stream share this memory, because they run one after another.
    pub(crate) fn scratch(&self, bytes: u64) -> Result<Binding> {
        let mut pending = self.pending.lock();
        let buffer = if let Some(kept) = pending.scratch.as_ref().filter(|kept| kept.size() >= bytes) {
            kept.clone()
        } else {
            self.device.buffer("scratch", bytes.next_power_of_two(), BufferUsages::STORAGE)?
        };
        pending.scratch = Some(buffer.clone());
        Ok(Binding { buffer, offset: 0, size: bytes })
    }

    /// Writes whole words to a buffer, starting at byte `start`. The write runs after all work recorded so
    /// far.
    pub(crate) fn write_words(&self, buffer: &Buffer, start: u64, bytes: &[u8]) -> Result<()> {
        let (device, mut pending) = (&self.device, self.pending.lock());
        pending.check(device)?;
        if bytes.len() > SMALL_WRITE {
            pending.write(device, buffer, start, bytes);
            return pending.check(device);
        }
        let from = pending.upload(device, bytes)?;
        let (offset, size) = (from.offset, Some(bytes.len() as u64));
        pending.encoder(device).copy_buffer_to_buffer(&from.buffer, offset, buffer, start, size);
        Ok(())
    }

    /// Submits all recorded work.
    pub(crate) fn submit(&self) {
        self.pending.lock().submit(&self.device);
    }

    /// Returns an error if the device has rejected work of this stream.
    pub(crate) fn check(&self) -> Result<()> {
        self.pending.lock().check(&self.device)
    }

    /// Returns the point after all work recorded so far, or `None` if nothing was ever recorded.
    pub(crate) fn point(&self) -> Option<Arc<Point>> {
        self.pending.lock().point()
    }

    /// Submits all recorded work, and waits until it is done.
    pub(crate) fn drain(&self) -> Result<()> {
        let last = {
            let mut pending = self.pending.lock();
            pending.submit(&self.device);
            pending.last()
        };
        self.wait(last)?;
        self.check()
    }

    /// Waits for the given submission, if there is one.
    pub(crate) fn wait(&self, submission: Option<SubmissionIndex>) -> Result<()> {
        submission.map_or_else(|| self.device.check(), |submission| self.device.wait(submission))
    }
}
