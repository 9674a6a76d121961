//! Work that has been recorded but not submitted.

use std::any::Any;
use std::sync::Arc;

use kvcore::{Counters, Result};
use parking_lot::Mutex;
use wgpu::{Buffer, CommandEncoder, CommandEncoderDescriptor, ComputePassDescriptor, SubmissionIndex};

use super::dispatch::Dispatch;
use super::upload::Uploads;
use crate::device::GpuDevice;
use crate::pipeline::Binding;

// Decision: docs/decisions/backend-wgpu.md#pending-work-is-limited
/// The number of bytes waiting in the device's queue at which the recorded work is submitted.
const MANY_WRITTEN: u64 = 64 << 20;

/// The number of recorded dispatches at which they are submitted, so that the device works while the host
/// continues.
const MANY: usize = 256;

/// A point in a stream's order of work: the end of a submission, which may not have been made yet.
#[derive(Debug, Default)]
pub(crate) struct Point(Mutex<Option<SubmissionIndex>>);

impl Point {
    /// Returns the submission, or `None` if it has not been made yet.
    pub(crate) fn submission(&self) -> Option<SubmissionIndex> {
        self.0.lock().clone()
    }
}

/// The work that a stream has recorded.
#[derive(Default)]
pub(super) struct Pending {
    encoder: Option<CommandEncoder>,
    dispatches: usize,
    /// The owners of buffers that recorded work reads.
    kept: Vec<Arc<dyn Any + Send + Sync>>,
    /// The number of bytes passed to the queue for the next submission.
    written: u64,
    uploads: Uploads,
    points: Vec<Arc<Point>>,
    /// The most recent submission.
    last: Option<SubmissionIndex>,
    /// The device's reason for rejecting work of this stream. It stays set, because everything submitted with
    /// or after that work is lost too.
    failed: Option<String>,
    /// A staging buffer for reads, or `None` while a read uses it.
    pub(super) staging: Option<Buffer>,
    /// The buffer that [`Queue::scratch`](super::Queue::scratch) keeps.
    pub(super) scratch: Option<Buffer>,
}

impl Pending {
    pub(super) fn encoder(&mut self, device: &GpuDevice) -> &mut CommandEncoder {
        self.encoder
            .get_or_insert_with(|| device.handle.create_command_encoder(&CommandEncoderDescriptor::default()))
    }

    /// Writes whole words to a buffer. The write runs after all work recorded so far.
    pub(super) fn write(&mut self, device: &GpuDevice, buffer: &Buffer, start: u64, bytes: &[u8]) {
        if self.encoder.is_some() {
            self.submit(device);
        }
        if let Err(reason) = device.fill(buffer, start, bytes) {
            self.failed.get_or_insert(reason);
        }
        self.count_written(device, bytes.len());
    }

    /// Counts bytes that the queue keeps until the next submission, and submits the recorded work if there
    /// are many.
    pub(super) fn count_written(&mut self, device: &GpuDevice, bytes: usize) {
        self.written += bytes as u64;
        if self.written >= MANY_WRITTEN {
            self.submit(device);
        }
    }

    /// Uploads bytes for a kernel or a copy in the next submission, and returns a binding for them.
    pub(super) fn upload(&mut self, device: &GpuDevice, bytes: &[u8]) -> Result<Binding> {
        if self.uploads.are_many_with(device, bytes.len()) {
            self.submit(device);
        }
        self.uploads.add(device, bytes)
    }

    /// Returns an error if the device has rejected work of this stream.
    pub(super) fn check(&self, device: &GpuDevice) -> Result<()> {
        self.failed.as_ref().map_or(Ok(()), |reason| Err(device.refusal(reason.clone())))
    }

    /// Records dispatches in order.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::Unsupported`] if arguments exceed the largest binding. Nothing is recorded in
    /// that case.
    pub(super) fn run(&mut self, device: &GpuDevice, work: Vec<Dispatch>) -> Result<()> {
        let most = device.limits.max_storage_buffer_binding_size;
        if let Some(large) =
            work.iter().map(|dispatch| 4 * dispatch.args.len() as u64).find(|&size| size > most)
        {
            return Err(device.lists_too_long(large));
        }
        let mut recorded = 0;
        match device.guarded(|| self.record(device, work, &mut recorded)) {
            Ok(Ok(())) => {}
            // An operation that was recorded only in part makes the stream fail.
            Ok(Err(error)) if recorded > 0 => {
                self.failed.get_or_insert(error.to_string());
                return Err(error);
            }
            Ok(Err(error)) => return Err(error),
            Err(reason) => {
                self.failed.get_or_insert(reason);
            }
        }
        self.check(device)
    }

    fn record(&mut self, device: &GpuDevice, work: Vec<Dispatch>, recorded: &mut usize) -> Result<()> {
        for dispatch in work.into_iter().filter(|dispatch| dispatch.groups > 0) {
            let args = self.upload(device, bytemuck::cast_slice(&dispatch.args))?;
            let group = dispatch.pipeline.bind(&device.handle, [&args].into_iter().chain(&dispatch.bindings));
            let most = u64::from(device.limits.max_compute_workgroups_per_dimension);
            let x = dispatch.groups.min(most);
            let mut pass = self.encoder(device).begin_compute_pass(&ComputePassDescriptor::default());
            pass.set_pipeline(&dispatch.pipeline.handle);
            pass.set_bind_group(0, &group, &[]);
            pass.dispatch_workgroups(x as u32, dispatch.groups.div_ceil(x) as u32, 1);
            drop(pass);
            self.kept.extend(dispatch.keeps);
            self.dispatches += 1;
            *recorded += 1;
        }
        if self.dispatches >= MANY {
            self.submit(device);
        }
        Ok(())
    }

    /// Submits all recorded work to the device.
    pub(super) fn submit(&mut self, device: &GpuDevice) {
        let encoder = self.encoder.take();
        if encoder.is_none() && self.written == 0 {
            self.uploads.forget();
            return;
        }
        let submitted = device.guarded(|| {
            self.uploads.write(device);
            device.queue.submit(encoder.map(CommandEncoder::finish))
        });
        Counters::add(&device.counters.submissions, 1);
        self.uploads.clear();
        (self.dispatches, self.written) = (0, 0);
        self.kept.clear();
        match submitted {
            Ok(submission) => {
                for point in self.points.drain(..) {
                    *point.0.lock() = Some(submission.clone());
                }
                self.last = Some(submission);
            }
            Err(reason) => {
                self.points.clear();
                self.failed.get_or_insert(reason);
            }
        }
    }

    /// Returns the point after all work recorded so far, or `None` if nothing was ever recorded.
    pub(super) fn point(&mut self) -> Option<Arc<Point>> {
        if self.encoder.is_some() || self.written > 0 {
            let point = Arc::new(Point::default());
            self.points.push(Arc::clone(&point));
            return Some(point);
        }
        self.last.clone().map(|last| Arc::new(Point(Mutex::new(Some(last)))))
    }

    pub(super) fn last(&self) -> Option<SubmissionIndex> {
        self.last.clone()
    }
}
