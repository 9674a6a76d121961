//! Work that is recorded and not yet submitted, and the host data that it needs.

use std::sync::Arc;

use kvcore::{Counters, Result};
use parking_lot::Mutex;
use wgpu::{
    Buffer, BufferUsages, CommandEncoder, CommandEncoderDescriptor, ComputePassDescriptor, SubmissionIndex,
};

use crate::device::Device;
use crate::kernels::Plan;
use crate::pipeline::{Binding, Pipeline};

/// Bytes of the first buffer for arguments; each further buffer of a submission is twice as large.
const ARGUMENTS: u64 = 64 << 10;

/// Bytes of all argument buffers beyond which the work so far is submitted.
const MANY_ARGUMENTS: u64 = 16 << 20;

/// Bytes kept by the queue for the next submission, at which the work so far is submitted.
const MANY_WRITTEN: u64 = 64 << 20;

/// Number of dispatches at which the work so far is submitted, so that the device works while the host goes
/// on.
const MANY: usize = 256;

/// One run of a kernel. The arguments become its first binding.
pub(crate) struct Dispatch {
    pub(crate) pipeline: Arc<Pipeline>,
    pub(crate) args: Vec<u32>,
    pub(crate) bindings: Vec<Binding>,
    /// Number of workgroups.
    pub(crate) groups: u64,
    /// The plan whose records the kernel reads. Its buffer is not written again before the kernel is submitted.
    pub(crate) plan: Option<Arc<Plan>>,
}

/// A moment in the order of a stream: the next submission, or the one that it became.
#[derive(Debug, Default)]
pub(super) struct Point(Mutex<Option<SubmissionIndex>>);

impl Point {
    pub(super) fn submission(&self) -> Option<SubmissionIndex> {
        self.0.lock().clone()
    }
}

/// A buffer that kernels and copies of a submission read, and the bytes written to it before.
struct Arguments {
    buffer: Buffer,
    bytes: Vec<u8>,
}

/// The work that a stream has recorded.
#[derive(Default)]
pub(super) struct Pending {
    encoder: Option<CommandEncoder>,
    dispatches: usize,
    /// Plans that recorded work reads.
    plans: Vec<Arc<Plan>>,
    /// Bytes given to the queue that come before the next submission.
    written: u64,
    /// Argument buffers, each larger than the one before. Only the last has room left.
    arguments: Vec<Arguments>,
    points: Vec<Arc<Point>>,
    /// The last submission.
    last: Option<SubmissionIndex>,
    /// The reason why the device refused work of this stream. Everything submitted with that work or after it
    /// was lost too, so that the reason stays.
    failed: Option<String>,
    /// A buffer through which reads go, while no read uses it.
    pub(super) staging: Option<Buffer>,
    /// The buffer that `WgpuStream::scratch` keeps.
    pub(super) scratch: Option<Buffer>,
}

impl Pending {
    pub(super) fn encoder(&mut self, device: &Device) -> &mut CommandEncoder {
        self.encoder
            .get_or_insert_with(|| device.handle.create_command_encoder(&CommandEncoderDescriptor::default()))
    }

    /// Writes whole words to a buffer, after all work recorded before.
    pub(super) fn write(&mut self, device: &Device, buffer: &Buffer, start: u64, bytes: &[u8]) {
        if self.encoder.is_some() {
            self.submit(device);
        }
        if let Err(reason) = device.fill(buffer, start, bytes) {
            self.failed.get_or_insert(reason);
        }
        self.count_written(device, bytes.len());
    }

    /// Counts bytes that the queue keeps until the next submission, and submits if they are many.
    pub(super) fn count_written(&mut self, device: &Device, bytes: usize) {
        self.written += bytes as u64;
        if self.written >= MANY_WRITTEN {
            self.submit(device);
        }
    }

