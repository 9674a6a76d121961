//! An open device. Its streams, storages and kernels share it.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use kvcore::{Counters, Error, Result, Rope, RopeTable};
use parking_lot::Mutex;
use wgpu::{
    Buffer, BufferDescriptor, BufferUsages, Device as Handle, ErrorFilter, Features, Limits, PollError,
    PollType, Queue, SubmissionIndex,
};

use crate::options::WgpuOptions;
use crate::pipeline::{Constant, Pipeline, Pipelines, Shader};

/// The backend's name in errors and on command lines.
pub(crate) const NAME: &str = "wgpu";

/// The next address for a storage. An address is an index that is unique across all devices in the process;
/// it does not point to memory.
static NEXT_ADDRESS: AtomicU64 = AtomicU64::new(ADDRESS_ALIGN);

/// The alignment of addresses. It suits every element type and every offset at which a buffer may be bound.
const ADDRESS_ALIGN: u64 = 256;

/// The maximum number of bytes per binding. Elements are counted in 32 bits, and a byte contains two 4-bit
/// elements.
const MOST_BINDING: u64 = (1 << 31) - ADDRESS_ALIGN;

/// The features that a device needs for its own f16 arithmetic.
pub(crate) const NATIVE_F16: Features = Features::SHADER_F16.union(Features::SHADER_I16);

/// The time to wait after the device has rejected a request, before checking whether it is lost.
const PATIENCE: Duration = Duration::from_secs(1);

/// A device with its queue, its compiled kernels, and the failures that it reported.
pub(crate) struct GpuDevice {
    pub(crate) handle: Handle,
    pub(crate) queue: Queue,
    pub(crate) limits: Limits,
    pub(crate) features: Features,
    pipelines: Pipelines,
    pub(crate) counters: Counters,
    /// The maximum number of a buffer's bytes to bind at once.
    pub(crate) binding: u64,
    health: Arc<Health>,
    /// The RoPE tables on the device, by the address of the table on the host.
    angles: Mutex<HashMap<usize, (Weak<RopeTable>, Buffer)>>,
    /// Buffers for bindings that a kernel does not use: one for writable bindings, one for read-only
    /// bindings.
    pub(crate) nothing: [Buffer; 2],
}

/// Failures that the device reported outside of any call.
#[derive(Default)]
struct Health {
    lost: OnceLock<String>,
    error: Mutex<Option<String>>,
}

impl std::fmt::Debug for GpuDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Device({})", self.handle.adapter_info().name)
    }
}

impl GpuDevice {
    pub(crate) fn new(handle: Handle, queue: Queue, options: &WgpuOptions) -> Arc<Self> {
        let health = Arc::new(Health::default());
        let lost = Arc::clone(&health);
        handle.set_device_lost_callback(move |reason, message| {
            let _ = lost.lost.set(format!("{reason:?}: {message}"));
        });
        let errors = Arc::clone(&health);
        handle.on_uncaptured_error(Arc::new(move |error: wgpu::Error| {
            errors.error.lock().get_or_insert(error.to_string());
        }));
        let (limits, features) = (handle.limits(), handle.features());
        let native = features.contains(NATIVE_F16) && !options.packed_f16;
        let binding = limits.max_storage_buffer_binding_size.min(MOST_BINDING);
        // This leaves room for rounding the start and the end of a row.
        let least = 4 * u64::from(limits.min_storage_buffer_offset_alignment).max(ADDRESS_ALIGN);
        let binding = options.max_binding.map_or(binding, |asked| binding.min(asked.max(least)));
        let nothing = [0, 1].map(|_| {
            let usage = BufferUsages::STORAGE;
            handle.create_buffer(&BufferDescriptor {
                label: Some("nothing"),
                size: ADDRESS_ALIGN,
                usage,
                mapped_at_creation: false,
            })
        });
        Arc::new(Self {
            pipelines: Pipelines::new(native),
            counters: Counters::default(),
            binding: binding - binding % 4,
            angles: Mutex::default(),
            handle,
            queue,
            limits,
            features,
            health,
            nothing,
        })
    }

    /// Returns the kernel with the given constants, which is compiled on first use. `texts` declares the
    /// constants that WGSL needs in its source code. Equal `constants` must always come with the same
    /// `texts`, because they identify a kernel in the cache.
    pub(crate) fn pipeline(
        &self,
        shader: Shader,
        constants: &[Constant],
        texts: &str,
    ) -> Result<Arc<Pipeline>> {
        self.pipelines.get(shader, constants, |native_f16| {
            self.check()?;
            self.guarded(|| {
                Pipeline::compile(&self.handle, shader, shader.text(native_f16, texts), constants)
            })
            .map_err(|reason| self.refusal(format!("{shader:?}: {reason}")))
        })
    }

    /// Reserves addresses for a storage of `bytes` bytes. Returns the first address.
    pub(crate) fn address(bytes: usize) -> u64 {
        let size = (bytes as u64).next_multiple_of(ADDRESS_ALIGN);
        NEXT_ADDRESS.fetch_add(size, Ordering::Relaxed)
    }

    /// Returns the alignment that a binding's offset must have, in bytes.
    pub(crate) fn binding_align(&self) -> u64 {
        u64::from(self.limits.min_storage_buffer_offset_alignment).max(16)
    }

    /// Checks that `words` 32-bit words fit in a workgroup's memory.
    pub(crate) fn check_workgroup(&self, words: usize) -> Result<()> {
        let bytes = self.limits.max_compute_workgroup_storage_size as usize;
        if 4 * words <= bytes {
            return Ok(());
        }
        let what = format!(
            "rows that take {} bytes of workgroup memory: the device has only {bytes}; the cpu backend has no such limit",
            4 * words
        );
        Err(Error::Unsupported { backend: NAME, what })
    }