    /// Uploads bytes that a kernel or a copy of this submission reads.
    pub(super) fn upload(&mut self, device: &Device, bytes: &[u8]) -> Result<Binding> {
        let align = device.binding_align();
        let size = (bytes.len() as u64).next_multiple_of(4).max(4);
        let fits =
            |last: &Arguments| (last.bytes.len() as u64).next_multiple_of(align) + size <= last.buffer.size();
        if !self.arguments.last().is_some_and(fits) {
            let all: u64 = self.arguments.iter().map(|one| one.buffer.size()).sum();
            if all + size > MANY_ARGUMENTS {
                self.submit(device);
            }
        }
        if !self.arguments.last().is_some_and(fits) {
            let next = self.arguments.last().map_or(ARGUMENTS, |last| 2 * last.buffer.size());
            let usage = BufferUsages::STORAGE | BufferUsages::COPY_SRC | BufferUsages::COPY_DST;
            let buffer = device.buffer("arguments", size.next_power_of_two().max(next), usage)?;
            self.arguments.push(Arguments { buffer, bytes: Vec::new() });
        }
        let last = self.arguments.len() - 1;
        let Arguments { buffer, bytes: filled } = &mut self.arguments[last];
        let offset = (filled.len() as u64).next_multiple_of(align);
        filled.resize(offset as usize, 0);
        filled.extend_from_slice(bytes);
        filled.resize((offset + size) as usize, 0);
        Ok(Binding { buffer: buffer.clone(), offset, size })
    }

    /// Returns an error if the device refused work of this stream.
    pub(super) fn check(&self, device: &Device) -> Result<()> {
        self.failed.as_ref().map_or(Ok(()), |reason| Err(device.refusal(reason.clone())))
    }

    /// Records runs of kernels, in order.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::Unsupported`] if arguments exceed the largest binding; in that case nothing
    /// is recorded.
    pub(super) fn run(&mut self, device: &Device, work: Vec<Dispatch>) -> Result<()> {
        let most = device.limits.max_storage_buffer_binding_size;
        if let Some(large) =
            work.iter().map(|dispatch| 4 * dispatch.args.len() as u64).find(|&size| size > most)
        {
            return Err(device.lists_too_long(large));
        }
        let mut recorded = 0;
        match device.guarded(|| self.record(device, work, &mut recorded)) {
            Ok(Ok(())) => {}
            // An operation of which only a part was recorded makes the stream fail.
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

    fn record(&mut self, device: &Device, work: Vec<Dispatch>, recorded: &mut usize) -> Result<()> {
        for dispatch in work.into_iter().filter(|dispatch| dispatch.groups > 0) {
            let args = self.upload(device, bytemuck::cast_slice(&dispatch.args))?;
            let group = dispatch.pipeline.bind(device, [&args].into_iter().chain(&dispatch.bindings));
            let most = u64::from(device.limits.max_compute_workgroups_per_dimension);
            let x = dispatch.groups.min(most);
            let mut pass = self.encoder(device).begin_compute_pass(&ComputePassDescriptor::default());
            pass.set_pipeline(&dispatch.pipeline.handle);
            pass.set_bind_group(0, &group, &[]);
            pass.dispatch_workgroups(x as u32, dispatch.groups.div_ceil(x) as u32, 1);
            drop(pass);
            self.plans.extend(dispatch.plan);
            self.dispatches += 1;
            *recorded += 1;
        }
        if self.dispatches >= MANY {
            self.submit(device);
        }
        Ok(())
    }

    /// Submits everything recorded to the device.
    pub(super) fn submit(&mut self, device: &Device) {
        let encoder = self.encoder.take();
        if encoder.is_none() && self.written == 0 {
            self.arguments.iter_mut().for_each(|one| one.bytes.clear());
            return;
        }
        let submitted = device.guarded(|| {
            for one in self.arguments.iter().filter(|one| !one.bytes.is_empty()) {
                device.queue.write_buffer(&one.buffer, 0, &one.bytes);
            }
            device.queue.submit(encoder.map(CommandEncoder::finish))
        });
        Counters::add(&device.counters.submissions, 1);
        // The largest argument buffer also serves the next submission.
        self.arguments = self.arguments.pop().into_iter().collect();
        self.arguments.retain_mut(|one| {
            one.bytes.clear();
            one.buffer.size() <= MANY_ARGUMENTS
        });
        (self.dispatches, self.written) = (0, 0);
        self.plans.clear();
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

    /// Returns the moment after everything recorded so far; none if nothing was ever recorded.
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