    /// Returns the error for an operation with lists that are too long to bind.
    pub(crate) fn lists_too_long(&self, bytes: u64) -> Error {
        let most = self.limits.max_storage_buffer_binding_size;
        let what = format!(
            "an operation with {bytes} bytes of lists: the device can bind only {most} at once; split the \
                 operation"
        );
        Error::Unsupported { backend: NAME, what }
    }

    /// Returns an error if the device is lost, or if it has rejected a request since the last call.
    pub(crate) fn check(&self) -> Result<()> {
        let refused = self.health.error.lock().take();
        match (refused, self.health.lost.get()) {
            (None, None) => Ok(()),
            (refused, _) => Err(self.refusal(refused.unwrap_or_default())),
        }
    }

    /// Returns the error for a rejected request: the loss of the device if it is lost, otherwise `reason`.
    /// Waits up to [`PATIENCE`], because a device reports its loss only when it has no work left.
    pub(crate) fn refusal(&self, reason: String) -> Error {
        let _ = self.poll(None, Some(PATIENCE));
        match self.health.lost.get() {
            Some(reason) => Error::DeviceLost { backend: NAME, reason: reason.clone() },
            None => Error::Device { backend: NAME, reason },
        }
    }

    /// Calls `make` and returns its result, or the device's reason for rejecting it.
    pub(crate) fn guarded<T>(&self, make: impl FnOnce() -> T) -> std::result::Result<T, String> {
        let scopes = [ErrorFilter::Validation, ErrorFilter::OutOfMemory, ErrorFilter::Internal]
            .map(|filter| self.handle.push_error_scope(filter));
        let made = make();
        let mut refused = None;
        for scope in scopes.into_iter().rev() {
            if let Some(error) = pollster::block_on(scope.pop()) {
                refused.get_or_insert(error.to_string());
            }
        }
        refused.map_or(Ok(made), Err)
    }

    /// Writes whole words to a buffer before the next submission. Returns the device's reason if it rejects
    /// the write.
    pub(crate) fn fill(&self, buffer: &Buffer, at: u64, bytes: &[u8]) -> std::result::Result<(), String> {
        self.guarded(|| self.queue.write_buffer(buffer, at, bytes))
    }

    /// Waits until a submission is done.
    pub(crate) fn wait(&self, submission: SubmissionIndex) -> Result<()> {
        let waited = self.poll(Some(submission), None);
        self.check()?;
        waited.map_err(|error| self.refusal(error.to_string()))
    }

    /// Returns whether a submission is done, or was lost with its device. This call never waits.
    pub(crate) fn is_done(&self, submission: SubmissionIndex) -> bool {
        !matches!(self.poll(Some(submission), Some(Duration::ZERO)), Err(PollError::Timeout))
    }

    /// Waits for a submission, or for all submissions if none is given.
    ///
    /// `wgpu` panics if the driver reports that the device is gone. This function catches the panic and marks
    /// the device as lost.
    fn poll(
        &self,
        submission_index: Option<SubmissionIndex>,
        timeout: Option<Duration>,
    ) -> std::result::Result<(), PollError> {
        let wait = || self.handle.poll(PollType::Wait { submission_index, timeout });
        catch_unwind(AssertUnwindSafe(wait)).map_or_else(
            |_| {
                let _ = self.health.lost.set("the driver lost it during an operation".to_owned());
                Ok(())
            },
            |polled| polled.map(drop),
        )
    }

    // Decision: docs/decisions/backend-wgpu.md#angles-are-read-from-a-table-on-the-device
    /// Returns a RoPE's table on the device, which has the cosine and sine of each pair, by position. Uploads
    /// the table again if it has grown on the host.
    pub(crate) fn angles(&self, rope: &Rope) -> Result<Buffer> {
        let table = rope.table([])?;
        let key = Arc::as_ptr(&table) as usize;
        let mut angles = self.angles.lock();
        if let Some((known, buffer)) = angles.get(&key)
            && known.upgrade().is_some_and(|known| Arc::ptr_eq(&known, &table))
        {
            return Ok(buffer.clone());
        }
        angles.retain(|_, (known, _)| known.strong_count() > 0);
        let pairs: Vec<f32> = table.cos().iter().zip(table.sin()).flat_map(|(&c, &s)| [c, s]).collect();
        let bytes = (size_of_val(&pairs[..]) as u64).max(8);
        let usage = BufferUsages::STORAGE | BufferUsages::COPY_DST;
        let buffer = self.buffer("angles", bytes, usage)?;
        self.fill(&buffer, 0, bytemuck::cast_slice(&pairs)).map_err(|reason| self.refusal(reason))?;
        angles.insert(key, (Arc::downgrade(&table), buffer.clone()));
        Ok(buffer)
    }

    /// Creates a buffer for the backend's own use.
    pub(crate) fn buffer(&self, label: &str, size: u64, usage: BufferUsages) -> Result<Buffer> {
        let descriptor = BufferDescriptor {
            label: Some(label),
            size: size.next_multiple_of(16),
            usage,
            mapped_at_creation: false,
        };
        self.guarded(|| self.handle.create_buffer(&descriptor))
            .map_err(|reason| self.no_memory(kvcore::MemoryKind::Device, size as usize, reason))
    }

    /// Returns the error for a failed allocation: out of memory, or a lost device.
    pub(crate) fn no_memory(&self, kind: kvcore::MemoryKind, bytes: usize, reason: String) -> Error {
        match self.refusal(reason) {
            Error::Device { reason, .. } => Error::Allocation { bytes, kind, reason },
            lost => lost,
        }
    }
}
